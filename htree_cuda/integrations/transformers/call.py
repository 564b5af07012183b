"""What one call of a model says about its sequences: which tokens exist, and where one sequence ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")  # arguments of a call with packed sequences


@dataclass
class Call:
    """One call of a model, shared by its layers.

    Every field that is None means the plain case. ``order`` and ``place`` move the tokens that exist to the front of
    their row and back; ``used`` counts them. ``valid`` says of the whole sequence, cached tokens included, which ones
    exist. ``cu_seqlens`` (packed sequences) excludes all of these.
    """

    used: Tensor | None = None  # [B] int32
    order: Tensor | None = None  # [B, T] int64
    place: Tensor | None = None  # [B, T] int64
    valid: Tensor | None = None  # [B, cached + T] bool
    cu_seqlens: Tensor | None = None  # [N + 1] int32, counted in the B * T tokens of the call
    max_seqlen: int = 0

    def on(self, device: torch.device) -> Call:
        """The same for layers on another device."""
        if all(x is None or x.device == device for x in (self.used, self.valid, self.cu_seqlens)):
            return self
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Call(**moved, max_seqlen=self.max_seqlen)

    def compact(self, x: Tensor) -> Tensor:
        """[B, T, H, D], the tokens that exist first."""
        return x if self.order is None else _rows(x, self.order)

    def spread(self, x: Tensor) -> Tensor:
        """The inverse of `compact`."""
        return x if self.place is None else _rows(x, self.place)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def _fail(rule: str, found) -> None:
    raise ValueError(f"htree attention: {rule}, got {found}")


def make_call(
    shape: tuple[int, int],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cached: int | None,
    known: Tensor | None,
    kwargs: dict,
) -> Call:
    """Reads the arguments of a model's forward.

    Args:
        shape: (B, T) of the tokens of the call.
        attention_mask: [B, cached + T], not 0 where a token exists; None: all do.
        position_ids: as the caller gave them; None: ascending.
        cached: tokens of each row in the cache, padding included; None: there is no cache.
        known: [B, cached] bool, which of them exist; None: all.
        kwargs: the other arguments of the call, of which those of packed sequences are read.
    """
    B, T = shape
    for name, given in (("position_ids", position_ids), *((name, kwargs.get(name)) for name in LENGTHS)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"htree attention: {name} must be a torch.Tensor or None, got {type(given).__name__}")
    unknown = position_ids is None or torch.compiler.is_compiling()
    if not unknown and position_ids.shape not in ((B, T), (1, T), (T,)):
        _fail(f"position_ids must be [batch, new tokens] = [{B}, {T}]", list(position_ids.shape))
    if attention_mask is None and cached is None:
        return _packed(B, T, position_ids, kwargs)
    if kwargs.get("cu_seq_lens_q") is not None:
        found = "a cache" if attention_mask is None else "an attention_mask"
        _fail("cu_seq_lens_q (packed sequences) needs use_cache=False and no attention_mask", found)
    past = cached or 0
    valid = None
    if attention_mask is None:
        if known is not None:
            valid = torch.cat((known, known.new_ones(B, T)), dim=1)
        call = Call(valid=valid)
    else:
        if attention_mask.shape != (B, past + T):
            rule = f"attention_mask must be [batch, cached + new tokens] = [{B}, {past + T}]"
            _fail(rule, list(attention_mask.shape))
        reads = not torch.compiler.is_compiling() and (T > 1 or attention_mask.device.type == "cpu")
        if reads and attention_mask.dtype != torch.bool and ((attention_mask != 0) & (attention_mask != 1)).any():
            _fail("attention_mask must be 1 for each token that exists and 0 for the others", "other numbers")
        call = _masked(attention_mask.bool(), T, known)
    # A step of decoding on a GPU waits for nothing.
    if not unknown and (T > 1 or (T == 1 and _on_cpu(position_ids, call.valid))):
        _check_positions(position_ids.expand(B, T), call, past)
    return call


def _masked(valid: Tensor, T: int, known: Tensor | None) -> Call:
    """The call of tokens that exist where valid [B, cached + T] says so."""
    new = valid[:, valid.shape[1] - T :]
    used = new.sum(1, dtype=torch.int32)
    # One step of decoding on a GPU waits for nothing; other calls may ask what needs no work.
    if not torch.compiler.is_compiling() and (T > 1 or valid.device.type == "cpu"):
        past = valid[:, : valid.shape[1] - T]
        same = past.all() if known is None else past.eq(known).all()
        in_order = torch.ones((), dtype=torch.bool, device=new.device) if T == 1 else new[:, 1:].le(new[:, :-1]).all()
        everything, same, in_order = torch.stack((new.all(), same, in_order)).tolist()
        if not same:
            _fail("attention_mask must say of the cached tokens what it said when they were new", "another")
        if everything:
            return Call(valid=valid if known is not None else None)
        if in_order:
            return Call(used=used, valid=valid)
    if T == 1:
        return Call(used=used, valid=valid)
    order = (~new).to(torch.uint8).argsort(dim=1, stable=True)
    return Call(used=used, order=order, place=order.argsort(dim=1), valid=valid)


def _on_cpu(*tensors: Tensor | None) -> bool:
    return all(x is None or x.device.type == "cpu" for x in tensors)


def _check_positions(positions: Tensor, call: Call, past: int) -> None:
    """Positions count the tokens that exist: anything else is another RoPE, or packed sequences beside a cache."""
    if call.order is not None:
        positions = positions.gather(1, call.order)
    steps = positions.diff(dim=1).eq(1)
    if call.used is not None:
        steps = steps | (torch.arange(1, positions.shape[1], device=positions.device) >= call.used[:, None])
    begins = _begins(positions, call, past)
    all_steps, all_begin = torch.stack((steps.all(), begins.all())).tolist()
    if not all_begin:
        row = int((~begins).nonzero()[0])
        count = past if call.valid is None else int(call.valid[row, :past].sum())
        rule = "position_ids beside a cache must begin with the number of cached tokens that exist"
        _fail(rule, f"{positions[row, 0].item()} in row {row}, which has {count}")
    if not all_steps:
        _fail(
            "position_ids must ascend by one over the tokens that exist (packed sequences: pass use_cache=False and no "
            "attention_mask)",
            "others",
        )


def _begins(positions: Tensor, call: Call, past: int) -> Tensor:
    """[B] bool, whether each row's positions [B, T], tokens that exist first, go on where its cached tokens end.

    Without cached tokens they may begin anywhere, because rotations are relative. With padding on the left they may
    count it, as a dense model does that is given no positions. With padding elsewhere everything is right, because
    `generate` goes on from the position of the last token of the prompt, which is 0 where that is padding.
    """
    first = positions[:, 0]
    if past == 0:
        return torch.ones_like(first, dtype=torch.bool)
    if call.valid is None:
        begins = first.eq(past)
    else:
        known = call.valid[:, :past].to(first.device)
        count = known.sum(1)
        elsewhere = ~known[:, -1] | known[:, 1:].lt(known[:, :-1]).any(1)
        counts_padding = first.eq(past)
        if call.order is not None:
            counts_padding = counts_padding & call.order[:, 0].eq(0)
        begins = first.eq(count) | counts_padding | elsewhere
        if positions.shape[1] == 1:  # `generate` counts from 1 where the prompt of a row is nothing but padding
            begins = begins | (first.eq(count + 1) & count.lt(past))
    return begins if call.used is None else begins | call.used.eq(0)


def _packed(B: int, T: int, position_ids: Tensor | None, kwargs: dict) -> Call:
    """Documents in one row: as the collators say them, or where the positions do not ascend by one."""
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        other, longest = kwargs.get("cu_seq_lens_k"), kwargs.get("max_length_q")
        if longest is None:
            _fail("cu_seq_lens_q needs max_length_q", "none")
        if other is None or other is cu_seqlens or torch.compiler.is_compiling():
            pass
        elif other.shape != cu_seqlens.shape or not other.to(cu_seqlens.device).eq(cu_seqlens).all():
            _fail("cu_seq_lens_k must be cu_seq_lens_q", "another")
        return Call(cu_seqlens=cu_seqlens.to(torch.int32), max_seqlen=int(longest))
    if position_ids is None or T == 1:
        return Call()
    breaks = position_ids.expand(B, T).diff(dim=1).ne(1)
    if not breaks.any():
        return Call()
    first = torch.ones(B, 1, dtype=torch.bool, device=breaks.device)
    starts = torch.cat((first, breaks), dim=1).flatten().nonzero().flatten()
    cu_seqlens = torch.cat((starts, starts.new_full((1,), B * T))).to(torch.int32)
    return Call(cu_seqlens=cu_seqlens, max_seqlen=int(cu_seqlens.diff().max()))
