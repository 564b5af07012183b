"""Models of transformers over a tree: they equal their dense selves, generate, train, are saved and refused."""

from __future__ import annotations

import copy
import doctest
import importlib.util
import inspect
import itertools
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

from htree_cuda.integrations import transformers as integration  # noqa: E402
from htree_cuda.integrations.transformers import HTreeCacheLayer, convert, new_cache, revert  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 61
WHOLE = {"top_k_per_layer": 32, "compression_rate": 4}  # sees everything up to 128 tokens
SPARSE = {"top_k_per_layer": 4, "compression_rate": 4}  # up to 16
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
NAMES = {"gemma3": "Gemma3", "phi3": "Phi3", "glm": "Glm", "glm4": "Glm4", "gpt_oss": "GptOss"}


def dense_model(kind: str, **options):
    """A small random model whose output depends on its attention."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 512,
    }  # fmt: skip
    if kind == "mistral":
        shape["sliding_window"] = None
    if kind == "qwen3":
        shape["head_dim"] = 12
    if kind in ("phi3", "glm", "glm4"):  # a half or three quarters of the elements are rotated
        part = 0.75 if kind == "phi3" else 0.5
        shape["rope_parameters"] = {**PLAIN, "partial_rotary_factor": part}
        shape |= {} if kind == "phi3" else {"head_dim": 8}
    if kind == "gpt_oss":  # sinks, and YaRN
        types = ["sliding_attention", "full_attention", "full_attention"]
        shape |= {"layer_types": types, "num_hidden_layers": 3, "sliding_window": 8, "head_dim": 16}
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "gemma3":
        types = ["sliding_attention", "full_attention", "full_attention"]
        shape |= {"layer_types": types, "num_hidden_layers": 3, "sliding_window": 8, "head_dim": 16}
    name = NAMES.get(kind, kind.capitalize())
    config = getattr(transformers, f"{name}TextConfig" if kind == "gemma3" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**shape | options)).eval()
    with torch.no_grad():  # norms and biases begin as constants: as of a trained model
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module", params=KINDS)
def models(request):
    """A dense model, and the same over a whole and over a sparse tree."""
    dense = dense_model(request.param)
    return dense, convert(copy.deepcopy(dense), **WHOLE), convert(copy.deepcopy(dense), **SPARSE)


@pytest.fixture(scope="module")
def llama():
    dense = dense_model("llama")
    return dense, convert(copy.deepcopy(dense), **WHOLE), convert(copy.deepcopy(dense), **SPARSE)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of these lengths, and their attention mask."""
    T = max(lengths)
    place = torch.arange(T).expand(len(lengths), T)
    count = torch.tensor(lengths)[:, None]
    mask = (place >= T - count if side == "left" else place < count).long()
    return tokens(len(lengths), T) * mask, mask


