"""DSAttention: against multi-head latent attention written out, its caches, its two gradients, and wrong variants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import htree_cuda
from htree_cuda import DSAttention, dsa_module
from htree_cuda.dsa_module import rope

SIZES = {
    "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": 5, "rope_base": 100.0, "rope_interleaved": True,
    "index_rope_interleaved": False, "dtype": torch.float64,
}  # fmt: skip
D, HEADS, B, T = 24, 3, 2, 20
INDEXER = ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"]
MODEL = [f"{name}.weight" for name in ("wq_a", "q_norm", "wq_b", "wkv_a", "kv_norm", "wkv_b", "wo")]


def layer(**options) -> DSAttention:
    module = DSAttention(D, HEADS, **{**SIZES, **options})
    for norm in (module.q_norm, module.kv_norm, module.indexer.k_norm):  # else a missing gain would not show
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.nn.init.normal_(module.indexer.k_norm.bias)
    return module


def tokens(T=T, B=B, dtype=torch.float64) -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64).to(dtype).requires_grad_()


# ---------------------------------------------------------------------------------------------------- written out


def rotated(x: Tensor, interleaved: bool, freqs: Tensor) -> Tensor:
    """x [T, ..., R] by complex numbers."""
    angle = torch.arange(len(x), dtype=torch.float64).view(-1, *[1] * (x.dim() - 1)) * freqs
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : len(freqs)], x[..., len(freqs) :])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def written_out(state: dict[str, Tensor], x: Tensor, *, topk: int | None, freqs=None, sm_scale=None, **flags):
    """(out [T, D], loss) of one sequence: keys and values of each head, scores [T, T] with a mask. topk None: all."""
    flags = {name: SIZES[name] for name in ("rope_interleaved", "index_rope_interleaved")} | flags
    nope, R, v_dim, latent_dim = 6, 4, 5, 12
    freqs = 100.0 ** (-torch.arange(R // 2, dtype=torch.float64) * 2 / R) if freqs is None else freqs
    sm_scale = (nope + R) ** -0.5 if sm_scale is None else sm_scale
    w = {name.removesuffix(".weight"): value for name, value in state.items()}
    n = len(x)
    q_latent = rms(x @ w["wq_a"].T, w["q_norm"])
    q = (q_latent @ w["wq_b"].T).view(n, HEADS, nope + R)
    q = torch.cat((q[..., :nope], rotated(q[..., nope:], flags["rope_interleaved"], freqs)), -1)
    down = x @ w["wkv_a"].T
    latent, k_rope = rms(down[:, :latent_dim], w["kv_norm"]), down[:, latent_dim:]
    k_rope = rotated(k_rope, flags["rope_interleaved"], freqs)
    up = (latent @ w["wkv_b"].T).view(n, HEADS, nope + v_dim)
    k = torch.cat((up[..., :nope], k_rope[:, None].expand(-1, HEADS, -1)), -1)
    x_i, q_latent = x.detach(), q_latent.detach()
    q_i = (q_latent @ w["indexer.wq_b"].T).view(n, 4, 8)
    k_i = torch.nn.functional.layer_norm(
        x_i @ w["indexer.wk"].T, (8,), w["indexer.k_norm"], w["indexer.k_norm.bias"], 1e-6
    )
    q_i, k_i = (
        torch.cat((rotated(y[..., :R], flags["index_rope_interleaved"], freqs), y[..., R:]), -1) for y in (q_i, k_i)
    )
    weights = x_i @ w["indexer.weights_proj"].T * (4 * 8) ** -0.5
    logits = torch.einsum("th,thj->tj", weights, torch.relu(torch.einsum("thd,jd->thj", q_i, k_i)))
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    if topk is not None:
        rank = logits.detach().masked_fill(~seen, -math.inf).argsort(dim=1, descending=True, stable=True)
        seen = seen & torch.zeros_like(seen).scatter_(1, rank[:, :topk], True)
    scores = (torch.einsum("thd,jhd->thj", q, k) * sm_scale).masked_fill(~seen[:, None], -math.inf)
    p = scores.softmax(-1)
    out = torch.einsum("thj,jhd->thd", p, up[..., nope:]).flatten(1) @ w["wo"].T
    target = p.detach().sum(1) / HEADS
    log_student = logits.masked_fill(~seen, -math.inf).log_softmax(-1)
    terms = target * (target.clamp(min=1e-300).log() - log_student)
    return out, torch.where(seen, terms, 0.0).sum(-1)


def compare(module: DSAttention, x: Tensor, **options) -> None:
    """out, loss and every gradient of both equal what is written out."""
    out, loss = module(x)
    parameters = dict(module.named_parameters())
    results = [written_out(parameters, row, **options) for row in x]
    expected, losses = torch.stack([out for out, _ in results]), torch.stack([loss for _, loss in results])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(loss, losses.mean(), rtol=0, atol=1e-11)
    inputs = [x, *parameters.values()]
    upstream = torch.randn_like(out)
    for found, wanted in ((out, expected), (loss, losses.mean())):
        up = upstream if found.dim() else None
        pairs = (torch.autograd.grad(y, inputs, up, allow_unused=True, retain_graph=True) for y in (found, wanted))
        for a, b in zip(*pairs, strict=True):
            a, b = (torch.zeros(1) if g is None else g for g in (a, b))
            torch.testing.assert_close(a.double(), b.double().expand_as(a), rtol=0, atol=1e-10)


@pytest.mark.parametrize("stage, topk", [("sparse", 64), ("sparse", T), ("warmup", 5)])
def test_with_every_key_it_is_dense_latent_attention(stage, topk):
    compare(layer(stage=stage, index_topk=topk), tokens(), topk=None)


@pytest.mark.parametrize("topk", [1, 5, 19])
def test_sparse_attention_is_dense_attention_to_the_selected_keys(topk):
    compare(layer(index_topk=topk), tokens(), topk=topk)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("flags", [(True, True), (False, False), (False, True)])
def test_layouts_of_rope(stage, flags):
    flags = dict(zip(("rope_interleaved", "index_rope_interleaved"), flags, strict=True))
    compare(layer(stage=stage, **flags), tokens(), topk=5 if stage == "sparse" else None, **flags)


def test_a_table_of_frequencies_and_a_scale_of_the_model():
    table = torch.tensor([0.9, 0.013])
    module = layer(rope_base=None, rope_inv_freq=table, sm_scale=0.7)
    compare(module, tokens(), topk=5, freqs=table.double(), sm_scale=0.7)
    assert module.bfloat16().rope_inv_freq.dtype == torch.float64, "frequencies are not cast with the parameters"
    assert "rope_inv_freq" not in module.state_dict()


def test_a_call_on_meta_leaves_the_table():
    table = torch.tensor([0.9, 0.013])
    module = layer(rope_base=None, rope_inv_freq=table).to("meta")
    x = tokens()
    for _ in range(2):
        assert module(x.to("meta"))[0].is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    compare(module, x, topk=5, freqs=table.double())


# ------------------------------------------------------------------------------------------------ wrong variants


def _scale_of_the_absorbed_width(patch):
    return {"sm_scale": (12 + 4) ** -0.5}


def _pairs_of_the_attention(patch):
    return {"rope_interleaved": False}


def _pairs_of_the_indexer(patch):
    return {"index_rope_interleaved": True}


def _indexer_rotated_at_its_end(patch):
    def wrong(x, positions, *, first, **options):
        return rope(x, positions, first=False, **options)

    patch.setattr(dsa_module, "rope", wrong)
    return {}


def _no_factor_of_the_weights(patch):
    original = dsa_module.Indexer.__init__

    def wrong(self, *args):
        original(self, *args)
        self.scale = 1.0

    patch.setattr(dsa_module.Indexer, "__init__", wrong)
    return {}


def _indexer_reaches_the_model(patch):
    original = dsa_module.Indexer.forward

    def wrong(self, *inputs):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Tensor, "detach", lambda x: x)
            return original(self, *inputs)

    patch.setattr(dsa_module.Indexer, "forward", wrong)
    return {}


def _target_of_an_lse_in_the_other_base(patch):
    original = dsa_module.attn_dist

    def wrong(q, kv, indices, lse, **options):
        return original(q, kv, indices, lse, lse_base=math.e, **options)

    patch.setattr(dsa_module, "attn_dist", wrong)
    return {}


def _future_keys(patch):
    original = dsa_module.indexer_topk

    def wrong(*args, q_start, **options):
        return original(*args, q_start=q_start + 1, **options)

    patch.setattr(dsa_module, "indexer_topk", wrong)
    return {}


def _one_key_short(patch):
    original = dsa_module.indexer_topk

    def wrong(q, k, weights, topk, **options):
        return original(q, k, weights, topk - 1, **options)

    patch.setattr(dsa_module, "indexer_topk", wrong)
    return {}


WRONG = [
    _scale_of_the_absorbed_width, _pairs_of_the_attention, _pairs_of_the_indexer, _indexer_rotated_at_its_end,
    _no_factor_of_the_weights, _indexer_reaches_the_model, _target_of_an_lse_in_the_other_base, _future_keys,
    _one_key_short,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_variants_fail(wrong):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        x = tokens()
        options = wrong(patch)
        compare(layer(**options), x, topk=5)


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_the_two_gradients_never_meet(stage):
    module, x = layer(stage=stage), tokens()
    out, loss = module(x)
    parameters = dict(module.named_parameters())
    reached = {}
    for name, y in (("out", out.sum()), ("loss", loss)):
        gradients = torch.autograd.grad(y, [x, *parameters.values()], allow_unused=True, retain_graph=True)
        reached[name] = {
            key for key, g in zip(["x", *parameters], gradients, strict=True) if g is not None and (g != 0).any()
        }
        assert [key for key, g in zip(["x", *parameters], gradients, strict=True) if g is not None] == sorted(
            reached[name], key=["x", *parameters].index
        ), "no gradient at all, and not one of zeros"
    assert reached["out"] == {"x", *MODEL}
    assert reached["loss"] == {f"indexer.{name}" for name in INDEXER}


def test_finite_differences():
    """Of out for the model, of the loss for the indexer: what else moves the loss is detached."""
    module = layer(index_topk=3)
    x = tokens(T=6, B=1)
    model = (x, module.wq_b.weight, module.wkv_b.weight)
    assert torch.autograd.gradcheck(lambda *_: module(x)[0], model, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *_: module(x)[1], tuple(module.indexer.parameters()), fast_mode=True)


def test_the_warm_up_moves_the_indexer_alone():
    module = layer(stage="warmup")
    module.requires_grad_(False)
    module.indexer.requires_grad_(True)
    x = tokens(T=40).detach()
    before = {name: p.clone() for name, p in module.named_parameters()}
    optimiser = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(30):
        out, loss = module(x)
        assert not out.requires_grad
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.6 * losses[0]
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"indexer.{name}" for name in INDEXER}


def test_checkpointing_changes_no_gradient():
    module, x = layer(), tokens()
    results = []
    for wrapped in (False, True):
        out, loss = checkpoint(module, x, use_reentrant=False) if wrapped else module(x)
        results.append(torch.autograd.grad(out.sum() + loss, [x, *module.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ----------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("table", [None, torch.tensor([0.9, 0.013])])
def test_steps_from_a_past_equal_the_whole_call(stage, table):
    module = layer(stage=stage, rope_base=100.0 if table is None else None, rope_inv_freq=table).eval()
    x = tokens()
    whole, loss, (latents, keys) = module(x, return_kv=True)
    assert loss is None and latents.shape == (B, T, 16) and keys.shape == (B, T, 8)
    parts, past = [], None
    for first, end in ((0, 7), (7, 12), *((t, t + 1) for t in range(12, T))):
        out, _, past = module(x[:, first:end], past=past, return_kv=True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    for mine, other in zip(past, (latents, keys), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-13)
    again, _ = module(x[:, 9:], past=tuple(p[:, :9] for p in past))
    torch.testing.assert_close(again, whole[:, 9:], rtol=0, atol=1e-12)


def test_the_loss_of_a_call_with_a_past_is_that_of_its_queries():
    for stage in ("sparse", "warmup"):
        module, x = layer(stage=stage), tokens(B=1)
        _, _, past = module(x[:, :8], return_kv=True)
        _, loss = module(x[:, 8:], past=tuple(p.detach() for p in past))
        _, losses = written_out(dict(module.named_parameters()), x[0], topk=5 if stage == "sparse" else None)
        torch.testing.assert_close(loss, losses[8:].mean(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_later_tokens_change_nothing(stage, poison):
    module, x = layer(stage=stage).eval(), tokens().detach()
    clean = module(x)[0]
    dirty = x.clone()
    dirty[0, 13:] = poison
    out = module(dirty)[0]
    assert torch.equal(out[1], clean[1]) and torch.equal(out[0, :13], clean[0, :13])
    assert out[0, 13:].isnan().any(-1).all()


# ------------------------------------------------------------------------------------------------------------ rope


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_rope_is_a_product_of_complex_numbers(interleaved, first):
    x = torch.randn(2, 9, 3, 10, dtype=torch.float64)
    freqs = 50.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    y = rope(x, torch.arange(9), dims=6, first=first, interleaved=interleaved, base=50.0)
    part, rest = (slice(0, 6), slice(6, 10)) if first else (slice(4, 10), slice(0, 4))
    expected = rotated(x.transpose(0, 1)[..., part], interleaved, freqs).transpose(0, 1)
    torch.testing.assert_close(y[..., part], expected, rtol=0, atol=1e-14)
    assert torch.equal(y[..., rest], x[..., rest])
    table = rope(x, torch.arange(9), dims=6, first=first, interleaved=interleaved, freqs=freqs)
    torch.testing.assert_close(table, y, rtol=0, atol=1e-14)
    other = rope(x, torch.arange(9), dims=6, first=first, interleaved=not interleaved, base=50.0)
    assert (other - y).abs().max() > 0.1
    far = rope(x.float(), torch.arange(9) + 10**6, dims=6, first=first, interleaved=interleaved, base=50.0)
    exact = rope(x, torch.arange(9) + 10**6, dims=6, first=first, interleaved=interleaved, base=50.0)
    torch.testing.assert_close(far.double(), exact, rtol=0, atol=1e-6)


@torch.no_grad()
def test_half_split_is_interleaved_after_a_permutation_of_rows():
    """m -> 2m and m + R/2 -> 2m + 1, in the rows that are rotated, of weights and of the norm of the indexer's keys."""
    half = layer(rope_interleaved=False, index_rope_interleaved=False)
    whole = layer(rope_interleaved=True, index_rope_interleaved=True)
    state = {name: value.clone() for name, value in half.state_dict().items()}
    place = torch.tensor([0, 2, 1, 3])  # of the half-split layout, in the order of the interleaved one
    q = state["wq_b.weight"].view(HEADS, 10, -1)
    q[:, 6:] = q[:, 6 + place]
    state["wkv_a.weight"][12:] = state["wkv_a.weight"][12 + place]
    q_i = state["indexer.wq_b.weight"].view(4, 8, -1)
    q_i[:, :4] = q_i[:, place]
    for name in ("wk.weight", "k_norm.weight", "k_norm.bias"):
        state[f"indexer.{name}"][:4] = state[f"indexer.{name}"][place]
    whole.load_state_dict(state)
    x = tokens()
    for a, b in zip(half(x), whole(x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    whole.load_state_dict(half.state_dict())
    assert (half(x)[0] - whole(x)[0]).abs().max() > 1e-3, "weights of the other layout give other results"


# ---------------------------------------------------------------------------------------------------- as a module


def test_names_and_shapes_of_the_state_dict_are_those_of_deepseek():
    module = DSAttention(
        7168, 128, q_lora_rank=1536, rope_base=10000.0, rope_interleaved=True, index_rope_interleaved=False,
        device="meta", dtype=torch.bfloat16,
    )  # fmt: skip
    expected = {
        "wq_a.weight": (1536, 7168), "q_norm.weight": (1536,), "wq_b.weight": (128 * 192, 1536),
        "wkv_a.weight": (576, 7168), "kv_norm.weight": (512,), "wkv_b.weight": (128 * 256, 512),
        "wo.weight": (7168, 128 * 128), "indexer.wq_b.weight": (64 * 128, 1536), "indexer.wk.weight": (128, 7168),
        "indexer.k_norm.weight": (128,), "indexer.k_norm.bias": (128,), "indexer.weights_proj.weight": (64, 7168),
    }  # fmt: skip
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == expected
    assert module.sm_scale == 192**-0.5 and module.index_topk == 2048
    dtypes = {name: x.dtype for name, x in module.state_dict().items()}
    assert dtypes.pop("indexer.weights_proj.weight") == torch.float32 and set(dtypes.values()) == {torch.bfloat16}


def test_a_state_dict_moves_between_modules_and_parameters_are_drawn_again():
    first, second = layer(), layer()
    second.load_state_dict(first.state_dict())
    x = tokens()
    assert all(torch.equal(a, b) for a, b in zip(first(x), second(x), strict=True))
    torch.manual_seed(5)
    second.reset_parameters()
    fresh = DSAttention(D, HEADS, **SIZES)
    torch.manual_seed(5)
    fresh.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), fresh.parameters(), strict=True))
    assert not torch.equal(second.wo.weight, first.wo.weight)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_low_precision_and_autocast(stage):
    """Selections of bfloat16 may differ, so every key is selected."""
    module = layer(stage=stage, index_topk=64)
    x = tokens().detach()
    with torch.no_grad():
        expected, loss = module(x)
        low = layer(stage=stage, index_topk=64, dtype=torch.bfloat16)
        low.load_state_dict(module.state_dict())
        assert low.indexer.weights_proj.weight.dtype == torch.float32
        out, low_loss = low(x.bfloat16())
        assert (out.dtype, low_loss.dtype) == (torch.bfloat16, torch.float32)
        single = layer(stage=stage, index_topk=64, dtype=torch.float32)
        single.load_state_dict(module.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            auto, auto_loss = single(x.float())
        assert (auto.dtype, auto_loss.dtype) == (torch.bfloat16, torch.float32)
    for found, found_loss in ((out, low_loss), (auto, auto_loss)):
        assert (found - expected).norm() < 0.03 * expected.norm()
        torch.testing.assert_close(found_loss.double(), loss, rtol=0.03, atol=0)


def test_x_in_the_dtype_of_autocast():
    """As a layer before this one returns it."""
    module = layer(dtype=torch.float32)
    x = tokens().detach().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"x must have the dtype of the parameters \(torch.float32\), or autocast be"):
        module(x)
    with torch.autocast("cpu", torch.bfloat16):
        out, _, past = module(x, return_kv=True)
        assert torch.equal(out, module(x.float())[0])
        module(x, past=past)
        with pytest.raises(ValueError, match=r"got torch\.float64"):
            module(x.double())
        with pytest.raises(ValueError, match=r"\(torch.float64\), or autocast be enabled and neither be float64"):
            layer()(x.float())


