"""Context parallelism with the kernels: two GPUs against one, bit for bit; and what one process can show of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import htree_cuda
from htree_cuda import distributed as cp
from htree_cuda import kernels

from ..bits import same_bits
from .test_backward import forward, gradients, inputs, tree_params

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RANKS = Path(__file__).with_name("context_parallel_ranks.py")
CHECKS = re.findall(r"^def (check_\w+)", RANKS.read_text(), re.MULTILINE)
WALL_LIMIT_S = 120  # of ranks that take 7 s on two H100


@pytest.mark.sample
@pytest.mark.emulated
def test_sums_are_added_in_float32():
    """Rounded they are what the op returns; on numbers that are there they come on top, rounded once in float32."""
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs(290, 7, G=3))
    expected, _ = gradients(q, k, v, dout, dlse, top_k_per_layer=16, q_start=283)
    params = tree_params(q, k, v, q_start=283, top_k_per_layer=16)
    results = forward(q, k, v, top_k_per_layer=16, q_start=283)
    found = []
    for before in (torch.zeros, torch.randn):
        sums = [before(x.shape, dtype=torch.float32).to(DEVICE) for x in (k, v)]
        added = [x.clone() for x in sums]
        dq = torch.empty_like(q)
        workspace = torch.empty(kernels.backward_workspace(q, k, v, params), dtype=torch.uint8, device=DEVICE)
        kernels.backward(dout, dlse, q, k, v, *results, dq, *added, workspace, params)
        same_bits([dq.cpu()], expected[:1])
        found.append((sums, added))
    plain = found[0][1]
    same_bits([x.cpu().to(torch.bfloat16) for x in plain], expected[1:])
    for before, own, after in zip(found[1][0], plain, found[1][1], strict=True):
        assert torch.equal(before + own, after)


@pytest.mark.sample
@pytest.mark.emulated
@pytest.mark.parametrize(("G", "remade"), [(3, False), (16, True)])
def test_some_heads_of_a_call(G, remade):
    """A call for some KV heads reads and writes views of tensors that have all of them, and leaves the others alone;
    its selection is a view as well, or was made again for its heads."""
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs(290, 5, H_kv=3, G=G))
    options = {"top_k_per_layer": 16, "q_start": 285}
    expected, _ = gradients(q, k, v, dout, dlse, **options)
    out, lse, selection = forward(q, k, v, **options)
    dq = torch.full_like(q, 7.0)
    untouched = dq[:, :, 2 * G :].clone()
    for heads in (slice(0, 1), slice(1, 2)):
        own = slice(heads.start * G, heads.stop * G)
        k_own, v_own = k[:, :, heads], v[:, :, heads]
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=DEVICE) for x in (k_own, v_own)]
        part = (600, 3, 1 if remade else 0)  # as if the queries were 5 of 600
        own_selection = selection[:, :, :, heads].contiguous() if remade else selection[:, :, :, heads]
        params = tree_params(q[:, :, own], k_own, v_own, **options)
        size = kernels.backward_workspace(q[:, :, own], k_own, v_own, params, part=part)
        workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        views = [x[:, :, own] for x in (dout, dlse, q)] + [k_own, v_own] + [x[:, :, own] for x in (out, lse)]
        kernels.backward(*views, own_selection, dq[:, :, own], *sums, workspace, params, part=part)
        same_bits([dq[:, :, own].cpu()], [expected[0][:, :, own]])
        same_bits([x.cpu().to(torch.bfloat16) for x in sums], [x[:, :, heads] for x in expected[1:]])
    same_bits([dq[:, :, 2 * G :]], [untouched])


@pytest.mark.emulated
@pytest.mark.parametrize("G", [pytest.param(3, marks=pytest.mark.sample), 16])
def test_runs_of_queries(G):
    """Queries in tensors of their own, two runs that touch, and one far from them and behind: the bits of one call, dk
    and dv but for the order of their sums. Written sums are those that are added to zeros."""
    start, n, H_kv = 260, 30, 2
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs(start + n, n, H_kv=H_kv, G=G))
    options = {"top_k_per_layer": 16, "q_start": start}
    expected, _ = gradients(q, k, v, dout, dlse, **options)
    results = forward(q, k, v, **options)
    runs, rows = [], [slice(12, 21), slice(21, 30), slice(2, 9)]
    for own in rows:
        x = q[:, own].clone()
        shapes = [[1, x.shape[1], *y.shape[2:]] for y in results[:2]]
        out, lse = (torch.full(shape, 7.0, dtype=y.dtype, device=DEVICE) for shape, y in zip(shapes, results))
        selection = torch.full([1, 1, x.shape[1], H_kv, 16], -1, dtype=torch.int32, device=DEVICE)
        params = tree_params(x, k, v, top_k_per_layer=16, q_start=start + own.start)
        of_own = dout[:, own].clone(), dlse[:, own].clone(), torch.full_like(x, 7.0)
        runs.append(kernels.Run(x, out, lse, selection, params, None, *of_own))
    workspace = torch.empty(kernels.forward_runs_workspace(runs, k, v), dtype=torch.uint8, device=DEVICE)
    kernels.forward_runs(runs, k, v, workspace)
    for run, own in zip(runs, rows, strict=True):
        same_bits([run.out, run.lse, run.selection], [x[:, own] for x in results[:2]] + [results[2][:, :, own]])
    found = []
    for add in (False, True):
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=DEVICE) for x in (k, v)]
        if not add:
            for x in sums:
                x.fill_(7.0)
        workspace = torch.empty(kernels.backward_runs_workspace(runs, k, v), dtype=torch.uint8, device=DEVICE)
        kernels.backward_runs(runs, k, v, *sums, workspace, add=add)
        for run, own in zip(runs, rows, strict=True):
            same_bits([run.dq.cpu()], [expected[0][:, own]])
        found.append(sums)
    same_bits(*found)
    # The gradients of k and v: those of one call in which the other queries have none.
    rest = torch.ones(n, dtype=torch.bool)
    for own in rows:
        rest[own] = False
    dout[:, rest], dlse[:, rest] = 0, 0
    for x, y in zip(found[0], gradients(q, k, v, dout, dlse, **options)[0][1:], strict=True):
        x, y = x.cpu(), y.float()
        assert ((x - y).abs() / (y.abs() + 2.0**-7 * y.abs().max())).max() <= 2.0**-6 and y.abs().max() > 0


@pytest.mark.parametrize(
    ("shape", "top_k", "head_chunks"),
    [({"T": 290, "T_q": 290, "G": 3}, 16, 1), ({"T": 5000, "T_q": 3000, "H_kv": 3, "K": 128, "V": 128}, 32, 3)],
)
def test_gradients_come_behind_an_event(shape, top_k, head_chunks):
    """What another stream writes to dk and dv before the event, however late, is gone; the gradients of the first of
    several chunks of KV heads are written on a second stream."""
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs(**shape))
    results = forward(q, k, v, top_k_per_layer=top_k)
    params = tree_params(q, k, v, top_k_per_layer=top_k)
    launches = kernels.explain_backward(q, k, v, params, sms=132)
    assert [x["launches"] for x in launches if x["phase"] == "distribute"] == [2 * head_chunks]
    run = kernels.Run(q, *results, params, None, dout, dlse, torch.empty_like(q))
    workspace = torch.empty(kernels.backward_runs_workspace([run], k, v), dtype=torch.uint8, device=DEVICE)
    late, expected = ([torch.zeros(x.shape, dtype=torch.float32, device=DEVICE) for x in (k, v)] for _ in range(2))
    for x in late:
        x.fill_(torch.nan)  # a kernel's first launch may wait for the device
    kernels.backward_runs([run], k, v, *expected, workspace, add=False)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)  # some 60 ms
        for x in late:
            x.fill_(torch.nan)
        event = other.record_event()
    kernels.backward_runs([run], k, v, *late, workspace, add=False, before_dkv=event)
    assert not event.query()
    torch.cuda.synchronize()
    same_bits(late, expected)


@pytest.mark.emulated
def test_runs_of_few_queries():
    """So few that only the blocks that they select are packed, those of each run one behind another: the bits of calls
    for one run."""
    T, H_kv = 6500, 2
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 64, generator=g).bfloat16().to(DEVICE) for n, h in ((20, 6), (T, 2), (T, 2)))

    def runs(*cuts):
        for begin, end in cuts:
            x = q[:, begin:end].clone()
            params = tree_params(x, k, v, top_k_per_layer=16, q_start=T - 20 + begin)
            selection = torch.full((2, 1, end - begin, H_kv, 16), -1, dtype=torch.int32, device=DEVICE)
            yield kernels.Run(
                x, torch.full_like(x, 7.0), torch.full(x.shape[:3], 7.0, device=DEVICE), selection, params
            )

    def call(found):
        workspace = torch.empty(kernels.forward_runs_workspace(found, k, v), dtype=torch.uint8, device=DEVICE)
        kernels.forward_runs(found, k, v, workspace)
        return found

    cuts = (0, 12), (12, 20)
    for several, one in zip(call(list(runs(*cuts))), runs(*cuts), strict=True):
        same_bits(
            [several.out, several.lse, several.selection],
            [getattr(call([one])[0], n) for n in ("out", "lse", "selection")],
        )


def test_what_runs_of_queries_may_be():
    """Refused before any launch."""
    q, k, v, *_ = (x.to(DEVICE) for x in inputs(40, 40, B=2))
    two, one = (kernels.Run(x, x, x, None, tree_params(x, k[:1], v[:1])) for x in (q[:1, :4], q[:1, :1]))
    for runs, keys in (([two, one], slice(0, 1)), ([], slice(0, 1)), ([two._replace(q=q[:, :4])] * 2, slice(0, 2))):
        for workspace in (kernels.forward_runs_workspace, kernels.backward_runs_workspace):
            with pytest.raises(ValueError, match="run"):
                workspace(runs, k[keys], v[keys])


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.emulated
@pytest.mark.parametrize(("T", "B", "H_kv", "G"), [(300, 1, 1, 3), (92, 2, 2, 2)])
def test_one_rank_in_two_pieces(group, T, B, H_kv, G):
    """The pieces of a sequence over the tokens up to each one's end: the bits of the whole, dk and dv but for the order
    of two sums."""
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs(T, T, B=B, H_kv=H_kv, G=G))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"top_k_per_layer": 16, "return_lse": True, "return_selection": True}
    whole = htree_cuda.forward(*leaves, **options)
    found = cp.context_parallel_forward(*leaves, group=group, layout="zigzag", **options)
    assert all(torch.equal(x, y) for x, y in zip(found, whole, strict=True))
    (dq, *dkv), (own_dq, *own_dkv) = (torch.autograd.grad(x[:2], leaves, (dout, dlse)) for x in (whole, found))
    assert torch.equal(dq, own_dq)
    for x, y in zip(own_dkv, dkv, strict=True):
        error = (x.float() - y.float()).abs() / (y.float().abs() + 2.0**-7 * y.float().abs().max())
        assert error.max() <= 2.0**-6


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks said of each check, on two GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are needed, there is {torch.cuda.device_count()}")
    folder, world = tmp_path_factory.mktemp("ranks"), 2
    logs = [folder / f"log.{rank}" for rank in range(world)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, RANKS, str(rank), str(world), folder / "rendezvous", folder / "said"]
            with open(log, "w") as file:  # a pipe that nobody reads would stop a rank that says much
                ranks.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
        end = time.monotonic() + WALL_LIMIT_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.returncode for rank in ranks):  # the others wait for it in vain
                end = min(end, time.monotonic() + 10)
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    files = [folder / f"said.{rank}" for rank in range(world)]
    said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [(row, log.read_text()[-3000:]) for row, log in zip(said, logs, strict=True)]


@pytest.mark.hardware
@pytest.mark.parametrize("name", CHECKS)
def test_two_gpus(said, name):
    """A rank ends at the first check that fails: what comes after it was not reached."""
    for rank, (row, log) in enumerate(said):
        assert row.get(name, f"not reached; the rank's last words:\n{log}") == "", f"rank {rank}"
