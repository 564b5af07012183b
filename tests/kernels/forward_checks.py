"""What the tests of the forward share: inputs on both devices, and the judgement of a call against the definition."""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import definition

from .. import baseline

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"


def inputs(T, T_q, *, B=1, H_kv=1, G=16, K=128, V=128, dtype=BF16, seed=0):
    """Drawn on the CPU, where the oracle runs; returned on both devices."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, T_q, H_kv * G, K), (B, T, H_kv, K), (B, T, H_kv, V)
    host = tuple(torch.randn(*shape, generator=g).to(dtype) for shape in shapes)
    return host, tuple(x.to(DEVICE, copy=True) for x in host)


def run(tensors, **options):
    return htree_cuda.forward(*tensors, return_lse=True, return_selection=True, **options)


def check(host, device, top_k, picks=None, share=0.99, selection_rules=True, **options):
    """Kernel against definition for the queries `picks` or slices of them (default: all), a walk of the oracle each."""
    q, k, v = host
    T, T_q = k.shape[1], q.shape[1]
    q_start = options.pop("q_start", T - T_q)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=top_k, q_start=q_start, **options))
    options = {"top_k_per_layer": top_k} | options
    exact_out, exact_lse, base_out, base_lse, shares = [], [], [], [], []
    parts = [slice(0, T_q)] if picks is None else [i if isinstance(i, slice) else slice(i, i + 1) for i in picks]
    for part in parts:
        options["q_start"] = q_start + part.start
        chosen = selection[:, :, part]
        exact = definition.forward(q[:, part], k, v, selection=chosen, **options)
        base = baseline.forward(q[:, part], k, v, chosen, **options)
        exact_out.append(exact.out), exact_lse.append(exact.lse)
        base_out.append(base.out), base_lse.append(base.lse)
        if selection_rules and selection.shape[0]:
            shares.append(baseline.check_selection(q[:, part], k, chosen, base.score_error, **options))
    exact_out, exact_lse, base_out, base_lse = (torch.cat(x, 1) for x in (exact_out, exact_lse, base_out, base_lse))
    out_part, lse_part = (torch.cat([x[:, part] for part in parts], 1) for x in (out, lse))
    baseline.assert_within("out", out_part, base_out, exact_out)
    baseline.assert_lse_within(lse_part, base_lse, exact_lse)
    assert not shares or sum(shares) / len(shares) >= share
    return out, lse, selection


def check_one_query(one, whole, host, device, top_k, G, **options):
    """A call with one query equals it in a longer one up to rounding. With more than 8 heads scores are the same to the
    bit; with fewer, queries of a longer call rotate by other instructions: both selections obey the rules, which may
    give them other nodes where importance is as good as equal, and the error is bounded."""
    if G > 8:
        assert torch.equal(one[2], whole[2])
        torch.testing.assert_close(one[1], whole[1], atol=1e-5, rtol=1e-5)
    else:
        check(host, device, top_k, share=0.9, **options)
    if torch.equal(one[2], whole[2]):
        torch.testing.assert_close(one[0], whole[0], atol=4e-3, rtol=2e-2)


# Queries share a warp where they have 8 heads or fewer, at the bottom four of them with 4 or fewer.
EITHER_WAY = pytest.mark.parametrize("G", [4, 7, 12])


def odd_rows(x):
    """The same numbers in rows of three elements more, which begin at an odd one."""
    return torch.nn.functional.pad(x, (1, 2), value=math.nan)[..., 1:-2]