def close(found, expected, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape and torch.isfinite(expected).all()
    assert (found - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def generated(model, ids, mask=None, **options):
    """Tokens, and the scores of every step."""
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options)
    return out.sequences, torch.stack(out.scores)


# -------------------------------------------------------------------------------------------- the model it was before


@torch.no_grad()
def test_forward_equals_the_dense_model(models):
    dense, whole, sparse = models
    ids = tokens(2, 90)
    expected = dense(ids).logits
    close(whole(ids).logits, expected)
    close(whole(ids, use_cache=False).logits, expected)
    assert (sparse(ids).logits - expected).abs().max() > 0.05 * expected.abs().max()


def test_gradients_equal_those_of_the_dense_model(models):
    dense, whole, _ = models
    ids, mask = padded([50, 37], "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected = gradients(dense, **inputs)
    for name, grad in gradients(whole, **inputs).items():
        close(grad, expected[name])
        assert expected[name].abs().max() > 0


@torch.no_grad()
def test_generate_equals_the_dense_model(models):
    """Prompts of unequal length, with the cache and without."""
    dense, whole, _ = models
    ids, mask = padded([40, 3, 21])
    expected, scores = generated(dense, ids, mask)
    for use_cache in (True, False):
        found, found_scores = generated(whole, ids, mask, use_cache=use_cache)
        assert torch.equal(found, expected)
        close(found_scores, scores)


@pytest.mark.parametrize("kind", ["phi3", "glm", "glm4", "gpt_oss"])
def test_partial_and_interleaved_rotations_and_sinks(kind):
    """Phi rotates a part of the elements, GLM neighbours of a part; GPT-OSS has sinks, which learn, and YaRN."""
    dense = dense_model(kind)
    whole, sparse = (convert(copy.deepcopy(dense), **tree) for tree in (WHOLE, SPARSE))
    ids, mask = padded([40, 27], "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected, found = (gradients(model, **inputs) for model in (dense, whole))
    for name, grad in found.items():
        close(grad, expected[name])
    assert kind != "gpt_oss" or all(found[f"model.layers.{i}.self_attn.sinks"].any() for i in (1, 2))
    ids, mask = padded([40, 27])
    with torch.no_grad():
        logits = dense(ids).logits
        close(whole(ids).logits, logits)
        assert (sparse(ids).logits - logits).abs().max() > 0.05 * logits.abs().max()
        steps, scores = generated(whole, ids, mask, max_new_tokens=4)
        again, expected = generated(dense, ids, mask, max_new_tokens=4)
        assert torch.equal(steps, again)
        close(scores, expected)
        steps, scores = generated(sparse, ids, mask, max_new_tokens=4)
        again, expected = generated(sparse, ids, mask, max_new_tokens=4, use_cache=False)
        assert torch.equal(steps, again)
        close(scores, expected)


@torch.no_grad()
def test_generate_equals_recomputation_beyond(models):
    dense, _, sparse = models
    ids, mask = padded([70, 3, 33])
    found, scores = generated(sparse, ids, mask)
    again, expected = generated(sparse, ids, mask, use_cache=False)
    assert torch.equal(found, again)
    close(scores, expected)
    for row, length in enumerate([70, 3, 33]):  # and a row alone is a row of the batch
        alone, expected = generated(sparse, ids[row : row + 1, 70 - length :])
        assert torch.equal(found[row, 70 - length :], alone[0])
        close(scores[:, row], expected[:, 0])
    assert (scores - generated(dense, ids, mask)[1]).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@torch.no_grad()
def test_scaled_frequencies(kind):
    scaling = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        scaling["attention_factor"] = 1.3
    dense = dense_model("llama", rope_parameters=scaling)
    whole, ids = convert(copy.deepcopy(dense), **WHOLE), tokens(2, 90)
    close(whole(ids).logits, dense(ids).logits)
    found, scores = generated(whole, ids)
    expected, dense_scores = generated(dense, ids)
    assert torch.equal(found, expected)
    close(scores, dense_scores)


@torch.no_grad()
def test_frequencies_by_the_type_of_the_layer():
    """As Gemma 3 from 4B on has them: full attention on divided positions, windows on a base of their own."""
    plain = {"rope_type": "default", "rope_theta": 100.0}
    scaling = {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}, "sliding_attention": plain}
    dense = dense_model("gemma3", rope_parameters=scaling)
    whole, ids = convert(copy.deepcopy(dense), **WHOLE), tokens(2, 90)
    logits = dense(ids).logits
    close(whole(ids).logits, logits)
    assert (dense_model("gemma3")(ids).logits - logits).abs().max() > 0.05 * logits.abs().max()


@torch.no_grad()
def test_the_text_of_a_model_with_images(tmp_path):
    """Refused as a whole, with the way out that the guide has."""
    text = dense_model("gemma3").config
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB - 1
    )
    model, ids = transformers.Gemma3ForConditionalGeneration(config).eval(), tokens(2, 40).clamp(max=VOCAB - 2)
    with pytest.raises(ValueError, match=r"of gemma3 the text model, in a Gemma3ForCausalLM.*, got 'gemma3'"):
        convert(model, **WHOLE)
    expected = model(ids, token_type_ids=torch.zeros_like(ids)).logits
    page = (ROOT / "docs" / "guides" / "huggingface.md").read_text()
    (block,) = re.findall(r"^    with torch\.device\(\"meta\"\):\n(?:    .*\n)+", page, re.MULTILINE)
    names = {"torch": torch, "model": model, "Gemma3ForCausalLM": transformers.Gemma3ForCausalLM}
    exec(compile(textwrap.dedent(block), "huggingface.md", "exec"), names)
    close(convert(names["text"].eval(), **WHOLE)(ids).logits, expected)
    text, kinds = names["text"], torch.zeros_like(ids)
    with pytest.raises(ValueError, match="got dict"):  # as the guide says, until revert
        model(ids, token_type_ids=kinds)
    assert text.config is text.model.config and not hasattr(model.config.text_config, "htree_cuda")
    model.save_pretrained(tmp_path)
    revert(text)
    assert text.config is text.model.config is model.config.text_config
    assert torch.equal(model(ids, token_type_ids=kinds).logits, expected)
    for implementation in ("sdpa", "eager"):  # a file says that its text is converted, and revert takes it away
        loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert isinstance(loaded.config.text_config.htree_cuda, dict)
        with pytest.raises(ValueError, match="got dict"):
            loaded(ids, token_type_ids=kinds)
        with torch.device("meta"):
            text = transformers.Gemma3ForCausalLM(loaded.config.text_config)
        text.model, text.lm_head = loaded.model.language_model, loaded.lm_head
        close(convert(text.eval(), **WHOLE)(ids).logits, expected)
        revert(text)
        close(loaded(ids, token_type_ids=kinds).logits, expected)
        assert text.config is text.model.config is loaded.config.text_config
        assert not hasattr(text.config, "htree_cuda")
    loaded.save_pretrained(tmp_path / "dense")
    assert torch.equal(type(model).from_pretrained(tmp_path / "dense")(ids, token_type_ids=kinds).logits, expected)


# ------------------------------------------------------------------------------------------------------------ training


def test_right_and_left_padding_equal_rows_alone(llama):
    _, _, sparse = llama
    lengths = [50, 20, 33]
    for side in ("left", "right"):
        ids, mask = padded(lengths, side)
        labels = ids.masked_fill(mask == 0, -100)
        found = gradients(sparse, input_ids=ids, attention_mask=mask, labels=labels)
        logits = sparse(ids, attention_mask=mask, use_cache=False).logits
        sparse.zero_grad()
        rows = [ids[row : row + 1, mask[row] == 1] for row in range(3)]
        count = sum(length - 1 for length in lengths)
        for row, alone in enumerate(rows):
            out = sparse(alone, labels=alone, use_cache=False)
            close(logits[row, mask[row] == 1], out.logits[0])
            first = int(mask[row].argmax())  # the token before a row on the left is padding, whose label is the first
            assert side == "right" or ids[row, first] == alone[0, 0]
            (out.loss * (alone.shape[1] - 1) / count).backward()
        if side == "right":
            for name, p in sparse.named_parameters():
                close(found[name], p.grad)


def test_packed_documents_equal_documents_alone(llama):
    _, _, sparse = llama
    lengths = [30, 1, 45, 17]
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = [sum(lengths[:i]) for i in range(5)]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    said = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 45, "max_length_k": 45}
    weights = torch.randn(1, sum(lengths), VOCAB)
    results = []
    for more in ({}, said):
        sparse.zero_grad()
        logits = sparse(ids, position_ids=positions, use_cache=False, **more).logits
        (logits * weights).sum().backward()
        results.append((logits.detach(), {name: p.grad.clone() for name, p in sparse.named_parameters()}))
    sparse.zero_grad()
    for first, last in itertools.pairwise(starts):
        logits = sparse(ids[:, first:last], use_cache=False).logits
        close(results[0][0][:, first:last], logits)
        (logits * weights[:, first:last]).sum().backward()
    for logits, grads in results:
        close(logits, results[0][0])
        for name, p in sparse.named_parameters():
            close(grads[name], p.grad)
    two = sparse(ids.view(3, 31), position_ids=torch.arange(31).expand(3, 31), use_cache=False).logits
    close(two[1:2], sparse(ids[:, 31:62], use_cache=False).logits)