def test_narrow_numpy_sizes():
    sizes = {**SIZES, "qk_nope_head_dim": np.uint8(252)}
    assert DSAttention(D, HEADS, **sizes).wq_b.weight.shape[0] == HEADS * (252 + SIZES["qk_rope_head_dim"])


def test_the_weights_of_the_indexer_are_never_rounded_to_bfloat16(monkeypatch):
    seen = []
    original = dsa_module.indexer_topk

    def look(q, k, weights, *args, **options):
        seen.append((q.dtype, k.dtype, weights))
        return original(q, k, weights, *args, **options)

    monkeypatch.setattr(dsa_module, "indexer_topk", look)
    module, x = layer(dtype=torch.bfloat16), tokens(dtype=torch.bfloat16)
    module(x)
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        module(x.float())
    for q_dtype, k_dtype, weights in seen:
        assert (q_dtype, k_dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        exact = x.double() @ module.indexer.weights_proj.weight.double().T * 32**-0.5
        torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_quantised_projections(stage, dtype):
    """`quantize_dynamic` packs the weights, two of which the layer multiplies by itself."""
    module = layer(stage=stage, dtype=torch.float32, index_topk=T).eval()
    quantised = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=dtype)
    x = tokens(dtype=torch.float32).detach()
    with torch.no_grad():
        expected, out = module(x)[0], quantised(x)[0]
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_empty_calls(stage):
    module = layer(stage=stage)
    for x in (tokens(T=0), tokens(B=0)):
        out, loss, (latents, keys) = module(x, return_kv=True)
        assert out.shape == x.shape and loss == 0 and latents.shape[:2] == keys.shape[:2] == x.shape[:2]


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_compile_fullgraph_with_dynamic_sizes(stage):
    module = layer(stage=stage, index_topk=64)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for n in (9, 12, 30):
        x = tokens(T=n)
        torch._dynamo.mark_dynamic(x, 1)
        results = [f(x) for f in (compiled, module)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        gradients = (torch.autograd.grad(out.sum() + loss, [x, *module.parameters()]) for out, loss in results)
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert counter.frame_count <= 2, "one graph for all lengths"


@torch.no_grad()
def test_compiled_steps_from_a_past_that_grows():
    torch._dynamo.reset()
    module, x = layer(index_topk=5).eval(), tokens()
    step = torch.compile(module, fullgraph=True, backend="aot_eager")
    _, _, past = module(x[:, :4], return_kv=True)
    for t in range(4, 9):
        expected = module(x[:, t : t + 1], past=past)[0]
        out, _, past = step(x[:, t : t + 1], past=past, return_kv=True)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


def test_it_says_what_it_is():
    text = repr(layer())
    assert all(name in text for name in ("index_topk=5", "rope_interleaved=True", "stage='sparse'", "sm_scale=0.316"))


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        (r"DSAttention: q_lora_rank must be an int, got None", TypeError, {"q_lora_rank": None}),
        (r"kv_lora_rank must be at least 1, got 0", ValueError, {"kv_lora_rank": 0}),
        (r"qk_rope_head_dim must be even: RoPE rotates pairs, got 3", ValueError, {"qk_rope_head_dim": 3}),
        (r"index_head_dim must be at least qk_rope_head_dim \(4\), got 3", ValueError, {"index_head_dim": 3}),
        (r"index_topk must be at least 1, got 0", ValueError, {"index_topk": 0}),
        (r"rope_interleaved must be a bool, got 1", TypeError, {"rope_interleaved": 1}),
        (r"index_rope_interleaved must be a bool, got None", TypeError, {"index_rope_interleaved": None}),
        (r"rope_base must be a number where rope_inv_freq is not given, got None", ValueError, {"rope_base": None}),
        (r"rope_base must be finite and positive, got 0", ValueError, {"rope_base": 0}),
        (r"rope_inv_freq takes the place of rope_base, which must be None or 10000, got 100", ValueError,
         {"rope_inv_freq": torch.ones(2)}),
        (r"dimension 0 of rope_inv_freq must equal rope_dim / 2 \(2\), got 3", ValueError,
         {"rope_base": None, "rope_inv_freq": torch.ones(3)}),
        (r"rope_inv_freq must be finite", ValueError,
         {"rope_base": None, "rope_inv_freq": torch.tensor([1.0, math.nan])}),
        (r"rope_inv_freq must be a torch.Tensor, got list", TypeError, {"rope_base": None, "rope_inv_freq": [1.0]}),
        (r"sm_scale must be finite, got nan", ValueError, {"sm_scale": math.nan}),
        (r"stage must be one of 'sparse', 'warmup', got 'dense'", ValueError, {"stage": "dense"}),
        (r"backend must be one of 'auto', 'torch', got 'cuda'", ValueError, {"backend": "cuda"}),
        (r"dtype must be float16, bfloat16, float32 or float64, got torch.int32", ValueError, {"dtype": torch.int32}),
    ],
)  # fmt: skip
def test_errors_of_the_arguments(match, error, change):
    with pytest.raises(error, match=match):
        DSAttention(D, HEADS, **{**SIZES, **change})


