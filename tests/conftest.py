"""Shared fixtures: what the `gpu` marker needs and where its tests run instead, threads, seeds."""

from __future__ import annotations

import functools
import os
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


def _emulated(item) -> bool:
    """Whether a test marked `gpu` runs on the emulator here; HTREE_CUDA_EMULATED: all that can, or none."""
    choice = os.environ.get("HTREE_CUDA_EMULATED", "marked")
    if choice == "all":
        wanted = not item.get_closest_marker("hardware")
    else:
        wanted = choice == "marked" and item.get_closest_marker("emulated")
    return bool(wanted and _no_hopper() and not ptx_emulator.why_not())


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (compute capability 9.0)")
    config.addinivalue_line("markers", "emulated: of the gpu tests, small enough for the emulator in every run")
    config.addinivalue_line("markers", "hardware: of the gpu tests, not for the emulator: streams, graphs, large sizes")


def pytest_collection_modifyitems(config, items):
    reason = _no_hopper()
    for item in items:
        if reason and item.get_closest_marker("gpu") and not _emulated(item):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _emulator(request, monkeypatch):
    """Without a Hopper GPU, the `emulated` ones of the gpu tests run on the CPU, each with a schedule of its own."""
    if not (request.node.get_closest_marker("gpu") and _emulated(request.node)):
        yield
        return
    kernels = os.environ.get("HTREE_CUDA_EMULATED_KERNELS", "").split(",")
    everything = os.environ.get("HTREE_CUDA_EMULATED") == "all"
    ptx_emulator.build(kernels if everything else ptx_emulator.SAMPLE)
    monkeypatch.setattr(request.module, "DEVICE", "cpu")
    seed = int(os.environ.get("HTREE_CUDA_EMULATED_SEED", zlib.crc32(request.node.nodeid.encode())))
    races = os.environ.get("HTREE_CUDA_EMULATED_RACES", "1") == "1"
    with ptx_emulator.emulated(seed=seed, races=races):
        yield
