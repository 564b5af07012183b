"""The ops as PyTorch sees them: opcheck, torch.compile, autocast, threads."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

import htree_cuda
from tests.unit.calls import SMALL, TREE, dist_args, qkv

# --------------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("T", [10, 70])
@pytest.mark.parametrize("need_selection, save_selection", [(True, "never"), (False, "never"), (False, "auto")])
def test_opcheck_forward(T, need_selection, save_selection):
    args = qkv(T=T, T_q=10, grad=need_selection or save_selection == "auto")
    options = {"need_selection": need_selection, "backend": "auto", "save_selection": save_selection}
    torch.library.opcheck(torch.ops.htree_cuda.forward, args, {**TREE, **options})


def test_opcheck_backward():
    q, k, v = qkv()
    out, lse, selection = torch.ops.htree_cuda.forward(q, k, v, **TREE, need_selection=True, backend="auto")
    args = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, selection)
    torch.library.opcheck(torch.ops.htree_cuda.backward, args, {**TREE, "backend": "auto"})


@pytest.mark.parametrize("B", [None, 2])
def test_opcheck_attn_dist(B):
    q, k, indices, lse = dist_args(B)
    numbers = {"sm_scale": None, "q_start": [3] * (B or 1), "k_stride": 2, "lse_base": 2.0, "backend": "auto"}
    length = torch.full(indices.shape[:-2], 7, dtype=torch.int32)
    for topk_length in (None, length):
        torch.library.opcheck(torch.ops.htree_cuda.attn_dist, (q, k, indices, lse, topk_length), numbers)


def test_opcheck_tree_pool():
    _, k, v = qkv(B=2)
    options = {"compression_rate": 4, "max_top_nodes": 5, "backend": "auto"}
    torch.library.opcheck(torch.ops.htree_cuda.tree_pool, (k, v), options)


def test_tree_pool_concatenates_the_layers():
    _, k, v = qkv(T=70, B=2, dtype=torch.bfloat16)
    k_tree, v_tree = torch.ops.htree_cuda.tree_pool(k, v, compression_rate=4, max_top_nodes=5, backend="auto")
    layers = htree_cuda.definition.build_tree(k, 4, 5)[1:]
    assert torch.equal(k_tree, torch.cat(layers, 1).transpose(1, 2)) and k_tree.shape == (2, 2, 18 + 5, 8)
    assert v_tree.shape == (2, 2, 23, 6)
    assert torch.ops.htree_cuda.tree_pool(k, v, compression_rate=4, max_top_nodes=70, backend="auto")[0].shape[2] == 0


# --------------------------------------------------------------------------------------------- compile, grad, autocast


def test_gradcheck_through_the_op():
    q, k, v = qkv(T=21, T_q=3, K=4, V=3, grad=True)
    options = {"compression_rate": 4, "top_k_per_layer": 2, "return_lse": True, "rope_base": 100.0}
    assert torch.autograd.gradcheck(lambda *x: htree_cuda.forward(*x, **options), (q, k, v))


def test_compile_fullgraph_with_dynamic_length():
    def call(q, k, v):
        return htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **SMALL)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 75, 91, 133, 200, 255):  # three layers each
        counted(*qkv(T=T))
    assert counter.frame_count <= 2, "one graph for a number of layers, not one for each length"
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for T in (70, 33, 17, 200):
        q, k, v = qkv(T=T)
        for x, y in zip(compiled(q, k, v), call(q, k, v), strict=True):
            assert torch.equal(x, y)


def test_compile_with_a_start_that_changes():
    q, k, v = qkv(T=70, T_q=5)
    used, indices = torch.tensor([69], dtype=torch.int32), dist_args()[2]
    rows, keys = torch.randn(5, 3, 8), torch.randn(40, 1, 8)
    for call in (
        lambda start: htree_cuda.forward(q, k, v, q_start=start, **SMALL),
        lambda start: htree_cuda.forward(q, k, v, q_start=start, seqused_k=used, **SMALL),
        lambda start: htree_cuda.sparse_attention(rows, keys, indices, d_v=6, q_start=start)[0],
    ):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for start in (0, 3, 5):
            assert torch.equal(compiled(start), call(start))


def test_compile_gradients_and_attn_dist():
    q, k, v = qkv(grad=True)
    compiled = torch.compile(lambda q, k, v: htree_cuda.forward(q, k, v, **SMALL).square().sum(), fullgraph=True)
    eager = torch.autograd.grad(htree_cuda.forward(q, k, v, **SMALL).square().sum(), (q, k, v))
    for x, y in zip(eager, torch.autograd.grad(compiled(q, k, v), (q, k, v))):
        torch.testing.assert_close(x, y)
    args = dist_args()
    compiled = torch.compile(lambda *x: htree_cuda.attn_dist(*x, q_start=4, k_stride=2), fullgraph=True)
    assert torch.equal(compiled(*args), htree_cuda.attn_dist(*args, q_start=4, k_stride=2))


def test_autocast():
    q, k, v = qkv(dtype=torch.float32, grad=True)
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = htree_cuda.forward(*half, return_lse=True, **SMALL)
    expected.float().square().sum().backward()
    args = dist_args()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = htree_cuda.forward(q, k, v, return_lse=True, **SMALL)
        out.float().square().sum().backward()
        dist = htree_cuda.attn_dist(*args)
        op = torch.ops.htree_cuda.forward(
            *(x.detach() for x in (q, k, v)), **TREE, need_selection=False, backend="auto"
        )
        double = htree_cuda.forward(*qkv(), **SMALL)
    assert (out.dtype, lse.dtype, dist.dtype, double.dtype) == (
        torch.bfloat16, torch.float32, torch.float32, torch.float64
    )  # fmt: skip
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse), "the accumulations stay float32"
    assert torch.equal(dist, htree_cuda.attn_dist(args[0].bfloat16(), args[1].bfloat16(), *args[2:]))
    plain = torch.ops.htree_cuda.forward(*(x.detach() for x in (q, k, v)), **TREE, need_selection=False, backend="auto")
    assert torch.equal(op[0], plain[0]) and torch.equal(op[1], plain[1])
    for x, y in zip((q, k, v), half):
        assert x.grad.dtype == torch.float32 and torch.equal(x.grad, y.grad.float())


def test_inference_keeps_no_selection(monkeypatch):
    seen = []
    original = htree_cuda.torch_backend.tree.forward

    def spy(*args, need_selection, **options):
        seen.append(need_selection)
        return original(*args, need_selection=need_selection, **options)

    monkeypatch.setattr(htree_cuda.torch_backend.tree, "forward", spy)
    htree_cuda.forward(*qkv(), **SMALL)
    with torch.no_grad():
        htree_cuda.forward(*qkv(grad=True), **SMALL)
    htree_cuda.forward(*qkv(grad=True), **SMALL)
    htree_cuda.forward(*qkv(), return_selection=True, **SMALL)
    assert seen == [False, False, True, True]


def test_returns_follow_the_flags():
    q, k, v = qkv()
    assert isinstance(htree_cuda.forward(q, k, v, **SMALL), torch.Tensor)
    _, selection = htree_cuda.forward(q, k, v, return_selection=True, **SMALL)
    assert selection.shape == (2, 1, 12, 2, 4) and selection.dtype == torch.int32
    _, lse = htree_cuda.forward(q, k, v, return_lse=True, **SMALL)
    assert lse.shape == (1, 12, 4)


def test_gradient_through_lse_only_and_out_only():
    q, k, v = qkv(grad=True)
    out, lse = htree_cuda.forward(q, k, v, return_lse=True, **SMALL)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    assert dq.abs().sum() > 0 and dk.abs().sum() > 0 and (dv == 0).all()
    assert torch.autograd.grad(out.sum(), v)[0].abs().sum() > 0


def test_double_backward_raises():
    q, k, v = qkv(grad=True)
    (dq,) = torch.autograd.grad(htree_cuda.forward(q, k, v, **SMALL).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()


@pytest.mark.parametrize(("op", "ragged"), [("forward", False), ("forward_varlen", True)])
def test_double_backward_through_a_sink_raises(op, ragged):
    q, k, v = qkv()
    sink = torch.zeros(q.shape[2], dtype=q.dtype, requires_grad=True)
    lengths = {"seqused_k": torch.full((len(q),), k.shape[1], dtype=torch.int32)} if ragged else {}
    out = htree_cuda.forward(q, k, v, attn_sink=sink, **lengths, **SMALL)
    (dsink,) = torch.autograd.grad(out.square().sum(), sink, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"^{op}: second derivatives \(double backward\) are not supported$"):
        dsink.sum().backward()


def counted_calls(monkeypatch) -> list[str]:
    """Names of the torch backend's functions, as they are called."""
    calls = []
    for name in ("forward", "backward"):
        original = getattr(htree_cuda.torch_backend.tree, name)

        def spy(*args, original=original, name=name, **options):
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(htree_cuda.torch_backend.tree, name, spy)
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strict_causal", [True, False])
def test_a_selection_found_again_gives_the_same_bits(monkeypatch, dtype, strict_causal):
    calls = counted_calls(monkeypatch)
    q, k, v = qkv(T=300, T_q=90, B=2, dtype=dtype, grad=True)
    results = []
    for save_selection in (True, False):
        out, lse = htree_cuda.forward(
            q, k, v, return_lse=True, save_selection=save_selection, strict_causal=strict_causal, **SMALL
        )
        loss = (out.float() * torch.arange(6)).sum() + lse.square().sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    assert calls == ["forward", "backward", "forward", "forward", "backward"]
    assert all(torch.equal(x, y) and x.abs().sum() > 0 for x, y in zip(*results, strict=True))