def test_documents_in_several_rows(llama):
    _, _, sparse = llama
    ids = tokens(2, 40)
    positions = torch.stack([torch.cat((torch.arange(n), torch.arange(40 - n))) for n in (13, 31)])
    logits = sparse(ids, position_ids=positions, use_cache=False).logits
    for row, n in enumerate((13, 31)):
        close(logits[row, :n], sparse(ids[row : row + 1, :n], use_cache=False).logits[0])
        close(logits[row, n:], sparse(ids[row : row + 1, n:], use_cache=False).logits[0])


def training_copy(model):
    return copy.deepcopy(model).train()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_activation_checkpointing_gives_the_same_bits(kind):
    model = convert(dense_model(kind), **SPARSE).train()
    ids, mask = padded([50, 37])
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected = gradients(model, **inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad()
    model(**inputs).loss.backward()  # use_cache is the configuration's, as in a loop that says nothing
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected[name])


def test_autocast(llama):
    _, _, sparse = llama
    ids = tokens(2, 60)
    expected = gradients(sparse, input_ids=ids, labels=ids)
    sparse.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        sparse(ids, labels=ids, use_cache=False).loss.backward()
        with torch.no_grad():
            cache = sparse(ids).cache
    assert cache.layers[0].tree.dtype == torch.bfloat16
    whole = torch.cat([g.flatten() for g in expected.values()])
    found = torch.cat([p.grad.flatten() for p in sparse.parameters()])
    assert (found - whole).norm() < 0.25 * whole.norm()


def test_a_cache_filled_under_autocast_serves_a_call_without(llama):
    _, _, sparse = llama
    ids = tokens(1, 30)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            cache = sparse(ids[:, :20]).past_key_values
        logits = sparse(ids[:, 20:], past_key_values=cache).logits
    assert logits.dtype == torch.float32 and logits.isfinite().all()


def test_what_is_said_of_documents_is_heard_or_refused(llama):
    """The lengths of packed documents beside a cache or a mask, other lengths of keys, and masks of other numbers."""
    _, _, sparse = llama
    ids, lengths = tokens(1, 40), [25, 15]
    cu = torch.tensor([0, 25, 40], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 25, "max_length_k": 25}
    assert sparse.config.use_cache
    with torch.no_grad():
        alone = torch.cat([sparse(part).logits for part in ids.split(lengths, dim=1)], dim=1)
        packed = sparse(ids, **said)  # a configuration that asks for caches means no packed documents
        close(packed.logits, alone)
        assert packed.past_key_values is None
        ones = torch.ones_like(ids)
        for more, message in (
            ({**said, "use_cache": True}, "needs use_cache=False and no attention_mask, got a cache"),
            ({**said, "attention_mask": ones, "use_cache": False}, "no attention_mask, got an attention_mask"),
            ({**said, "cu_seq_lens_k": cu.flip(0)}, "cu_seq_lens_k must be cu_seq_lens_q, got another"),
            ({"attention_mask": (1.0 - ones) * -1e9 - 1e9}, "attention_mask must be 1 for each token that exists"),
            ({"attention_mask": ones * float("nan")}, "attention_mask must be 1 for each token that exists"),
        ):
            with pytest.raises(ValueError, match=message):
                sparse(ids, **more)
        close(sparse(ids, attention_mask=ones.double()).logits, sparse(ids).logits)
        lists = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in said.items()}
        for name, more in (
            ("cu_seq_lens_q", lists),
            ("cu_seq_lens_q", {**said, "cu_seq_lens_q": cu.numpy(), "use_cache": False}),
            ("cu_seq_lens_k", {**said, "cu_seq_lens_k": lists["cu_seq_lens_k"]}),
            ("position_ids", {"position_ids": list(range(40))}),
        ):
            kind = type(more[name]).__name__
            with pytest.raises(TypeError, match=f"htree attention: {name} must be a torch.Tensor or None, got {kind}"):
                sparse(ids, **more)


def test_a_cache_of_another_rate_is_refused():
    model = convert(dense_model("llama"), **SPARSE).eval()
    cache = new_cache(model)
    revert(model)
    convert(model, top_k_per_layer=4, compression_rate=8)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"compression_rate of the cache must equal the model's \(8\)"),
    ):
        model(tokens(1, 20), past_key_values=cache)


def test_layers_are_indices():
    with pytest.raises(TypeError, match='convert: layers must be "full_attention" or a sequence of indices, got 1'):
        convert(dense_model("llama"), **SPARSE, layers=1)


@torch.no_grad()
def test_a_dense_model_is_refused_the_cache_of_a_converted_one():
    model = convert(dense_model("llama"), **SPARSE).eval()
    cache = model(tokens(1, 20), use_cache=True).past_key_values
    revert(model)
    with pytest.raises(ValueError, match="give the dense model a cache of its own"):
        model(tokens(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_a_second_chunk_cuts_no_gradient():
    """Where values alone are trained, keys and queries require no gradient, and the cached call has none to give."""
    frozen = convert(dense_model("llama"), **SPARSE)
    for name, p in frozen.named_parameters():
        p.requires_grad_("v_proj" in name)
    first = frozen(tokens(1, 20), use_cache=True)
    with pytest.raises(RuntimeError, match="a cached call has no gradient"):
        frozen(tokens(1, 20), past_key_values=first.past_key_values)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_compile(kind):
    """One graph, with and without a padding mask, and for packed documents whose lengths are said."""
    model = convert(dense_model(kind), **SPARSE).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, mask = padded([40, 25])
    cu_seqlens = torch.tensor([0, 13, 40, 80], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (13, 27, 40)])[None]
    said = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 40, "max_length_k": 40}
    calls = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]
    if kind == "llama":  # sliding windows read documents from the positions, which breaks the graph in any model
        calls.append({"input_ids": ids.view(1, 80), "position_ids": positions, **said})
    for inputs in calls:
        results = []
        for run in (model, compiled):
            model.zero_grad()
            logits = run(**inputs, use_cache=False).logits
            logits.square().sum().backward()
            results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
        for found, expected in zip(*results):
            close(found, expected)


