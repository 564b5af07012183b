"""Inputs `trained`: q, k and v of decoders that examples/train_bytes.py trains on this machine.

A decoder of a group G has four blocks with two KV heads of G query heads each. Its checkpoint is kept in FOLDER,
outside git. A row of more KV heads than blocks have takes those of other seeds' decoders too. What a decoder computes
of held-out text is the input: queries and keys after their norm and before RoPE, as `htree_cuda.forward` takes them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path("demo_out") / "trained"
KV_HEADS = 2  # of each block
# T, batch, steps: most of the training is short, the rest is long enough for queries of three layers at top_k 64.
STAGES = ((8192, 1, 350), (32768, 1, 50))
TOP_K = 64

# The longest sequence that was computed so far, by group, dimension, KV heads, first seed and device.
_found: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}


def _example() -> types.ModuleType:
    """examples/train_bytes.py of this source tree; the wheel has none."""
    path = Path(__file__).resolve().parents[2] / "examples" / "train_bytes.py"
    if not path.exists():
        sys.exit(f"inputs trained need the source tree, for {path.name}: run the benchmark from a checkout")
    if "train_bytes" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_bytes", path)
        sys.modules["train_bytes"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["train_bytes"]


def _decoder(group: int, dim: int, seed: int, device: torch.device):
    """The trained run of a group and seed, from its checkpoint where there is one."""
    example = _example()
    steps = sum(stage[2] for stage in STAGES)
    text = example.Task(tuple(example.Stage(*stage) for stage in STAGES), 1e-3, steps, 1)
    preset = dataclasses.replace(
        example.PRESETS["gpu"], name=f"trained_g{group}_d{dim}", n_heads=KV_HEADS * group, n_kv_heads=KV_HEADS,
        head_dim=dim, top_k=TOP_K, text=text, autocast=device.type == "cuda",
    )  # fmt: skip
    run = example.Run(preset, "text", "htree", seed, example.Text(), device, "auto")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{run.name}.pt"
    run.resume(path)
    if run.step < steps:
        run.train(path)
    return run


@torch.no_grad()
def _heads(run, T: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q [1, T, G, K], k [1, T, 1, K], v [1, T, 1, K]) of every KV head: the first one of each block, then the next."""
    data = run.data.parts["validation"]
    if len(data) < T:
        raise ValueError(f"inputs trained: T must be at most {len(data)}, the held-out bytes of text, got {T}")
    blocks = []
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.preset.autocast):
        x = run.model.embedding(data[:T].long().to(run.device)[None])
        for block in run.model.blocks:
            q, k, v = block.attention.project(block.attention_norm(x))
            blocks.append((q.unflatten(2, (KV_HEADS, -1)), k, v))
            x = block(x)
    return [
        (q[:, :, i], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(KV_HEADS) for q, k, v in blocks
    ]  # fmt: skip


def tree_inputs(T: int, T_q: int, H: int, H_kv: int, K: int, dtype, device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, T_q, H, K], the last queries, and k, v [1, T, H_kv, K]. What a longer sequence of the same shape computed
    before is cut: no token sees later ones."""
    key = (H // H_kv, K, H_kv, seed, str(device), dtype)
    if key not in _found or _found[key][0].shape[1] < T:
        heads: list[tuple[Tensor, Tensor, Tensor]] = []
        while len(heads) < H_kv:
            blocks = _example().PRESETS["gpu"].n_layers
            run = _decoder(H // H_kv, K, seed + len(heads) // (KV_HEADS * blocks), torch.device(device))
            heads += [tuple(x.to(dtype) for x in head) for head in _heads(run, T)]
        _found[key] = tuple(torch.cat(column, 2) for column in zip(*heads[:H_kv]))
    q, k, v = (x[:, :T] for x in _found[key])
    return q[:, T - T_q :], k, v
