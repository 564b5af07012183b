"""What a caller can get wrong: each error names the op, the argument, the rule and the value, before any launch."""

from __future__ import annotations

import math
import types

import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError
from tests.unit.calls import SMALL, TREE, dist_args, qkv


def forward_error(match, error=ValueError, *, q=None, k=None, v=None, **options):
    base = qkv()
    q, k, v = (b if x is None else x for x, b in zip((q, k, v), base))
    with pytest.raises(error, match=match):
        htree_cuda.forward(q, k, v, **{**SMALL, **options})


def f64(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("match", "tensors"),
    [
        (r"forward: q must have 4 dimensions \[B, T_q, H, K\], got shape \(12, 4, 8\)", {"q": f64(12, 4, 8)}),
        (r"forward: k must have 4 dimensions \[B, T, H_kv, K\], got shape \(70, 8\)", {"k": f64(70, 8)}),
        (r"forward: v must have 4 dimensions", {"v": f64(1, 1, 70, 2, 6)}),
        (r"forward: q must be float16, bfloat16, float32 or float64, got torch.int32", {"q": f64(1, 12, 4, 8).int()}),
        (r"forward: q must have the dtype of k and v \(torch.float32\), got torch.float64",
         {"k": torch.zeros(1, 70, 2, 8), "v": torch.zeros(1, 70, 2, 6)}),
        (r"forward: k must have the dtype of q and v \(torch.float64\), got torch.float32",
         {"k": torch.zeros(1, 70, 2, 8)}),
        (r"forward: k must have the dtype of q \(torch.float64\), got torch.float32",
         {"k": torch.zeros(1, 70, 2, 8), "v": torch.zeros(1, 70, 2, 6).half()}),
        (r"forward: v must have the dtype of q and k \(torch.float64\), got torch.bfloat16",
         {"v": f64(1, 70, 2, 6).bfloat16()}),
        (r"forward: v must be float16, bfloat16, float32 or float64, got torch.int8", {"v": f64(1, 70, 2, 6).char()}),
        (r"forward: k must be float16, bfloat16, float32 or float64, got torch.complex128",
         {"k": f64(1, 70, 2, 8).to(torch.complex128)}),
        (r"forward: dimension 0 of k must equal B of q \(1\), got 3", {"k": f64(3, 70, 2, 8), "v": f64(3, 70, 2, 6)}),
        (r"forward: dimension 0 of v must equal B of k \(1\), got 2", {"v": f64(2, 70, 2, 6)}),
        (r"forward: dimension 1 of v must equal T of k \(70\), got 71", {"v": f64(1, 71, 2, 6)}),
        (r"forward: dimension 2 of v must equal H_kv of k \(2\), got 1", {"v": f64(1, 70, 1, 6)}),
        (r"forward: dimension 3 of k must equal K of q \(8\), got 10", {"k": f64(1, 70, 2, 10)}),
        (r"forward: K .* must be even: RoPE rotates pairs, got 7", {"q": f64(1, 12, 4, 7), "k": f64(1, 70, 2, 7)}),
        (r"forward: H .* must be a positive multiple of H_kv \(2\), got 3", {"q": f64(1, 12, 3, 8)}),
        (r"forward: H .* must be a positive multiple of H_kv \(2\), got 0", {"q": f64(1, 12, 0, 8)}),
        (r"forward: T_q .* must be at most T \(70\), got 71", {"q": f64(1, 71, 4, 8)}),
        (r"forward: T \(dimension 1 of k\) must be at least 1, got 0", {"k": f64(1, 0, 2, 8), "v": f64(1, 0, 2, 6)}),
        (r"forward: H_kv .* must be at least 1, got 0", {"k": f64(1, 70, 0, 8), "v": f64(1, 70, 0, 6)}),
        (r"forward: K .* must be at least 1, got 0", {"q": f64(1, 12, 4, 0), "k": f64(1, 70, 2, 0)}),
        (r"forward: V .* must be at least 1, got 0", {"v": f64(1, 70, 2, 0)}),
        (r"forward: q must be on the device of k and v \(meta\), got cpu",
         {"k": f64(1, 70, 2, 8).to("meta"), "v": f64(1, 70, 2, 6).to("meta")}),
        (r"forward: k must be on the device of q and v \(cpu\), got meta", {"k": f64(1, 70, 2, 8).to("meta")}),
        (r"forward: v must be on the device of q and k \(cpu\), got meta", {"v": f64(1, 70, 2, 6).to("meta")}),
        (r"forward: q must be a dense \(strided\) tensor, got torch.sparse_coo", {"q": f64(1, 12, 4, 8).to_sparse()}),
        (r"forward: q must be a dense \(strided\) tensor, got a nested one",
         {"q": torch.nested.nested_tensor([f64(12, 4, 8)])}),
        (r"forward: q must be on the device of k and v \(cpu\), got meta", {"q": f64(1, 12, 4, 8).to("meta")}),
    ],
)  # fmt: skip
def test_forward_tensor_errors(match, tensors):
    forward_error(match, **tensors)