def test_trainer_equals_a_plain_loop(llama, tmp_path):
    pytest.importorskip("accelerate")
    _, _, sparse = llama
    rows = tokens(8, 48)
    data = [{"input_ids": row, "labels": row} for row in rows]
    models = [training_copy(sparse) for _ in range(2)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, learning_rate=0.01, report_to=[], optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0, use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(models[0], arguments, train_dataset=data)
    order = list(iter(trainer.get_train_dataloader()))
    trainer = transformers.Trainer(models[0], arguments, train_dataset=data)
    trainer.train()
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.01)
    for batch in order:
        optimizer.zero_grad()
        models[1](**batch).loss.backward()
        optimizer.step()
    moved = 0.0
    for (name, p), q, start in zip(models[0].named_parameters(), models[1].parameters(), sparse.parameters()):
        assert torch.allclose(p, q, atol=1e-6), name
        moved = max(moved, (p - start).abs().max().item())
    assert moved > 1e-3


FSDP = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, sys.argv[4])
from test_transformers import SPARSE, convert, dense_model, padded

rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
plain = convert(dense_model("llama"), **SPARSE).train()
ids, mask = padded([50, 37])
inputs = [{"input_ids": ids[r::world], "attention_mask": mask[r::world]} for r in range(world)]
loss = lambda model, r: model(**inputs[r]).logits[inputs[r]["attention_mask"] == 1].square().mean()
(sum(loss(plain, r) for r in range(world)) / world).backward()
for policy, tolerance in ((MixedPrecisionPolicy(), 1e-5), (MixedPrecisionPolicy(torch.bfloat16, torch.float32), 0.3)):
    model = convert(dense_model("llama"), **SPARSE).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    loss(model, rank).backward()
    found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert (found - expected).norm() <= tolerance * expected.norm(), (found - expected).norm() / expected.norm()
dist.destroy_process_group()
print("equal", flush=True)
os._exit(0)  # PyTorch's threads may abort while the interpreter ends, after all that is tested
"""


@pytest.mark.parametrize("world", [1, 2] if os.environ.get("HTREE_CUDA_THOROUGH") else [2])
def test_fsdp2(world, tmp_path):
    """Sharded, with activation checkpointing and mixed precision, on processes of gloo."""
    folder = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", FSDP]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store"), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for process in processes:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and out.strip().endswith("equal"), out[-3000:]


# ------------------------------------------------------------------------------------------------------------ generate


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
        {"prefill_chunk_size": 16},
    ],
    ids=["beams", "beams sampled", "sampled", "chunks"],
)
@torch.no_grad()
def test_ways_to_generate(llama, options):
    _, _, sparse = llama
    ids, mask = padded([50, 11])
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        if "prefill_chunk_size" in options and not use_cache:
            options = {}
        results.append(sparse.generate(ids, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **options))
    assert torch.equal(*results)


@torch.no_grad()
def test_assisted_generation(llama):
    """A dense, a sparse and no assistant: the tokens are those of the model alone."""
    dense, _, sparse = llama
    ids = tokens(1, 45)
    expected = sparse.generate(ids, max_new_tokens=16)
    other = convert(dense_model("llama", num_hidden_layers=1), **SPARSE)
    for more in ({"assistant_model": dense}, {"assistant_model": other}, {"prompt_lookup_num_tokens": 12}):
        assert torch.equal(sparse.generate(ids, max_new_tokens=16, **more), expected)
    assert torch.equal(
        dense.generate(ids, max_new_tokens=16, assistant_model=sparse), dense.generate(ids, max_new_tokens=16)
    )


@torch.no_grad()
def test_generate_goes_on_from_a_cache(llama):
    _, _, sparse = llama
    ids, mask = padded([50, 11])
    first = sparse.generate(ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
    longer = torch.cat((first.sequences, tokens(2, 7, seed=5)), dim=1)
    mask = torch.cat((mask, mask.new_ones(2, 12)), dim=1)
    found = sparse.generate(longer, attention_mask=mask, max_new_tokens=5, cache=first.cache)
    assert torch.equal(found, sparse.generate(longer, attention_mask=mask, max_new_tokens=5, use_cache=False))


@torch.no_grad()
def test_generate_makes_the_cache(llama):
    """As long as it may become; where nobody says so it grows."""
    _, _, sparse = llama
    out = sparse.generate(tokens(2, 20), max_new_tokens=5, return_dict_in_generate=True)
    layer = out.cache.layers[0]
    assert isinstance(layer, HTreeCacheLayer) and layer.tree.max_tokens == layer.get_max_length() == 24
    assert layer.get_seq_length() == out.cache.get_seq_length() == 24
    cache = new_cache(sparse)
    ids, logits = tokens(1, 1500), []
    for first, last in ((0, 700), (700, 701), (701, 1500)):
        logits.append(sparse(ids[:, first:last], cache=cache).logits)
    assert cache.layers[1].tree.max_tokens >= 1500 and cache.layers[1].get_max_length() == -1
    close(torch.cat(logits, 1), sparse(ids, use_cache=False).logits)
    assert sparse(ids[:, :9]).cache.get_seq_length() == 9
    plain = transformers.DynamicCache()
    close(sparse(ids[:, :9], cache=plain).logits, logits[0][:, :9])
    assert isinstance(plain.layers[1], HTreeCacheLayer)


# --------------------------------------------------------------------------------------------------------- cache layer


@torch.no_grad()
def test_cache_layer(llama):
    _, _, sparse = llama
    ids, mask = padded([30, 12])
    more = tokens(2, 4, seed=9)
    mask_more = torch.cat((mask, torch.ones(2, 4, dtype=torch.long)), 1)

    def filled():
        cache = new_cache(sparse, 64)
        sparse(ids, attention_mask=mask, cache=cache)
        return cache

    def step(cache, rows=slice(None), new=more):
        return sparse(new[rows], attention_mask=mask_more[rows], cache=cache).logits

    expected = step(filled())
    layer = filled().layers[1]
    assert layer.tree.lengths.tolist() == [30, 12] and layer.keys.shape == (2, 2, 30, 8) and layer.batch_size == 2
    assert layer.get_mask_sizes(4) == (34, 0) and layer.is_croppable
    cache = filled()
    step(cache, new=tokens(2, 4, seed=7))
    cache.crop(-4)
    assert cache.get_seq_length() == 30 and cache.layers[1].tree.lengths.tolist() == [30, 12]
    close(step(cache), expected)
    cache.crop(-20)  # into the padding of the second row
    assert cache.layers[1].tree.lengths.tolist() == [14, 0]
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        cache = filled()
        change(cache)
        close(step(cache, rows), expected[rows])
    cache = filled()
    twin = copy.deepcopy(cache)
    step(cache)
    close(step(twin), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    sparse(ids, attention_mask=mask, cache=cache)
    close(step(cache), expected)
    with pytest.raises(ValueError, match="crop: tokens_to_remove must be 0 or negative, got 3"):
        cache.crop(3)


@torch.no_grad()
def test_cache_layer_without_a_model():
    layer = HTreeCacheLayer(compression_rate=4)
    k, v = torch.randn(2, 1, 2, 30, 8)
    layer.update(k[:, :, :20], v[:, :, :20])
    with pytest.raises(ValueError, match="a layer that is not converted adds to it"):
        layer.update(k[:, :, 20:], v[:, :, 20:])
    layer.awaited = True  # as a converted layer says
    keys, values = layer.update(k[:, :, 20:], v[:, :, 20:])
    assert torch.equal(keys, k) and torch.equal(values, v) and layer.get_seq_length() == 30


@torch.no_grad()
def test_tokens_that_do_not_exist_in_the_middle(llama):
    """A mask with holes: positions count the tokens that exist, as generate's position_ids do."""
    _, _, sparse = llama
    ids, mask = tokens(1, 40), torch.ones(1, 40, dtype=torch.long)
    mask[0, 7:19] = 0
    close(
        sparse(ids, attention_mask=mask, use_cache=False).logits[mask == 1],
        sparse(ids[mask == 1][None], use_cache=False).logits[0],
    )


