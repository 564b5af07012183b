"""What the library says that a call launches: each query once a layer, by the kernel of its group and dtype."""

from __future__ import annotations

import itertools

import pytest

from htree_cuda import kernels

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.emulated, pytest.mark.sample]


def explain(T, *, T_q=None, B=1, H_kv=1, G=16, K=64, V=64, top_k=16, dtype="bfloat16", selection=False, backward=False):
    module = kernels.load()
    T_q = T if T_q is None else T_q
    params = module.ForwardParams(
        q=(0, 0, 0, 0), k=(0, 0, 0, 0), v=(0, 0, 0, 0), B=B, T=T, T_q=T_q, q_start=T - T_q, H_kv=H_kv,
        G=G, K=K, V=V, top_k=top_k, scale=1.0, rope_base=1e4, strict_causal=True,
        dtype=getattr(module.DType, dtype),
    )  # fmt: skip
    if backward:
        return module.explain_backward(params, processors=132)
    return module.explain_forward(params, selection=selection, processors=132)


def rows(told, phase, layer=None):
    return [row for row in told if row["phase"] == phase and layer in (None, row["layer"])]


@pytest.mark.parametrize(("T", "T_q"), [(100, 100), (5000, 5000), (70000, 70000), (70000, 1), (1 << 20, 64)])
@pytest.mark.parametrize("G", [1, 6, 16])
def test_every_query_attends_every_layer_from_its_entry_layer_down_once(T, T_q, G):
    """In an attend pass the kinds of a layer share the queries without gaps; a score pass has those that select."""
    top_k = 16
    told = explain(T, T_q=T_q, G=G, B=2, H_kv=3)
    for layer in {row["layer"] for row in rows(told, "attend")}:
        ranges = sorted((row["first_query"], row["end_query"]) for row in rows(told, "attend", layer))
        first = 0 if layer == 0 else top_k * 16**layer
        assert ranges[0][0] == max(first, T - T_q) and ranges[-1][1] == T
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        scored = sorted((row["first_query"], row["end_query"]) for row in rows(told, "score", layer))
        assert bool(scored) == (layer > 0)
        assert not scored or (scored[0][0], scored[-1][1]) == (ranges[0][0], T)
    entry = [row for row in rows(told, "attend", 0) if row["kind"] == "entry"]
    if T == T_q == 100:
        assert [row["pairs"] for row in entry] == [6 * sum(t // 16 + 1 for t in range(T))]


@pytest.mark.parametrize(("G", "dtype", "name"), [
    (16, "bfloat16", "bf16, 64 x 64, attend, 1, 1"), (9, "float16", "fp16, 64 x 64, attend, 1, 1"),
    (8, "bfloat16", "bf16, 64 x 64, attend, 2, 2"), (4, "bfloat16", "bf16, 64 x 64, attend, 4, 4"),
    (8, "float16", "fp16, 64 x 64, attend, 2, 2"), (1, "float16", "fp16, 64 x 64, attend, 4, 4"),
])  # fmt: skip
def test_the_group_and_the_dtype_choose_the_kernel_of_the_bottom(G, dtype, name):
    told = explain(9000, G=G, dtype=dtype)
    assert {row["kernel"] for row in rows(told, "attend", 0)} == {f"htree_fwd_kernel<{name}>"}
    one_query = name.rsplit(", ", 2)[0] + ", 1, 1"
    told = explain(9000, T_q=1, G=G, dtype=dtype)
    assert {row["kernel"] for row in rows(told, "attend", 0)} == {f"htree_fwd_kernel<{one_query}>"}


@pytest.mark.parametrize(("G", "dtype", "name"), [
    (16, "bfloat16", "64, score, 1, 1"), (8, "bfloat16", "64, score, 2, 2"), (3, "bfloat16", "64, score, 4, 4"),
    (16, "float16", "64, score, 1, 1"), (8, "float16", "64, score, 2, 2"), (3, "float16", "64, score, 4, 4"),
])  # fmt: skip
def test_the_group_and_the_dtype_choose_the_kernel_of_score_passes(G, dtype, name):
    """The same in selected layers, which a query of three layers has above the bottom, and in entry layers."""
    told = explain(9000, G=G, dtype=dtype)
    assert {row["kind"] for row in rows(told, "score", 1)} >= {"entry", "selected"}
    assert {row["kernel"] for row in rows(told, "score")} == {f"htree_fwd_kernel<{name}>"}


def test_layers_that_are_half_selected_are_those_of_bf16_above_the_bottom():
    kinds = {row["kind"] for row in rows(explain(100000), "attend", 1)}
    assert kinds == {"entry", "half-selected", "selected"}
    assert {row["kind"] for row in rows(explain(100000, dtype="float16"), "attend", 1)} == {"entry", "selected"}
    assert {row["kind"] for row in rows(explain(100000, G=8), "attend", 1)} == {"entry", "selected"}
    assert {row["kind"] for row in rows(explain(100000), "attend", 0)} == {"entry", "selected"}


def test_steps_come_in_the_order_of_a_call():
    told = explain(100000, selection=True)
    packs = len(rows(told, "pack"))
    assert [row["phase"] for row in told[: 2 + packs]] == ["rotations", "pool", *["pack"] * packs]
    layers = [row["layer"] for row in told[2 + packs :]]
    assert layers == sorted(layers, reverse=True)
    bottom = [row["phase"] for row in told[2 + packs :] if row["layer"] == 0]
    assert bottom == sorted(bottom, key=["union", "gather", "attend"].index)
    above = [row["phase"] for row in told[2 + packs :] if row["layer"] == 1]
    assert above == sorted(above, key=["union", "gather", "score", "select", "attend"].index)
    assert all(row["reason"] and row["launches"] > 0 for row in told)


def test_head_dimensions_that_were_not_built_are_refused():
    if kernels.mixed_dims():
        assert explain(100, K=64, V=128)
    else:
        with pytest.raises(ValueError, match=r"explain_forward: K and V must be equal .* got 64 and 128"):
            explain(100, K=64, V=128)


@pytest.mark.parametrize(("T", "T_q", "top_k"), [(100, 100, 16), (5000, 5000, 16), (70000, 70000, 16), (70000, 1, 512)])
def test_pairs_of_the_backward_are_those_of_the_definition(T, T_q, top_k):
    """A query visits all blocks up to its own in its entry layer, and top_k blocks in each layer below it."""
    told = explain(T, T_q=T_q, top_k=top_k, B=2, H_kv=3, backward=True)
    entry = selected = 0
    for t in range(T - T_q, T):
        layer = next(l for l in range(9) if t >> 4 * (l + 1) < top_k)
        entry += (t >> 4 * (layer + 1)) + 1
        selected += layer * top_k
    for phase in ("dq", "dkdv"):
        pairs = {row["kind"]: row["pairs"] for row in rows(told, phase)}
        assert pairs["entry"] == 6 * entry and (pairs.get("selected") or 0) == 6 * selected
    queries = [(row["first_query"], row["end_query"]) for row in rows(told, "dq") if row["kind"] == "entry"]
    assert queries == [(T - T_q, T)]


@pytest.mark.parametrize(("H_kv", "G"), [(1, 16), (8, 4), (16, 1)])
@pytest.mark.parametrize("top_k", [16, 64, 512])
@pytest.mark.parametrize("T", [256, 300, 700, 1970, 5000])
def test_sums_of_the_last_heads_have_room(T, top_k, H_kv, G):
    """A last chunk of few heads is cut into more items than the others. A workspace that is too small is refused."""
    for B in {65536 // T, 37, 50}:
        assert explain(T, B=B, H_kv=H_kv, G=G, top_k=top_k, backward=True)


def test_steps_of_the_backward_come_in_the_order_of_a_call():
    told = explain(100000, top_k=64, backward=True)
    names = [row["kernel"].partition("<")[0] for row in told if row["phase"] not in ("pack", "rotations", "pool")]
    assert names == [
        "reverse_index_kernel", "visit_lists_kernel", "dkdv_entry_kernel", "add_segments_kernel",
        "dkdv_selected_kernel", "dq_entry_kernel", "dq_selected_kernel", "distribute_kernel",
    ]  # fmt: skip
    assert [row["phase"] for row in told[:3]] == ["rotations", "pool", "pack"]
    assert all(row["reason"] and row["launches"] > 0 for row in told)
    one_layer = [row["kernel"].partition("<")[0] for row in explain(100, backward=True)]
    assert "dkdv_selected_kernel" not in one_layer and "reverse_index_kernel" not in one_layer


@pytest.mark.parametrize(("G", "dtype"), [(3, "bfloat16"), (8, "bfloat16"), (8, "float16"), (9, "bfloat16")])
def test_small_groups_in_bf16_hand_ds_over(G, dtype):
    told = explain(100000, top_k=64, G=G, dtype=dtype, backward=True)
    names = [row["kernel"].partition("<")[0] for row in told if row["kind"] == "selected" and row["phase"] != "pack"]
    hands_over = G <= 8 and dtype == "bfloat16"
    expected = (
        ["dkdv_selected_kernel", "dq_gather_kernel"] if hands_over else ["dq_selected_kernel", "dkdv_selected_kernel"]
    )
    # A first chunk without selected layers launches dq_gather alone, so that its row may come first.
    assert sorted(names) == sorted(expected)


def test_a_part_of_a_call_has_the_chunks_of_the_whole():
    """As many launches for a query and a head, however few of the call's the part has; two equal chunks, where the part
    has no more, may each be a little longer than those of the whole, which are cut to rounds of dq_gather."""
    launches = []
    for queries, heads in ((65536, 8), (32768, 2), (16384, 2)):
        params = kernels.load().ForwardParams(
            q=(0, 0, 0, 0), k=(0, 0, 0, 0), v=(0, 0, 0, 0), B=1, T=65536, T_q=queries, q_start=65536 - queries,
            H_kv=heads, G=4, K=128, V=128, top_k=512, scale=1.0, rope_base=1e4, strict_causal=True,
            dtype=kernels.load().DType.bfloat16,
        )  # fmt: skip
        told = kernels.load().explain_backward(params, processors=132, part=(65536, 8, 0))
        launches.append(sum(row["launches"] for row in rows(told, "dq")))
    whole, half, two_chunks = launches
    assert whole <= 8 * half <= 1.3 * whole
    assert 8 * half == 20 * two_chunks and 16 * two_chunks <= 1.3 * whole  # five chunks a head, and two
