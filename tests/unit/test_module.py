"""HTreeAttention, and what surrounds a model that trains with it: cache, compile, checkpointing, autocast, DDP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import htree_cuda
from htree_cuda import HTreeAttention, definition

TREE = {"compression_rate": 4, "top_k_per_layer": 2, "rope_base": 100.0}


def attention(dtype=torch.float64, d_model=12, **options) -> HTreeAttention:
    shape = {"n_kv_heads": 2, "head_dim": 6, "v_head_dim": 5, "qk_norm": True, "bias": True}
    return HTreeAttention(d_model, 4, **{**shape, **TREE, **options}, dtype=dtype)


class Block(nn.Module):
    """A decoder block as a user writes it; rerun recomputes it in the backward."""

    def __init__(self, dtype=torch.float64, rerun=False, **options):
        super().__init__()
        self.rerun = rerun
        self.norm = nn.LayerNorm(12, dtype=dtype)
        self.attention = attention(dtype, **options)
        self.mlp = nn.Sequential(nn.Linear(12, 24, dtype=dtype), nn.GELU(), nn.Linear(24, 12, dtype=dtype))

    def body(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.rerun else self.body(x)


def model(**options) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(**options), Block(**options))


def gradients(m: nn.Module, x: torch.Tensor, call=None) -> list[torch.Tensor]:
    out = (m if call is None else call)(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(m.parameters()))]


def assert_same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    assert all(x.abs().sum() > 0 for x in expected), "zeros are equal too"


# ------------------------------------------------------------------------------------------------------------- module


@pytest.mark.parametrize("qk_norm", [True, False])
def test_it_is_the_projections_around_the_definition(qk_norm):
    module = attention(qk_norm=qk_norm, scale=0.7, max_top_nodes=5, strict_causal=False)
    x = torch.randn(2, 40, 12, dtype=torch.float64)
    q = (x @ module.q_proj.weight.T + module.q_proj.bias).view(2, 40, 4, 6)
    k = (x @ module.k_proj.weight.T + module.k_proj.bias).view(2, 40, 2, 6)
    v = (x @ module.v_proj.weight.T + module.v_proj.bias).view(2, 40, 2, 5)
    if qk_norm:
        for norm in (module.q_norm, module.k_norm):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
        q = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.q_norm.weight
        k = k * (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.k_norm.weight
    options = {**TREE, "scale": 0.7, "max_top_nodes": 5, "strict_causal": False}
    expected = definition.forward(q, k, v, **options).out.flatten(2) @ module.o_proj.weight.T + module.o_proj.bias
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-12)


def test_state_dict_keys_are_stable():
    shapes = {
        "q_proj.weight": (24, 12), "q_proj.bias": (24,), "k_proj.weight": (12, 12), "k_proj.bias": (12,),
        "v_proj.weight": (10, 12), "v_proj.bias": (10,), "o_proj.weight": (12, 20), "o_proj.bias": (12,),
        "q_norm.weight": (6,), "k_norm.weight": (6,),
    }  # fmt: skip
    state = attention().state_dict()
    assert state.pop("_extra_state").tolist() == [4, 2, 8, 6**-0.5, 100.0, 1]
    assert list(state) == list(shapes) and {name: tuple(x.shape) for name, x in state.items()} == shapes
    plain = attention(qk_norm=False, bias=False).state_dict()
    assert [name for name in plain if name != "_extra_state"] == [n for n in shapes if n.endswith("proj.weight")]


def test_state_dict_round_trip(tmp_path):
    x = torch.randn(1, 30, 12, dtype=torch.float64)
    first, second = attention(), attention()
    assert not torch.equal(first(x), second(x))
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize(
    ("name", "change", "mine", "theirs"),
    [
        ("compression_rate", {"compression_rate": 8}, "8", "4"),
        ("top_k_per_layer", {"top_k_per_layer": 4}, "4", "2"),
        ("max_top_nodes", {"max_top_nodes": 5}, "5", "8"),
        ("scale", {"scale": 0.5}, "0.5", "0.408248"),
        ("rope_base", {"rope_base": 10000.0}, "10000", "100"),
        ("strict_causal", {"strict_causal": False}, "0", "1"),
    ],
)
def test_weights_of_another_tree_are_refused(tmp_path, name, change, mine, theirs):
    """The projections have the same shapes, so that nothing else would notice; the module keeps its weights."""
    torch.save(nn.Sequential(attention()).state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    module = attention(**change)
    match = rf"HTreeAttention: {name} of the state dict must be that of the module \({mine}\);.* got {theirs}"
    with pytest.raises(ValueError, match=match):
        nn.Sequential(module).load_state_dict(state)
    del state["0._extra_state"]
    nn.Sequential(module).load_state_dict(state)
    assert torch.equal(module.q_proj.weight, state["0.q_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_state_dict_that_was_cast_loads(dtype):
    """A base of 500000 is infinite in float16, and no scale of these head dimensions is a number of 24 bits."""
    for options in ({}, {"rope_base": 500000.0}, {"scale": 0.1}):
        module = attention(**options)
        state = {name: x.to(dtype) for name, x in module.state_dict().items()}
        module.load_state_dict(state)
        module.load_state_dict({name: x.double() for name, x in state.items()})
    with pytest.raises(ValueError, match=r"scale of the state dict must be .* \(0\.40824829.*\);.* got 0\.(1|09)"):
        attention().load_state_dict({name: x.to(dtype) for name, x in attention(scale=0.1).state_dict().items()})


def test_a_state_dict_that_was_cast_twice_loads():
    """84 ** -0.5 rounded to float16 and then to bfloat16 is not what it is rounded to bfloat16 at once."""
    module = attention(head_dim=84)
    exact = torch.tensor(84**-0.5, dtype=torch.float64)
    assert exact.half().bfloat16() != exact.bfloat16()
    state = module.state_dict()
    for dtype in (torch.float16, torch.bfloat16, torch.float16, torch.float32):
        state = {name: x.to(dtype) for name, x in state.items()}
        module.load_state_dict(state)
    with pytest.raises(ValueError, match="HTreeAttention: scale of the state dict must be that of the module"):
        attention(head_dim=84, scale=0.11).load_state_dict(state)


def test_a_state_dict_on_meta_is_compared_by_shapes_alone():
    module = attention()
    state = {name: x.to("meta") for name, x in module.state_dict().items()}
    attention(device="meta").load_state_dict(state)
    attention(device="meta").load_state_dict(module.state_dict(), assign=True)
    with pytest.raises(ValueError, match="HTreeAttention: _extra_state must be a tensor of 6 numbers, got 5 numbers"):
        module.load_state_dict({**state, "_extra_state": state["_extra_state"][:5]})


@pytest.mark.parametrize("state, found", [(None, "NoneType"), (torch.zeros(3), "3 numbers")])
def test_numbers_of_a_tree_that_are_none_are_refused(state, found):
    module = attention()
    with pytest.raises(ValueError, match=f"HTreeAttention: _extra_state must be a tensor of 6 numbers, got {found}"):
        module.load_state_dict({**module.state_dict(), "_extra_state": state})


def test_defaults_spelled_out_are_the_same_tree():
    spelled = attention(max_top_nodes=8, scale=6**-0.5, backend="torch", save_selection=False)
    spelled.load_state_dict(attention().state_dict())
    assert not spelled.load_state_dict(spelled.state_dict()).missing_keys
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj"):
        spelled.load_state_dict({})


def test_reset_parameters_draws_what_the_constructor_draws():
    torch.manual_seed(3)
    module = attention()
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(3)
    module.reset_parameters()
    assert all(torch.equal(x, expected[name]) for name, x in module.state_dict().items())


def test_device_and_dtype_reach_every_parameter():
    module = attention(torch.bfloat16, device="meta")
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.bfloat16)}
    assert module(torch.empty(2, 9, 12, device="meta", dtype=torch.bfloat16)).shape == (2, 9, 12)


def test_defaults_and_repr():
    module = HTreeAttention(32, 4)
    assert (module.n_kv_heads, module.head_dim, module.v_head_dim) == (4, 8, 8)
    assert module.options == {
        "compression_rate": 16, "top_k_per_layer": 512, "max_top_nodes": None, "scale": None, "rope_base": 10000.0,
        "strict_causal": True, "backend": "auto", "deterministic": None, "save_selection": "auto",
    }  # fmt: skip
    shown = repr(HTreeAttention(32, 4, 2, v_head_dim=6, top_k_per_layer=32))
    for words in ("d_model=32", "n_heads=4", "n_kv_heads=2", "head_dim=8", "v_head_dim=6", "top_k_per_layer=32"):
        assert words in shown


# 43 tokens, r 4, top_k 2: layers begin at 9 and 33 tokens, so the steps cross both.
@pytest.mark.parametrize("prefill", [0, 1, 30, 42])
def test_prefill_and_steps_equal_the_whole(prefill):
    module = attention()
    x = torch.randn(2, 43, 12, dtype=torch.float64)
    whole, (k, v) = module(x, return_kv=True)
    past, parts = None, []
    pieces = ([x[:, :prefill]] if prefill else []) + list(x[:, prefill:].split(1, dim=1))
    for piece in pieces:
        out, past = module(piece, past=past, return_kv=True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(past, (k, v), rtol=1e-12, atol=1e-13)
    assert past[0].shape == (2, 43, 2, 6) and past[1].shape == (2, 43, 2, 5)


def test_a_cache_can_be_cut():
    module = attention()
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    whole, past = module(x, return_kv=True)
    again = module(x[:, 35:], past=tuple(part[:, :35] for part in past))
    torch.testing.assert_close(again, whole[:, 35:], rtol=1e-11, atol=1e-12)


def test_a_cache_has_the_layers_that_the_module_needs():
    """With max_top_nodes below what the default's highest layer has: one layer more, or an error before an append."""
    module = attention(compression_rate=16, top_k_per_layer=8, max_top_nodes=8)
    x = torch.randn(1, 30, 12, dtype=torch.float64)
    with torch.no_grad():
        cache = module.new_cache(1, 200)
        assert cache.num_layers == 3
        torch.testing.assert_close(module(x, cache=cache), module(x), rtol=1e-11, atol=1e-12)
        small = module.new_cache(1, 200, num_layers=2)
        with pytest.raises(ValueError, match="HTreeAttention: max_top_nodes must be at least 13, the nodes of"):
            module(x, cache=small)
    assert small.lengths.tolist() == [0]
    for change, error, message in (
        ({"compression_rate": 1}, ValueError, "TreeCache: compression_rate must be a power of two, at least 2, got 1"),
        ({"compression_rate": 0}, ValueError, "TreeCache: compression_rate must be a power of two, at least 2, got 0"),
        ({"max_tokens": 0}, ValueError, "TreeCache: max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2.5}, TypeError, r"TreeCache: max_tokens must be an int, got 2\.5"),
    ):
        with pytest.raises(error, match=message):
            module.new_cache(**{"batch_size": 1, "max_tokens": 200, **change})


@torch.no_grad()
def test_a_cache_keeps_the_layers_that_the_module_needs_when_it_is_resized():
    module = attention(compression_rate=16, top_k_per_layer=4, max_top_nodes=4)
    x = torch.randn(1, 400, 12, dtype=torch.float64)
    cache = module.new_cache(1, 100)
    module(x[:, :50], cache=cache)
    cache = cache.clone()
    for max_tokens in (2000, 300, 5000):
        cache.resize(max_tokens)
        assert cache.num_layers == module.new_cache(1, max_tokens).num_layers
    parts = [module(part, cache=cache) for part in (x[:, 50:300], x[:, 300:301], x[:, 301:])]
    torch.testing.assert_close(torch.cat(parts, 1), module(x)[:, 50:], rtol=1e-11, atol=1e-12)


def test_a_cached_call_cuts_no_gradient():
    module = attention()
    module.q_proj.requires_grad_(False)
    cache = module.new_cache(1, 100)
    with pytest.raises(RuntimeError, match="HTreeAttention: a cached call has no gradient"):
        module(torch.randn(1, 5, 12, dtype=torch.float64), cache=cache)
    assert cache.lengths.tolist() == [0]


def test_gradients_flow_through_the_cache():
    module = attention()
    x = torch.randn(1, 20, 12, dtype=torch.float64)
    expected = torch.autograd.grad(module(x)[:, 12:].square().sum(), list(module.parameters()))
    _, past = module(x[:, :12], return_kv=True)
    found = torch.autograd.grad(module(x[:, 12:], past=past).square().sum(), list(module.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_gradcheck():
    """float64, a gap between every importance and the threshold: the selection is constant around x."""
    module = HTreeAttention(4, 2, 1, head_dim=4, v_head_dim=3, qk_norm=True, bias=True, **TREE, dtype=torch.float64)
    x = torch.randn(1, 14, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    assert torch.autograd.gradcheck(call, (x, *(p.detach().requires_grad_() for p in module.parameters())))


# ------------------------------------------------------------------------------------------------- what surrounds it


@pytest.mark.parametrize("save_selection", [True, False])
def test_compile_fullgraph_of_a_model(save_selection):
    m, x = model(save_selection=save_selection), torch.randn(2, 40, 12, dtype=torch.float64)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradients(m, x, compiled), gradients(m, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)  # decompositions sum in another order


def test_compile_fullgraph_with_inductor():
    """Code is generated for one module without norms and biases: compiling it is what takes the time."""
    m, x = attention(qk_norm=False, bias=False), torch.randn(2, 40, 12, dtype=torch.float64)
    compiled = torch.compile(m, fullgraph=True)
    for found, expected in zip(gradients(m, x, compiled), gradients(m, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_compile_fullgraph_of_a_decoding_step():
    m, x = attention(), torch.randn(1, 40, 12, dtype=torch.float64)
    _, past = m(x[:, :39], return_kv=True)
    compiled = torch.compile(lambda x, past: m(x, past=past, return_kv=True), fullgraph=True, backend="aot_eager")
    out, (k, v) = compiled(x[:, 39:], past)
    expected, kv = m(x[:, 39:], past=past, return_kv=True)
    assert_same_bits((out, k, v), (expected, *kv))


@pytest.mark.parametrize("save_selection", [True, False])
def test_activation_checkpointing(save_selection):
    """The same operations in the same order: the same bits."""
    x = torch.randn(2, 40, 12, dtype=torch.float64)
    plain = gradients(model(save_selection=save_selection), x)
    assert_same_bits(gradients(model(rerun=True, save_selection=save_selection), x), plain)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_autocast(qk_norm):
    """What is attended to is bfloat16; parameters, their gradients and the residual stream stay float32."""
    m, x = model(dtype=torch.float32, qk_norm=qk_norm), torch.randn(2, 40, 12)
    seen = []
    for block in m:
        block.attention.attend = lambda q, k, v, attend=block.attention.attend: seen.append(attend(q, k, v)) or seen[-1]
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(m, x)
        again = gradients(m, x)
    assert {out.dtype for out in seen} == {torch.bfloat16}
    assert {g.dtype for g in found} == {torch.float32}
    assert_same_bits(found, again)


def test_past_under_autocast():
    """Of any floating dtype, and of no other."""
    m, x = model(dtype=torch.float32)[0].attention, torch.randn(1, 5, 12)
    past = m(x, return_kv=True)[1]
    with torch.autocast("cpu", torch.bfloat16):
        expected, kv = m(x, past=past, return_kv=True)
        assert [y.dtype for y in kv] == [torch.float32] * 2 and torch.equal(kv[0][:, :5], past[0])
        assert (m(x, past=tuple(y.half() for y in past)) - expected).abs().max() < 0.05
        with pytest.raises(ValueError, match=r"HTreeAttention: k of past must be .*float"):
            m(x, past=tuple(y.long() for y in past))


@pytest.mark.parametrize("qk_norm", [True, False])
def test_autocast_stays_near_float32(qk_norm):
    """One layer, so that no near-tie of a selection falls the other way; bfloat16 has 8 bits of mantissa."""
    m = model(dtype=torch.float32, qk_norm=qk_norm, top_k_per_layer=16)
    x = torch.randn(2, 40, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(m, x)
    for a, b in zip(found, gradients(m, x), strict=True):
        assert 0 < (a - b).norm() <= 0.03 * b.norm()


@pytest.mark.filterwarnings("error")
def test_norms_stay_one_kernel_under_autocast():
    """PyTorch warns where the gain's dtype keeps RMSNorm from its fused kernel."""
    module, x = attention(torch.float32), torch.randn(1, 20, 12)
    with torch.autocast("cpu", torch.bfloat16):
        module(x).sum().backward()
    assert module.q_norm.weight.grad.dtype == torch.float32 and bool(module.q_norm.weight.grad.any())


def test_autocast_with_a_cache():
    m, x = attention(torch.float32), torch.randn(1, 20, 12)
    with torch.autocast("cpu", torch.bfloat16):
        whole = m(x)
        _, past = m(x[:, :19], return_kv=True)
        step = m(x[:, 19:], past=past)
    torch.testing.assert_close(step, whole[:, 19:], rtol=0.05, atol=0.05)


DDP = """
import sys
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from tests.unit.test_module import model

rank, rendezvous, out = int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=2)
m = torch.nn.parallel.DistributedDataParallel(model())
x = torch.load(out + ".x", weights_only=True)
m(x[2 * rank : 2 * rank + 2]).square().sum().backward()
if rank == 0:
    torch.save([p.grad for p in m.parameters()], out)
dist.barrier()  # neither rank takes its group down while the other still uses it
del m
dist.destroy_process_group()
"""


def test_ddp_on_two_processes(tmp_path):
    """DDP averages the gradients of the halves: halving is exact and an addition of two has one order, so the bits
    are those of the plain run over the halves; the whole batch in one run sums in another order (float64)."""
    x = torch.randn(4, 40, 12, dtype=torch.float64)
    out, root = tmp_path / "gradients", Path(__file__).resolve().parents[2]
    torch.save(x, f"{out}.x")
    (tmp_path / "ddp.py").write_text(DDP)
    command = [sys.executable, str(tmp_path / "ddp.py"), str(root)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous"), str(out)], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd=root,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    found = torch.load(out, weights_only=True)
    m, threads = model(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        halves = [gradients(m, part)[1:] for part in x.split(2)]
        whole = gradients(m, x)[1:]
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(found, [(a + b) / 2 for a, b in zip(*halves, strict=True)])
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b / 2, rtol=1e-10, atol=1e-11)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("match", "error", "options"),
    [
        (r"HTreeAttention: dropout must be 0: .* never stored.*, got 0.1", ValueError, {"dropout": 0.1}),
        (r"HTreeAttention: dropout must be a number, got None", TypeError, {"dropout": None}),
        (r"HTreeAttention: d_model must be at least 1, got 0", ValueError, {"d_model": 0}),
        (r"HTreeAttention: d_model must be an int, got 12.0", TypeError, {"d_model": 12.0}),
        (r"HTreeAttention: n_kv_heads must be at least 1, got 0", ValueError, {"n_kv_heads": 0}),
        (r"HTreeAttention: n_heads must be a multiple of n_kv_heads \(3\), got 4", ValueError, {"n_kv_heads": 3}),
        (r"HTreeAttention: d_model must be a multiple of n_heads \(4\) where head_dim is not given, got 14",
         ValueError, {"d_model": 14, "head_dim": None}),
        (r"HTreeAttention: head_dim must be even: RoPE rotates pairs, got 5", ValueError, {"head_dim": 5}),
        (r"HTreeAttention: head_dim must be at least 1, got 0", ValueError, {"head_dim": 0}),
        (r"HTreeAttention: v_head_dim must be at least 1, got -1", ValueError, {"v_head_dim": -1}),
        (r"HTreeAttention: v_head_dim must be an int or None, got '8'", TypeError, {"v_head_dim": "8"}),
        (r"HTreeAttention: qk_norm must be a bool, got 1", TypeError, {"qk_norm": 1}),
        (r"HTreeAttention: bias must be a bool, got None", TypeError, {"bias": None}),
        (r"HTreeAttention: dtype must be float16, .* got torch.int32", ValueError, {"dtype": torch.int32}),
        (r"HTreeAttention: compression_rate must be a power of two, at least 2, got 3", ValueError,
         {"compression_rate": 3}),
        (r"HTreeAttention: top_k_per_layer must be a power of two, at least 1, got 6", ValueError,
         {"top_k_per_layer": 6}),
        (r"HTreeAttention: max_top_nodes must lie in .* \(2 .. 8\), got 9", ValueError, {"max_top_nodes": 9}),
        (r"HTreeAttention: scale must be finite, got nan", ValueError, {"scale": float("nan")}),
        (r"HTreeAttention: rope_base must be finite and greater than 0, got 0", ValueError, {"rope_base": 0}),
        (r"HTreeAttention: strict_causal must be a bool, got 1", TypeError, {"strict_causal": 1}),
        (r"HTreeAttention: backend must be one of 'auto', 'torch', got 'cuda'", ValueError, {"backend": "cuda"}),
        (r"HTreeAttention: deterministic must be a bool, got 0", TypeError, {"deterministic": 0}),
        (r"HTreeAttention: save_selection must be one of True, False, 'auto', got 'no'", ValueError,
         {"save_selection": "no"}),
    ],
)  # fmt: skip
def test_constructor_errors(match, error, options):
    with pytest.raises(error, match=match):
        attention(**options)


def f64(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("match", "error", "x", "call"),
    [
        (r"HTreeAttention: x must be a torch.Tensor, got list", TypeError, [1.0], {}),
        (r"HTreeAttention: x must have 3 dimensions \[B, T_q, d_model\], got shape \(5, 12\)", ValueError,
         f64(5, 12), {}),
        (r"HTreeAttention: dimension 2 of x must equal d_model \(12\), got 11", ValueError, f64(1, 5, 11), {}),
        (r"HTreeAttention: return_kv must be a bool, got 1", TypeError, f64(1, 5, 12), {"return_kv": 1}),
        (r"HTreeAttention: past must be a pair \(k, v\) of tensors or None, got Tensor", TypeError, f64(1, 5, 12),
         {"past": f64(2, 1, 3, 2, 6)}),
        (r"HTreeAttention: k of past must be a torch.Tensor, got NoneType", TypeError, f64(1, 5, 12),
         {"past": (None, None)}),
        (r"HTreeAttention: k of past must have 4 dimensions \[B, T, n_kv_heads, head_dim\]", ValueError, f64(1, 5, 12),
         {"past": (f64(3, 2, 6), f64(1, 3, 2, 5))}),
        (r"HTreeAttention: dimension 0 of v of past must equal B of x \(1\), got 2", ValueError, f64(1, 5, 12),
         {"past": (f64(1, 3, 2, 6), f64(2, 3, 2, 5))}),
        (r"HTreeAttention: dimension 2 of k of past must equal n_kv_heads \(2\), got 4", ValueError, f64(1, 5, 12),
         {"past": (f64(1, 3, 4, 6), f64(1, 3, 2, 5))}),
        (r"HTreeAttention: dimension 3 of v of past must equal the head dimension \(5\), got 6", ValueError,
         f64(1, 5, 12), {"past": (f64(1, 3, 2, 6), f64(1, 3, 2, 6))}),
        (r"HTreeAttention: dimension 1 of v of past must equal T of k of past \(3\), got 4", ValueError, f64(1, 5, 12),
         {"past": (f64(1, 3, 2, 6), f64(1, 4, 2, 5))}),
        (r"HTreeAttention: k of past must be on the device of x \(cpu\), got meta", ValueError, f64(1, 5, 12),
         {"past": (f64(1, 3, 2, 6).to("meta"), f64(1, 3, 2, 5))}),
        (r"HTreeAttention: k of past must have the dtype of x and v of past \(torch.float64\), got .*int32", ValueError,
         f64(1, 5, 12), {"past": (f64(1, 3, 2, 6).int(), f64(1, 3, 2, 5))}),
        (r"HTreeAttention: x must have the dtype of the parameters \(torch.float64\), or autocast be .*, got .*32",
         ValueError, f64(1, 5, 12).float(), {}),
        (r"HTreeAttention: x must be on the device of the parameters \(cpu\), got meta", ValueError,
         f64(1, 5, 12).to("meta"), {}),
    ],
)  # fmt: skip
def test_call_errors(match, error, x, call):
    with pytest.raises(error, match=match):
        attention()(x, **call)


@pytest.mark.parametrize("call", [{}, {"past": (f64(2, 0, 2, 6), f64(2, 0, 2, 5))}, {"seqused": torch.zeros(2).int()}])
def test_a_call_without_a_token_is_refused(call):
    """As `forward` refuses it; with a past, or packed, it is empty."""
    message = r"^HTreeAttention: the tokens of past and x together \(dimension 1\) must be at least 1, got 0$"
    with pytest.raises(ValueError, match=message):
        attention()(f64(2, 0, 12), **call)
    x = f64(2, 0, 12).requires_grad_()
    out = attention()(x, past=(f64(2, 3, 2, 6), f64(2, 3, 2, 5)))
    assert out.shape == (2, 0, 12) and torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_quantised_projections(dtype):
    """`quantize_dynamic` replaces the projections; x stays float32, and so do keys and values. Every key is attended
    to, since rounded scores select other nodes."""
    module = attention(torch.float32, d_model=64, top_k_per_layer=16, max_top_nodes=None).eval()
    quantised = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=dtype)
    x = torch.randn(2, 40, 64)
    with torch.no_grad():
        expected, out = module(x), quantised(x)
        assert (out - expected).abs().max() < 0.1 * expected.abs().max()
        cache = quantised.new_cache(2, 40)
        assert cache.dtype == torch.float32
        torch.testing.assert_close(quantised(x, cache=cache), out, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="HTreeAttention: x must have the dtype of the parameters"):
        quantised(x.half())


def test_attention_is_exported():
    assert htree_cuda.HTreeAttention is HTreeAttention and "HTreeAttention" in htree_cuda.__all__
