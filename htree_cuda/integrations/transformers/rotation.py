"""How a layer of a model rotates queries and keys, said in the words of `htree_cuda.forward`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Types whose angles per position are one table, whatever the length of the sequence.
FIXED_TYPES = ("default", "linear", "llama3", "yarn")
# Models that rotate elements 2 m and 2 m + 1 against each other.
INTERLEAVED = ("glm", "glm4")


@dataclass
class Rotation:
    """`rope_base` or a float32 table of inverse frequencies, the factor that both cos and sin carry (YaRN), and which
    elements are pairs."""

    rope_base: float | None
    inv_freq: tuple[float, ...] | None
    factor: float
    rope_dim: int
    interleaved: bool
    tables: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def options(self, device: torch.device) -> dict:
        """The keyword arguments of `htree_cuda.forward`. The table is the same tensor at every call on a device."""
        pairs = {"rope_dim": self.rope_dim, "rope_interleaved": self.interleaved}
        if self.inv_freq is None:
            return {"rope_base": self.rope_base, **pairs}
        if device not in self.tables:
            self.tables[device] = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        return {"rope_inv_freq": self.tables[device], **pairs}


def rotation(config, layer_type: str, head_dim: int) -> Rotation:
    """The rotation of the layers of one type, from the configuration of a text model; refused where it is no table."""
    parameters = config.rope_parameters
    by_type = isinstance(parameters.get(layer_type), dict)
    parameters = parameters[layer_type] if by_type else parameters
    kind = parameters["rope_type"]
    if kind not in FIXED_TYPES:
        raise ValueError(
            f"convert: rope_type must be one of {', '.join(FIXED_TYPES)}, whose angles do not depend on the length of "
            f"the sequence, got {kind!r}; set config.rope_parameters to one of them (positions in htree attention stay "
            "below top_k_per_layer * compression_rate, so long sequences need no scaling), or leave the model dense"
        )
    part = parameters.get("partial_rotary_factor")
    rope_dim = head_dim if part is None else int(head_dim * part)
    if rope_dim % 2 or not 0 < rope_dim <= head_dim:
        raise ValueError(
            f"convert: partial_rotary_factor must leave an even number of the {head_dim} elements of a head to rotate, "
            f"got {part}; leave the model dense"
        )
    interleaved = config.model_type in INTERLEAVED
    if kind == "default":
        return Rotation(float(parameters["rope_theta"]), None, 1.0, rope_dim, interleaved)
    compute = ROPE_INIT_FUNCTIONS[kind]
    with torch.device("cpu"):  # also where a model is being made on the meta device
        table, factor = compute(config, torch.device("cpu"), **({"layer_type": layer_type} if by_type else {}))
    if table.numel() != rope_dim // 2:
        raise ValueError(
            f"convert: rope_type {kind!r} must give an angle for each of {rope_dim // 2} pairs, got {table.numel()}"
        )
    return Rotation(None, tuple(table.tolist()), float(factor), rope_dim, interleaved)