@torch.no_grad()
def test_positions_go_on_where_the_cache_ends(llama):
    """A chunk or a step that skips or goes back is refused; what counts the tokens that exist is not."""
    _, _, sparse = llama
    ids = tokens(2, 30)
    expected = sparse(ids, use_cache=False).logits

    def after(count, first, mask=None, crop=0, rows=2):
        """The logits of tokens from place 10 - crop on, whose first position is said."""
        cache = new_cache(sparse)
        known = None if mask is None else mask[:, :10]
        sparse(ids[:rows, :10], attention_mask=known, cache=cache)
        cache.crop(-crop)
        begin = 10 - crop
        new = torch.tensor(first).reshape(-1, 1) + torch.arange(count)
        mask = None if mask is None else mask[:, : begin + count]
        return sparse(ids[:rows, begin : begin + count], attention_mask=mask, position_ids=new, cache=cache).logits

    for count in (1, 2, 5):
        for first in (3, 9, 11, 77, 500, -1):
            words = f"must begin with the number of cached tokens that exist, got {first} in row 0, which has 10"
            with pytest.raises(ValueError, match=f"htree attention: position_ids beside a cache {words}"):
                after(count, first)
        with pytest.raises(ValueError, match="got 12 in row 1, which has 10"):
            after(count, [10, 12])
        with pytest.raises(ValueError, match="got 10 in row 0, which has 6"):
            after(count, 10, crop=4)
        close(after(count, 10), expected[:, 10 : 10 + count])
        close(after(count, [10, 10]), expected[:, 10 : 10 + count])
        close(after(count, 6, crop=4), expected[:, 6 : 6 + count])
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :4] = 0
    row = sparse(ids[1:, 4:], use_cache=False).logits[0]
    for count in (1, 2, 5):
        for first in ([10, 6], 10):  # as generate counts, or with the padding on the left
            found = after(count, first, mask)
            close(found[0], expected[0, 10 : 10 + count])
            close(found[1], row[6 : 6 + count])
        for first in ([10, 4], [10, 8], [10, 77]):
            with pytest.raises(ValueError, match=f"got {first[1]} in row 1, which has 6"):
                after(count, first, mask)
    close(after(1, 4, mask, crop=6), torch.stack((expected[0, 4:5], row[:1])))  # a row of padding begins anywhere
    cache = new_cache(sparse)
    close(sparse(ids, position_ids=torch.arange(7, 37), cache=cache).logits, expected)


@pytest.mark.parametrize("lengths", [[0, 20], [20, 0, 7]])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_generate_on_padding_of_either_side_and_of_whole_rows(llama, side, lengths):
    _, _, sparse = llama
    ids, mask = padded(lengths, side)
    found, scores = generated(sparse, ids, mask, max_new_tokens=5)
    assert found.shape == (len(lengths), 25) and torch.isfinite(scores).all()
    for row, length in enumerate(lengths):
        if length == 20 or (length and side == "left"):  # with padding at its end, generate reads the padding's logits
            alone, expected = generated(sparse, ids[row : row + 1, mask[row] == 1], max_new_tokens=5)
            assert torch.equal(found[row, 20:], alone[0, length:])
            close(scores[:, row], expected[:, 0])