@pytest.mark.parametrize("missing", ["rope_base", "rope_interleaved", "index_rope_interleaved", "q_lora_rank"])
def test_layouts_have_no_default(missing):
    with pytest.raises(TypeError, match=missing):
        DSAttention(D, HEADS, **{name: value for name, value in SIZES.items() if name != missing})


@pytest.mark.parametrize(
    ("match", "error", "args"),
    [
        (r"DSAttention: x must be a torch.Tensor, got list", TypeError, ([1.0],)),
        (r"x must have 3 dimensions \[B, T_q, d_model\], got shape \(5, 24\)", ValueError,
         (torch.zeros(5, 24).double(),)),
        (r"dimension 2 of x must equal d_model \(24\), got 23", ValueError, (torch.zeros(1, 5, 23).double(),)),
        (r"x must have the dtype of the parameters \(torch.float64\), or autocast be enabled .*, got torch.float32",
         ValueError, (torch.zeros(1, 5, 24),)),
        (r"past must be a pair \(latents, indexer keys\) of tensors or None, got 3", TypeError,
         (torch.zeros(1, 5, 24).double(), 3)),
        (r"dimension 2 of latents of past must equal the width of the module's \(16\), got 8", ValueError,
         (torch.zeros(1, 5, 24).double(), (torch.zeros(1, 2, 8).double(), torch.zeros(1, 2, 16).double()))),
        (r"dimension 1 of indexer keys of past must equal T_past of latents of past \(2\), got 3", ValueError,
         (torch.zeros(1, 5, 24).double(), (torch.zeros(1, 2, 16).double(), torch.zeros(1, 3, 8).double()))),
        (r"dimension 0 of latents of past must equal B of x \(1\), got 2", ValueError,
         (torch.zeros(1, 5, 24).double(), (torch.zeros(2, 2, 16).double(), torch.zeros(2, 2, 8).double()))),
        (r"return_kv must be a bool, got 1", TypeError, (torch.zeros(1, 5, 24).double(), None, 1)),
    ],
)  # fmt: skip
def test_errors_of_a_call(match, error, args):
    with pytest.raises(error, match=match):
        layer()(*args)


def test_the_stage_is_set_between_calls():
    module, x = layer(), tokens()
    sparse = module(x)[0]
    module.stage = "warmup"
    dense = module(x)[0]
    assert (sparse - dense).abs().max() > 1e-3
    module.stage = "sparse"
    assert torch.equal(module(x)[0], sparse)
    with pytest.raises(ValueError, match="stage must be one of 'sparse', 'warmup', got 'Sparse'"):
        module.stage = "Sparse"


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"rope: dims must be even, 2 .. 10", {"dims": 5}),
        (r"dims must be even, 2 .. 10 .*, got 12", {"dims": 12}),
        (r"either base or freqs must be given, got none", {"base": None}),
        (r"either base or freqs must be given, got both", {"freqs": torch.ones(3)}),
        (r"the size of positions must equal dimension -3 of x \(9\), got 8", {"positions": torch.arange(8)}),
    ],
)
def test_errors_of_rope(match, change):
    args = {"positions": torch.arange(9), "dims": 6, "first": True, "interleaved": True, "base": 50.0} | change
    with pytest.raises(ValueError, match=match):
        rope(torch.zeros(2, 9, 3, 10), **args)


def test_it_is_exported():
    assert htree_cuda.DSAttention is DSAttention
