"""`python -m htree_cuda explain`: which kernels a call of htree attention or DSA runs, in which order, why, their cost.

The kernels come from the library, which runs the same schedule and counts launches where a call makes them; no GPU is
needed. Their share of the time is a prediction of `cost_model`.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from . import checks, cost_model, explain_decode, explain_dsa, kernels
from .bench.inputs import DTYPES
from .definition import layer_sizes

DSA_DTYPES = {name: DTYPES[name] for name in ("bfloat16", "float16")} | {"float8_e4m3fn": torch.float8_e4m3fn}
DEFAULT_SMS = 132  # of an H100 or H200 SXM
MAX_NUMBERS = 2**42  # of a tensor
HOW_TO_GET_ONE = (
    "install a wheel that holds the kernels, or build them, for which no GPU is needed: "
    "HTREE_CUDA_KERNELS=on pip install ."
)


class ExplainError(Exception):
    """What the user can put right, in one line."""


def explain(
    *,
    T: int,
    H: int,
    H_kv: int,
    top_k_per_layer: int = 512,
    T_q: int | None = None,
    B: int = 1,
    K: int = 128,
    V: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    sms: int = DEFAULT_SMS,
) -> dict:
    """The kernels of one call of `htree_cuda.forward`, or of its backward, in their order.

    Args:
        T: int, tokens of the context.
        H, H_kv: int, query heads and KV heads.
        top_k_per_layer: int, nodes expanded per layer; default 512.
        T_q: int, queries, the last ones; default T.
        B: int, sequences; default 1.
        K, V: int, head dimensions of keys and values; default 128 and K.
        dtype: float16 or bfloat16; default bfloat16.
        backward: bool; the kernels of the backward; default False.
        sms: int, SMs of the GPU: calls are cut into chunks that fill them; default 132, H100 and H200 SXM.

    Returns:
        A dict of the call's numbers, ``layers`` (nodes of each layer, the tokens first), ``rows`` and ``model``. A row
        is a kernel in a layer for a layer kind, over all of its launches: phase, layer, kind, kernel, tile, reason,
        launches, ctas, first_query, end_query, pairs, ms and share; None where there is nothing to tell. ``model`` says
        where ms comes from: files, gpu, date, G, K, V, the largest relative error of the fit, and the ms of the call,
        in which rows without one have a part; None without ms.

    Raises:
        ValueError, UnsupportedError: as `htree_cuda.forward`.
        RuntimeError: the installation has no kernels.

    Notes:
        Deterministic; launches nothing. Times are predicted for calls of 4,096 queries or more, which fill a GPU.

    Example:
        >>> from htree_cuda.explain import explain
        >>> rows = explain(T=65536, H=32, H_kv=8, top_k_per_layer=128)["rows"]  # where the kernels are built

    Source: csrc/sm90/htree_fwd/dispatch.h and schedule.h; docs/architecture.md.
    """
    T_q, V = T if T_q is None else T_q, K if V is None else V
    sizes = {"B": B, "T": T, "T_q": T_q, "H": H, "H_kv": H_kv, "K": K, "V": V, "sms": sms}
    for name, value in sizes.items():
        checks.common.size("explain", name, checks.common.integer("explain", name, value), most=checks.common.MAX_INT32)
    numbers = B * max(T, T_q) * max(H, H_kv) * max(K, V)
    if numbers >= MAX_NUMBERS:  # no GPU holds them, and the launches are counted one by one
        checks.common.fail("explain", "B * max(T, T_q) * max(H, H_kv) * max(K, V) must be below 2^42", numbers)
    q = torch.empty(B, T_q, H, K, dtype=dtype, device="meta")
    k, v = (torch.empty(B, T, H_kv, D, dtype=dtype, device="meta") for D in (K, V))
    params = checks.tree.forward(
        q, k, v, q_start=None, compression_rate=16, top_k_per_layer=top_k_per_layer, max_top_nodes=None, scale=None,
        rope_base=10000.0, strict_causal=True, backend="auto", op="explain",
    )  # fmt: skip
    checks.support.forward(q, k, v, params, "explain")
    launches = kernels.explain_backward if backward else kernels.explain_forward
    call = {
        "op": "backward" if backward else "forward", **sizes, "top_k": top_k_per_layer,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": layer_sizes(T, params.compression_rate, params.max_top_nodes),
    }  # fmt: skip
    call["rows"] = launches(q, k, v, params, sms=sms)
    measured = cost_model.nearest(call)
    times = [None] * len(call["rows"]) if measured is None else cost_model.predict(call, measured)
    rest = 0.0 if measured is None else cost_model.rest(call, measured)
    total = sum(ms for ms in times if ms is not None) + rest
    for row, ms in zip(call["rows"], times):
        row["ms"], row["share"] = ms, None if ms is None or total == 0 else ms / total
    call["model"] = measured and {name: x for name, x in measured.items() if name != "ns"} | {"ms": total}
    return call


def _queries(row: dict) -> str:
    if row["first_query"] is None:
        return ""
    return f"{row['first_query']:,} .. {row['end_query'] - 1:,}"


COLUMNS = {
    "phase": lambda row: row["phase"],
    "layer": lambda row: "" if row["layer"] is None else str(row["layer"]),
    "kind": lambda row: row["kind"],
    "kernel": lambda row: row["kernel"],
    "tile of a CTA": lambda row: row["tile"],
    "queries": _queries,
    "launches": lambda row: f"{row['launches']:,}",
    "share": lambda row: "" if row["share"] is None else f"{row['share']:.1%}",
}
NUMBERS = ("layer", "launches", "share")


def render(call: dict) -> str:
    """The report for people."""
    shape = ", ".join(f"{name} {call[name]:,}" for name in ("B", "T", "T_q", "H", "H_kv", "K", "V", "top_k"))
    sizes = " <- ".join(f"{n:,}" for n in call["layers"])
    lines = [
        f"{call['op']}: {shape}, {call['dtype']}; groups of {call['H'] // call['H_kv']} heads, {call['sms']} SMs",
        f"tree: {sizes} nodes, tokens (layer 0) first",
        "",
    ]
    rows = [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in call["rows"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        cells = [
            cell.rjust(width) if name in NUMBERS else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths)
        ]
        lines.append("  ".join(cells).rstrip())
    lines += ["", "why"]
    for kernel in dict.fromkeys(row["kernel"] for row in call["rows"]):
        reasons = dict.fromkeys(row["reason"] for row in call["rows"] if row["kernel"] == kernel)
        lines += [f"  {kernel}: {reason}" for reason in reasons]
    lines.append("")
    model = call["model"]
    if model is None:
        lines.append(
            f"shares: no prediction. The measured ones are of calls with {cost_model.MIN_QUERIES:,} queries or more, "
            "which fill a GPU."
        )
    else:
        rest = 1 - sum(row["share"] or 0.0 for row in call["rows"])
        if any(row["share"] is None for row in call["rows"]):
            lines.append(f"Rows without a share take {rest:.1%} together.")
        lines.append(
            f"shares: predicted, of {model['ms']:.2f} ms on one {model['gpu']}, by rates measured {model['date']} with "
            f"groups of {model['G']} and K {model['K']} (benchmarks/results: {', '.join(model['files'])}); of the "
            f"calls measured there the model is off by at most {model['error']:.0%}."
        )
    return "\n".join(lines)


SIZES = ("T", "H", "H_kv", "top_k", "T_q", "B", "K", "V", "sms")
# Options that only some operations have.
ONLY_OF = {
    "H_kv": ("forward", "forward_cached"),
    "V": ("forward",),
    "backward": ("forward", *explain_dsa.BACKWARDS),
    "deterministic": ("sparse_attention",),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m htree_cuda explain", description=__doc__.splitlines()[0].split(": ", 1)[1],
    )  # fmt: skip
    add = parser.add_argument
    ops = ["forward", "forward_cached", *explain_dsa.OPS]
    add("--op", choices=ops, default="forward", help="the operation (default: forward)")
    add("--T", type=int, required=True, help="tokens of the context, or key rows")
    add("--H", type=int, required=True, help="query heads")
    add("--H-kv", type=int, help="KV heads; divides --H; of forward and forward_cached, which need it")
    add("--top-k", type=int, help="nodes expanded per layer (default: 512), or slots of a list (default: 2048)")
    add("--T-q", type=int, help="queries, the last ones (default: T; of forward_cached 1)")
    add("--B", type=int, default=1, help="sequences (default: 1)")
    add("--K", type=int, help="head dimension of keys (default: 128; of attn_dist and sparse_attention 576)")
    add("--V", type=int, help="head dimension of values (default: K)")
    add("--dtype", choices=list(DSA_DTYPES), default="bfloat16", help="of q, k and v (default: bfloat16)")
    add("--backward", action="store_true", help="the kernels of the backward")
    add("--deterministic", action="store_true", help="of the backward of sparse_attention: repeatable sums")
    add("--sms", type=int, help="SMs of the GPU (default: those of this one, else 132)")
    add("--json", action="store_true", help="machine-readable")
    return parser


def _sms() -> int:
    if not torch.cuda.is_available():
        return DEFAULT_SMS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _call(args: argparse.Namespace) -> dict:
    dtype, sms = DSA_DTYPES[args.dtype], _sms() if args.sms is None else args.sms
    for name, ops in ONLY_OF.items():
        if getattr(args, name) not in (None, False) and args.op not in ops:
            raise ExplainError(f"--{name.replace('_', '-')} is of {', '.join(ops)}, not of {args.op}")
    for name in SIZES:
        value, option, most = getattr(args, name), f"--{name.replace('_', '-')}", checks.common.MAX_INT32
        if value is not None and not 1 <= value <= most:
            raise ExplainError(f"{option} must be at {'least 1' if value < 1 else f'most {most}'}, got {value}")
    if args.op not in ("forward", "forward_cached"):
        K = args.K or (576 if args.op in ("attn_dist", "sparse_attention") else 128)
        return explain_dsa.explain(
            args.op, T=args.T, H=args.H, K=K, top_k=args.top_k or 2048, T_q=args.T_q, B=args.B, dtype=dtype,
            backward=args.backward, deterministic=args.deterministic, sms=sms,
        )  # fmt: skip
    if args.H_kv is None:
        raise ExplainError(f"--H-kv is missing: the KV heads of {args.op}")
    if args.op == "forward_cached":
        return explain_decode.explain(
            T=args.T, H=args.H, H_kv=args.H_kv, top_k_per_layer=args.top_k or 512, T_q=args.T_q or 1, B=args.B,
            K=args.K or 128, dtype=dtype, sms=sms,
        )  # fmt: skip
    return explain(
        T=args.T, H=args.H, H_kv=args.H_kv, top_k_per_layer=args.top_k or 512, T_q=args.T_q, B=args.B, K=args.K or 128,
        V=args.V, dtype=dtype, backward=args.backward, sms=sms,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Prints the report; 0, or 2 with one line on stderr where the user can put something right."""
    args = _parser().parse_args(argv)
    try:
        if not kernels.built():
            raise ExplainError(f"there are no kernels to explain ({kernels.why_not_built()}); {HOW_TO_GET_ONE}")
        try:
            call = _call(args)
        except RuntimeError as error:
            if not str(error).startswith("Storage size"):  # PyTorch, of a meta tensor with too many numbers
                raise
            raise ExplainError(f"tensors of these sizes do not exist: {error}") from None
    except (ExplainError, ValueError, checks.UnsupportedError) as error:
        print(f"htree_cuda explain: {str(error).removeprefix('explain: ')}", file=sys.stderr)
        return 2
    text = render if args.op == "forward" else explain_dsa.render
    print(json.dumps(call, indent=2) if args.json else text(call))
    return 0