@pytest.mark.parametrize(
    ("match", "error", "options"),
    [
        (r"q_start must lie in 0 .. T - T_q \(58\), got -1", ValueError, {"q_start": -1}),
        (r"q_start must lie in 0 .. T - T_q \(58\), got 59", ValueError, {"q_start": 59}),
        (r"q_start must be an int or None, got 1.5", TypeError, {"q_start": 1.5}),
        (r"compression_rate must be a power of two, at least 2, got 3", ValueError, {"compression_rate": 3}),
        (r"compression_rate must be a power of two, at least 2, got 1", ValueError, {"compression_rate": 1}),
        (r"compression_rate must be an int, got '4'", TypeError, {"compression_rate": "4"}),
        (r"top_k_per_layer must be a power of two, at least 1, got 0", ValueError, {"top_k_per_layer": 0}),
        (r"top_k_per_layer must be a power of two, at least 1, got 6", ValueError, {"top_k_per_layer": 6}),
        (r"max_top_nodes must lie in top_k .. top_k \* compression_rate \(4 .. 16\), got 3", ValueError,
         {"max_top_nodes": 3}),
        (r"max_top_nodes must lie in .* \(4 .. 16\), got 17", ValueError, {"max_top_nodes": 17}),
        (r"q_start must be an int or None, got True", TypeError, {"q_start": True}),
        (r"q_start must be an int or None, got b'.x01'", TypeError, {"q_start": b"\x01"}),
        (r"q_start must fit in 64 bits, got 1180591620717411303424", ValueError, {"q_start": 2**70}),
        (r"compression_rate must be at most 2\^30, got 2147483648", ValueError, {"compression_rate": 2**31}),
        (r"top_k_per_layer must be at most 2\^30, got 4611686018427387904", ValueError, {"top_k_per_layer": 2**62}),
        (r"max_top_nodes must be an int or None, got 8.0", TypeError, {"max_top_nodes": 8.0}),
        (r"scale must be finite, got nan", ValueError, {"scale": math.nan}),
        (r"scale must be finite in float64, got an int of 1329 bits", ValueError, {"scale": 10**400}),
        (r"rope_base must be a number or None, got 'x'", TypeError, {"rope_base": "x"}),
        (r"backend must be one of 'auto', 'torch', got None", ValueError, {"backend": None}),
        (r"scale must be a number or None, got 'x'", TypeError, {"scale": "x"}),
        (r"rope_base must be finite and greater than 0, got 0", ValueError, {"rope_base": 0}),
        (r"rope_base must be finite and greater than 0, got inf", ValueError, {"rope_base": math.inf}),
        (r"strict_causal must be a bool, got 1", TypeError, {"strict_causal": 1}),
        (r"return_lse must be a bool, got None", TypeError, {"return_lse": None}),
        (r"backend must be one of 'auto', 'torch', got 'cuda'", ValueError, {"backend": "cuda"}),
        (r"forward: q must be a torch.Tensor, got list", TypeError, {"q": [1.0]}),
        (r"deterministic must be a bool, got 1", TypeError, {"deterministic": 1}),
        (r"save_selection must be one of True, False, 'auto', got 1", ValueError, {"save_selection": 1}),
        (r"save_selection must be one of True, False, 'auto', got None", ValueError, {"save_selection": None}),
        (r"save_selection must be one of True, False, 'auto', got 'never'", ValueError, {"save_selection": "never"}),
    ],
)  # fmt: skip
def test_forward_option_errors(match, error, options):
    forward_error(match, error, **options)


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        (r"attn_dist: indices must be int32, got torch.int64", ValueError, {"indices": torch.zeros(5, 1, 9).long()}),
        (r"attn_dist: q must have the dimensions", ValueError, {"q": torch.zeros(5, 8)}),
        (r"attn_dist: k must have 3 dimensions \[s_kv, h_kv, d_qk\]", ValueError, {"k": torch.zeros(1, 20, 1, 8)}),
        (r"attn_dist: indices must have 3 dimensions", ValueError, {"indices": torch.zeros(5, 9).int()}),
        (r"attn_dist: lse must have 2 dimensions \[s_q, h_q\]", ValueError, {"lse": torch.zeros(5)}),
        (r"attn_dist: k must have the dtype of q", ValueError, {"k": torch.zeros(20, 1, 8).half()}),
        (r"lse must be float32 where q is torch.float32, got torch.float64", ValueError, {"lse": f64(5, 66)}),
        (r"k must have one KV head \(dimension -2 must be 1: multi-query attention\), got 2", ValueError,
         {"k": torch.zeros(20, 2, 8)}),
        (r"indices must have one KV head", ValueError, {"indices": torch.zeros(5, 2, 9).int()}),
        (r"d_qk of k must equal d_qk of q \(8\), got 4", ValueError, {"k": torch.zeros(20, 1, 4)}),
        (r"s_q of indices must equal s_q of q \(5\), got 4", ValueError, {"indices": torch.zeros(4, 1, 9).int()}),
        (r"s_q of lse must equal s_q of q \(5\), got 6", ValueError, {"lse": torch.zeros(6, 66)}),
        (r"h_q of lse must equal h_q of q \(66\), got 65", ValueError, {"lse": torch.zeros(5, 65)}),
        (r"h_q must be at least 1, got 0", ValueError, {"q": torch.zeros(5, 0, 8), "lse": torch.zeros(5, 0)}),
        (r"topk_length must be int32, got torch.int64", ValueError, {"topk_length": torch.zeros(5).long()}),
        (r"topk_length must have 1 dimensions \[s_q\]", ValueError, {"topk_length": torch.zeros(5, 1).int()}),
        (r"s_q of topk_length must equal s_q of q \(5\), got 4", ValueError, {"topk_length": torch.zeros(4).int()}),
        (r"topk_length must be a torch.Tensor, got int", TypeError, {"topk_length": 3}),
        (r"k must be on the device of q, indices and lse \(cpu\), got meta", ValueError,
         {"k": torch.zeros(20, 1, 8, device="meta")}),
        (r"k_stride must be at least 1, got 0", ValueError, {"k_stride": 0}),
        (r"q_start must lie in 0 .. .*, got -1", ValueError, {"q_start": -1}),
        (r"q_start must be one int, got 2 of them", ValueError, {"q_start": [1, 2]}),
        (r"q_start must be an int, got 0.5", TypeError, {"q_start": 0.5}),
        (r"sm_scale must be finite, got inf", ValueError, {"sm_scale": math.inf}),
        (r"lse_base must be 2 or math.e, got 10", ValueError, {"lse_base": 10}),
        (r"backend must be one of", ValueError, {"backend": "fast"}),
        (r"backend must be one of", ValueError, {"backend": []}),
        (r"q must be float16, bfloat16, float32 or float64, got torch.int32", ValueError,
         {"q": torch.zeros(5, 66, 8).int()}),
        (r"q must be a dense \(strided\) tensor", ValueError, {"q": torch.zeros(5, 66, 8).to_sparse()}),
        (r"d_qk must be at least 1, got 0", ValueError, {"q": torch.zeros(5, 66, 0), "k": torch.zeros(20, 1, 0)}),
        (r"k_stride must be an int, got True", TypeError, {"k_stride": True}),
        (r"k_stride must be an int, got '2'", TypeError, {"k_stride": "2"}),
        (r"k_stride must fit in 64 bits", ValueError, {"k_stride": 2**63}),
        (r"lse_base must be a number, got None", TypeError, {"lse_base": None}),
        (r"sm_scale must be a number or None, got '1'", TypeError, {"sm_scale": "1"}),
        (r"sm_scale must be 0 or of a magnitude", ValueError, {"sm_scale": 1e300}),
        (r"lse must be float32 where q is torch.bfloat16, got torch.bfloat16", ValueError,
         dict(zip(("q", "k", "lse"), (torch.zeros(*s).bfloat16() for s in ((5, 66, 8), (20, 1, 8), (5, 66)))))),
    ],
)  # fmt: skip
def test_attn_dist_errors(match, error, change):
    args = dict(zip(("q", "k", "indices", "lse"), dist_args()))
    with pytest.raises(error, match=match):
        htree_cuda.attn_dist(**{**args, **change})


