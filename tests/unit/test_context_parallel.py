"""htree_cuda.distributed on gloo: 2 and 4 processes on a CPU against one, in float64, and its rules in this one."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import htree_cuda
from htree_cuda import distributed as cp
from htree_cuda.bench import cli
from htree_cuda.bench import context_parallel as bench
from htree_cuda.bench.inputs import visited
from htree_cuda.distributed import balance
from tools.update_docs import context_parallel as docs

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

RANKS = Path(__file__).with_name("context_parallel_ranks.py")
CHECKS = re.findall(r"^def (check_\w+)", RANKS.read_text(), re.MULTILINE)
WALL_LIMIT_S = 240  # of all checks of a number of ranks, on a busy machine: what hangs ends here


@pytest.fixture(scope="module", params=[2, 4])
def said(request, tmp_path_factory):
    """What every rank said of each check. Processes start once for each number of ranks."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    command = [sys.executable, str(RANKS)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / "rendezvous"), str(folder / "said")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=WALL_LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    files = [folder / f"said.{rank}" for rank in range(world)]
    assert all(file.exists() for file in files), "\n".join(outputs)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(said, name):
    if not any(name in row for row in said):
        pytest.skip("two ranks show it")
    for rank, row in enumerate(said):
        assert row[name] == "", f"rank {rank}: {row[name]}"


