"""The built library and its module: what they need, and the reasons for not using them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import htree_cuda_compile as compiling
import pytest

from .common import ROOT, command


@pytest.fixture
def library():
    spec = importlib.util.find_spec("htree_cuda")
    path = Path(spec.origin).parent / "libhtree_cuda.so"
    if not path.exists():
        pytest.skip("the kernels are not built here")
    return path


def test_library_needs_no_torch_and_no_cuda(library):
    module = next(library.parent.glob("_C*.so"), None)
    for path in filter(None, (library, module)):
        if shutil.which("ldd"):
            linked = [line.split()[0] for line in command("ldd", path).splitlines()]
            assert not [name for name in linked if re.search(r"torch|c10|libcuda", name)], linked
            assert "not found" not in command("ldd", path)
        if shutil.which("nm"):
            symbols = command("nm", "-D", path)
            undefined = [line for line in symbols.splitlines() if " U " in line]
            assert not re.search(r"\b(cuda|cu[A-Z])|torch|c10|at::", "\n".join(undefined)), undefined
            defined = "\n".join(line for line in symbols.splitlines() if re.search(r" [TDBR] ", line))
            assert not re.search(r" (cuda|__cuda|cu[A-Z])\w*$", defined, re.MULTILINE), "the CUDA runtime is exported"


def test_module_imports_without_a_gpu(library):
    if not any(library.parent.glob(compiling.Python.here().module)):
        pytest.skip("the module was built for another Python")
    from htree_cuda import kernels

    assert kernels.built() and kernels.why_not_built() == ""
    assert kernels.load().params_hash == compiling.params_hash(ROOT), "stale build: python tools/build_inplace.py"


@pytest.fixture
def bare_kernels(monkeypatch, tmp_path):
    """htree_cuda.kernels of a package folder that is still empty."""
    from htree_cuda import kernels

    monkeypatch.setattr(kernels, "_PACKAGE", tmp_path)
    monkeypatch.setattr(kernels, "_LIBRARY", tmp_path / "libhtree_cuda.so")
    cached = (kernels.build_info, kernels._load, kernels.device_supported)
    for function in cached:
        function.cache_clear()
    yield kernels
    for function in cached:
        function.cache_clear()


def test_a_source_tree_that_hides_an_installation_says_so(bare_kernels, tmp_path, monkeypatch):
    installed = tmp_path / "site" / tmp_path.name
    installed.mkdir(parents=True)
    (installed / "libhtree_cuda.so").write_bytes(b"")
    monkeypatch.setattr(bare_kernels.sys, "path", [str(tmp_path.parent), str(installed.parent)])
    assert f"hides the htree_cuda installed in {installed.parent}" in bare_kernels.why_not_built()


def test_reasons_for_no_kernels(bare_kernels, tmp_path, monkeypatch):
    assert not bare_kernels.built() and "tools/build_inplace.py" in bare_kernels.why_not_built()
    bare_kernels._load.cache_clear()
    bare_kernels.build_info.cache_clear()
    (tmp_path / "_build_info.json").write_text(json.dumps({"kernels": False, "reason": "no C++ compiler"}))
    assert bare_kernels.why_not_built() == "built without kernels: no C++ compiler"
    bare_kernels._load.cache_clear()
    (tmp_path / "libhtree_cuda.so").write_bytes(b"")

    def fail(name):
        raise ImportError("params.h differs")

    monkeypatch.setattr(bare_kernels.importlib, "import_module", fail)
    with pytest.raises(
        RuntimeError, match=r"htree_cuda has no kernels: .* does not load: ImportError: params.h differs"
    ):
        bare_kernels.load()


def test_supported_devices(bare_kernels, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bare_kernels.device_supported(0) == (False, "torch finds no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        bare_kernels.device_supported.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, c=capability: c)
        supported, reason = bare_kernels.device_supported(0)
        assert supported is (capability == (9, 0))
        assert (
            supported or f"capability {capability[0]}.{capability[1]}, the kernels are built for exactly 9.0" in reason
        )


def test_driver_too_old(bare_kernels, monkeypatch):
    import types

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for driver, expected in ((0, False), (12090, False), (13000, True), (13020, True), (14000, True)):
        module = types.SimpleNamespace(runtime_version=lambda: 13010, driver_version=lambda d=driver: d)
        monkeypatch.setattr(bare_kernels, "_load", lambda m=module: (m, ""))
        bare_kernels.device_supported.cache_clear()
        supported, reason = bare_kernels.device_supported(0)
        assert supported is expected
        assert supported or f"built with CUDA 13.1, the NVIDIA driver runs CUDA {driver // 1000}." in reason