# --------------------------------------------------------------------------------------- saving, reverting, converting


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_saved_and_loaded(kind, tmp_path, monkeypatch):
    dense = dense_model(kind)
    model = convert(copy.deepcopy(dense), **SPARSE, layers=[1])
    assert model.state_dict().keys() == dense.state_dict().keys()
    ids = tokens(2, 40)
    model.save_pretrained(tmp_path)
    for load in (type(model), transformers.AutoModelForCausalLM):
        loaded = load.from_pretrained(tmp_path)
        assert loaded.config.htree_cuda == model.config.htree_cuda and loaded.config.htree_cuda["layers"] == [1]
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert torch.equal(loaded.generate(ids, max_new_tokens=3), model.generate(ids, max_new_tokens=3))
    assert torch.equal(revert(loaded)(ids).logits, dense(ids).logits)
    made = transformers.AutoModelForCausalLM.from_config(model.config)
    assert hasattr(made.model.layers[1].self_attn, "htree") and not hasattr(made.model.layers[0].self_attn, "htree")
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)
    # Without this library the checkpoint does not load as a dense model in silence.
    mapping = dict(transformers.AttentionInterface._global_mapping)
    del mapping["htree_cuda"]
    monkeypatch.setattr(transformers.AttentionInterface, "_global_mapping", mapping)
    with pytest.raises(ValueError, match="htree_cuda"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_revert_gives_the_bits_back(models):
    dense, _, sparse = models
    ids = tokens(2, 40)
    model = revert(copy.deepcopy(sparse))
    assert torch.equal(model(ids).logits, dense(ids).logits)
    assert model.config.to_dict() == dense.config.to_dict()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model.generate(ids, max_new_tokens=3), dense.generate(ids, max_new_tokens=3))
    assert torch.equal(revert(model)(ids).logits, dense(ids).logits)


@torch.no_grad()
def test_converted_again(llama):
    dense, _, sparse = llama
    ids = tokens(2, 60)
    model = convert(convert(copy.deepcopy(dense), **WHOLE), **SPARSE)
    assert torch.equal(model(ids).logits, sparse(ids).logits)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 3
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, sparse(ids).logits)
        assert torch.equal(twin.generate(ids, max_new_tokens=3), sparse.generate(ids, max_new_tokens=3))
    first = convert(copy.deepcopy(dense), **SPARSE, layers=[0])
    assert (first(ids).logits - sparse(ids).logits).abs().max() > 0.05
    eager = copy.deepcopy(dense)
    eager.set_attn_implementation("eager")
    left, mask = padded([60, 31])
    eager = convert(eager, **SPARSE, layers=[0])  # the other layer keeps its own attention and its own mask
    real = mask == 1
    close(eager(left, attention_mask=mask).logits[real], first(left, attention_mask=mask).logits[real])
    assert first.config.htree_cuda["attn_implementation"] == "sdpa"


def siblings(kind: str = "llama", **options):
    """Two models of different weights, made from one configuration."""
    first = dense_model(kind, **options)
    torch.manual_seed(1)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    return first, second


def written(config) -> tuple[dict, str]:
    return config.to_dict(), config._attn_implementation


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_a_model_made_from_the_same_configuration_is_unaffected(kind, implementation):
    """A teacher and a student: the teacher has the same bits before, during and after, and sees no later token."""
    teacher, student = siblings(kind, attn_implementation=implementation)
    config, says = teacher.config, written(teacher.config)
    ids, mask = padded([40, 23])
    later = ids.clone()
    later[:, -1] = 1

    def seen(model):
        return model(ids, attention_mask=mask).logits[mask == 1], model(ids).logits, model(later).logits[:, :-1]

    before, dense = seen(teacher), seen(student)
    tokens_before = teacher.generate(ids, attention_mask=mask, max_new_tokens=3)
    convert(student, **SPARSE)
    sparse = seen(student)
    assert teacher.config is config and written(config) == says
    assert not any(hasattr(module, "htree") or module._forward_pre_hooks for module in teacher.modules())
    for found, expected in zip(seen(teacher), before):
        assert torch.equal(found, expected)
    assert torch.equal(seen(teacher)[1][:, :-1], seen(teacher)[2])
    assert torch.equal(teacher.generate(ids, attention_mask=mask, max_new_tokens=3), tokens_before)
    revert(teacher)  # it is not converted, and the other one stays so
    for found, expected in zip(seen(student), sparse):
        assert torch.equal(found, expected)
    assert (sparse[1] - dense[1]).abs().max() > 0.05
    revert(student)
    for model, expected in ((teacher, before), (student, dense)):
        assert model.config is config and model.model.layers[1].self_attn.config is config
        for x, y in zip(seen(model), expected):
            assert torch.equal(x, y)
    assert written(config) == says


@torch.no_grad()
def test_two_converted_models_of_one_configuration():
    """Other layers and another budget in each; one reverts, the other stays."""
    a, b = siblings(attn_implementation="eager")
    ids, mask = padded([40, 23])

    def seen(model):
        return model(ids, attention_mask=mask).logits[mask == 1]

    dense = seen(a), seen(b)
    convert(a, **SPARSE, layers=[0])
    alone = seen(a)
    convert(b, top_k_per_layer=2, compression_rate=4)
    other = seen(b)
    assert torch.equal(seen(a), alone)
    assert a.config.htree_cuda["layers"] == [0] and b.config.htree_cuda["layers"] == "full_attention"
    revert(a)
    assert torch.equal(seen(a), dense[0]) and torch.equal(seen(b), other)
    convert(a, **SPARSE, layers=[0])
    revert(b)
    assert torch.equal(seen(a), alone) and torch.equal(seen(b), dense[1])
    torch.manual_seed(1)
    third = type(a)(a.config).eval()  # from the configuration of a converted model: converted as it is
    assert third.config is not a.config and third.config.htree_cuda == a.config.htree_cuda
    converted = seen(third)
    revert(third)
    assert torch.equal(seen(third), dense[1]) and torch.equal(seen(a), alone)
    assert not hasattr(third.config, "htree_cuda") and not hasattr(third.model.config, "htree_cuda")
    convert(third, **SPARSE, layers=[0])
    revert(a)
    assert torch.equal(seen(third), converted) and torch.equal(seen(a), dense[0])


