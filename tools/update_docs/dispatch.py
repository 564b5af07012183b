"""Blocks that say which kernel runs for which shape, read from the dispatch data of csrc/."""

from __future__ import annotations

import re

from .common import ROOT, markdown

FORWARD = re.compile(
    r"\{Pass::k(\w+),\s*DType::k(\w+),\s*(\d+),\s*"
    r"\{(\d), (\d)\},\s*\"([^\"]*)\"\}"
)
BACKWARD = re.compile(
    r"\{Kernel::k\w+,\s*\"(\w+)\",\s*Ctas::k(\w+),\s*Order::k(\w+),\s*Calls::k(\w+),\s*"
    r"\"([^\"]*)\",\s*\"([^\"]*)\"\}"
)
ORDERS = {"OnlySelected": "where a query has selected layers", "BesideSelected": "beside `dkdv_selected`"}
CALLS = {"All": "all", "HandingOver": "bf16, groups up to 8", "Others": "others"}
DTYPES = {"BFloat16": "bfloat16", "Float16": "float16"}


def rules(op: str, pattern: re.Pattern) -> list[tuple[str, ...]]:
    """The rows of kRules in the op's dispatch.h, every one of them."""
    text = (ROOT / "csrc" / "sm90" / op / "dispatch.h").read_text()
    (table,) = re.findall(r"kRules\[\] = \{\n(.*?)\n\};", text, re.DOTALL)
    found = pattern.findall(table)
    if not found or len(found) != len(re.findall(r"^    \{", table, re.MULTILINE)):
        raise SystemExit(f"csrc/sm90/{op}/dispatch.h: {len(found)} rows of kRules are understood, not all")
    return found


def forward_rules() -> str:
    """One row a rule of the forward; the first that matches holds."""
    rows = []
    for which, dtype, group, selected, entry, reason in rules("htree_fwd", FORWARD):
        swap = ", swap A/B" if selected != "1" else ""
        rows.append([which.lower(), DTYPES[dtype], group, f"{selected}{swap}", entry, reason])
    header = ["pass", "dtype", "group up to", "queries a warp, selected", "queries a warp, entry", "why"]
    return markdown(header, rows)


def backward_rules() -> str:
    """One row a matrix kernel of the backward, in the order in which a chunk runs them."""
    rows = [
        [
            f"`{name}`", ORDERS.get(order, "in this order"), CALLS[calls],
            "persistent" if ctas == "Persistent" else "one for its queries", tile, reason,
        ]
        for name, ctas, order, calls, tile, reason in rules("htree_bwd", BACKWARD)
    ]  # fmt: skip
    return markdown(["kernel", "when", "calls", "CTAs", "tile", "why"], rows)


BLOCKS = {"forward_rules": forward_rules, "backward_rules": backward_rules}
