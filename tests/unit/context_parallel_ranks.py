"""One rank of tests/unit/test_context_parallel.py: `RANK WORLD RENDEZVOUS OUT` runs every check below on gloo and
writes what each one said, an empty text where it passed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import htree_cuda
from htree_cuda import distributed as cp
from htree_cuda.distributed import attention, balance, exchange

TREE = {"compression_rate": 4, "top_k_per_layer": 2, "rope_base": 100.0}
OF_TWO_RANKS = ("check_training_example", "check_benchmark")  # which more ranks would not test better
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64, sums in another order


def inputs(B=1, T=64, H=4, H_kv=2, K=6, V=4, seed=3):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, h, d, dtype=torch.float64) for h, d in ((H, K), (H_kv, K), (H_kv, V)))
    return (q, k, v), (torch.randn(B, T, H, V, dtype=torch.float64), torch.randn(B, T, H, dtype=torch.float64))


def leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def on_one(tensors, grads, **options):
    """(out, lse, dq, dk, dv) and the selection, of `htree_cuda.forward`."""
    own = leaves(tensors)
    out, lse, selection = htree_cuda.forward(*own, return_lse=True, return_selection=True, **options)
    return [out, lse, *torch.autograd.grad((out, lse), own, grads)], selection


def on_all(tensors, grads, group, layout, *, selects=True, **options):
    """The same by `context_parallel_forward`, put together again; without the selection where it is not asked for."""
    own = leaves(cp.shard(x, 1, group, layout) for x in tensors)
    out, lse, *selection = cp.context_parallel_forward(
        *own, group=group, layout=layout, return_lse=True, return_selection=selects, **options
    )
    found = [out, lse, *torch.autograd.grad((out, lse), own, [cp.shard(x, 1, group, layout) for x in grads])]
    return [cp.unshard(x.detach(), 1, group, layout) for x in found], [
        cp.unshard(x, 2, group, layout) for x in selection
    ]


@contextlib.contextmanager
def loans_of_any_size():
    """Queries are lent even where they are few."""
    saved = balance.MIN_ROWS, balance.ROW_STEP
    balance.MIN_ROWS = balance.ROW_STEP = 1
    balance.loans.cache_clear()
    try:
        yield
    finally:
        balance.MIN_ROWS, balance.ROW_STEP = saved
        balance.loans.cache_clear()


def compare(group=None, layouts=("zigzag", "contiguous"), shape=None, selects=True, **options):
    group = dist.group.WORLD if group is None else group
    tensors, grads = inputs(**(shape or {}))
    options = {**TREE, **options}
    expected, chosen = on_one(tensors, grads, **options)
    for layout in layouts:
        found, selection = on_all(tensors, grads, group, layout, selects=selects, **options)
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
            torch.testing.assert_close(
                x, y, **EXACT, msg=lambda text, name=name, layout=layout: f"{layout} {name}: {text}"
            )
        assert all(torch.equal(x, chosen) for x in selection), layout


def refused(call, *texts):
    try:
        call()
    except (ValueError, TypeError) as error:
        assert all(text in str(error) for text in texts), f"{error!r} lacks one of {texts}"
        return
    raise AssertionError("no error")


# ------------------------------------------------------------------------------------------------------------- checks


def check_values_and_gradients():
    for save in (True, False):
        compare(save_selection=save)
    compare(shape={"B": 2, "T": 48, "H_kv": 1}, strict_causal=False, save_selection=False)
    compare(shape={"T": 32, "H": 2, "H_kv": 2, "K": 4, "V": 6}, max_top_nodes=5, scale=0.7)


@contextlib.contextmanager
def lent(forward: int, backward: int, T: int):
    """So many queries, of two ranks, in place of what balances them."""
    plain = attention.loans
    loan = lambda count: balance.Loan(1, 0, 3 * T // 4 - count, count) if count else None  # noqa: E731
    attention.loans = lambda T_, ranks, *sizes: (
        balance.Loans(loan(forward), loan(backward)) if ranks == 2 else plain(T_, ranks, *sizes)
    )
    try:
        yield
    finally:
        attention.loans = plain


def check_queries_that_are_lent():
    """Selections that are kept and made again, one KV head at a time, several sequences. Counted is what every rank
    computes."""
    r, top_k = TREE["compression_rate"], TREE["top_k_per_layer"]
    world = dist.get_world_size()
    computed = []
    plain = attention.pieces.forward

    def counted(k, v, runs, **options):
        computed.append(sum(run.q.shape[1] for run in runs))
        return plain(k, v, runs, **options)

    with loans_of_any_size():
        loan = balance.loans(96, world, 2, r, top_k, r * top_k).forward
        assert (loan is not None) == (world == 2)
        attention.pieces.forward = counted
        try:
            compare(layouts=["zigzag"], shape={"T": 96}, selects=False)
        finally:
            attention.pieces.forward = plain
        change = {loan.borrower: loan.count, loan.lender: -loan.count}[dist.get_rank()] if loan else 0
        assert sum(computed) == 96 // world + change
        saved, attention.SUM_BYTES = attention.SUM_BYTES, 1
        try:
            for strict in (True, False):
                options = {"save_selection": False, "strict_causal": strict}
                compare(layouts=["zigzag"], shape={"B": 2, "T": 96, "H_kv": 2}, selects=False, **options)
        finally:
            attention.SUM_BYTES = saved
        compare(layouts=["zigzag"], shape={"T": 96, "K": 8}, selects=False, rope_interleaved=True, rope_dim=4)


def check_fewer_queries_lent_in_the_backward():
    """Selections of the others travel back to their rank, of as many layers as its own queries have: three of 96 tokens
    of which the borrower sees four."""
    most = TREE["compression_rate"] * TREE["top_k_per_layer"]
    held = []  # bytes of the storage of what is saved for the backward, beside its own

    def saved(x):
        held.append(x.untyped_storage().nbytes() / max(1, x.numel() * x.element_size()))
        return x

    with lent(11, 4, 96), torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
        own = leaves(cp.shard(x, 1, dist.group.WORLD) for x in inputs(T=96)[0])
        cp.context_parallel_forward(*own, group=dist.group.WORLD, **TREE)
    assert held and set(held) == {1.0}, "what is lent in the forward alone is kept for the backward"
    for T, forward, backward in ((96, 11, 4), (96, 7, 0), (96, 5, 5), (4 * most, most // 2, 1)):
        with lent(forward, backward, T):
            for save in (True, False):
                for shape in ({"T": T}, {"T": T, "B": 2, "H_kv": 1}):
                    compare(layouts=["zigzag"], shape=shape, selects=False, save_selection=save)
            compare(layouts=["zigzag"], shape={"T": T}, selects=False, strict_causal=False)


def check_options_of_the_rotation_and_sinks():
    group = dist.group.WORLD
    (q, k, v), (dout, dlse) = inputs(H_kv=1)
    table = torch.tensor([1.0, 0.3], dtype=torch.float64)
    options = {**TREE, "rope_dim": 4, "rope_interleaved": True, "return_lse": True, "rope_inv_freq": table}
    del options["rope_base"]
    sink = torch.randn(4, dtype=torch.float64)
    for layout in ("zigzag", "contiguous"):
        own = leaves((q, k, v, sink))
        results = htree_cuda.forward(*own[:3], attn_sink=own[3], **options)
        expected = [*results, *torch.autograd.grad(results, own, (dout, dlse))]
        own = leaves((*(cp.shard(x, 1, group, layout) for x in (q, k, v)), sink))
        results = cp.context_parallel_forward(*own[:3], attn_sink=own[3], group=group, layout=layout, **options)
        *found, dsink = torch.autograd.grad(results, own, [cp.shard(x, 1, group, layout) for x in (dout, dlse)])
        dist.all_reduce(dsink, group=group)
        for x, y in zip((*results, *found), expected[:-1], strict=True):
            torch.testing.assert_close(cp.unshard(x.detach(), 1, group, layout), y, **EXACT)
        torch.testing.assert_close(dsink, expected[-1], **EXACT)


def check_a_selection_that_is_replayed():
    """Of other queries, so that what these would choose differs."""
    group = dist.group.WORLD
    (q, k, v), grads = inputs()
    other, _ = inputs(seed=4)
    chosen = htree_cuda.forward(other[0], k, v, return_selection=True, **TREE)[1]
    own = leaves((q, k, v))
    results = htree_cuda.forward(*own, selection=chosen, return_lse=True, **TREE)
    expected = [*results, *torch.autograd.grad(results, own, grads)]
    for layout in ("zigzag", "contiguous"):
        own = leaves(cp.shard(x, 1, group, layout) for x in (q, k, v))
        results = cp.context_parallel_forward(
            *own, group=group, layout=layout, selection=cp.shard(chosen, 2, group, layout), return_lse=True, **TREE
        )
        found = torch.autograd.grad(results, own, [cp.shard(x, 1, group, layout) for x in grads])
        for x, y in zip((*results, *found), expected, strict=True):
            torch.testing.assert_close(cp.unshard(x.detach(), 1, group, layout), y, **EXACT)


def check_packed_sequences():
    """Documents that span ranks, one of no token, one of one token, and padding at the end, which holds NaN."""
    group = dist.group.WORLD
    cu = torch.tensor([0, 5, 5, 38, 39, 52, 60], dtype=torch.int32)
    for kv_heads, save in ((2, True), (1, False)):
        (q, k, v), (dout, dlse) = ([x[0] for x in some] for some in inputs(T=64, H_kv=kv_heads))
        sink = torch.randn(4, dtype=torch.float64)
        for x in (q, k, v):
            x[60:] = float("nan")
        options = {**TREE, "return_lse": True, "return_selection": True, "save_selection": save}
        own = leaves((q, k, v, sink))
        out, lse, chosen = htree_cuda.forward_varlen(*own[:3], cu, cu, 40, 40, attn_sink=own[3], **options)
        *grads, dsink = torch.autograd.grad((out, lse), own, (dout, dlse))
        mine = leaves((*(cp.shard(x, 0, group, "contiguous") for x in (q, k, v)), sink))
        results = cp.context_parallel_forward(
            *mine[:3], group=group, layout="contiguous", cu_seqlens=cu, max_seqlen=40, attn_sink=mine[3], **options
        )
        own_grads = [cp.shard(x, 0, group, "contiguous") for x in (dout, dlse)]
        *found, own_dsink = torch.autograd.grad(results[:2], mine, own_grads)
        dist.all_reduce(own_dsink, group=group)
        for x, y in zip((*results[:2], *found), (out, lse, *grads), strict=True):
            torch.testing.assert_close(cp.unshard(x.detach(), 0, group, "contiguous"), y, **EXACT)
        torch.testing.assert_close(own_dsink, dsink, **EXACT)
        assert torch.equal(cp.unshard(results[2], 1, group, "contiguous"), chosen)


def check_packed_sequences_that_ranks_see_differently():
    (q, k, v), _ = inputs()
    own = [cp.shard(x[0], 0, dist.group.WORLD, "contiguous") for x in (q, k, v)]
    cu = torch.tensor([0, 20 + dist.get_rank(), 64], dtype=torch.int32)
    group = dist.new_group()
    call = lambda **more: cp.context_parallel_forward(*own, group=group, cu_seqlens=cu, max_seqlen=64, **TREE, **more)  # noqa: E731
    refused(lambda: call(layout="contiguous"), "got cu_seqlens (3,)")
    refused(lambda: call(), 'cu_seqlens needs layout "contiguous"')
    refused(lambda: call(layout="contiguous", strict_causal=False), "cu_seqlens needs strict_causal True", "got False")


def check_a_length_that_is_no_multiple_of_nodes():
    """Parts that end within a node of every layer."""
    compare(shape={"T": 8 * 13})


def check_every_length_of_a_tree_that_grows():
    """Ranks whose queries all lie before max_top_nodes, and ranks whose trees have more layers."""
    for T in (16, 24, 40):
        compare(shape={"T": T, "H": 2, "H_kv": 1})


def check_small_steps_and_single_heads():
    """The exchange in steps of a few rows, dk and dv one KV head at a time."""
    saved = exchange.STAGING_BYTES, attention.SUM_BYTES
    exchange.STAGING_BYTES = 500
    attention.SUM_BYTES = 1
    try:
        compare(shape={"B": 2, "H": 6, "H_kv": 3})
        attention.SUM_BYTES = 2 * 64 * (6 + 4) * 8  # units of one and two KV heads
        compare(shape={"B": 3, "H": 6, "H_kv": 3})
        attention.SUM_BYTES = 1
        compare(shape={"H": 6, "H_kv": 3}, save_selection=False)
    finally:
        exchange.STAGING_BYTES, attention.SUM_BYTES = saved


def check_what_nccl_is_given():
    """Contiguous tensors on which sender and receiver agree, none for the rank itself: what all_to_all and
    batch_isend_irecv of NCCL take, of which gloo has not the first."""
    calls = []

    def all_to_all(received, sent, group, async_op):
        rank, sizes = dist.get_rank(group), [None] * dist.get_world_size(group)
        assert len(received) == len(sent) == len(sizes)
        assert all(x.is_contiguous() and x.dtype == sent[0].dtype for x in (*received, *sent))
        assert received[rank].numel() == sent[rank].numel() == 0
        dist.all_gather_object(sizes, [x.numel() for x in sent], group=group)
        assert [x.numel() for x in received] == [row[rank] for row in sizes]
        calls.append("all_to_all")
        later = Later(
            [dist.P2POp(call, x, i, group) for call, some in ((dist.irecv, received), (dist.isend, sent))
             for i, x in enumerate(some) if x.numel()]
        )  # fmt: skip
        return later if async_op else later.wait()

    def batch_isend_irecv(ops):
        rank, boxes = dist.get_rank(), [None] * dist.get_world_size()
        assert all(x.tensor.is_contiguous() and x.tensor.numel() > 0 and x.peer != rank for x in ops)
        mine = {call: [(x.peer, x.tensor.numel()) for x in ops if x.op is call] for call in (dist.isend, dist.irecv)}
        dist.all_gather_object(boxes, [mine[dist.isend], mine[dist.irecv]])
        for peer, (sent, _) in enumerate(boxes):
            to_me = [n for i, n in sent if i == rank]
            assert to_me == [n for i, n in mine[dist.irecv] if i == peer]
        calls.append("batch")
        return Later(ops)

    class Later(list):
        """Travels when it is waited for."""

        def __init__(self, ops):
            super().__init__([self])
            self.ops = ops

        def wait(self):
            for work in [x.op(x.tensor, x.peer, group=x.group) for x in self.ops]:
                work.wait()

    questions = exchange._takes_lists, exchange._groups_transfers
    exchange._takes_lists = lambda x: True
    originals = dist.all_to_all, dist.batch_isend_irecv
    dist.all_to_all, dist.batch_isend_irecv = all_to_all, batch_isend_irecv
    staging, exchange.STAGING_BYTES = exchange.STAGING_BYTES, 500  # three steps and more
    try:
        for grouped in (True, False):
            exchange._groups_transfers = lambda group, x, grouped=grouped: grouped
            compare(shape={"B": 2, "H": 6, "H_kv": 3})
            with loans_of_any_size():
                compare(layouts=["zigzag"], shape={"B": 2, "T": 96}, selects=False)
            check_the_gradient_of_unshard_is_that_of_all_losses()
    finally:
        exchange.STAGING_BYTES = staging
        exchange._takes_lists, exchange._groups_transfers = questions
        dist.all_to_all, dist.batch_isend_irecv = originals
    assert set(calls) == {"all_to_all", "batch"}


def check_what_does_not_travel_is_not_read():
    """Memory without values holds NaN: tokens behind a rank's last query, which it does not receive."""
    seen = cp.placement.Placement("zigzag", 0, dist.get_world_size()).seen(True)
    assert seen == sorted(seen, reverse=True) and seen[0] == 2 * len(seen) > seen[-1] == len(seen) + 1
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        compare(save_selection=False)
        with loans_of_any_size():
            compare(layouts=["zigzag"], shape={"T": 96}, selects=False)
    finally:
        torch.use_deterministic_algorithms(False)


