"""Build of htree_cuda: pure Python, or with the Hopper kernels. Switches: build_backend/htree_cuda_build.py.

`pip install .` is the front door. For development, `python setup.py build_ext --inplace` or
`python tools/build_inplace.py` builds the kernels into htree_cuda/, incrementally.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import htree_cuda_build as build  # noqa: E402
import htree_cuda_compile as compiling  # noqa: E402
import htree_cuda_store as store  # noqa: E402


def say(text: str) -> None:
    print(f"htree_cuda: {text}", flush=True)


def decide() -> tuple[build.Plan, build.Toolchain | None]:
    """Plan and tools of this build; with `auto`, a missing tool means no kernels and a reason."""
    plan = build.plan()
    tools = None
    if plan.kernels:
        try:
            tools = build.resolve(plan)
            compiling.pybind11_include()
        except build.Missing as missing:
            if plan.mode == "on":
                raise build.BuildError(f"HTREE_CUDA_KERNELS=on, but {missing}") from missing
            plan, tools = build.Plan(False, plan.mode, str(missing)), None
    return plan, tools


def run_setup() -> None:
    """setuptools' part: called as a script, by pip and by hand."""
    import setuptools
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py

    if int(setuptools.__version__.split(".")[0]) < 77:  # the licence fields of pyproject.toml
        sys.exit(f"htree_cuda: the build needs setuptools 77 or newer, this is {setuptools.__version__}")

    # Metadata and an sdist need no decision, and must not depend on the machine.
    passive = any(name in sys.argv for name in ("egg_info", "dist_info", "sdist", "clean", "--help", "--version"))
    try:
        plan, tools = (build.Plan(False, "off", ""), None) if passive else decide()
        build.features()  # a wrong request ends the build before it compiles anything
    except build.BuildError as error:
        sys.exit(f"htree_cuda: {error}")
    if not passive:
        what = f"WITH kernels for {build.ARCH}" if plan.kernels else "WITHOUT kernels"
        say(f"building {what}: {plan.reason}")

    class BuildPy(build_py):
        """Python files, and what was decided about the kernels."""

        def run(self) -> None:
            if not self.editable_mode:
                # Leftovers of older builds would travel in the wheel.
                shutil.rmtree(Path(self.build_lib) / "htree_cuda", ignore_errors=True)
            super().run()
            if not plan.kernels:
                folder = ROOT / "htree_cuda" if self.editable_mode else Path(self.build_lib) / "htree_cuda"
                for name in (
                    compiling.LIBRARY,
                    compiling.Python.here().module,
                ):  # an editable install finds older ones here
                    (folder / name).unlink(missing_ok=True)
                compiling.write_build_info(folder, compiling.build_info(ROOT, plan, None, build.EVERYTHING))

        def get_outputs(self, include_bytecode=True) -> list[str]:
            outputs = super().get_outputs(include_bytecode)
            if not plan.kernels and not self.editable_mode:
                outputs.append(str(Path(self.build_lib) / "htree_cuda" / compiling.BUILD_INFO))
            return outputs

    class BuildKernels(build_ext):
        """nvcc and ninja instead of setuptools' compilers; the outputs go into the package folder."""

        files = (compiling.LIBRARY, compiling.Python.here().module, compiling.BUILD_INFO)

        def run(self) -> None:
            if tools is None:
                say(f"no kernels to build: {plan.reason}")
                return
            in_place = self.inplace or self.editable_mode
            folder = ROOT / "htree_cuda" if in_place else Path(self.build_lib) / "htree_cuda"
            try:
                features = build.features(debug=bool(self.debug))
                temporary = Path(self.build_temp).resolve() / "kernels"
                build_dir = in_place_build_dir(features.debug) if in_place else temporary
                build_kernels(plan, tools, features, build_dir, folder)
            except build.BuildError as error:
                sys.exit(f"htree_cuda: {error}")

        def get_outputs(self) -> list[str]:
            folder = "htree_cuda" if self.inplace or self.editable_mode else f"{self.build_lib}/htree_cuda"
            return [f"{folder}/{name}" for name in self.files] if tools is not None else []

        def get_output_mapping(self) -> dict[str, str]:
            return {}

    extensions = [Extension("htree_cuda._C", ["csrc/bindings.cpp"])] if tools is not None else []
    setup(
        version=build.read_version(ROOT),
        ext_modules=extensions,
        cmdclass={"build_py": BuildPy, "build_ext": BuildKernels},
    )


def in_place_build_dir(debug: bool) -> Path:
    """Where builds into the source tree keep nvcc.log and the benchmark programs."""
    return ROOT / "build" / ("kernels-debug" if debug else "kernels")


def build_kernels(
    plan: build.Plan,
    tools: build.Toolchain,
    features: build.Features,
    build_dir: Path,
    folder: Path,
    *,
    benchmarks: bool = False,
) -> list[store.Job]:
    """Builds the library and the module and puts them, with the build's data, into `folder`; returns what it had to
    compile and link, which is nothing where an earlier build left the same objects."""
    objects_dir = store.usable(store.folder(), build_dir / "objects")
    compilation = compiling.Compilation(ROOT, tools, features, objects_dir)
    kernels = compilation.kernels()
    library = compilation.library(kernels)
    python = compiling.Python.here()
    binding, module = compilation.module(python, library)
    programs = []
    if benchmarks:
        to_package = os.path.relpath(folder, build_dir / "bin")
        programs = [compilation.benchmark(source, library, to_package) for source in compiling.benchmark_sources(ROOT)]
    jobs = [*kernels, library, binding, module, *(job for pair in programs for job in pair)]
    made = compilation.run(jobs, build_dir)
    say(f"compiled {sum(job.output.suffix == '.o' for job in made)} of {len(kernels) + 1 + len(programs)} sources")
    compiling.write_log(build_dir / "nvcc.log", [*kernels, binding])
    compiling.place(library.output, folder / compiling.LIBRARY)
    compiling.place(module.output, folder / python.module)
    for _, program in programs:
        compiling.place(program.output, build_dir / "bin" / program.output.name)
    compiling.write_build_info(folder, compiling.build_info(ROOT, plan, tools, features))
    if made:
        store.prune(objects_dir)
    return made


if __name__ == "__main__":
    run_setup()