def test_attn_dist_batch_errors():
    q, k, indices, lse = dist_args(B=2)
    with pytest.raises(ValueError, match=r"dimension 0 of k must equal B of q \(2\), got 1"):
        htree_cuda.attn_dist(q, k[:1], indices, lse)
    with pytest.raises(ValueError, match=r"list of B \(2\) ints, got 3 of them"):
        htree_cuda.attn_dist(q, k, indices, lse, q_start=[1, 2, 3])
    with pytest.raises(ValueError, match=r"list of B \(2\) ints, got 1 of them"):
        htree_cuda.attn_dist(q, k, indices, lse, q_start=[1])


def test_scale_must_survive_the_accumulation_dtype():
    args = qkv(dtype=torch.float32)
    for scale in (1e-50, 1e300):
        with pytest.raises(ValueError, match=r"scale must be 0 or of a magnitude from .* for torch.float32, got"):
            htree_cuda.forward(*args, scale=scale, **SMALL)
    q, k, v = qkv()
    assert htree_cuda.forward(q, k, v, scale=1e-50, **SMALL).isfinite().all()


def test_large_numbers_under_a_small_scale():
    """The scale belongs to the scores: multiplied into q it would overflow or vanish on the way."""
    q, k, v = qkv(dtype=torch.float32)
    expected = htree_cuda.forward(q, k, v, scale=0.1, **SMALL)
    for power in (60, -60):
        out = htree_cuda.forward(q * 2.0**power, k * 2.0**-power, v, scale=0.1, **SMALL)
        assert torch.equal(out, expected)