# ----------------------------------------------------------------------------------------------- rules, in one process


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A group of this process alone."""
    path = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def qkv(T=16, dtype=torch.float64):
    return [torch.randn(1, T, h, 4, dtype=dtype) for h in (4, 2, 2)]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_rank_equals_forward(group, layout):
    options = {"compression_rate": 4, "top_k_per_layer": 2}
    leaves = [x.requires_grad_() for x in qkv(48)]
    expected = htree_cuda.forward(*leaves, **options, return_lse=True)
    found = cp.context_parallel_forward(*leaves, group=group, layout=layout, **options, return_lse=True)
    grads = [torch.randn_like(x) for x in expected]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    for x, y in zip(
        torch.autograd.grad(found, leaves, grads), torch.autograd.grad(expected, leaves, grads), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_autocast_casts_as_forward_does(group):
    tensors = qkv(32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = cp.context_parallel_forward(*tensors, group=group, layout="contiguous", top_k_per_layer=2)
        expected = htree_cuda.forward(*tensors, top_k_per_layer=2)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()])
def test_second_derivatives_raise(group, loss):
    leaves = [x.requires_grad_() for x in qkv()]
    out = cp.context_parallel_forward(*leaves, group=group)
    grads = torch.autograd.grad(loss(out), leaves, create_graph=True)
    for grad in grads:
        assert grad.requires_grad
        with pytest.raises(RuntimeError, match=r"once_differentiable|second derivatives"):
            grad.square().sum().backward(retain_graph=True)


def test_a_number_may_be_any_int(group):
    q, k, v = qkv()
    expected = htree_cuda.forward(q, k, v, scale=2**70)
    assert torch.equal(cp.context_parallel_forward(q, k, v, group=group, scale=2**70), expected)


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        (r"layout must be one of 'contiguous', 'zigzag', got 'striped'", ValueError, {"layout": "striped"}),
        (r"group must be a .*ProcessGroup or a DeviceMesh, got None", TypeError, {"group": None}),
        (r"group must be a .*ProcessGroup that this rank is in, got 'cp'", TypeError, {"group": "cp"}),
        (r"T \(dimension 1 of k, times 1 ranks\) must be a multiple of the 2 parts .*, got 15", ValueError, {"T": 15}),
        (r".* must be at least 4, two tokens for each of the 2 parts, got 2", ValueError, {"T": 2}),
        (r".* must be at least 2, two tokens .*, got 1", ValueError, {"T": 1, "layout": "contiguous"}),
        (r"dimension 1 of q must equal the rank's tokens, dimension 1 of k \(16\), got 12", ValueError, {"T_q": 12}),
        (r"top_k_per_layer must be a power of two, at least 1, got 3", ValueError, {"top_k_per_layer": 3}),
        (r"return_lse must be a bool, got 1", TypeError, {"return_lse": 1}),
        (r"q must be a torch.Tensor, got None", TypeError, {"q": None}),
    ],
)  # fmt: skip
def test_errors(group, match, error, change):
    q, k, v = qkv(change.pop("T", 16))
    q = change.pop("q", q[:, : change.pop("T_q", q.shape[1])])
    with pytest.raises(error, match=rf"^context_parallel_forward: {match}"):
        cp.context_parallel_forward(q, k, v, **{"group": group, **change})


def test_errors_of_the_helpers(group):
    with pytest.raises(ValueError, match=r"^shard: dimension 1 of x must be a multiple of the 2 parts .*, got 5"):
        cp.shard(torch.zeros(2, 5), 1, group)
    with pytest.raises(ValueError, match=r"^shard: dim must lie in -2 .. 1, got 2"):
        cp.shard(torch.zeros(2, 4), 2, group)
    with pytest.raises(ValueError, match=r"^unshard: T \(dimension 0 of x, times 1 ranks\) must be at least 4"):
        cp.unshard(torch.zeros(2), 0, group)
    with pytest.raises(ValueError, match=r"^positions: T must be a multiple of the 2 parts"):
        cp.positions(7, group)
    with pytest.raises(TypeError, match=r"^positions: T must be an int, got 4.0"):
        cp.positions(4.0, group)


@pytest.mark.parametrize("name", cp.__all__)
def test_the_docstring_is_a_contract(name):
    text = inspect.getdoc(getattr(cp, name))
    found = re.findall(r"^(Args|Returns|Raises|Notes|Example|Source):", text, re.MULTILINE)
    assert found == ["Args", "Returns", "Raises", "Notes", "Example", "Source"]
    assert text.splitlines()[0].endswith(".") and f"`{name}`" in cp.__doc__
    described = text[text.index("Args:") : text.index("Raises:")]
    arguments = inspect.signature(getattr(cp, name)).parameters
    assert [argument for argument in arguments if not re.search(rf"\b{argument}\b", described)] == []


# --------------------------------------------------------------------------------------------------------- benchmark


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_zigzag_is_balanced_and_contiguous_is_not(part):
    """The counted imbalance, which the cost model takes: work of the busiest rank over the mean. With the loan of two
    ranks nothing is left of it, unless the backward lends all that the forward does and wants more."""
    for T, top_k in ((1 << 17, 64), (1 << 17, 512), (1 << 20, 64), (1 << 20, 512)):
        for ranks in (2, 4, 8):
            zigzag, contiguous = (bench.imbalance(T, ranks, x, top_k, 4, part) for x in ("zigzag", "contiguous"))
            plain = bench.imbalance(T, ranks, "zigzag", top_k, 4, part, lends=False)
            assert 1 <= zigzag <= plain < 1.048 and contiguous > 1.068 and plain <= contiguous + 1e-9
            loans = balance.loans(T, ranks, 4, 16, top_k, 16 * top_k)
            loan = getattr(loans, part)
            bounded = part == "backward" and loan is not None and loan.count == loans.forward.count
            assert (zigzag < 1.001) == (ranks == 2 and not bounded)
            assert not bounded or (T, top_k) == (1 << 20, 64)
            assert (loan is not None) == (ranks == 2) == (zigzag < plain)
        assert bench.imbalance(T, 1, "zigzag", top_k, 4, part) == 1


@pytest.mark.parametrize("weights", [*balance.weights(4), balance.BACKWARD, balance.Weights(1, 1, 3, 1, 1, 1)])
def test_work_is_counted_as_the_tree_is_walked(weights):
    """The candidates of selected layers and of the entry layer; up to the last node, of which the tree's own walk has
    fewer children, and but for the layers above, of which it takes all."""
    T, r, top_k = 4096, 4, 8
    for t in (0, 1, 30, 31, 32, 127, 128, 500, 511, 512, 2000, 4095):
        layers = 0
        while t // r**layers + 1 > top_k * r:
            layers += 1
        entry = t // r**layers + 1
        walked = visited(T, t, t + 1, r, top_k, top_k * r)[0]
        above = sum(t // r**l + 1 for l in range(layers + 1, 5))
        of_entry = (weights.bottom, weights.above_one, *[weights.above_more] * 4)[layers]
        of_selected = [0, weights.highest, *(weights.highest + weights.selected * n for n in (1, 2, 3))][layers]
        expected = of_selected * max(1, top_k * r - weights.free) + of_entry * entry
        assert balance.work_of(t, r, top_k, top_k * r, weights) == expected
        assert abs(walked - above - layers * top_k * r - entry) <= layers * r
    work = balance.Work(T, 4, r, top_k, top_k * r, weights)
    for position in (0, 1, 77, 2048, 4095, 4096):
        assert work.position(work.up_to(position)) in (position - 1, position)


@pytest.mark.parametrize("group_size", [1, 4, 16])
def test_a_loan_is_of_what_a_rank_has(group_size):
    """The last queries of the second of two ranks, at most half of a part and what memory allows; nothing where they
    are few; those of the backward among those of the forward."""
    lent = 0
    for T in (4 * n for n in (2, 37, 640, 5000, 40000)):
        for r, top_k, most in ((16, 64, 1024), (4, 2, 8), (2, 16, 100), (64, 16, 1024)):
            loans = balance.loans(T, 2, group_size, r, top_k, most)
            for loan in loans:
                if loan is not None:
                    lent += 1
                    assert (loan.lender, loan.borrower) == (1, 0) and loan.start + loan.count == 3 * T // 4
                    assert balance.MIN_ROWS <= loan.count <= min(T // 8, balance.most_rows(T, group_size))
            if loans.backward is not None:
                assert loans.backward.count <= loans.forward.count
            assert balance.loans(2 * T, 4, group_size, r, top_k, most) == (None, None)
    assert lent > 5


def test_the_benchmark_needs_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start it by torchrun"):
        cli.main(["context_parallel", "--device", "cpu", "--lengths", "256"])


def test_one_part_is_left_out(group):
    """Without exchange the results are those of a call, without compute nothing is computed, and both come back."""
    tensors = qkv(32)
    call = lambda: cp.context_parallel_forward(*tensors, group=group, top_k_per_layer=2)  # noqa: E731
    expected = call()
    with bench.no_exchange():
        assert torch.equal(call(), expected) and torch.equal(call(), expected)
    with bench.no_compute():
        leaves = [x.requires_grad_() for x in tensors]
        torch.autograd.grad(call().sum(), leaves)
    assert torch.equal(call(), expected)


def test_tables_of_the_guide(monkeypatch):
    """A shape that was measured twice is shown as it was last; what is computed says so."""
    monkeypatch.setattr(docs, "load_all", lambda pattern: [])
    monkeypatch.setattr(docs, "load", lambda name: None)
    assert docs.measured() == docs.model() == docs.NOT_MEASURED
    times = {"ms": 10.0, "overlap": 0.5, "to_model": 1.0, "gb_per_s": 100.0}
    both = {"forward": times, "backward": times, "ms": 20.0}
    figure = {
        "H": 16, "H_kv": 1, "K": 128, "top_k": 64, "T": 1 << 20, "layout": "zigzag", "ranks": 2, "inputs": "iid",
        **both, "one": {**both, "ms": 39.0}, "exchange": both, "compute": both, "weak": None, "speedup": 1.95,
        "imbalance": {"measured": 1.0, "counted": 1.0},
    }  # fmt: skip
    report = {"gpu": "H100", "driver": "1", "torch": "2", "date": "2026-01-01", "figures": [figure]}
    newer = {**report, "date": "2026-01-02", "figures": [{**figure, "speedup": 1.75}]}
    monkeypatch.setattr(docs, "load_all", lambda pattern: [report, newer])
    assert "1.75" in docs.measured() and "1.95" not in docs.measured()
    figures = [{**figure, "T_q": T, "T": T, "ms": T / 1000} for T in (1 << 15, 1 << 16)]
    monkeypatch.setattr(docs, "load", lambda name: {**report, "figures": figures})
    text = docs.model()
    assert text.startswith("**Computed, not measured.**") and "T 64K" in text and "the measured 66 ms" in text
    assert [line.split("|")[1].strip() for line in text.splitlines()[-3:]] == ["8", "64", "512"]
