"""What every test of the kernels needs."""

from __future__ import annotations

import pytest

from htree_cuda import kernels

# Some of their tests run PyTorch operations alone on a GPU.
NEED_NONE = {"test_dsa_layer.py", "test_module.py", "test_transformers.py"}


@pytest.fixture(autouse=True)
def _kernels_are_built(request):
    """A Hopper GPU without kernels is a failure, not a skip."""
    if request.node.get_closest_marker("gpu") and request.path.name not in NEED_NONE:
        kernels.load()