def test_a_model_and_its_modules_keep_one_configuration(tmp_path):
    """Converted, loaded, reverted: what is set on the configuration of the head reaches the layers."""

    def one(model):
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        assert len(configs) > 4 and all(config is model.config for config in configs)
        return model.config

    model = dense_model("llama")
    original = model.config
    assert one(convert(model, **SPARSE)) is not original and one(convert(model, **WHOLE)).use_cache
    model.save_pretrained(tmp_path)
    assert one(revert(model)) is original
    loaded = type(model).from_pretrained(tmp_path)
    assert one(loaded).htree_cuda["top_k_per_layer"] == 32
    one(convert(loaded, **SPARSE))
    one(copy.deepcopy(loaded))
    assert one(revert(loaded))._attn_implementation == "sdpa"
    convert(model, **SPARSE).config.use_cache = False  # and what was set stays
    assert one(revert(model)).use_cache is False and original.use_cache
    convert(model, **SPARSE).resize_token_embeddings(VOCAB + 3)
    assert one(revert(model)).vocab_size == VOCAB + 3
    convert(convert(model.model, **WHOLE), **SPARSE)  # the decoder alone, then with its head
    assert one(convert(model, **SPARSE)).htree_cuda["top_k_per_layer"] == 4
    assert not hasattr(one(revert(model)), "htree_cuda")
    convert(model, **WHOLE)
    assert one(convert(model.model, **SPARSE) and model).htree_cuda["top_k_per_layer"] == 4
    assert not hasattr(one(revert(model.model) and model), "htree_cuda")
    assert one(convert(model, **SPARSE)).htree_cuda["top_k_per_layer"] == 4


@torch.no_grad()
def test_a_part_is_saved_as_it_is(tmp_path):
    """What is written says whether the layers are converted, also where `convert` or `revert` was given the decoder."""
    model, ids = dense_model("llama"), tokens(2, 40)
    dense = model(ids).logits
    convert(model.model, **SPARSE)
    sparse = model(ids).logits
    model.save_pretrained(tmp_path / "sparse")
    assert not hasattr(model.config, "htree_cuda")
    loaded = type(model).from_pretrained(tmp_path / "sparse")
    assert loaded.config.htree_cuda["top_k_per_layer"] == 4 and torch.equal(loaded(ids).logits, sparse)
    revert(convert(model, **SPARSE).model)
    model.save_pretrained(tmp_path / "dense")
    loaded = type(model).from_pretrained(tmp_path / "dense")
    assert not hasattr(loaded.config, "htree_cuda") and torch.equal(loaded(ids).logits, dense)


def test_sliding_windows_stay():
    model = convert(dense_model("gemma3"), **SPARSE)
    sliding, full = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    assert not sliding._forward_pre_hooks and len(full._forward_pre_hooks) == 1
    cache = new_cache(model, 100)
    assert not isinstance(cache.layers[0], HTreeCacheLayer) and cache.is_sliding == [True, False, False]


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"attention_dropout": 0.1}}, "attention_dropout must be 0"),
        ({"config": {"sliding_window": 8}, "kind": "mistral"}, "must have a full-attention layer"),
        ({"config": {"attn_logit_softcapping": 50.0}, "kind": "gemma3"}, "no soft-cap; leave the model dense, got 50"),
        ({"config": {"use_bidirectional_attention": True}, "kind": "gemma3"}, "must be causal"),
        ({"config": {"rope_parameters": DYNAMIC}}, "rope_type must be"),
        ({"config": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4}}, "kind": "phi3"}, "an even number of"),
        ({"layers": [0, 5]}, r"layers must be among the full-attention layers \[0, 1\], got \[0, 5\]"),
        ({"layers": [0], "kind": "gemma3"}, r"full-attention layers \[1, 2\]"),
        ({"layers": "all"}, "layers must be"),
        ({"top_k_per_layer": None}, "top_k_per_layer must be given"),
        ({"top_k_per_layer": 6}, "top_k_per_layer must be a power of two"),
        ({"compression_rate": 3}, "compression_rate must be a power of two"),
        ({"backend": "fast"}, "backend"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_converted(change, words):
    change = dict(change)
    model = dense_model(change.pop("kind", "llama"), **change.pop("config", {}))
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=words):
        convert(model, **SPARSE | change)
    assert model.config.to_dict() == before and not any(m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_other_heads():
    """A classifier reads the last token that exists, padding on either side."""
    config = dense_model("llama").config
    config.num_labels = 3
    dense = transformers.LlamaForSequenceClassification(config).eval()
    model = convert(copy.deepcopy(dense), **WHOLE)
    for side in ("left", "right"):
        ids, mask = padded([40, 11], side)
        close(model(ids, attention_mask=mask).logits, dense(ids, attention_mask=mask).logits)


def test_other_models_are_not_converted():
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        convert(torch.nn.Linear(2, 2), top_k_per_layer=4)
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)
    with pytest.raises(ValueError, match=r"must be one of llama, qwen2, .*, got 'gpt2'"):
        convert(transformers.GPT2LMHeadModel(config), top_k_per_layer=4)