def test_transforms_are_refused():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match=r"forward: q is inside a torch.func transform"):
        torch.func.grad(lambda x: htree_cuda.forward(x, k, v, **SMALL).sum())(q)
    with pytest.raises(RuntimeError, match=r"forward: q is inside a torch.func transform"):
        torch.func.vmap(lambda x: htree_cuda.forward(x, k, v, **SMALL))(q[None])
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"forward: q carries a forward-mode tangent"),
    ):
        htree_cuda.forward(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v, **SMALL)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_transforms_are_refused_by_compiled_calls(fullgraph):
    q, k, v = qkv()

    def call(x):
        return htree_cuda.forward(x, k, v, **SMALL)

    def tangent(x):
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(call(torch.autograd.forward_ad.make_dual(x, x))).tangent

    for transformed, match in (
        (lambda x: torch.func.jvp(call, (x,), (x,))[1], "forward: q is inside a torch.func transform"),
        (torch.func.grad(lambda x: call(x).sum()), "forward: q is inside a torch.func transform"),
        (lambda x: torch.func.vmap(call)(x[None]), "forward: q is inside a torch.func transform"),
        (tangent, "forward: q carries a forward-mode tangent"),
    ):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=match):
            torch.compile(transformed, fullgraph=fullgraph, backend="aot_eager")(q)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=fullgraph, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(q), call(q))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="carries a forward-mode tang"):
            compiled(torch.autograd.forward_ad.make_dual(q, q))


