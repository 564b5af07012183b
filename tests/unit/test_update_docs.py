"""Generated blocks: what is stale is found, and a table says what was measured and no more."""

from __future__ import annotations

import pytest

from tools.update_docs import __main__ as update
from tools.update_docs import budgets, decode, dispatch, dsa, packed, training


def figure(T, ms, dense=None, inputs="iid", **shape):
    at = {
        "op": "forward",
        "B": 1,
        "T": T,
        "T_q": T,
        "H": 16,
        "H_kv": 1,
        "K": 128,
        "top_k": 64,
        "inputs": inputs,
        "ms": ms,
    }
    return {**at, **shape, **({"dense": {"ms": dense}, "speedup_over_dense": dense / ms} if dense else {})}


def reports(monkeypatch, *found):
    monkeypatch.setattr(budgets, "load_all", lambda pattern: list(found))


def report(figures, gpu="H100", date="2026-01-02"):
    return {"gpu": gpu, "date": date, "figures": figures}


def test_a_stale_block_is_rewritten_and_the_rest_kept(monkeypatch):
    monkeypatch.setitem(update.BLOCKS, "budgets", lambda: "new")
    text = "a\n<!-- generated: budgets -->\nold\n<!-- end generated -->\nb\n"
    assert update.regenerate(text) == "a\n<!-- generated: budgets -->\n\nnew\n\n<!-- end generated -->\nb\n"


def test_an_unknown_block_is_an_error():
    with pytest.raises(SystemExit, match="nowhere"):
        update.regenerate("<!-- generated: nowhere -->\n<!-- end generated -->\n")


def test_it_overtakes_where_every_longer_length_is_faster(monkeypatch):
    rows = [(8192, 1.0, 1.1), (16384, 3.0, 2.0), (32768, 5.0, 8.0), (65536, 9.0, 30.0)]
    reports(monkeypatch, report([figure(*row) for row in rows]))
    found = budgets.figures_of("forward")
    assert budgets.overtakes(found, (16, 1, 128, 64)) == "32K"


def test_it_overtakes_nowhere_if_the_longest_is_slower_or_one_kind_is(monkeypatch):
    reports(monkeypatch, report([figure(65536, 9.0, 30.0), figure(65536, 31.0, 30.0, inputs="local")]))
    assert budgets.overtakes(budgets.figures_of("forward"), (16, 1, 128, 64)) == "not up to 64K"


def test_one_card_a_table_the_one_measured_last(monkeypatch):
    old, new = figure(65536, 9.0, 30.0), figure(65536, 8.0, 29.0, top_k=128)
    reports(monkeypatch, report([old], gpu="H200", date="2026-01-01"), report([new]))
    text = budgets.BLOCKS["budgets"]()
    assert "H100" in text and "H200" not in text
    assert "| 16 | 16, 1, 128 | 128 | 3.62 | 64K |" in text


def test_parts_of_a_sequence_and_the_torch_backend_are_no_rows(monkeypatch):
    part, torch_backend = figure(65536, 1.0, T_q=1), figure(65536, 1.0, backend="torch")
    reports(monkeypatch, report([part, torch_backend]))
    assert budgets.figures_of("forward") == {}


def test_every_rule_of_the_dispatch_is_a_row():
    text = (dispatch.ROOT / "csrc/sm90/htree_fwd/dispatch.h").read_text()
    rules = dispatch.rules("htree_fwd", dispatch.FORWARD)
    assert len(rules) == text.count("{Pass::k") >= 9
    assert dispatch.forward_rules().count("\n") == len(rules) + 2


def test_a_rule_that_is_not_understood_is_an_error(tmp_path, monkeypatch):
    folder = tmp_path / "csrc" / "sm90" / "htree_fwd"
    folder.mkdir(parents=True)
    row = '    {Pass::kScore, DType::kBFloat16, 4, {1, 4}, "why"},\n'
    (folder / "dispatch.h").write_text(f"Rule kRules[] = {{\n{row}    {{Pass::kNew, 4}},\n}};\n")
    monkeypatch.setattr(dispatch, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="1 rows"):
        dispatch.forward_rules()


def test_a_row_of_generation_has_both_arms(monkeypatch):
    figures = [
        {"prompt": T, "arm": arm, "tokens_per_s": speed}
        for T, speeds in ((32768, (1234.4, 800.0)), (131072, (1200.0, 250.6)))
        for arm, speed in zip(("htree", "dense"), speeds)
    ]
    found = {"gpu": "H100", "driver": "1", "torch": "2", "date": "2026-01-02", "top_k": 64, "figures": figures}
    monkeypatch.setattr(decode, "load", lambda name: found if name == "generate_gpu" else None)
    assert "| 32K | 1,234 | 800 |\n| 128K | 1,200 | 251 |\n" in decode.generate_gpu()


def test_no_groups_are_one_sentence_at_the_longest_length(monkeypatch):
    shape = {"H": 16, "H_kv": 16}
    rows = [
        figure(T, ms, 2.0, **shape, top_k=top_k)
        for T, ms, top_k in ((8192, 1.0, 64), (65536, 9.0, 64), (65536, 5.0, 32))
    ]
    rows += [figure(65536, 12.0, 4.0, **shape, op="backward"), figure(65536, 1.0, 2.0)]
    words = (
        "Without groups (16 on 16 heads, T 64K, iid; one H100, 2026-01-02), with top_k 32, 64, the forward takes 2.5, "
        "4.5 times dense attention's time"
    )
    reports(monkeypatch, report(rows))
    assert budgets.no_groups() == f"{words}.", "a backward that was not measured at each top_k is left out"
    reports(monkeypatch, report([*rows, figure(65536, 5.0, 2.0, **shape, op="backward", top_k=32)]))
    assert budgets.no_groups() == f"{words}, the backward 2.5, 3.0 times."
    reports(monkeypatch, report([figure(65536, 1.0, 2.0)]))
    assert "not measured yet" in budgets.no_groups()


