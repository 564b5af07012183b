"""The only Python file that touches the compiled module: tensors in, pointers and the current stream out.

Nothing is validated here (`checks` does that, called by `ops.py`) and nothing is allocated. Importing this
file loads neither the module nor CUDA; `load()` does, once.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import pairs
from .params import TreeParams, start_of

_PACKAGE = Path(__file__).resolve().parent
_LIBRARY = _PACKAGE / "libhtree_cuda.so"
ALL_FAMILIES = ("htree", "decode", "dsa")
CAPABILITY = (9, 0)  # code for sm_90a runs on exactly this


@functools.cache
def build_info() -> dict:
    """What the build recorded (see `python -m htree_cuda info`); empty where the package was never built."""
    try:
        return json.loads((_PACKAGE / "_build_info.json").read_text())
    except FileNotFoundError:
        return {}


def _hidden() -> str | None:
    """The folder of an installed htree_cuda with kernels that this one comes before in sys.path."""
    for entry in sys.path:
        other = Path(entry).resolve() / _PACKAGE.name
        if other != _PACKAGE and (other / _LIBRARY.name).exists():
            return str(other.parent)
    return None


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    if not _LIBRARY.exists():
        info = build_info()
        if not info and (hidden := _hidden()):
            reason = f"a source tree without a build hides the htree_cuda installed in {hidden}: run from elsewhere"
        elif not info:
            reason = "a source tree without a build: run `python tools/build_inplace.py` or `pip install .`"
        else:
            reason = f"built without kernels: {info.get('reason', 'no reason recorded')}"
        return None, reason
    try:
        return importlib.import_module("htree_cuda._C"), ""
    except Exception as error:  # any failure to load becomes the reason, whatever raised it
        return None, f"the kernel library is there but does not load: {type(error).__name__}: {error}"


def built() -> bool:
    """Whether the kernels were built and load."""
    return _load()[0] is not None


def why_not_built() -> str:
    """Why `built()` is False; empty where it is True."""
    return _load()[1]


def load() -> ModuleType:
    """The compiled module. Raises RuntimeError with the reason where there is none."""
    module, reason = _load()
    if module is None:
        raise RuntimeError(f"htree_cuda has no kernels: {reason}")
    return module


def families() -> tuple[str, ...]:
    """The kernel families that this build holds (HTREE_CUDA_FAMILIES at build time)."""
    return tuple(build_info().get("families", ALL_FAMILIES))


def mixed_dims() -> bool:
    """Whether the htree kernels for K != V are there (HTREE_CUDA_MIXED_DIMS=1 at build time)."""
    return load().has_mixed_dims()


@functools.cache
def device_supported(device_index: int | None) -> tuple[bool, str]:
    """Whether the kernels run on a CUDA device (None: the current one), and if not, why."""
    if not torch.cuda.is_available():
        return False, "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device_index)
    if capability != CAPABILITY:
        name = torch.cuda.get_device_name(device_index)
        return False, (
            f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels are built "
            f"for exactly {CAPABILITY[0]}.{CAPABILITY[1]} (Hopper: H100, H200, H20, GH200)"
        )
    module = _load()[0]
    # Within one major version a driver runs newer minor ones; an older major version it does not.
    if module is not None and module.driver_version() // 1000 < module.runtime_version() // 1000:
        runtime, driver = (f"{v // 1000}.{v % 1000 // 10}" for v in (module.runtime_version(), module.driver_version()))
        return False, (
            f"the kernels were built with CUDA {runtime}, the NVIDIA driver runs CUDA {driver} at most: "
            "update the driver, or build with the nvcc of an older toolkit (HTREE_CUDA_NVCC)"
        )
    return True, ""


def _dtype(x: Tensor):
    return getattr(load().DType, str(x.dtype).removeprefix("torch."))


def _place(x: Tensor) -> dict[str, int]:
    """Device and current stream, as every launcher takes them."""
    if x.device.type == "meta":  # of `recorded`
        return {"device": -1, "stream": 0}
    return {"device": x.get_device(), "stream": torch.cuda.current_stream(x.device).cuda_stream}


def tree_pool(k: Tensor, v: Tensor, k_tree: Tensor, v_tree: Tensor, *, compression_rate: int, layers: int) -> None:
    """Fills k_tree and v_tree ([B, H_kv, M, D], contiguous) from k and v ([B, T, H_kv, D]); `layers` is L."""
    B, T, H_kv, _ = k.shape

    def tensor(x: Tensor, tree: Tensor) -> tuple[int, ...]:
        stride_b, stride_t, stride_h, _ = x.stride()
        return x.data_ptr(), stride_b, stride_t, stride_h, tree.data_ptr(), x.shape[3]

    load().tree_pool(
        k=tensor(k, k_tree),
        v=tensor(v, v_tree),
        B=B,
        T=T,
        H_kv=H_kv,
        compression_rate=compression_rate,
        layers=layers,
        dtype=_dtype(k),
        **_place(k),
    )


def _strided(x: Tensor) -> tuple[int, ...]:
    return x.data_ptr(), *x.stride()[:3]


def _slots(indices: Tensor) -> tuple[int, ...]:
    """(pointer, stride_b, stride_s, stride of slots) of an index list [B, s_q, 1, topk]."""
    return indices.data_ptr(), indices.stride(0), indices.stride(1), indices.stride(3)


def _starts(q_start: list[int] | None, B: int) -> list[int] | None:
    """B starts, of those that `params.start_of` reads."""
    return None if q_start is None else [start_of(q_start, b) for b in range(B)]


def _or_none(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """(pointer, stride of each dimension), zeros for None."""
    return (0,) * (dims + 1) if x is None else (x.data_ptr(), *x.stride())


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _forward_params(q: Tensor, k: Tensor, v: Tensor, params, maxima: tuple[int, int] | None = None):
    """maxima: T and T_q where they are not those of k and q."""
    B, T_q, H, K = q.shape
    T = k.shape[1]
    if maxima is not None:
        T, T_q = maxima
    H_kv = k.shape[2]
    pairs.check_arranged(params, K)
    return load().ForwardParams(
        q=_strided(q),
        k=_strided(k),
        v=_strided(v),
        B=B,
        T=T,
        T_q=T_q,
        q_start=params.q_start,
        H_kv=H_kv,
        G=H // H_kv,
        K=K,
        V=v.shape[3],
        top_k=params.top_k,
        scale=params.scale,
        rope_base=10000.0 if params.rope_base is None else params.rope_base,
        strict_causal=params.strict_causal,
        dtype=_dtype(q),
        inv_freq=_pointer(params.rope_inv_freq),
        attn_sink=_pointer(params.attn_sink),
    )


class Run(NamedTuple):
    """Queries with consecutive positions, [B, n, ..]; a call has one run or several. q_start of params is theirs.
    selection is None where the forward does not write it; given: one to replay. What is behind it is the backward's."""

    q: Tensor
    out: Tensor
    lse: Tensor
    selection: Tensor | None
    params: TreeParams
    given: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None