def test_backward_op_checks_what_it_is_given():
    q, k, v = qkv()
    out, lse, selection = torch.ops.htree_cuda.forward(q, k, v, **TREE, need_selection=True, backend="auto")
    good = {"dout": out, "dlse": lse, "out": out, "lse": lse, "selection": selection}
    for name, bad, match in (
        ("selection", selection[:0], r"backward: selection must have the shape \(2, 1, 12, 2, 4\)"),
        ("selection", selection.long(), r"backward: selection must be torch.int32, got torch.int64"),
        ("dout", out[:, :3], r"backward: dout must have the shape"),
        ("dlse", lse.float(), r"backward: dlse must be torch.float64, got torch.float32"),
    ):
        x = {**good, name: bad}
        with pytest.raises(ValueError, match=match):
            torch.ops.htree_cuda.backward(
                x["dout"], x["dlse"], q, k, v, x["out"], x["lse"], x["selection"], **TREE, backend="auto"
            )


def test_fake_tensors_meet_the_same_rules():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(s, dtype=torch.bfloat16) for s in ((1, 12, 4, 8), (1, 70, 2, 8), (1, 70, 2, 6)))
        out, lse, selection = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **SMALL)
        assert (out.shape, lse.dtype, selection.shape) == ((1, 12, 4, 6), torch.float32, (2, 1, 12, 2, 4))
        with pytest.raises(ValueError, match="power of two"):
            htree_cuda.forward(q, k, v, compression_rate=5)


def test_other_devices_get_a_way_out():
    """backend="auto" never falls back: a device without kernels is an error that names backend="torch"."""
    from htree_cuda import checks

    with pytest.raises(UnsupportedError, match=r'no kernels exist for device type .meta.*backend="torch"'):
        checks.support.kernel_device("forward", torch.empty(1, device="meta"))


def test_a_build_without_the_family_gets_a_way_out(monkeypatch):
    """HTREE_CUDA_FAMILIES=htree leaves the kernels over index lists out."""
    from types import SimpleNamespace

    from htree_cuda import checks, kernels

    x = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(kernels, "built", lambda: True)
    monkeypatch.setattr(kernels, "device_supported", lambda index: (True, ""))
    monkeypatch.setattr(kernels, "build_info", lambda: {"families": ["htree"]})
    checks.support.kernel_device("forward", x)
    match = r'attn_dist: .* families htree and not dsa \(HTREE_CUDA_FAMILIES at build time\); pass backend="torch"'
    with pytest.raises(UnsupportedError, match=match):
        checks.support.kernel_device("attn_dist", x)
    monkeypatch.setattr(kernels, "build_info", dict)
    checks.support.kernel_device("attn_dist", x)