def check_nan_reaches_what_attends_it_and_nothing_before():
    (q, k, v), _ = inputs()
    v[0, 40] = float("nan")
    for layout in ("zigzag", "contiguous"):
        own = [cp.shard(x, 1, dist.group.WORLD, layout) for x in (q, k, v)]
        out = cp.context_parallel_forward(*own, group=dist.group.WORLD, layout=layout, **TREE)
        whole = cp.unshard(out, 1, dist.group.WORLD, layout)
        torch.testing.assert_close(whole, htree_cuda.forward(q, k, v, **TREE), **EXACT, equal_nan=True)
        assert not whole[:, :40].isnan().any() and whole[:, 40].isnan().any()


def check_gradients_are_repeatable():
    tensors, grads = inputs(T=96)
    first, _ = on_all(tensors, grads, dist.group.WORLD, "zigzag", **TREE, deterministic=True)
    for _ in range(3):
        again, _ = on_all(tensors, grads, dist.group.WORLD, "zigzag", **TREE, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


def check_a_gradient_of_one_result_alone():
    (q, k, v), (dout, dlse) = inputs()
    for which in (0, 1):
        own = leaves((q, k, v))
        results = htree_cuda.forward(*own, return_lse=True, **TREE)
        expected = torch.autograd.grad(results[which], own, (dout, dlse)[which])
        own = leaves(cp.shard(x, 1, dist.group.WORLD) for x in (q, k, v))
        results = cp.context_parallel_forward(*own, group=dist.group.WORLD, return_lse=True, **TREE)
        found = torch.autograd.grad(results[which], own, cp.shard((dout, dlse)[which], 1, dist.group.WORLD))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(cp.unshard(x, 1, dist.group.WORLD), y, **EXACT)


def check_shard_unshard_positions():
    world, group = dist.get_world_size(), dist.group.WORLD
    for layout in ("zigzag", "contiguous"):
        own = cp.positions(8 * world, group, layout)
        assert own.shape == (8,) and bool((own.diff() > 0).all())
        x = torch.arange(8 * world * 3).view(3, 8 * world)
        assert torch.equal(cp.shard(x, -1, group, layout), x[:, own])
        assert torch.equal(cp.unshard(x[:, own], 1, group, layout), x)
        assert torch.equal(cp.unshard(own, 0, group, layout), torch.arange(8 * world))
    assert cp.positions(4 * world, group, "zigzag").tolist()[:2] == [2 * dist.get_rank(), 2 * dist.get_rank() + 1]


def check_shard_and_unshard_of_odd_tensors():
    """Nothing at all, with a gradient, and another memory format."""
    n = 4 * dist.get_world_size()
    x = torch.empty(0, n // dist.get_world_size(), 4, requires_grad=True)
    cp.unshard(x, 1, dist.group.WORLD).sum().backward()
    assert x.grad.shape == x.shape
    own = cp.shard(torch.randn(2, 3, n, 5).to(memory_format=torch.channels_last), 2, dist.group.WORLD)
    assert own.is_contiguous()


def check_the_gradient_of_unshard_is_that_of_all_losses():
    group, world = dist.group.WORLD, dist.get_world_size()
    weight = torch.arange(4.0 * world, dtype=torch.float64)
    for layout in ("zigzag", "contiguous"):
        own = cp.shard(torch.ones_like(weight), 0, group, layout).requires_grad_()
        (cp.unshard(own, 0, group, layout) * weight * (1 + dist.get_rank())).sum().backward()
        assert torch.equal(own.grad, cp.shard(weight, 0, group, layout) * sum(range(1, world + 1)))


def _disagreement(options=None, shape=None, dtype=torch.float64, grad=False, layout="zigzag"):
    (q, k, v), _ = inputs(**(shape or {}))
    own = [cp.shard(x.to(dtype), 1, dist.group.WORLD, "contiguous").requires_grad_(grad) for x in (q, k, v)]
    options = {**TREE, **(options or {})}
    return lambda group: cp.context_parallel_forward(*own, group=group, layout=layout, **options)


def check_ranks_that_disagree_raise_everywhere():
    """In the first call of a group, and with HTREE_CUDA_CHECK=1 in a later one."""
    last = dist.get_rank() == dist.get_world_size() - 1
    cases = [
        ({"shape": {"T": 96}}, "the shape of q"),
        ({"shape": {"H": 8}}, "the shape of q"),
        ({"shape": {"V": 8}}, "the shape of v"),
        ({"dtype": torch.float32}, "dtype torch.float64 on rank 0 and torch.float32"),
        ({"layout": "contiguous"}, "layout zigzag on rank 0 and contiguous"),
        ({"options": {"top_k_per_layer": 4}}, "top_k_per_layer 2 on rank 0 and 4"),
        ({"options": {"rope_base": 1e4}}, "rope_base"),
        ({"options": {"strict_causal": False}}, "strict_causal"),
        ({"options": {"attn_sink": torch.ones(4, dtype=torch.float64)}}, "attn_sink None on rank 0 and (4,)"),
        ({"options": {"deterministic": True}}, "deterministic False on rank 0 and True"),
        ({"options": {"return_selection": True}}, "return_selection False on rank 0 and True"),
        ({"grad": True}, "whether a gradient is wanted False on rank 0 and True"),
    ]
    fresh, used = dist.new_group(), dist.new_group()
    same = _disagreement()
    same(used)
    for different, text in cases:
        call = _disagreement(**different) if last else same
        refused(lambda call=call: call(fresh), "context_parallel_forward: all ranks", text)
        os.environ["HTREE_CUDA_CHECK"] = "1"
        try:
            refused(lambda call=call: call(used), "context_parallel_forward: all ranks", text)
        finally:
            del os.environ["HTREE_CUDA_CHECK"]
    sink = torch.full((4,), float(dist.get_rank()), dtype=torch.float64)
    refused(lambda: _disagreement(options={"attn_sink": sink})(fresh), "got attn_sink (4,)")
    same(fresh)  # a group that disagreed is whole, and its next call is its first


def check_an_error_of_one_rank_reaches_the_others():
    last = dist.get_world_size() - 1
    group = dist.new_group()
    x, cu = torch.randn(8, 2, 4), torch.tensor([0, 8 * dist.get_world_size()], dtype=torch.int32)
    packed = {"layout": "contiguous", "cu_seqlens": cu, "max_seqlen": 8 * dist.get_world_size()}
    bad = "x" if dist.get_rank() == last else None
    call = lambda: cp.context_parallel_forward(x, x, x, group=group, selection=bad, top_k_per_layer=2, **packed)  # noqa: E731
    mine = "context_parallel_forward: selection must be a torch.Tensor"
    refused(call, *([mine] if dist.get_rank() == last else [f"rank {last} refused its own: TypeError", "selection"]))
    for bad, text in (({"options": {"scale": float("nan")}}, "scale must be finite"), ({"shape": {"V": 0}}, "V ")):
        if dist.get_rank() == last:
            refused(lambda bad=bad: _disagreement(**bad)(group), "context_parallel_forward: ", text)
        else:
            refused(lambda: _disagreement()(group), f"rank {last} refused its own: ValueError", text)


def _module(**options):
    torch.manual_seed(1)
    shape = {"n_kv_heads": 2, "head_dim": 6, "v_head_dim": 5, "qk_norm": True}
    return htree_cuda.HTreeAttention(12, 4, **shape, **TREE, **options, dtype=torch.float64)


def _module_gradients(module, x, call=None):
    out = (module if call is None else call)(x)
    return out, torch.autograd.grad((out * out.detach().cos()).sum(), list(module.parameters()))


def check_module_with_checkpointing_and_compile():
    group = dist.group.WORLD
    x = torch.randn(2, 64, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected, grads = _module_gradients(_module(), x)
    module = _module(context_parallel_group=group)
    own = cp.shard(x, 1, group)
    calls = [None, lambda x: checkpoint(module, x, use_reentrant=False)]
    if dist.get_world_size() == 2:
        calls.append(torch.compile(module, backend="eager"))
    for call in calls:
        out, partial = _module_gradients(module, own, call)
        torch.testing.assert_close(cp.unshard(out.detach(), 1, group), expected, **EXACT)
        for x_, y in zip(partial, grads, strict=True):
            dist.all_reduce(x_, group=group)
            torch.testing.assert_close(x_, y, **EXACT)
    assert copy.deepcopy(module).context_parallel_group is group
    refused(lambda: module(own, past=(own, own)), "past")
    packed = _module(context_parallel_group=group, context_parallel_layout="contiguous")
    cu = torch.tensor([0, 40, 64], dtype=torch.int32)
    expected = _module()(x[0], cu_seqlens=cu, max_seqlen=40)
    found = packed(cp.shard(x[0], 0, group, "contiguous"), cu_seqlens=cu, max_seqlen=40)
    torch.testing.assert_close(cp.unshard(found, 0, group, "contiguous"), expected, **EXACT)


def check_mesh_with_fsdp_on_the_other_dimension():
    """2 x 2: data parallel by FSDP2 over two batches, each sequence over two ranks."""
    if dist.get_world_size() != 4:
        return
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    refused(lambda: cp.positions(64, mesh), "DeviceMesh of one dimension")
    compare(group=mesh["cp"], shape={"T": 32})
    x = torch.randn(2, 32, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = [_module_gradients(_module(), part)[1] for part in x.split(1)]
    model = nn.Sequential(_module(context_parallel_group=mesh["cp"]))
    fully_shard(model, mesh=mesh["dp"])
    own = cp.shard(x[mesh["dp"].get_local_rank()][None], 1, mesh["cp"])
    out = model(own)
    (out * out.detach().cos()).sum().backward()
    for p, *parts in zip(model.parameters(), *expected, strict=True):
        found = p.grad.full_tensor()  # the mean over dp
        dist.all_reduce(found, group=mesh["cp"].get_group())
        torch.testing.assert_close(found, sum(parts) / 2, **EXACT)


def check_the_code_of_the_guide():
    """Its blocks, in their order, on four ranks with smaller numbers."""
    if dist.get_world_size() != 4:
        return
    from torch.distributed.fsdp import fully_shard

    page = Path(__file__).resolve().parents[2] / "docs" / "guides" / "context_parallel.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    group = dist.group.WORLD
    (q, k, v), _ = inputs(T=64)
    names = {
        "torch": torch, "nn": nn, "dist": dist, "htree_cuda": htree_cuda, "distributed": cp, "group": group,
        "init_device_mesh": init_device_mesh, "fully_shard": fully_shard,
    }  # fmt: skip
    for block, given in zip(
        blocks,
        (
            {"q": q, "k": k, "v": v},
            {"x": torch.randn(1, 64, 256)},
            {
                **{name: cp.shard(x[0], 0, group, "contiguous") for name, x in (("q", q), ("k", k), ("v", v))},
                "cu": torch.tensor([0, 30, 64], dtype=torch.int32),
            },
        ),
        strict=True,
    ):
        exec(compile(block.replace('"cuda"', '"cpu"'), page.name, "exec"), names | given)


def check_training_example():
    """examples/train_bytes.py --context-parallel learns what one process learns."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import train_bytes as example

    task = example.Task((example.Stage(64, 1, 4),), lr=1e-2, eval_every=2, eval_batches=1)
    preset = dataclasses.replace(
        example.PRESETS["cpu"], d_model=16, n_layers=2, n_heads=2, head_dim=8, top_k=2, text=task
    )  # fmt: skip
    place = (preset, "text", "htree", 0, example.Text(), torch.device("cpu"), "auto")
    alone, shared = example.Run(*place), example.SharedRun(*place, group=dist.group.WORLD)
    with tempfile.TemporaryDirectory() as folder:
        for name, run in (("alone", alone), ("shared", shared)):
            run.train(Path(folder) / f"{name}.pt")
    for x, y in zip(shared.log, alone.log, strict=True):
        assert abs(x["train_loss"] - y["train_loss"]) < 1e-4 and abs(x["loss"] - y["loss"]) < 1e-4
    for x, y in zip(shared.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def check_benchmark():
    """Every shape and layout has a row on each rank, every shape was measured alone by one rank, and the file is whole
    after each row. A step that takes long is made once, and nothing of it is measured apart."""
    from htree_cuda.bench import cli
    from htree_cuda.bench import context_parallel as bench

    bench.SHAPES, bench.TIMED_S, written = [(2, 1, 2), (4, 2, 4)], 0.0, []
    original = bench.write_report
    with tempfile.TemporaryDirectory() as folder:

        def write(path, *arguments):
            original(path, *arguments)
            written.append(len(json.loads(path.read_text())["figures"]))

        bench.write_report = write
        options = ["--quick", "--device", "cpu", "--dtype", "float32", "--dim", "8", "--lengths", "64,128"]
        args = cli._parser().parse_args(["context_parallel", *options, "--out", f"{folder}/out.json"])
        with loans_of_any_size():
            loans = [balance.loans(T, 2, 2, 16, top_k, 16 * top_k) for T in (64, 128) for top_k in (2, 4)]
            count = lambda loan: loan.count if loan else 0  # noqa: E731
            assert any(count(x.forward) > count(x.backward) for x in loans), "no selection travels back"
            figures = bench._figures(args)
        bench.LONG_S = bench.ONCE_S = 0.0
        long = bench._figures(args)
    rows = [(T, H, layout) for T in (64, 128) for H in (2, 4) for layout in ("zigzag", "contiguous")]
    for found in (figures, long):
        assert [(f["T"], f["H"], f["layout"]) for f in found] == rows
        assert all(f["speedup"] > 0 and f["exchange"]["ms"] > 0 and f["weak"]["ms"] > 0 for f in found)
        assert [f["one"]["rank"] == 0 for f in found[:4]] == [False, False, True, True], "each measures its own"
    assert all("compute" in f and "memory" in f and f["forward"]["calls"] > 1 for f in figures)
    assert not any("compute" in f or "memory" in f or f["forward"]["calls"] > 1 for f in long)
    assert written == (2 * list(range(1, 9)) if dist.get_rank() == 0 else [])


def main() -> None:
    rank, world, rendezvous, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    said = {}
    for name, check in list(globals().items()):
        if name.startswith("check_") and not (world > 2 and name in OF_TWO_RANKS):
            try:
                check()
                said[name] = ""
            except Exception:
                said[name] = traceback.format_exc()
    Path(f"{out}.{rank}").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
