"""The emulator itself: small kernels that are right give the right numbers, small kernels that are wrong are caught."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from tools.ptx_emulator import SAMPLE, build, make, why_not
from tools.ptx_emulator.translate import registers_at_launch

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "available")


@pytest.fixture(scope="module")
def faults():
    library = ctypes.CDLL(str(make.build_faults()))
    library.run_fault.restype = ctypes.c_char_p
    library.run_fault.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.emulator_configure.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_bool]
    library.emulator_allow.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def run(which, a, out, b=None, number=0, seed=0, races=False):
        library.emulator_configure(seed, 3, races)
        library.emulator_forget_allocations()
        tensors = [a, out] + ([] if b is None else [b])
        for x in tensors:
            library.emulator_allow(x.data_ptr(), x.numel() * x.element_size())
        out.fill_(float("nan"))
        return library.run_fault(which, a.data_ptr(), 0 if b is None else b.data_ptr(), out.data_ptr(), number).decode()

    return run


SEEDS = range(12)


def test_a_relay_through_shared_memory(faults):
    a, out = torch.randn(128), torch.empty(128)
    for seed in SEEDS:
        assert faults(0, a, out, seed=seed) == ""
        assert torch.equal(a, out)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (1, "without fence.proxy.async"),
        (3, "rewritten while a bulk store was reading it"),
        (4, "deadlock"),
    ],
)
def test_a_wrong_relay_is_noticed(faults, which, message):
    a, out = torch.randn(128), torch.empty(128)
    for seed in SEEDS:
        assert message in faults(which, a, out, seed=seed)


def test_copies_that_nobody_waited_for_have_not_landed(faults):
    """Either the fence is too early for them, or their bytes are still NaN."""
    a, out = torch.randn(128), torch.empty(128)
    for seed in SEEDS:
        message = faults(2, a, out, seed=seed)
        assert "without fence.proxy.async" in message or out.isnan().any()


def test_global_bounds(faults):
    a, out = torch.randn(64), torch.empty(32)
    assert faults(10, a[:32], out) == "" and torch.equal(out, a[:32])
    assert "outside every allocation: 128 bytes into one of 128" in faults(10, a[:32], out, number=1)
    assert "outside every allocation" in faults(10, a[8:40], out, number=-1)


def test_a_grid_waits_for_the_one_before_it(faults):
    a, out = torch.randn(32), torch.empty(32)
    assert faults(90, a, out) == "" and torch.equal(out, a)
    assert "global memory before griddepcontrol.wait" in faults(91, a, out)
    assert "launch_dependents before griddepcontrol.wait" in faults(92, a, out)


def test_shared_bounds(faults):
    a, out = torch.randn(1), torch.empty(32)
    assert faults(11, a, out) == "" and (out == 1).all()
    assert "shared memory access of 4 bytes at 128 of 128" in faults(11, a, out, number=1)


def test_lost_updates_show(faults):
    a, out = torch.randn(1), torch.empty(64)
    totals = set()
    for seed in SEEDS:
        assert faults(20, a, out, seed=seed) == "" and (out == 64 * 20).all()
        assert faults(21, a, out, seed=seed) == ""
        totals.add(float(out[0]))
    assert min(totals) < 64 * 20 and len(totals) > 1


def test_warps_meet(faults):
    a, out = torch.randn(32), torch.empty(32)
    for seed in SEEDS:
        assert faults(30, a, out, seed=seed) == ""
        torch.testing.assert_close(out, a.sum().expand(32))
        assert "deadlock" in faults(31, a, out, seed=seed)


def test_warpgroup_products(faults):
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    out = torch.empty(64, 8)
    exact = a.double() @ b.double().T
    for seed in SEEDS:
        assert faults(40, a, out, b, seed=seed) == ""
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        assert faults(41, a, out, b, seed=seed) == ""
        assert out[:, ::2].isnan().any()  # the register of a product in flight
        assert "rewritten in shared memory while it was in flight" in faults(42, a, out, b, seed=seed)
        assert "wgmma reads shared memory" in faults(43, a, out, b, seed=seed)


def test_products_of_transposed_operands(faults):
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    out = torch.empty(64, 8)
    exact = a.double().T @ b[:, :8].double()
    for seed in SEEDS:
        assert faults(52, a, out, b, seed=seed) == ""
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("which", "depth"), [(49, 16), (51, 8)])
def test_products_with_sums_in_half(faults, which, depth):
    a, b = torch.randn(16, depth).half(), torch.randn(8, depth).half()
    out = torch.empty(16, 8)
    for seed in SEEDS:
        assert faults(which, a, out, b, seed=seed) == ""
        torch.testing.assert_close(out.half(), (a.double() @ b.double().T).half(), rtol=1e-3, atol=1e-3)
        assert faults(which, torch.eye(16)[:, :depth].half().contiguous(), out, b, seed=seed) == ""
        assert torch.equal(out[:depth], b.T.float())


def test_the_warps_of_a_product_are_on_their_own(faults):
    """One that writes over an operand when its own part is done has not waited for the others."""
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    out = torch.empty(64, 8)
    exact = a.double() @ b.double().T
    rewritten = 0
    for seed in SEEDS:
        for races in (False, True):
            assert faults(44, a, out, b, seed=seed, races=races) == ""
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        assert "a race on shared memory" in faults(45, a, out, b, seed=seed, races=True)
        rewritten += "rewritten in shared memory while" in faults(45, a, out, b, seed=seed)
        assert "no wgmma.fence" in faults(46, a, out, b, seed=seed)
        assert "the warps of a warpgroup disagree: wgmma.mma_async" in faults(47, a, out, b, seed=seed)
        assert "the warps of a warpgroup disagree" in faults(48, a, out, b, seed=seed)
    assert rewritten > 0


@pytest.mark.parametrize(("right", "wrong"), [(60, 61), (62, 63), (64, 65), (66, 67)])
def test_races_show_in_every_schedule(faults, right, wrong):
    """A barrier, bar.warp.sync, an mbarrier, and one back: without them, or with the access on their other side."""
    a, out = torch.randn(32).repeat(2), torch.empty(64)
    for seed in SEEDS:
        assert faults(right, a, out, seed=seed, races=True) == ""
        assert torch.equal(a, out)
        assert "a race on shared memory at" in faults(wrong, a, out, seed=seed, races=True)


def test_blocks_of_a_launch_do_not_read_from_each_other(faults):
    a, out = torch.randn(64), torch.empty(64)
    assert faults(80, a, out, races=True) == "" and torch.equal(a, out)
    assert "a race on global memory: a read of what block 0" in faults(81, a, out, races=True)


def test_bulk_copies_over_ordinary_stores_come_after_a_fence(faults):
    a, out = torch.randn(32), torch.empty(32)
    for seed in SEEDS:
        assert faults(82, a, out, seed=seed, races=True) == "" and torch.equal(a, out)
        assert "cp.async.bulk writes shared memory" in faults(83, a, out, seed=seed)


def test_a_warp_that_asks_again_keeps_no_copy_from_landing(faults):
    a, out = torch.randn(32), torch.empty(32)
    for seed in SEEDS:
        assert faults(84, a, out, seed=seed) == "" and torch.equal(a, out)


def test_registers_that_setmaxnreg_may_take(faults):
    a, out = torch.randn(384), torch.empty(384)
    for seed in SEEDS:
        assert faults(70, a, out, seed=seed) == ""
        assert torch.equal(a, out)
        assert "registers: 240 a thread, 168 held" in faults(71, a, out, seed=seed)
        assert "the warps of a warpgroup disagree: setmaxnreg" in faults(72, a, out, seed=seed)


def test_ptxas_grants_the_registers_that_the_emulator_counts():
    """What setmaxnreg shares out is what the real build gave a thread, not only what its launch bounds allow."""
    build(SAMPLE)
    seen = 0
    for source in make.sources(SAMPLE):
        log = make.real_log(source)
        if not log.exists():
            pytest.skip("needs the compiled kernels: make check-kernels")
        given = dict(re.findall(r"Compiling entry function '(\S+)'(?:.*\n)*?.*Used (\d+) registers", log.read_text()))
        path = make.ptx(source)
        for name, directives, body in re.findall(
            r"\.entry (\w+)\([^{]*?\)([^{]*)(\{.*?^\})", path.read_text(), re.M | re.S
        ):
            if "setmaxnreg" in body:
                assert int(given[name]) == registers_at_launch(directives), name
                seen += 1
    assert seen


@pytest.mark.parametrize("races", [False, True])
def test_clusters_exchange(faults, races):
    a, out = torch.randn(64), torch.empty(64)
    for seed in SEEDS:
        for which in (50, 53, 55):
            assert faults(which, a, out.fill_(0), seed=seed, races=races) == ""
            assert torch.equal(out, a.roll(32))


def test_a_block_that_is_read_by_others_has_to_stay(faults):
    a, out = torch.randn(64), torch.empty(64)
    messages = [faults(56, a, out, seed=seed) for seed in SEEDS]
    assert any("shared memory of a block whose threads have all ended" in message for message in messages)


def test_stores_that_nobody_waited_for_have_not_landed(faults):
    a, out, noticed = torch.randn(64), torch.empty(64), 0
    for seed in SEEDS:
        message = faults(54, a, out, seed=seed)
        noticed += message != "" or not torch.equal(out, a.roll(32))
    assert noticed == len(SEEDS)
