"""Builds the kernels into htree_cuda/ for development, incrementally; objects and log are in build/kernels.

python tools/build_inplace.py                  library and Python module
python tools/build_inplace.py --benchmarks     also benchmarks/cpp/*.cu into build/kernels/bin
python tools/build_inplace.py --module-only    the Python module alone, against htree_cuda/libhtree_cuda.so:
                                                 a library built elsewhere, another Python, no CUDA toolkit
python tools/build_inplace.py --debug          bounded waits and device assertions, into build/kernels-debug
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_setup():
    """setup.py as a module: the source lists and build_kernels."""
    spec = importlib.util.spec_from_file_location("htree_cuda_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: list[str] | None = None) -> int:
    """Builds; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", action="store_true", help="build the benchmark binaries too")
    parser.add_argument("--module-only", action="store_true", help="only bindings.cpp, against the existing library")
    parser.add_argument("--debug", action="store_true", help="build with HTREE_CUDA_DEBUG")
    arguments = parser.parse_args(argv)
    setup = load_setup()
    build, ninja = setup.build, setup.ninja
    package = ROOT / "htree_cuda"
    try:
        if arguments.module_only:
            cxx = build.Probe().cxx(os.environ)
            if cxx is None:
                raise build.BuildError("no C++ compiler: install g++ or set CXX")
            target = ninja.build_module_only(ROOT, package / ninja.LIBRARY, package, cxx)
            setup.say(f"built {target.relative_to(ROOT)} against htree_cuda/{ninja.LIBRARY}")
            return 0
        plan = build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"})
        tools = build.resolve(plan)
        build_dir = setup.in_place_build_dir(arguments.debug)
        setup.build_kernels(plan, tools, build_dir, package, benchmarks=arguments.benchmarks, debug=arguments.debug)
    except (build.BuildError, build.Missing) as error:
        print(f"htree_cuda: {error}", file=sys.stderr)
        return 1
    setup.say(f"built htree_cuda/{ninja.LIBRARY} and htree_cuda/{ninja.module_name()}; log: {build_dir}/nvcc.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
