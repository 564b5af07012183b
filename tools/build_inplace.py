"""Builds the kernels into htree_cuda/ for development, incrementally; objects and log are in build/kernels.

python tools/build_inplace.py                  library and Python module
python tools/build_inplace.py --benchmarks     also benchmarks/cpp/*.cu into build/kernels/bin
python tools/build_inplace.py --module-only    the Python module alone, against htree_cuda/libhtree_cuda.so:
                                                 a library built elsewhere, another Python, no CUDA toolkit
python tools/build_inplace.py --debug          bounded waits and device assertions, into build/kernels-debug
python tools/build_inplace.py --times          also writes build_backend/compile_seconds.json: builds begin with
                                                 the sources that take longest
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_setup():
    """setup.py as a module: the source lists and build_kernels."""
    spec = importlib.util.spec_from_file_location("htree_cuda_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_times(log: Path, target: Path) -> None:
    """The seconds that each source of a log took to compile."""
    found = re.findall(r"^==== (\S+).*\n(?:(?!====).*\n)*?seconds: ([\d.]+)$", log.read_text(), re.MULTILINE)
    seconds = {source: float(time) for source, time in found}
    target.write_text(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Builds; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", action="store_true", help="build the benchmark binaries too")
    parser.add_argument("--module-only", action="store_true", help="only bindings.cpp, against the existing library")
    parser.add_argument("--debug", action="store_true", help="build with HTREE_CUDA_DEBUG")
    parser.add_argument("--times", action="store_true", help="note what each source took to compile")
    arguments = parser.parse_args(argv)
    setup = load_setup()
    build, compiling = setup.build, setup.compiling
    package = ROOT / "htree_cuda"
    try:
        if arguments.module_only:
            cxx = build.Probe().cxx(os.environ)
            if cxx is None:
                raise build.BuildError("no C++ compiler: install g++ or set CXX")
            target = compiling.build_module_only(ROOT, package / compiling.LIBRARY, package, cxx)
            setup.say(f"built {target.relative_to(ROOT)} against htree_cuda/{compiling.LIBRARY}")
            return 0
        plan = build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"})
        tools = build.resolve(plan)
        build_dir = setup.in_place_build_dir(arguments.debug)
        features = build.features(debug=arguments.debug)
        setup.build_kernels(plan, tools, features, build_dir, package, benchmarks=arguments.benchmarks)
    except (build.BuildError, build.Missing) as error:
        print(f"htree_cuda: {error}", file=sys.stderr)
        return 1
    if arguments.times:
        write_times(build_dir / "nvcc.log", setup.store.SECONDS)
    module = compiling.Python.here().module
    setup.say(f"built htree_cuda/{compiling.LIBRARY} and htree_cuda/{module}; log: {build_dir}/nvcc.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
