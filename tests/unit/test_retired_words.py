"""The words that `make lint` knows as retired."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())
sys.path.insert(0, str(ROOT / "tools"))
import retired_words  # noqa: E402


@pytest.mark.parametrize(
    ("path", "line", "word"),
    [
        ("csrc/tree/rope.cuh", "struct alignas(16) TurnColumns {", "turn"),
        ("csrc/sm90/htree_bwd/dq_entry.cuh", "uint32_t const fragment_turns;", "turns"),
        ("csrc/tree/geometry.cuh", "inline int first_layer(std::int64_t t, int top_k) {", "first layer"),
        ("docs/algorithm.md", "In the First Layer of a query", "first layer"),
        ("docs/numerics.md", "A normaliser for each head.", "normaliser"),
        ("csrc/sm90/htree_bwd/traits.cuh", "static constexpr int kMostShared = 1;", "k most"),
        ("csrc/sm90/htree_fwd/softmax.cuh", "bool const raised = softmax.raised();", "raised"),
        ("csrc/tree/select.h", "std::uint16_t* closed;", "closed"),
        ("htree_cuda/ops.py", "equal to the bit", "to the bit"),
        ("htree_cuda/torch_backend/tree.py", "class _Walk:", "walk"),
        ("docs/algorithm.md", "Ascending, nothing beyond the rightmost.", "nothing beyond"),
        ("docs/numerics.md", "The maximum is raised only then.", "raised"),
        ("docs/kernels/tree.md", "Mostly its own beginning.", "beginning"),
        ("docs/sanitizers.md", "Each warp of its nodes kernel.", "nodes kernel"),
        ("benchmarks/README.md", "Timed in turn with its peer.", "turn"),
    ],
)
def test_retired_words_are_named(path, line, word):
    problems = retired_words.in_line(path, line)
    assert len(problems) == 1 and problems[0].startswith(f'"{word}" is retired: say ')


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/device/ptx.cuh", "return value;  // what a lane returns"),
        ("csrc/device/ptx.cuh", "__device__ __forceinline__ void raise_registers() {"),
        ("csrc/device/ptx.cuh", "// Until at most kPending groups are in flight."),
        ("htree_cuda/ops.py", 'raise ValueError("q is closed")'),
        ("htree_cuda/bench/runner.py", '"clocks": read_clocks(),'),
        ("docs/numerics.md", "At most two rows, the first of the layer, saturate."),
        ("docs/guides/install.md", "Turn off the check."),
        ("docs/guides/dsa.md", "Second derivatives raise."),
        ("docs/guides/demo.md", "Memory is the peak beyond the inputs."),
        ("htree_cuda/demo/text.py", "for folder, folders, files in os.walk(root):"),
        ("docs/architecture.md", "| rotate | turn, turned |"),
    ],
)
def test_other_meanings_pass(path, line):
    assert retired_words.in_line(path, line) == []


def test_the_tree_is_read(tmp_path):
    (tmp_path / "csrc" / "device").mkdir(parents=True)
    (tmp_path / "csrc" / "device" / "gather.cuh").write_text("// Rows.\n// Rows that turned.\n")
    (tmp_path / "README.md").write_text("It walks.\n")
    problem = 'csrc/device/gather.cuh:2: "turned" is retired: '
    assert [p.startswith(problem) for p in retired_words.check(tmp_path)] == [True]
    assert retired_words.check(ROOT) == []