def test_kernel_limits_have_their_messages(monkeypatch):
    """The kernels' support checks, on tensors that need no GPU."""
    from htree_cuda import checks, kernels

    monkeypatch.setattr(kernels, "mixed_dims", lambda: True)

    def tree(**change):
        options = {**TREE, "compression_rate": 16, "top_k_per_layer": 16, "backend": "auto", **change}
        return checks.tree.forward(q, k, v, **options)

    q, k, v = (x.bfloat16() for x in qkv(K=64, V=128))
    checks.support.forward(q, k, v, tree())
    for change, match in (
        ({"compression_rate": 8}, r"compression_rate 16, got 8"),
        ({"top_k_per_layer": 8}, r"top_k_per_layer in 16 .. 512, got 8"),
        ({"top_k_per_layer": 1024}, r"top_k_per_layer in 16 .. 512, got 1024"),
        ({"max_top_nodes": 100}, r"max_top_nodes = top_k \* compression_rate \(256\), got 100"),
        ({"scale": 3e38}, r"\|scale\| \* log2\(e\) finite in float32, got 3e\+38"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            checks.support.forward(q, k, v, tree(**change))
    for tensors, match in (
        ((q.float(), k.float(), v.float()), r"float16 or bfloat16, q is torch.float32"),
        ((q[..., :32], k[..., :32], v), r"K \(dimension 3 of q\) to be 64 or 128, got 32"),
        ((q, k, v[..., :6]), r"V \(dimension 3 of v\) to be 64 or 128, got 6"),
        ((q.repeat(1, 1, 9, 1), k, v), r"at most 16 query heads for each KV head \(H / H_kv\), got 18"),
        ((q, k, v.repeat(1, 1, 1, 2)[..., ::2]), r"last dimension of v contiguous, its stride is 2"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            checks.support.forward(*tensors, tree())
    x = types.SimpleNamespace(device=torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "built", lambda: True)
        checks.support.module_heads(x, 64, 128, 16)
        for sizes, match in (
            ((84, 64, 1), "head_dim to be 64 or 128, got 84"),
            ((64, 84, 1), "v_head_dim to be 64 or 128, got 84"),
            ((64, 64, 32), r"at most 16 query heads for each KV head \(n_heads / n_kv_heads\), got 32"),
        ):
            with pytest.raises(UnsupportedError, match=f"HTreeAttention: the kernels need {match}"):
                checks.support.module_heads(x, *sizes)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "mixed_dims", lambda: False)
        with pytest.raises(UnsupportedError, match=r"need K = V, got K 64 and V 128 .*HTREE_CUDA_MIXED_DIMS=1"):
            checks.support.forward(q, k, v, tree())
        checks.support.forward(q, k, v[..., :64], tree())
    out, lse, selection = q.new_empty(1, 12, 2, 128), torch.empty(1, 12, 2), torch.empty(0, 1, 12, 2, 16)
    checks.support.backward(q, k, v, out, lse, selection, tree())
    with pytest.raises(UnsupportedError, match=r"backward: .*top_k_per_layer in 16 .. 512, got 8"):
        checks.support.backward(q, k, v, out, lse, selection, tree(top_k_per_layer=8))
    with pytest.raises(UnsupportedError, match=r"backward: the kernels need lse contiguous"):
        checks.support.backward(q, k, v, out, lse.transpose(1, 2).contiguous().transpose(1, 2), selection, tree())
    q, k, indices, lse = (x[None] for x in dist_args(d_qk=128, dtype=torch.bfloat16))
    checks.support.attn_dist(q, k, indices, lse, None, 0.1)
    checks.support.attn_dist(q, k, indices[:, :1].expand(-1, 5, -1, -1), lse.repeat(1, 1, 2)[..., ::2], None, 0.1)
    many = torch.empty(1, 1, 1, 1, dtype=torch.int32).expand(1, 1, 1, 2**30 + 1)
    for args, match in (
        ((q, k, indices, lse, None, 3e38), r"\|sm_scale\| \* log2\(e\) finite in float32"),
        ((q, k, many, lse, None, 0.1), r"topk to be at most 1073741824, got 1073741825"),
        ((q[..., :64], k[..., :64], indices, lse, None, 0.1), r"d_qk to be one of 576, 512, 192, 128, got 64"),
        ((q[:, :, :1].expand(-1, -1, 66, -1), k, indices, lse, None, 0.1), r"heads of q apart"),
        ((q, torch.zeros(1, 20, 1, 132).bfloat16()[..., :128], indices, lse, None, 0.1), r"dimension -3 is 264 bytes"),
        ((q, torch.zeros(2561).bfloat16()[1:].view(1, 20, 1, 128), indices, lse, None, 0.1), r"multiple of 16 bytes"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            checks.support.attn_dist(*args)


def test_meta_tensors_go_through_the_fake():
    q, k, v = (x.to("meta") for x in qkv())
    out, lse = htree_cuda.forward(q, k, v, return_lse=True, **SMALL)
    assert (out.shape, lse.shape, out.device.type) == ((1, 12, 4, 6), (1, 12, 4), "meta")
    dist = htree_cuda.attn_dist(*(x.to("meta") for x in dist_args()))
    assert dist.shape == (2, 5, 9) and dist.device.type == "meta"
