"""Continues text, byte by byte, with a decoder whose attention keeps its tree: tokens per second of htree and dense.

    python examples/generate_bytes.py                                        # about a minute on 2 CPU cores
    python examples/generate_bytes.py --preset gpu                           # one Hopper GPU: 32K and 128K
    python examples/generate_bytes.py --checkpoint demo_out/train/gpu_text_htree_0.pt --prompts 32768

The model is that of examples/train_bytes.py with htree attention, trained here for a few steps, or whole from a
checkpoint of that program. The prompt is held-out text. Two arms continue it with the same weights:

    htree   htree_cuda.HTreeAttention with a TreeCache; on a GPU one captured graph serves every length
    dense   PyTorch's SDPA over cached keys, the heads of a group as rows of the query; on a GPU one graph each length,
            captured before the time begins, because SDPA takes no length from the device

The weights were trained with htree attention, so the dense arm shows what a step costs and not what dense attention
would write. The time of a token holds everything: embedding, all blocks, sampling.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_bytes import PRESETS, Decoder, Preset, Run, Text

from htree_cuda.bench.protocol import identity
from htree_cuda.bench.tables import table
from htree_cuda.demo.progress import progress

ARMS = ("htree", "dense")
BYTES = 256
# cuDNN's makes a plan for every length, which cannot be captured.
STEP_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DEFAULTS = {"cpu": {"steps": 60, "prompts": "4096"}, "gpu": {"steps": 100, "prompts": "32768,131072"}}
SYNCHRONISE_EVERY = 16  # tokens that the host may be ahead of a GPU


# ------------------------------------------------------------------------------------------------------------- caches


class DenseCache:
    """Rotated keys and values of all tokens: [1, H_kv, max_tokens, D], and the rotation of every position."""

    def __init__(self, attention: nn.Module, max_tokens: int):
        weight, K = attention.k_proj.weight, attention.head_dim
        place = {"dtype": weight.dtype, "device": weight.device}
        self.k = torch.zeros(1, attention.n_kv_heads, max_tokens, K, **place)
        self.v = torch.zeros(1, attention.n_kv_heads, max_tokens, attention.v_head_dim, **place)
        inv_freq = attention.options["rope_base"] ** (-2.0 * torch.arange(K // 2, dtype=torch.float64) / K)
        angle = torch.arange(max_tokens, dtype=torch.float64)[:, None, None] * inv_freq
        self.cos, self.sin = (x.float().to(weight.device) for x in (angle.cos(), angle.sin()))

    def rotated(self, x: Tensor, first: int) -> Tensor:
        """x [1, T_q, H, K] of the positions from `first` on."""
        part = slice(first, first + x.shape[1])
        lo, hi = x.float().chunk(2, dim=3)
        cos, sin = self.cos[part], self.sin[part]
        return torch.cat((lo * cos - hi * sin, lo * sin + hi * cos), dim=3).to(x.dtype)

    def attend(self, attention: nn.Module, x: Tensor, first: int) -> Tensor:
        """x [1, T_q, d_model] at the positions from `first` on: a prefill from 0, or one token."""
        q, k, v = attention.project(x)
        q, k = self.rotated(q, first), self.rotated(k, first)
        end = first + x.shape[1]
        self.k[:, :, first:end], self.v[:, :, first:end] = k.transpose(1, 2), v.transpose(1, 2)
        keys, values = self.k[:, :, :end], self.v[:, :, :end]
        if x.shape[1] == 1:
            rows = q[:, 0].unflatten(1, (attention.n_kv_heads, -1))
            with sdpa_kernel(STEP_BACKENDS, set_priority=True):
                out = F.scaled_dot_product_attention(rows, keys, values).flatten(1, 2)[:, None]
        elif first == 0:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
            out = out.transpose(1, 2)
        else:
            raise ValueError("the dense cache takes a prompt from 0 or one token")
        return attention.o_proj(out.flatten(2))


class Writer:
    """A decoder with the caches of one sequence."""

    def __init__(self, model: Decoder, arm: str, max_tokens: int):
        self.model, self.arm = model, arm
        attentions = [block.attention for block in model.blocks]
        if arm == "htree":
            self.caches = [attention.new_cache(1, max_tokens) for attention in attentions]
        else:
            self.caches = [DenseCache(attention, max_tokens) for attention in attentions]

    def logits(self, tokens: Tensor, first: int) -> Tensor:
        """tokens [1, T_q] at the positions from `first` on -> [vocabulary] of the last one. htree's caches know their
        length themselves."""
        x = self.model.embedding(tokens)
        for block, cache in zip(self.model.blocks, self.caches):
            inner = block.attention_norm(x)
            if self.arm == "htree":
                x = x + block.attention(inner, cache=cache)
            else:
                x = x + cache.attend(block.attention, inner, first)
            x = x + block.mlp(block.mlp_norm(x))
        return self.model.head(self.model.norm(x[:, -1]))[0]

    def truncate(self, length: int) -> None:
        """Forgets the tokens at and past length; dense keys are overwritten."""
        if self.arm == "htree":
            for cache in self.caches:
                cache.truncate(length)


# --------------------------------------------------------------------------------------------------------- generation


class Sampler:
    """The next token, by Gumbel noise that was drawn before: no random numbers inside a captured step, and the same
    continuation from eager steps and from replays."""

    def __init__(self, count: int, vocabulary: int, temperature: float, seed: int, device: torch.device):
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(count, vocabulary, generator=generator).clamp(1e-20, 1 - 1e-7)
        self.noise = (-(-uniform.log()).log() * temperature).to(device)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(count, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def take(self, logits: Tensor) -> None:
        """Chooses from logits [vocabulary], writes the choice into `token` and behind the earlier ones."""
        choice = (logits.float() + self.noise.index_select(0, self.count)[0]).argmax()
        self.token.copy_(choice.view(1, 1))
        self.chosen.index_copy_(0, self.count, choice.view(1))
        self.count.add_(1)

    def restart(self, token: Tensor) -> None:
        """Back to after the first choice."""
        self.token.copy_(token)
        self.count.fill_(1)


def steps_of(writer: Writer, sampler: Sampler, prompt: int, count: int) -> list[Callable[[], object]]:
    """One call for each further token; on a GPU replays, of one graph for htree, of a graph each for dense."""

    def step(first: int) -> None:
        sampler.take(writer.logits(sampler.token, first))

    if sampler.token.device.type != "cuda":
        return [lambda first=prompt + i: step(first) for i in range(count)]
    token = sampler.token.clone()
    step(prompt)  # what is made in a first call is not captured
    graphs: list[torch.cuda.CUDAGraph] = []
    torch.cuda.synchronize()
    for i in range(1 if writer.arm == "htree" else count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            step(prompt + i)
        graphs.append(graph)
    writer.truncate(prompt)
    sampler.restart(token)
    return [graphs[min(i, len(graphs) - 1)].replay for i in range(count)]


@torch.inference_mode()
def generate(model: Decoder, arm: str, prompt: Tensor, count: int, temperature: float, seed: int) -> dict:
    """Continues prompt [T] by count tokens; their text, and what it took."""
    device, T = prompt.device, prompt.shape[0]
    writer = Writer(model, arm, T + count)
    sampler = Sampler(count, model.head.out_features, temperature, seed, device)

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    started = finish()
    sampler.take(writer.logits(prompt[None], 0))
    prefill = finish() - started
    steps = steps_of(writer, sampler, T, count - 1)
    started = finish()
    for i, step in enumerate(progress(steps, len(steps), f"{arm}, {T:,} bytes")):
        step()
        if i % SYNCHRONISE_EVERY == 0:
            finish()
    seconds = finish() - started
    return {
        "arm": arm, "prompt": T, "new": count, "prefill_s": round(prefill, 4), "seconds": round(seconds, 4),
        "tokens_per_s": round(len(steps) / seconds, 2), "ms_per_token": round(1e3 * seconds / len(steps), 4),
        "text": bytes(sampler.chosen.tolist()).decode("utf-8", "replace"),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- model


def trained(preset: Preset, steps: int, out: Path, text: Text, device: torch.device, backend: str) -> Run:
    """The text run of train_bytes with htree attention, up to `steps`; goes on from what an earlier call left."""
    run = Run(preset, "text", "htree", 0, text, device, backend)
    path = out / f"generate_{run.name}.pt"
    run.resume(path)
    if run.step < steps:
        run.train(path, stop_at=steps)
    return run


def from_checkpoint(path: Path, device: torch.device) -> tuple[Preset, dict, int]:
    """(preset, state dict, steps) of a checkpoint of train_bytes."""
    state = torch.load(path, map_location=device, weights_only=True)
    settings = state["settings"]
    if (settings["task"], settings["arm"]) != ("text", "htree"):
        raise SystemExit(
            f"{path} must be of the text task with htree attention, is {settings['task']}, {settings['arm']}"
        )
    preset = PRESETS.get(settings["preset"]["name"])
    known = {} if preset is None else {name: getattr(preset, name) for name in settings["preset"]}
    if known != settings["preset"]:
        raise SystemExit(f"{path} belongs to another version of train_bytes: {settings['preset']}")
    return preset, state["model"], state["step"]


def models(preset: Preset, weights: dict, device: torch.device, backend: str) -> dict[str, Decoder]:
    """A decoder for each arm with the same weights, in bfloat16 on a GPU."""
    found = {}
    for arm in ARMS:
        model = Decoder(preset, arm, BYTES, preset.window(preset.text.stages[-1].T), backend)
        model.load_state_dict(weights)
        found[arm] = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    return found


COLUMNS = {
    "arm": lambda f: f["arm"],
    "prompt": lambda f: f"{f['prompt']:,}",
    "new bytes": lambda f: f"{f['new']:,}",
    "prefill s": lambda f: f"{f['prefill_s']:.2f}",
    "bytes/s": lambda f: f"{f['tokens_per_s']:,.1f}",
    "ms a byte": lambda f: f"{f['ms_per_token']:.3f}",
}


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--checkpoint", type=Path, help="of train_bytes, text task, htree; default: train here")
    parser.add_argument("--steps", type=int, help="training steps without a checkpoint; default: 60 (gpu: 100)")
    parser.add_argument("--prompts", type=lengths, help="bytes of each prompt; default: 4096 (gpu: 32768,131072)")
    parser.add_argument("--new", type=int, default=256, help="bytes to write, at least 2")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the most likely byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda for the gpu preset, else cpu")
    parser.add_argument("--backend", choices=("auto", "torch"), default="auto", help="of htree attention")
    parser.add_argument("--out", type=Path, default=Path("demo_out") / "generate", help="checkpoint and JSON")
    parser.add_argument("--json", type=Path, help="where to write the figures; default: generate_PRESET.json in --out")
    args = parser.parse_args(argv)
    try:
        torch.device(args.device or "cpu")
    except RuntimeError:
        parser.error(f"--device must be a device of PyTorch, got {args.device}")
    if args.new < 2:
        parser.error(f"--new must be at least 2, got {args.new}")
    args.out.mkdir(parents=True, exist_ok=True)
    preset, text = PRESETS[args.preset], Text()
    device = torch.device(args.device or ("cuda" if args.preset == "gpu" else "cpu"))
    if args.checkpoint is None:
        steps = DEFAULTS[args.preset]["steps"] if args.steps is None else args.steps
        run = trained(preset, steps, args.out, text, device, args.backend)
        weights, steps = run.model.state_dict(), run.step
    else:
        preset, weights, steps = from_checkpoint(args.checkpoint, device)
    held_out = text.parts["validation"]
    decoders, figures = models(preset, weights, device, args.backend), []
    for T in args.prompts or lengths(DEFAULTS[args.preset]["prompts"]):
        prompt = held_out.repeat(-(-T // len(held_out)))[:T].long().to(device)
        for arm in ARMS:
            figures.append(generate(decoders[arm], arm, prompt, args.new, args.temperature, args.seed))
        print(f"\n... {bytes(prompt[-160:].tolist()).decode('utf-8', 'replace')}\n>>> {figures[-2]['text']}\n")
    print(table(figures, COLUMNS))
    report = {
        "program": "generate_bytes", **identity(device.type), "preset": preset.name, "top_k": preset.top_k,
        "compression_rate": preset.compression_rate, "steps": steps, "data": text.about, "figures": figures,
    }  # fmt: skip
    path = args.json or args.out / f"generate_{preset.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
