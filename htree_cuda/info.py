"""`python -m htree_cuda info`: what is installed, what it was built with, what it will run on."""

from __future__ import annotations

import argparse
import json
import platform

import torch

from . import kernels
from ._version import __version__


def collect() -> dict:
    """Everything that `main` prints, as plain data."""
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        supported, reason = kernels.device_supported(index)
        major, minor = torch.cuda.get_device_capability(index)
        devices.append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "capability": f"{major}.{minor}",
                "supported": supported,
                "reason": reason,
            }
        )
    if not kernels.built():
        auto, why = "torch", f"no kernels: {kernels.why_not_built()}"
    elif not devices:
        auto, why = "torch", "kernels are built, but torch finds no CUDA device"
    elif not any(device["supported"] for device in devices):
        auto, why = "torch", "kernels are built, but no CUDA device here can run them"
    else:
        auto, why = "kernels", "kernels are built and a device supports them"
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "built": kernels.built(),
        "why_not_built": kernels.why_not_built(),
        "build": kernels.build_info(),
        "devices": devices,
        "auto": {"cuda_tensors": auto if auto == "kernels" else "error", "cpu_tensors": "torch", "why": why},
    }


def render(info: dict) -> str:
    """The report for people."""
    build = info["build"]
    lines = [
        f"htree_cuda {info['version']}, Python {info['python']}, torch {info['torch']}"
        + (f" (CUDA {info['torch_cuda']})" if info["torch_cuda"] else " (no CUDA)"),
        f"kernels: {'built' if info['built'] else 'NOT built: ' + info['why_not_built']}",
    ]
    if build.get("kernels"):
        lines.append(
            f"  for {build['arch']}{' (debug)' if build.get('debug') else ''} by nvcc {build['nvcc']} "
            f"({build['nvcc_source']}), {build['cxx']}, "
            f"CUTLASS {build['cutlass']}, pybind11 {build['pybind11']}"
        )
        lines.append(f"  sources {build['csrc_hash'][:12]}; HTREE_CUDA_KERNELS={build['mode']}: {build['reason']}")
        if build.get("families"):
            mixed = "K != V too" if build["mixed_dims"] else "K == V"
            lines.append(f"  kernel families {', '.join(build['families'])}; {mixed}")
    if not info["devices"]:
        lines.append("CUDA devices: none")
    for device in info["devices"]:
        verdict = "supported" if device["supported"] else f"not supported: {device['reason']}"
        lines.append(f"CUDA device {device['index']}: {device['name']}, capability {device['capability']}, {verdict}")
    lines.append('backend="auto": CPU tensors use the torch backend')
    if info["auto"]["cuda_tensors"] == "kernels":
        lines.append('                CUDA tensors use the kernels; backend="torch" runs what they do not cover')
    else:
        lines.append(f'                CUDA tensors raise ({info["auto"]["why"]}); backend="torch" runs')
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m htree_cuda info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    arguments = parser.parse_args(argv)
    info = collect()
    print(json.dumps(info, indent=2) if arguments.json else render(info))
    return 0
