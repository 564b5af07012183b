"""Shared fixtures: what the `gpu` marker needs and where its tests run instead, threads, seeds."""

from __future__ import annotations

import functools
import os
import sys
import zlib

import pytest
import torch

from tools import ptx_emulator


@functools.cache
def _no_hopper() -> str:
    """Why the kernels cannot run on device 0; empty where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(0)
    return "" if capability == (9, 0) else f"device 0 has compute capability {capability}, the kernels need (9, 0)"


# Which of the gpu tests run on the emulator where there is no Hopper GPU, and the kernels that they need.
CHOICES = {
    "none": [],
    "sample": ptx_emulator.SAMPLE,  # a few of every kernel family, in every run
    "marked": ptx_emulator.MARKED,
    "all": [],  # every kernel
}


def _choice() -> str:
    choice = os.environ.get("HTREE_CUDA_EMULATED") or "sample"
    if choice not in CHOICES:
        raise pytest.UsageError(f"HTREE_CUDA_EMULATED must be of {', '.join(CHOICES)}, got {choice!r}")
    return choice


def emulated_kernels() -> list[str]:
    """Which kernels this run translates; HTREE_CUDA_EMULATED_KERNELS names others."""
    named = os.environ.get("HTREE_CUDA_EMULATED_KERNELS")
    return named.split(",") if named else CHOICES[_choice()]


def _emulated(item) -> bool:
    """Whether a test marked `gpu` runs on the emulator here."""
    choice = _choice()
    if choice == "all":
        wanted = not item.get_closest_marker("hardware")
    else:
        wanted = choice != "none" and item.get_closest_marker({"marked": "emulated"}.get(choice, choice))
    return bool(wanted and _no_hopper() and not ptx_emulator.why_not())


def pytest_configure(config):
    # Test processes side by side share the cores: more threads than cores wait for each other, spinning.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of what the tests start
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (compute capability 9.0)")
    config.addinivalue_line("markers", "emulated(sms=3): of the gpu tests, small enough for the emulator")
    config.addinivalue_line("markers", "sample: of the emulated tests, those of every run: K = V = 64, one dtype")
    config.addinivalue_line("markers", "hardware: of the gpu tests, not for the emulator: streams, graphs, large sizes")


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="i/n: every n-th test from the i-th on")


def part_of(items: list, text: str) -> list:
    """`i/n` of the items."""
    part, parts = map(int, text.split("/"))
    return items[part - 1 :: parts]


def pytest_collection_modifyitems(config, items):
    items[:] = part_of(items, config.getoption("--part"))
    reason = _no_hopper()
    for item in items:
        if reason and item.get_closest_marker("gpu") and not _emulated(item):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _emulator(request, monkeypatch):
    """Without a Hopper GPU, some of the gpu tests run on the emulator, each with a schedule of its own."""
    if not (request.node.get_closest_marker("gpu") and _emulated(request.node)):
        yield
        return
    ptx_emulator.build(emulated_kernels())
    helpers = [module for name, module in sys.modules.items() if name.startswith("tests.kernels.")]
    for module in {request.module, *helpers}:
        if hasattr(module, "DEVICE"):
            monkeypatch.setattr(module, "DEVICE", "cpu")
    seed = int(os.environ.get("HTREE_CUDA_EMULATED_SEED", zlib.crc32(request.node.nodeid.encode())))
    races = os.environ.get("HTREE_CUDA_EMULATED_RACES", "1") == "1"
    marker = request.node.get_closest_marker("emulated")
    with ptx_emulator.emulated(seed=seed, races=races, **(marker.kwargs if marker else {})):
        yield
