"""On a Hopper GPU: models of transformers over a tree, whose attention runs on the kernels."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from htree_cuda.integrations.transformers import convert  # noqa: E402
from htree_cuda.integrations.transformers.attention import CACHE_NAMES  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB = 61
SPARSE = {"top_k_per_layer": 16}  # everything up to 256 tokens


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
OTHERS = {  # a part of the elements rotated, neighbours of a part, sinks with YaRN
    "Phi3": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75}},
    "Glm4": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "GptOss": {
        "rope_parameters": YARN, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32,
        "num_local_experts": 1, "num_experts_per_tok": 1,
    },
}  # fmt: skip


def dense_model(head_dim: int, scaled: bool = False, kind: str = "Llama", **options):
    torch.manual_seed(0)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shape = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": head_dim, "initializer_range": 0.06,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }  # fmt: skip
    if scaled:
        shape["rope_parameters"] = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **scaling}
    config = getattr(transformers, f"{kind}Config")(**shape | OTHERS.get(kind, {}) | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():  # sinks that take a part of the weight
        for name, p in model.named_parameters():
            if "sinks" in name:
                p.normal_(mean=3.0)
    return model.to(DEVICE).eval()


def three(head_dim: int, scaled: bool = False, **options):
    """The kernels in bfloat16, the PyTorch backend in bfloat16, and the PyTorch backend in float32."""
    dense = dense_model(head_dim, scaled, **options)
    exact = convert(copy.deepcopy(dense), **SPARSE, backend="torch")
    dense = dense.to(torch.bfloat16)
    plain = convert(copy.deepcopy(dense), **SPARSE, backend="torch")
    return convert(copy.deepcopy(dense), **SPARSE), plain, exact.bfloat16().float(), dense


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def judge(found, plain, exact) -> None:
    """At most twice the error that the PyTorch backend makes in bfloat16, in norm."""
    error, allowed = (found.float() - exact).norm(), (plain.float() - exact).norm()
    assert torch.isfinite(found).all() and 0 < error <= 2 * allowed < 0.5 * exact.norm(), (error, allowed, exact.norm())


def the_cache(output) -> dict:
    """An output's cache as the argument of the next call, by the name that this version of transformers has for it."""
    name = next(name for name in CACHE_NAMES if name in output)
    return {name: output[name]}


@pytest.mark.emulated
def test_a_small_model():
    """Forward, gradients, a cached prompt and steps behind it, in a size that the emulator can run."""
    kernels, plain, exact, _ = three(64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1)
    ids, results = tokens(1, 290), []
    for model in (kernels, plain, exact):
        logits = model(ids, use_cache=False).logits
        logits[:, 250:].float().square().mean().backward()
        with torch.no_grad():
            cache = the_cache(model(ids[:, :287]))
            steps = [model(ids[:, t : t + 1], **cache).logits for t in (287, 288, 289)]
        gradient = torch.cat([p.grad.float().flatten() for p in model.model.layers.parameters()])
        results.append((logits[:, 250:].detach(), torch.cat(steps, 1), gradient))
    for found in zip(*results):
        judge(*found)


@pytest.mark.hardware
@pytest.mark.parametrize(("head_dim", "scaled"), [(64, False), (128, False), (64, True)])
def test_forward_and_gradients(head_dim, scaled):
    kernels, plain, exact, dense = three(head_dim, scaled)
    ids = tokens(2, 900)
    mask = torch.ones_like(ids)
    mask[1, :333] = 0
    packed = {
        "input_ids": ids.view(1, -1),
        "position_ids": torch.cat([torch.arange(n) for n in (700, 13, 1087)])[None].to(DEVICE),
    }
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}, packed):
        results = []
        for model in (kernels, plain, exact):
            model.zero_grad()
            logits = model(**inputs, use_cache=False).logits
            real = logits[mask == 1] if "attention_mask" in inputs else logits
            real.float().square().mean().backward()
            results.append((real.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])))
        for found in zip(*results):
            judge(*found)
    with torch.no_grad():  # and while everything is seen, what the dense model computes
        short = ids[:, :256]
        judge(kernels(short).logits, dense(short).logits, exact(short).logits)


@pytest.mark.hardware
@pytest.mark.parametrize("kind", list(OTHERS))
def test_partial_and_interleaved_rotations_and_sinks(kind):
    """Forward, gradients, a cached prompt and steps behind it: the options of the rotation and sinks on the kernels."""
    kernels, plain, exact, _ = three(64, kind=kind)
    ids, results = tokens(2, 700), []
    for model in (kernels, plain, exact):
        logits = model(ids, use_cache=False).logits
        logits[:, 300:].float().square().mean().backward()
        with torch.no_grad():
            cache = the_cache(model(ids[:, :690], use_cache=True))
            steps = [model(ids[:, t : t + 1], **cache).logits for t in range(690, 700)]
        gradient = torch.cat([p.grad.float().flatten() for p in model.model.layers[1].self_attn.parameters()])
        results.append((logits[:, 300:].detach(), torch.cat(steps, 1), gradient))
    for found in zip(*results):
        judge(*found)


@pytest.mark.hardware
@torch.no_grad()
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cached_steps_equal_a_whole_forward(head_dim):
    """Prompts of unequal length, then steps of decoding by the kernel, as generate makes them."""
    kernels, plain, exact, _ = three(head_dim)
    ids = tokens(3, 700)
    mask = torch.ones_like(ids)
    mask[1, :333], mask[2, :598] = 0, 0
    written = kernels.generate(
        ids, attention_mask=mask, max_new_tokens=40, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    (cache,) = the_cache(written).values()
    assert cache.layers[0].tree.lengths.tolist() == [739, 406, 141]
    sequence = written.sequences[:, :-1]
    whole = torch.cat((mask, mask.new_ones(3, 39)), dim=1)
    inputs = {"input_ids": sequence, "attention_mask": whole, "use_cache": False}
    steps = torch.stack(written.logits, dim=1)
    judge(steps, *(model(**inputs).logits[:, 699:] for model in (plain, exact)))
    beams = kernels.generate(ids, attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False)
    assert beams.shape == (3, 708)
    alone = kernels.generate(ids[1:2, 333:], max_new_tokens=40, do_sample=False)
    same = (alone[0] == written.sequences[1, 333:]).float().mean()
    assert same > 0.9, "a row alone writes what it writes in a batch, near ties apart"


@pytest.mark.hardware
def test_what_the_kernels_do_not_cover_names_the_way_out():
    import htree_cuda

    model = convert(dense_model(64), **SPARSE)  # float32
    with pytest.raises(htree_cuda.UnsupportedError, match='backend="torch"'):
        model(tokens(1, 300))