@torch.no_grad()
def test_calls_that_are_refused(llama):
    dense, _, sparse = llama
    ids = tokens(2, 20)
    tree = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    for inputs, words in (
        ({"output_attentions": True}, "output_attentions must be False.*revert"),
        ({"attention_mask": tree}, "masks other than the causal one are not supported.*revert"),
        ({"attention_mask": {"full_attention": tree}}, "got dict"),
        ({"attention_mask": torch.ones(2, 19)}, r"must be .* = \[2, 20\], got \[2, 19\]"),
        ({"is_causal": False}, "is_causal must be True"),
        ({"position_ids": 2 * torch.arange(20)[None], "use_cache": True}, "position_ids must ascend by one"),
        ({"position_ids": torch.arange(20).expand(3, 20)}, r"position_ids must be \[batch, new tokens\]"),
        ({"position_ids": (torch.arange(20) % 10)[None], "use_cache": True}, "use_cache=False"),
        ({"cache": dense(ids).cache}, "filled by the model before convert"),
    ):
        with pytest.raises(ValueError, match=words):
            sparse(ids, **inputs)
    cache = sparse(ids).cache
    with pytest.raises(ValueError, match="must say of the cached tokens"):
        sparse(ids, attention_mask=torch.tensor([[0] * 5 + [1] * 35] * 2), cache=cache)
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation must be left alone.*{kind}"):
            sparse.generate(ids, cache_implementation=kind, max_new_tokens=2)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gradient"):
        sparse(ids, cache=cache)
    model = convert(copy.deepcopy(dense), **SPARSE)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="must stay 'htree_cuda'"):
        model(ids)
    unconverted = copy.deepcopy(dense)
    unconverted.set_attn_implementation("htree_cuda")
    with pytest.raises(RuntimeError, match="must be converted first"):
        unconverted(ids)


# ------------------------------------------------------------------------------------------------------------ contracts


@pytest.mark.parametrize("name", ["convert", "revert", "new_cache"])
def test_docstrings(name):
    text = inspect.getdoc(getattr(integration, name))
    places = [text.index(f"\n{section}:") for section in ("Args", "Returns", "Raises", "Notes", "Example", "Source")]
    assert places == sorted(places)
    exec(compile(doctest.script_from_examples(text), name, "exec"), {"torch": torch})


def test_transformers_is_optional():
    """htree_cuda does not import it, and says what is missing where it is."""
    program = """
import sys, htree_cuda
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    import htree_cuda.integrations.transformers
except ImportError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "pip install 'htree_cuda[hf]'" in done.stdout


# ----------------------------------------------------------------------------------------------- the example, the guide


def test_the_example_runs(capsys):
    path = ROOT / "examples" / "convert_llama.py"
    spec = importlib.util.spec_from_file_location("convert_llama", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert (
        example.main(["--top-k", "8", "--compression-rate", "4", "--prompt", "100", "--new", "4", "--steps", "4"]) == 0
    )
    out = capsys.readouterr().out
    assert "the same tokens: True" in out and "the same bits: True" in out and out.count("largest difference") == 4


@torch.no_grad()
def test_the_guide_runs(tmp_path):
    """Every block of the page, in its order, on a small model."""
    page = (ROOT / "docs" / "guides" / "huggingface.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    dense_model("llama").save_pretrained(tmp_path / "model")
    ids, mask = padded([50, 11])
    names = {
        "path": tmp_path / "model", "folder": tmp_path / "folder", "ids": ids, "mask": mask,
        "next_ids": tokens(2, 1), "next_mask": torch.cat((mask, mask[:, -1:]), dim=1),
    }  # fmt: skip
    for block in blocks:
        exec(compile(block, "huggingface.md", "exec"), names)
    assert len(blocks) == 3 and names["tokens"].shape == (2, 82) and names["tree"].lengths.tolist() == [50, 11]
    assert names["model"].config.htree_cuda["top_k_per_layer"] == 64


def test_dense_layers_keep_packed_documents_apart_or_refuse_them():
    """Sliding layers of GPT-OSS know of no documents; other dense layers need positions to know of them."""
    lengths = [12, 15]
    ids, positions = tokens(1, 27), torch.cat([torch.arange(n) for n in lengths])[None]
    cu = torch.tensor([0, 12, 27], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 15, "max_length_k": 15, "use_cache": False}
    oss = convert(dense_model("gpt_oss"), **SPARSE)
    for more in ({"position_ids": positions, "use_cache": False}, said, {**said, "position_ids": positions}):
        with pytest.raises(ValueError, match="packed documents need every layer of a gpt_oss model to be converted"):
            oss(ids, **more)
    for model in (convert(dense_model("gemma3"), **SPARSE), convert(dense_model("llama"), **SPARSE, layers=[0])):
        with pytest.raises(ValueError, match="cu_seq_lens_q needs position_ids that begin again"):
            model(ids, **said)
        with torch.no_grad():
            logits = model(ids, position_ids=positions, **said).logits[0, 12:]
            close(logits, model(ids[:, 12:], use_cache=False).logits[0], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_models_of_one_configuration_are_independent(implementation):
    teacher = dense_model("llama", attn_implementation=implementation)
    student = type(teacher)(teacher.config).eval()
    student.load_state_dict(teacher.state_dict())
    assert student.config is teacher.config
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    calls = [lambda model: model(ids).logits, lambda model: model(ids, attention_mask=mask).logits]
    before = [call(teacher) for call in calls]
    part = convert(type(teacher)(teacher.config).eval(), layers=[0], **WHOLE)
    of_part = part(ids).logits
    convert(student, **WHOLE)
    for call, expected in zip(calls, before, strict=True):
        assert torch.equal(call(teacher), expected)
    assert torch.equal(part(ids).logits, of_part)
    revert(student)
    assert student.config is teacher.config and torch.equal(part(ids).logits, of_part)
    for model in (teacher, student):
        assert all(torch.equal(call(model), expected) for call, expected in zip(calls, before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("positions", [[500, 501], [3, 4], [77]])
def test_positions_that_jump_behind_a_cache_are_refused(llama, positions):
    model, ids = llama[2], tokens(1, 12)
    cache = new_cache(model)
    model(ids[:, :10], past_key_values=cache)
    with pytest.raises(
        ValueError, match=f"begin with the number of cached tokens that exist, got {positions[0]} in row 0"
    ):
        model(ids[:, 10 : 10 + len(positions)], past_key_values=cache, position_ids=torch.tensor([positions]))


def test_lengths_of_packs_are_tensors(llama):
    with pytest.raises(TypeError, match=r"htree attention: cu_seq_lens_q must be a torch\.Tensor or None, got list"):
        llama[2](tokens(1, 12), cu_seq_lens_q=[0, 5, 12], use_cache=False)