def test_ties_are_found_again():
    """All scores equal: nothing but positions decides, in both sweeps."""
    q, k, v = qkv(T=300, T_q=90)
    q, k, v = q.zero_().requires_grad_(), k.requires_grad_(), v.requires_grad_()
    kept, again = (
        torch.autograd.grad(htree_cuda.forward(q, k, v, save_selection=save, **SMALL).square().sum(), (q, k, v))
        for save in (True, False)
    )
    assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True)) and kept[0].abs().sum() > 0


@pytest.mark.parametrize("top_k, kept", [(8, True), (16, False)])
def test_the_memory_rule_of_auto(monkeypatch, top_k, kept):
    """Bytes a token: H 2 * (K 4 + V 4) * 8 = 128 of q and out; 4 * 2 layers * H_kv 2 * top_k 8 = 128 of the selection
    at top_k 8, 256 at top_k 16."""
    calls = counted_calls(monkeypatch)
    q, k, v = qkv(H=2, K=4, V=4, grad=True)
    out = htree_cuda.forward(q, k, v, compression_rate=4, top_k_per_layer=top_k, max_top_nodes=16)
    out.sum().backward()
    assert calls.count("forward") == (1 if kept else 2)


class Made(TorchDispatchMode):
    """What the calls below make: (name of the operation, numbers in its result)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.append((function.overloadpacket.__name__, result.numel()))
        return result


@pytest.mark.parametrize("differentiate", ["out", "lse"])
def test_outputs_without_a_gradient_cost_nothing(differentiate):
    """Neither the selection, which has none, nor an output that was not used is given zeros of its size."""
    q, k, v = qkv(T=300, T_q=90, grad=True)
    out, lse = htree_cuda.forward(q, k, v, return_lse=True, save_selection=True, **SMALL)
    with Made() as made:
        (out if differentiate == "out" else lse).sum().backward()
    assert [n for name, n in made.found if name in ("zeros", "new_zeros", "zeros_like") and n > 1] == []
    for x in (q, k) if differentiate == "lse" else (q, k, v):
        assert x.grad.abs().sum() > 0


def test_a_returned_selection_is_kept(monkeypatch):
    calls = counted_calls(monkeypatch)
    out, _ = htree_cuda.forward(*qkv(grad=True), return_selection=True, save_selection=False, **SMALL)
    out.sum().backward()
    assert calls == ["forward", "backward"]


def test_the_op_finds_a_selection_that_was_not_needed():
    q, k, v = qkv(grad=True)
    grads = []
    for need_selection in (True, False):
        out, _, _ = torch.ops.htree_cuda.forward(q, k, v, **TREE, need_selection=need_selection, backend="auto")
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))
    with pytest.raises(ValueError, match="save_selection must be one of 'always', 'never', 'auto', got 'no'"):
        torch.ops.htree_cuda.forward(q, k, v, **TREE, need_selection=False, backend="auto", save_selection="no")


def test_compile_with_gradients_and_dynamic_length():
    """The rule of save_selection asks for the number of layers alone: no graph for each length."""

    def call(q, k, v):
        return htree_cuda.forward(q, k, v, **SMALL).square().sum()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 75, 91, 133, 200, 255):  # three layers each
        q, k, v = qkv(T=T, grad=True)
        found = torch.autograd.grad(counted(q, k, v), (q, k, v))
        for x, y in zip(found, torch.autograd.grad(call(q, k, v), (q, k, v)), strict=True):
            torch.testing.assert_close(x, y)
    assert counter.frame_count <= 2


def test_deterministic_follows_torch(monkeypatch):
    """None is what torch says at the call; an answer overrides it. On a CPU the bits are the same either way."""
    seen = []
    original = htree_cuda.torch_backend.tree.backward

    def spy(*args, deterministic):
        seen.append(deterministic)
        return original(*args, deterministic=deterministic)

    monkeypatch.setattr(htree_cuda.torch_backend.tree, "backward", spy)
    q, k, v = qkv(T=300, T_q=90, grad=True)
    grads = []
    for torch_says in (False, True):
        for wanted in (None, False, True):
            torch.use_deterministic_algorithms(torch_says)
            try:
                loss = htree_cuda.forward(q, k, v, deterministic=wanted, **SMALL).square().sum()
            finally:
                torch.use_deterministic_algorithms(False)
            grads.append(torch.autograd.grad(loss, (q, k, v)))
    assert seen == [False, False, True, True, False, True]
    assert all(torch.equal(x, y) for row in grads for x, y in zip(row, grads[0], strict=True))


@pytest.mark.parametrize("B, T_q", [(0, 5), (2, 0)])
def test_empty_sizes(B, T_q):
    q, k, v = qkv(B=B, T_q=T_q, grad=True)
    out, lse, selection = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **SMALL)
    assert out.shape == (B, T_q, 4, 6) and lse.shape == (B, T_q, 4) and selection.shape == (2, B, T_q, 2, 4)
    out.sum().backward()
    assert (k.grad == 0).all() and k.grad.shape == k.shape


def test_the_same_call_twice_and_from_two_threads():
    q, k, v = qkv(T=300, T_q=40)
    first = htree_cuda.forward(q, k, v, **SMALL)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: htree_cuda.forward(q, k, v, **SMALL), range(8)))
    assert all(torch.equal(first, x) for x in results)


def test_inference_mode_and_outputs_alias_nothing():
    q, k, v = qkv()
    with torch.inference_mode():
        out = htree_cuda.forward(q, k, v, **SMALL)
    assert out.untyped_storage().data_ptr() not in {x.untyped_storage().data_ptr() for x in (q, k, v)}