def test_training_steps_are_a_table(monkeypatch):
    steps = [("dense", 50.0), ("htree", 40.0)]
    found = {"gpu": "H100", "driver": "1", "torch": "2", "date": "2026-01-02"}
    found["preset"] = {"n_heads": 8, "n_kv_heads": 2, "head_dim": 64, "top_k": 64}
    found["throughput"] = [{"T": 32768, "arm": arm, "step_ms": ms} for arm, ms in steps]
    monkeypatch.setattr(training, "load", lambda name: found if name == "train_steps_gpu" else None)
    assert "| 32,768 | 50.0 | 40.0 | 0.80 |" in training.train_steps()


def test_a_study_of_packed_documents_has_the_seeds_that_were_run(monkeypatch):
    stage = {"T": 1024, "batch": 2, "steps": 200}
    losses = [("dense", 0, 2.5), ("htree", 0, 2.0), ("window", 0, 2.25), ("dense", 1, 2.5)]
    runs = [{"arm": arm, "seed": seed, "final": {"loss": x, "accuracy": 0.25}} for arm, seed, x in losses]
    found = {"cores": 2, "cpu": "a CPU", "threads": 1, "torch": "2", "date": "2026-01-02"}
    found |= {"preset": {"text": {"stages": [stage]}}, "tasks": {"text": {"runs": runs}}}
    monkeypatch.setattr(training, "load", lambda name: found if name == "train_cpu_packed" else None)
    table = training.training_packed()
    assert "200 steps of documents packed to 2 x 1,024 bytes" in table
    assert "| dense | 2.500, 2.500 | 2.500 | +0.0% | 25.0% |" in table
    assert "| htree | 2.000 | 2.000 | -20.0% | 25.0% |" in table


def test_dense_attention_timed_by_its_first_call_is_left_out(monkeypatch):
    """A report of the older protocol keeps its own times; a warm peer, and the newer protocol, count."""
    cold, warm = figure(65536, 50.0, 100.0), figure(8192, 1.0, 2.0)
    cold["dense"]["calls"], warm["dense"]["calls"] = 1, 5
    old = report([cold, warm]) | {"protocol": {"long_s": 0.3}}
    reports(monkeypatch, old)
    assert {key[5]: "dense" in f for key, f in budgets.figures_of("forward").items()} == {65536: False, 8192: True}
    reports(monkeypatch, old | {"protocol": {"long_s": 0.3, "long_calls": 1}})
    assert all("dense" in f for f in budgets.figures_of("forward").values())


def test_a_peer_of_other_heads_stands_in_and_is_marked(monkeypatch):
    alone = figure(65536, 50.0, H=32, H_kv=8)
    reports(monkeypatch, report([figure(65536, 10.0, 29.0), alone]))
    (*_, first, second) = budgets.table("forward", budgets._speedup, True).splitlines()
    assert first == "| 16 | 16, 1, 128 | 64 | 2.90 | 64K |"
    assert second == "| 4 | 32, 8, 128 | 64 | ~1.16 | ~64K |"
    assert "~: beside" in budgets.table("forward", budgets._speedup, True)


MACHINE = {"gpu": "H100", "driver": "1", "torch": "2", "date": "2026-01-02"}


def test_a_pack_stands_beside_what_it_is_compared_with(monkeypatch):
    shape = {"what": "forward", "sequences": 16, "total": 65536, "H": 32, "H_kv": 8, "K": 128, "top_k": 512}
    shape |= {"dtype": "bfloat16", "seed": 0, "ms": 2.0}
    beside = {"ms": 4.0, "name": "FlashAttention"}
    figures = [shape | {"case": "dense", "beside": beside, "ratio": 0.5}, shape | {"case": "short"}]
    monkeypatch.setattr(packed, "load", lambda name: {**MACHINE, "figures": figures})
    lines = packed.packed().splitlines()
    assert "FlashAttention" in lines[0]
    assert lines[-2].endswith("| 32 on 8 | 512 | 2.00 | 4.00 | 0.500 |")
    assert lines[-1].endswith("| 2.00 |  |  |")


def test_a_piece_of_dsa_without_a_kernel_has_an_empty_cell(monkeypatch):
    shape = {"s_q": 1, "h_q": 128, "s_kv": 65536, "topk": 2, "d_qk": 3, "d_v": 4, "h_i": 5, "d_i": 6, "dtype": "x"}
    figures = [
        shape | {"piece": "step", "error": "no kernel", "torch_backend": {"ms": 3.0, "peak_bytes": 2**30}},
        shape | {"piece": "topk_indices", "ms": 1.5, "peer": {"name": "torch.topk", "ms": 2.5}},
    ]
    monkeypatch.setattr(dsa, "load", lambda name: {**MACHINE, "figures": figures})
    *_, first, second = dsa.dsa_step().splitlines()
    assert first == "| step | 128 | 65,536 |  |  | 3.00 | 1.00 |  |"
    assert second == "| topk_indices | 128 | 65,536 | 1.50 |  |  |  | torch.topk 2.50 |"
