"""CPU tensors through the CUDA path: the public functions run the emulated kernels inside `emulated()`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from htree_cuda import kernels, ops

from . import make

_LAUNCHERS = (
    "tree_pool", "forward_runs", "forward_varlen", "backward_runs", "backward_varlen", "attn_dist", "sparse_attention",
    "sparse_attention_backward", "tree_append", "tree_decode", "topk_indices", "indexer_logits",
    "indexer_logits_listed", "indexer_topk",
)  # fmt: skip
_WORKSPACES = tuple(f"{op}{kind}_workspace" for op in ("forward", "backward") for kind in ("", "_runs", "_varlen"))
_ALIGNMENT = 256  # of a CUDA allocation, which the launchers rely on for the workspace


@functools.cache
def _load_module(path: Path):
    spec = importlib.util.spec_from_file_location("_C", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def module():
    """The compiled bindings over the emulated library that was built last."""
    return _load_module(make.built())


def library() -> ctypes.CDLL:
    """The emulated library that was built last."""
    return _load_library(make.built().parent / make.LIBRARY)


@functools.cache
def _load_library(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    found.emulator_configure.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_bool]
    found.emulator_allow.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    found.emulator_launch_count.restype = ctypes.c_uint64
    return found


def _allow(values) -> None:
    for x in values:
        if isinstance(x, (tuple, list)):
            _allow(x)
        elif dataclasses.is_dataclass(x):  # params, which hold a table of angles and sinks
            _allow(getattr(x, field.name) for field in dataclasses.fields(x))
        elif isinstance(x, torch.Tensor) and x.numel():
            storage = x.untyped_storage()
            library().emulator_allow(storage.data_ptr(), storage.nbytes())


@contextlib.contextmanager
def emulated(seed: int = 0, sms: int = 3, races: bool = True) -> Iterator[ctypes.CDLL]:
    """Inside, ops on CPU tensors take the way of CUDA tensors, and their kernels run here.

    A kernel reads and writes the storages of the tensors that it was given and nothing else; `seed` decides how its
    threads and asynchronous copies are scheduled (seed % 3: round robin, random, priorities that change). `races`: also
    looks for accesses to shared memory that nothing orders, whatever the schedule.
    """
    compiled = module()
    library().emulator_configure(seed, sms, races)
    saved = {name: getattr(kernels, name) for name in (*_LAUNCHERS, *_WORKSPACES, "load", "_place")}
    use_torch = ops._use_torch

    def checked(name):
        def run(*args, **options):
            library().emulator_forget_allocations()
            if f"{name}_workspace" in _WORKSPACES:
                args, at = list(args), -1 if name.endswith("_runs") else -2  # params come behind
                skip = -args[at].data_ptr() % _ALIGNMENT
                args[at] = args[at][skip : args[at].numel() - _ALIGNMENT + skip].fill_(0xFF)
            _allow(args)
            _allow(options.values())
            return saved[name](*args, **options)

        return run

    def workspace(name):
        size = getattr(compiled, name.replace("_varlen", "").replace("_runs", ""))
        if "varlen" in name:
            return lambda *args: size([kernels.varlen_params(*args)], device=0) + _ALIGNMENT
        if "runs" in name:
            return lambda *args, part=(0, 0, 0): size(kernels._runs(*args), device=0, part=part) + _ALIGNMENT
        return lambda *args, part=(0, 0, 0): size([kernels._forward_params(*args)], device=0, part=part) + _ALIGNMENT

    try:
        for name in _LAUNCHERS:
            setattr(kernels, name, checked(name))
        kernels.load = lambda: compiled
        kernels._place = lambda x: {"device": 0, "stream": 0}
        for name in _WORKSPACES:
            setattr(kernels, name, workspace(name))
        ops._use_torch = lambda op, x, backend: backend == "torch"
        yield library()
    finally:
        for name, function in saved.items():
            setattr(kernels, name, function)
        ops._use_torch = use_torch
