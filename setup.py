"""Build of htree_cuda: pure Python, or with the Hopper kernels. Switches: build_backend/htree_cuda_build.py.

`pip install .` is the front door. For development, `python setup.py build_ext --inplace` or
`python tools/build_inplace.py` builds the kernels into htree_cuda/, incrementally.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import htree_cuda_build as build  # noqa: E402
import htree_cuda_ninja as ninja  # noqa: E402

# Every kernel source; one instantiation a file where compiling takes long.
# tools/check_house_rules.py compares the list with csrc/.
KERNEL_SOURCES = [
    "csrc/host/library.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_128_heads.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_128_keys.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_192_heads.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_192_keys.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_512_heads.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_512_keys.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_576_heads.cu",
    "csrc/sm90/attn_dist/instantiations/bf16_576_keys.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_128_heads.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_128_keys.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_192_heads.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_192_keys.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_512_heads.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_512_keys.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_576_heads.cu",
    "csrc/sm90/attn_dist/instantiations/fp16_576_keys.cu",
    "csrc/sm90/attn_dist/launch.cu",
    "csrc/sm90/htree_bwd/instantiations/bf16_128.cu",
    "csrc/sm90/htree_bwd/instantiations/bf16_64.cu",
    "csrc/sm90/htree_bwd/instantiations/fp16_128.cu",
    "csrc/sm90/htree_bwd/instantiations/fp16_64.cu",
    "csrc/sm90/htree_bwd/launch.cu",
    "csrc/sm90/htree_bwd/pack/launch.cu",
    "csrc/sm90/htree_fwd/forward.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_bf16_128_128.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_bf16_128_64.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_bf16_64_128.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_bf16_64_64.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_fp16_128_128.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_fp16_128_64.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_fp16_64_128.cu",
    "csrc/sm90/htree_fwd/instantiations/attend_fp16_64_64.cu",
    "csrc/sm90/htree_fwd/instantiations/score_128.cu",
    "csrc/sm90/htree_fwd/instantiations/score_64.cu",
    "csrc/sm90/sparse_attention/instantiations/bf16_512.cu",
    "csrc/sm90/sparse_attention/instantiations/bf16_576.cu",
    "csrc/sm90/sparse_attention/instantiations/fp16_512.cu",
    "csrc/sm90/sparse_attention/instantiations/fp16_576.cu",
    "csrc/sm90/sparse_attention/launch.cu",
    "csrc/tree/build_union/launch.cu",
    "csrc/tree/pack/launch.cu",
    "csrc/tree/pool/launch.cu",
    "csrc/tree/select/launch.cu",
]

# Benchmark programs without Python, each linked to the kernel library: build/kernels/bin/<stem>.
BENCHMARK_SOURCES = [
    "benchmarks/cpp/attn_dist.cu",
    "benchmarks/cpp/forward.cu",
    "benchmarks/cpp/sparse_attention.cu",
    "benchmarks/cpp/tree_pool.cu",
]


def say(text: str) -> None:
    print(f"htree_cuda: {text}", flush=True)


def decide() -> tuple[build.Plan, build.Toolchain | None]:
    """Plan and tools of this build; with `auto`, a missing tool means no kernels and a reason."""
    plan = build.plan()
    tools = None
    if plan.kernels:
        try:
            tools = build.resolve(plan)
            ninja.cxx_flags(ROOT)
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
                for name in (ninja.LIBRARY, ninja.module_name()):  # an editable install finds older ones here
                    (folder / name).unlink(missing_ok=True)
                ninja.write_build_info(folder, ninja.build_info(ROOT, plan, None))

        def get_outputs(self, include_bytecode=True) -> list[str]:
            outputs = super().get_outputs(include_bytecode)
            if not plan.kernels and not self.editable_mode:
                outputs.append(str(Path(self.build_lib) / "htree_cuda" / ninja.BUILD_INFO))
            return outputs

    class BuildKernels(build_ext):
        """Ninja instead of setuptools' compilers; the outputs go into the package folder."""

        files = (ninja.LIBRARY, ninja.module_name(), ninja.BUILD_INFO)

        def run(self) -> None:
            if tools is None:
                say(f"no kernels to build: {plan.reason}")
                return
            in_place = self.inplace or self.editable_mode
            folder = ROOT / "htree_cuda" if in_place else Path(self.build_lib) / "htree_cuda"
            # In place, the objects are shared with tools/build_inplace.py: nothing is compiled twice.
            debug = bool(self.debug)
            build_dir = in_place_build_dir(debug) if in_place else Path(self.build_temp).resolve() / "kernels"
            try:
                build_kernels(plan, tools, build_dir, folder, debug=debug)
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
    """Where builds into the source tree keep objects and nvcc.log."""
    return ROOT / "build" / ("kernels-debug" if debug else "kernels")


def build_kernels(
    plan: build.Plan,
    tools: build.Toolchain,
    build_dir: Path,
    folder: Path,
    *,
    benchmarks: bool = False,
    debug: bool = False,
) -> None:
    """Builds the library and the module and puts them, with the build's data, into `folder`."""
    sources = BENCHMARK_SOURCES if benchmarks else []
    options = ninja.Options(ROOT, build_dir, KERNEL_SOURCES, sources, module=True, debug=debug)
    ninja.run_ninja(options, tools, ["library", "module", *(["benchmarks"] if benchmarks else [])])
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ninja.LIBRARY, ninja.module_name()):
        # A fresh file: overwriting one that a running process has mapped would crash it.
        (folder / name).unlink(missing_ok=True)
        shutil.copy2(build_dir / name, folder / name)
    ninja.write_build_info(folder, ninja.build_info(ROOT, plan, tools, debug))


if __name__ == "__main__":
    run_setup()
