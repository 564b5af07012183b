"""Puts htree attention under a Llama model of Hugging Face transformers: a small random one, on a CPU, in a minute.

    pip install '.[hf]'
    python examples/convert_llama.py

First the converted model computes what the dense one computed, as long as a query may expand every node: up to
top_k * compression_rate tokens. Then it reads and continues longer prompts, of unequal length in one batch, from a
cached tree; the continuation is that of a model that computes everything again for every token. At last it trains for a
few steps, is saved, and loaded again. Random weights say nothing about quality: docs/guides/huggingface.md says what
to expect.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time

import torch

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs transformers: pip install '.[hf]'")

from htree_cuda.integrations.transformers import convert, revert

VOCAB = 257
TOLERANCE = 1e-5  # float32, of the largest logit


def small_llama() -> LlamaForCausalLM:
    """Two layers, four query heads on one KV head of 32, float32."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, initializer_range=0.15, max_position_embeddings=4096, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest difference, in units of the largest number."""
    return ((x - y).abs().max() / y.abs().max()).item()


@torch.no_grad()
def equality(dense, model, seen: int) -> list[tuple[int, float]]:
    """Lengths, and how far the converted model is from the dense one."""
    rows = []
    for T in (seen // 4, seen, 2 * seen, 4 * seen):
        ids = torch.randint(2, VOCAB, (2, T))
        rows.append((T, difference(model(ids).logits, dense(ids).logits)))
    return rows


@torch.no_grad()
def continuation(model, lengths: list[int], new: int) -> tuple[bool, float, float]:
    """Whether generate with the cache writes what it writes without, and the seconds of both."""
    T = max(lengths)
    mask = (torch.arange(T) >= T - torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(2, VOCAB, (len(lengths), T)) * mask
    results, seconds = [], []
    for use_cache in (True, False):
        begin = time.perf_counter()
        options = {"max_new_tokens": new, "do_sample": False, "use_cache": use_cache}
        results.append(model.generate(ids, attention_mask=mask, **options))
        seconds.append(time.perf_counter() - begin)
    return torch.equal(*results), *seconds


def training(model, steps: int) -> list[float]:
    """Losses of a few steps on one batch that repeats itself."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(2, VOCAB, (2, 64)).repeat(1, 8)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def main(argv: list[str] | None = None) -> int:
    """Prints what the text above says; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top-k", type=int, default=16, help="nodes expanded per layer; default 16")
    parser.add_argument("--compression-rate", type=int, default=16, help="children per node; default 16")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the longest prompt; default 1000")
    parser.add_argument("--new", type=int, default=24, help="tokens to write; default 24")
    parser.add_argument("--steps", type=int, default=8, help="steps of training; default 8")
    args = parser.parse_args(argv)
    for name, value, least in (("--top-k", args.top_k, 1), ("--compression-rate", args.compression_rate, 2)):
        if value < least or value & (value - 1):
            parser.error(f"{name} must be a power of two, at least {least}, got {value}")
    for name, value in (("--prompt", args.prompt), ("--new", args.new), ("--steps", args.steps)):
        if value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    torch.manual_seed(0)
    dense = small_llama()
    options = {"top_k_per_layer": args.top_k, "compression_rate": args.compression_rate}
    model = convert(copy.deepcopy(dense), **options)
    seen = args.top_k * args.compression_rate
    failed = False

    print(f"top_k {args.top_k}, compression_rate {args.compression_rate}: everything is seen up to {seen} tokens")
    for T, apart in equality(dense, model, seen):
        print(f"  T {T:6,}: largest difference of the logits to the dense model {apart:.1e}")
        failed |= (apart <= TOLERANCE) is not (seen >= T)

    lengths = [args.prompt, max(1, args.prompt // 3), 5]
    same, cached, again = continuation(model, lengths, args.new)
    print(f"prompts of {lengths} tokens, {args.new} more: {cached:.1f} s with the cached tree, {again:.1f} s without")
    print(f"  the same tokens: {same}")
    failed |= not same

    losses = training(model, args.steps)
    print(f"{args.steps} steps of training: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    failed |= not losses[-1] < losses[0]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.randint(2, VOCAB, (1, 4 * seen))
        kept = torch.equal(loaded(ids).logits, model(ids).logits)
        print(f"saved and loaded: the conversion {loaded.config.htree_cuda}, the same bits: {kept}")
        apart = difference(revert(loaded)(ids).logits, model(ids).logits)
        print(f"reverted: {apart:.1e} from the converted model")
        failed |= not kept or apart <= TOLERANCE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