def varlen_params(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start, params):
    """The params struct of a packed or ragged call; params: params.VarlenParams."""
    packed = params.packed
    total_q, total_k = (x.shape[0] if packed else x.shape[0] * x.shape[1] for x in (q, k))
    maxima = (max(1, params.max_seqlen_k), params.max_seqlen_q)
    batched = (x[None] for x in (q, k, v)) if packed else (q, k, v)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q}
    lengths |= {"seqused_k": seqused_k, "q_start": q_start}
    return _forward_params(*batched, params.tree, maxima).with_sequences(
        count=params.sequences,
        **{name: 0 if x is None else x.data_ptr() for name, x in lengths.items()},
        q_start_64=q_start is not None and q_start.dtype == torch.int64,
        total_q=total_q,
        total_k=total_k,
    )


def forward_varlen_workspace(q: Tensor, k: Tensor, v: Tensor, *lengths_params) -> int:
    """Bytes of workspace that `forward_varlen` needs; the arguments of `varlen_params`."""
    return load().forward_workspace([varlen_params(q, k, v, *lengths_params)], device=q.get_device())


def forward_varlen(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, seqused_q: Tensor | None, seqused_k: Tensor | None, q_start: Tensor | None,
    workspace: Tensor, params, given: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills out, lse and, where given, selection, contiguous and with the rows of q, of sequences of different lengths,
    of which there is one at least, as there is a row of q and of k."""
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start)
    load().forward(
        [_with_results(varlen_params(q, k, v, *lengths, params), out, lse, selection, given)],
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        **_place(q),
    )


def backward_varlen_workspace(q: Tensor, k: Tensor, v: Tensor, *lengths_params) -> int:
    """Bytes of workspace that `backward_varlen` needs; the arguments of `varlen_params`."""
    return load().backward_workspace([varlen_params(q, k, v, *lengths_params)], device=q.get_device())


def backward_varlen(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None, seqused_k: Tensor | None, q_start: Tensor | None, workspace: Tensor, params,
) -> None:  # fmt: skip
    """`backward` of sequences of different lengths, of which there is one at least, as there is a row of q and of k.
    Rows of no sequence get 0; where dk and dv are float32 they are added to, and such rows stay as they are."""
    batched = (0,) if params.packed else ()  # a stride that is not looked at
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start)
    forward = _with_results(varlen_params(q, k, v, *lengths, params), out, lse, selection)
    own = load().BackwardParams(
        forward,
        dout=(dout.data_ptr(), *batched, *dout.stride()),
        dlse=(dlse.data_ptr(), *batched, *dlse.stride()),
        dq=dq.data_ptr(),
        **_sums(dk, dv),
    )
    load().backward(
        [own],
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        **_place(q),
    )


def _with_results(params, out: Tensor, lse: Tensor, selection: Tensor | None, given: Tensor | None = None):
    written, given = (x if x is not None and x.numel() else None for x in (selection, given))
    return params.with_results(
        out=out.data_ptr(), lse=lse.data_ptr(), selection=_pointer(written), given=_pointer(given)
    )  # fmt: skip


def _runs(runs: Sequence[Run], k: Tensor, v: Tensor) -> list:
    return [
        _with_results(_forward_params(x.q, k, v, x.params), x.out, x.lse, x.selection, x.given) for x in runs
    ]  # fmt: skip


def _sums(dk: Tensor, dv: Tensor, add: bool = True) -> dict:
    return {"dk": dk.data_ptr(), "dv": dv.data_ptr(), "float32": dk.dtype == torch.float32, "add": add}


def forward_workspace(q: Tensor, k: Tensor, v: Tensor, params, part: tuple[int, int, int] = (0, 0, 0)) -> int:
    """Bytes of workspace that `forward` needs for this call; params: params.TreeParams."""
    return load().forward_workspace([_forward_params(q, k, v, params)], part=part, device=q.get_device())


def forward_runs_workspace(runs: Sequence[Run], k: Tensor, v: Tensor, part: tuple[int, int, int] = (0, 0, 0)) -> int:
    """Bytes of workspace that `forward_runs` needs."""
    return load().forward_workspace(_runs(runs, k, v), part=part, device=k.get_device())


def forward_runs(
    runs: Sequence[Run], k: Tensor, v: Tensor, workspace: Tensor, part: tuple[int, int, int] = (0, 0, 0)
) -> None:  # fmt: skip
    """Fills out, lse and, where not None, selection of each run; several need B 1. part: queries of a sequence in a
    larger call that this one is a part of, and zeros."""
    load().forward(
        _runs(runs, k, v), workspace=workspace.data_ptr(), workspace_bytes=workspace.numel(), part=part, **_place(k)
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Tensor | None,
    workspace: Tensor,
    params,
    given: Tensor | None = None,
) -> None:
    """Fills out [B, T_q, H, V], lse [B, T_q, H] and, where not None, selection [L-1, B, T_q, H_kv, top_k], contiguous.
    given: a selection of that shape, contiguous, in place of choosing; selection is None then."""
    forward_runs([Run(q, out, lse, selection, params, given)], k, v, workspace)


def recorded(call: Callable[[], None], *, sms: int) -> list[dict]:
    """The kernels over index lists that `call` would launch on a GPU with so many SMs, as `htree_cuda.explain` tells
    them. `call` calls functions of this file with meta tensors; nothing is launched."""
    return load().recorded(call, processors=sms)


def explain_forward(q: Tensor, k: Tensor, v: Tensor, params, *, sms: int) -> list[dict]:
    """The kernels of `forward` on a GPU with so many SMs, as `htree_cuda.explain` tells them; tensors may be meta."""
    return load().explain_forward(_forward_params(q, k, v, params), selection=False, processors=sms)


def explain_backward(q: Tensor, k: Tensor, v: Tensor, params, *, sms: int) -> list[dict]:
    """The kernels of `backward`, likewise."""
    return load().explain_backward(_forward_params(q, k, v, params), processors=sms)


def backward_workspace(q: Tensor, k: Tensor, v: Tensor, params, part: tuple[int, int, int] = (0, 0, 0)) -> int:
    """Bytes of workspace that `backward` needs for this call; params: params.TreeParams."""
    return load().backward_workspace([_forward_params(q, k, v, params)], part=part, device=q.get_device())


def backward_runs_workspace(runs: Sequence[Run], k: Tensor, v: Tensor, part: tuple[int, int, int] = (0, 0, 0)) -> int:
    """Bytes of workspace that `backward_runs` needs."""
    return load().backward_workspace(_runs(runs, k, v), part=part, device=k.get_device())


def backward_runs(
    runs: Sequence[Run], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, workspace: Tensor, *, add: bool,
    part: tuple[int, int, int] = (0, 0, 0), before_dkv: torch.cuda.Event | None = None,
) -> None:  # fmt: skip
    """Fills dq of each run, and dk and dv of all runs together; several need B 1. dk and dv may be float32: they are
    then added to where `add` says so. part: queries of a sequence and KV heads of a larger call that this one is a part
    of, and KV heads of the selection. Where the former KV heads are not 0, out, lse, selection and dq are views of some
    heads of contiguous tensors; where the latter are not, the selection has so many heads of its own. before_dkv: an
    event behind which dk and dv are read and written, at the end of the first chunk of KV heads."""
    module = load()
    own = [
        module.BackwardParams(
            forward,
            dout=(run.dout.data_ptr(), *run.dout.stride()),
            dlse=(run.dlse.data_ptr(), *run.dlse.stride()),
            dq=run.dq.data_ptr(),
            **_sums(dk, dv, add),
        )
        for run, forward in zip(runs, _runs(runs, k, v), strict=True)
    ]
    module.backward(
        own, workspace=workspace.data_ptr(), workspace_bytes=workspace.numel(), part=part,
        before_dkv=0 if before_dkv is None else before_dkv.cuda_event, **_place(k),
    )  # fmt: skip


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, workspace: Tensor, params, part: tuple[int, int, int] = (0, 0, 0),
) -> None:  # fmt: skip
    """Fills dq, dk, dv (contiguous, of the shapes of q, k, v) from what `forward` wrote and the gradients of that;
    dout [B, T_q, H, V] and dlse [B, T_q, H] have any strides. Where dk and dv are float32, they are added to.
    part: as in `backward_runs`."""
    run = Run(q, out, lse, selection, params, None, dout, dlse, dq)
    backward_runs([run], k, v, dk, dv, workspace, add=dk.dtype == torch.float32, part=part)


def attn_dist(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    lse: Tensor,
    out: Tensor,
    *,
    sm_scale: float,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    lse_base: float,
) -> None:
    """Fills out [B, ceil(h_q / 64), s_q, topk] float32 from q [B, s_q, h_q, d], k [B, s_kv, 1, d],
    indices [B, s_q, 1, topk], lse [B, s_q, h_q], topk_length [B, s_q], all of them strided."""
    B, s_q, h_q, d_qk = q.shape
    load().attn_dist(
        q=(q.data_ptr(), *q.stride()[:3]),
        k=(k.data_ptr(), *k.stride()[:2]),
        indices=_slots(indices),
        lse=_strided(lse),
        topk_length=_or_none(topk_length, 2),
        out=out.data_ptr(),
        q_start=_starts(q_start, B),
        k_stride=k_stride,
        B=B,
        s_q=s_q,
        s_kv=k.shape[1],
        h_q=h_q,
        d_qk=d_qk,
        topk=indices.shape[3],
        sm_scale=sm_scale,
        lse_base=lse_base,
        dtype=_dtype(q),
        **_place(q),
    )


def sparse_attention_workspace(q: Tensor, indices: Tensor) -> int:
    """Bytes of workspace that `sparse_attention` needs: 0 but for few queries."""
    B, s_q, h_q, _ = q.shape
    return load().sparse_attention_workspace(B=B, s_q=s_q, h_q=h_q, topk=indices.shape[3])


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    *,
    sm_scale: float,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    lse_base: float,
) -> None:
    """Fills out [B, s_q, h_q, d_v] and lse [B, s_q, h_q] float32, both contiguous, from q [B, s_q, h_q, d],
    kv [B, s_kv, 1, d], indices [B, s_q, 1, topk], topk_length [B, s_q], attn_sink [h_q], all of
    them strided."""
    B, s_q, h_q, d_qk = q.shape
    load().sparse_attention(
        q=_strided(q),
        kv=(kv.data_ptr(), *kv.stride()[:2]),
        indices=_slots(indices),
        topk_length=_or_none(topk_length, 2),
        attn_sink=_or_none(attn_sink, 1),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        q_start=_starts(q_start, B),
        k_stride=k_stride,
        B=B,
        s_q=s_q,
        s_kv=kv.shape[1],
        h_q=h_q,
        d_qk=d_qk,
        d_v=out.shape[3],
        topk=indices.shape[3],
        sm_scale=sm_scale,
        lse_base=lse_base,
        dtype=_dtype(q),
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        **_place(q),
    )


def sparse_attention_backward_workspace(q: Tensor, kv: Tensor, attn_sink: Tensor | None, deterministic: bool) -> int:
    """Bytes of workspace that `sparse_attention_backward` needs."""
    B, s_q, h_q, d_qk = q.shape
    return load().sparse_attention_backward_workspace(
        B=B, s_q=s_q, s_kv=kv.shape[1], h_q=h_q, d_qk=d_qk, sink=attn_sink is not None, deterministic=deterministic
    )


def sparse_attention_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dkv: Tensor,
    dsink: Tensor,
    workspace: Tensor,
    *,
    sm_scale: float,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    lse_base: float,
    deterministic: bool,
) -> None:
    """Fills dq, dkv (contiguous, of the shapes of q, kv) and, with a sink, dsink [h_q], from contiguous out and lse as
    `sparse_attention` wrote them and the gradients of those: dout [B, s_q, h_q, d_v], the last dimension contiguous and
    the others strided in multiples of 16 bytes, and dlse [B, s_q, h_q] of any strides."""
    B, s_q, h_q, d_qk = q.shape
    load().sparse_attention_backward(
        dout=_strided(dout),
        dlse=_strided(dlse),
        dq=dq.data_ptr(),
        dkv=dkv.data_ptr(),
        dsink=dsink.data_ptr() if dsink.numel() else 0,
        deterministic=deterministic,
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        q=_strided(q),
        kv=(kv.data_ptr(), *kv.stride()[:2]),
        indices=_slots(indices),
        topk_length=_or_none(topk_length, 2),
        attn_sink=_or_none(attn_sink, 1),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        q_start=_starts(q_start, B),
        k_stride=k_stride,
        B=B,
        s_q=s_q,
        s_kv=kv.shape[1],
        h_q=h_q,
        d_qk=d_qk,
        d_v=out.shape[3],
        topk=indices.shape[3],
        sm_scale=sm_scale,
        lse_base=lse_base,
        dtype=_dtype(q),
        **_place(q),
    )


def _cache_params(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, layout):
    paged = layout.page_size > 0
    begin = list(layout.layer_begin)
    begin[: layout.paged_layers] = layout.page_layer_begin
    tensors = (k, v, k_upper, v_upper, lengths, overflowed)
    return load().TreeCacheParams(
        pointers=[
            *(x.data_ptr() if x.numel() else 0 for x in tensors),
            *(x.data_ptr() if paged else 0 for x in (reserved, block_table)),
        ],
        layer_begin=begin,
        rows=layout.page_rows if paged else layout.sequence_rows,
        upper_rows=layout.sequence_rows if paged else 0,
        B=lengths.shape[0],
        H_kv=k.shape[1],
        K=k.shape[3],
        V=v.shape[3],
        max_tokens=layout.max_tokens,
        page_size=layout.page_size,
        paged_layers=layout.paged_layers,
        num_pages=k.shape[0] if paged else 0,
        max_pages=block_table.shape[1] if paged else 0,
        dtype=_dtype(k),
    )  # fmt: skip


def tree_append(k_new, v_new, seqused, lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, *, layout):
    """Writes the first seqused [B] (None: all) of k_new, v_new [B, T_new, H_kv, D] (strided) behind lengths, then the
    nodes that they complete, then lengths; layout: layout.TreeLayout, which says where rows lie."""
    load().tree_append(
        _cache_params(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, layout),
        k=_strided(k_new),
        v=_strided(v_new),
        seqused=0 if seqused is None else seqused.data_ptr(),
        T_new=k_new.shape[1],
        **_place(k_new),
    )


def tree_decode(
    q, seqused_q, lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, rope_table, out, lse, selection,
    *, layout, params,
):  # fmt: skip
    """Fills out [B, T_q, H, V], lse [B, T_q, H] and, where given, selection [L-1, B, T_q, H_kv, top_k], contiguous,
    for T_q of 1 to 8; rope_table [positions, K/2, 2] float32; params: params.CachedParams."""
    load().tree_decode(
        _cache_params(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, layout),
        q=_strided(q),
        seqused_q=0 if seqused_q is None else seqused_q.data_ptr(),
        rotations=rope_table.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        selection=0 if selection is None else selection.data_ptr(),
        selection_layers=0 if selection is None else selection.shape[0],
        T_q=q.shape[1],
        G=q.shape[2] // k.shape[1],
        top_k=params.top_k,
        scale=params.scale,
        attn_sink=_pointer(params.attn_sink),
        rope_dim=q.shape[3] if params.rope_interleaved else params.rope_dim,
        interleaved=params.rope_interleaved,
        **_place(q),
    )


# ----------------------------------------------------------------------------------------------- indexer and selector


def _rows(x: Tensor | None) -> tuple[int, int, int]:
    """Pointer and the strides of the first two dimensions; zeros for None."""
    return (0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:2])


def _heads(x: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3])


def topk_indices(logits: Tensor, k_start, k_end, indices: Tensor, values: Tensor | None, *, params) -> None:
    """Fills indices [B, s_q, 1, topk] and, where given, values [B, s_q, topk], contiguous, from logits [B, s_q, n]
    float32, last dimension contiguous; k_start, k_end [B, s_q] of any strides or None; params: params.IndexerParams."""
    B, s_q, n = logits.shape
    load().topk_indices(
        logits=_rows(logits),
        k_start=_rows(k_start),
        k_end=_rows(k_end),
        q_start=_starts(params.q_start, B),
        k_stride=params.k_stride,
        indices=indices.data_ptr(),
        values=0 if values is None else values.data_ptr(),
        B=B,
        s_q=s_q,
        n=n,
        topk=indices.shape[3],
        **_place(logits),
    )


def _indexer(q: Tensor, k: Tensor, weights: Tensor, q_scale, k_scale, k_start, k_end, params) -> dict:
    B, s_q, h_i, d_i = q.shape
    return {
        "q": _strided(q),
        "k": _rows(k),
        "weights": _heads(weights),
        "q_scale": _heads(q_scale),
        "k_scale": _rows(k_scale),
        "k_start": _rows(k_start),
        "k_end": _rows(k_end),
        "q_start": _starts(params.q_start, B),
        "k_stride": params.k_stride,
        "sizes": (B, s_q, k.shape[1], h_i, d_i),
        "dtype": _dtype(q),
        **_place(q),
    }


def indexer_logits(q, k, weights, q_scale, k_scale, k_start, k_end, out: Tensor, *, params, fill: bool = True) -> None:
    """Fills out [B, s_q, s_kv] float32, last dimension contiguous, from q [B, s_q, h_i, d_i] and k [B, s_kv, 1, d_i]
    (strided); weights, scales and bounds of any strides. fill: minus infinity outside the windows; else nothing."""
    call = _indexer(q, k, weights, q_scale, k_scale, k_start, k_end, params)
    load().indexer_logits(out=_rows(out), fill=fill, **call)


def indexer_logits_listed(
    q, k, weights, indices, topk_length, k_start, k_end, *, params, out=None, dlogits=None, grads=(None, None, None)
) -> None:
    """Fills out [B, s_q, topk] float32, last dimension contiguous, from indices [B, s_q, 1, topk]. Given dlogits
    [B, s_q, topk] and grads, fills dq [B, s_q, h_i, d_i] in the dtype of q and dweights [B, s_q, h_i], and adds to dk
    [B, s_kv, 1, d_i] float32, all contiguous."""
    dq, dk, dweights = (0 if x is None else x.data_ptr() for x in grads)
    load().indexer_logits_listed(
        indices=_heads(indices[:, :, 0]),
        topk_length=_rows(topk_length),
        topk=indices.shape[3],
        out=_rows(out),
        dlogits=_heads(dlogits),
        dq=dq,
        dk=dk,
        dweights=dweights,
        **_indexer(q, k, weights, None, None, k_start, k_end, params),
    )


def indexer_topk_workspace(q, k, weights, q_scale, k_scale, k_start, k_end, topk: int, *, params) -> int:
    """Bytes of workspace that `indexer_topk` needs for this call."""
    call = _indexer(q, k, weights, q_scale, k_scale, k_start, k_end, params)
    return load().indexer_topk(indices=0, values=0, topk=topk, workspace=0, workspace_bytes=0, **call)


def indexer_topk(
    q, k, weights, q_scale, k_scale, k_start, k_end, indices: Tensor, values: Tensor, workspace: Tensor, *, params
) -> None:
    """Fills indices [B, s_q, 1, topk] and values [B, s_q, topk], contiguous: topk_indices of indexer_logits."""
    load().indexer_topk(
        indices=indices.data_ptr(),
        values=values.data_ptr(),
        topk=indices.shape[3],
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        **_indexer(q, k, weights, q_scale, k_scale, k_start, k_end, params),
    )
