"""Shared fixtures: the `gpu` marker and its reason to skip, threads, seeds."""

from __future__ import annotations

import pytest
import torch


def _no_hopper() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(0)
    return None if capability == (9, 0) else f"device 0 has compute capability {capability}, the kernels need (9, 0)"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (compute capability 9.0)")


def pytest_collection_modifyitems(config, items):
    reason = _no_hopper()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
