"""The demo: its quality bar on the Python documentation, the leaves it rebuilds, its messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import htree_cuda
from htree_cuda.demo import cli, embedding, main, report, search, text
from htree_cuda.demo.embedding import Embedding, content_word, stem
from htree_cuda.demo.search import Search, leaves, pool_layers, spread
from htree_cuda.demo.text import DemoError, Document, Topic

CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def python_search() -> tuple[Document, Search]:
    document = Document("topics", text.python_topics(), max_tokens=1 << 19)
    return document, Search(Embedding(document, CPU, torch.float32))


@pytest.fixture(scope="module")
def answers(python_search):
    """Of the committed questions, all asked in one call."""
    _, engine = python_search
    return engine.ask([engine.embedding.question(question) for question, _ in report.stored_questions()])


@pytest.fixture(scope="module")
def outcomes(python_search, answers):
    return report.judge(python_search[0], answers, [topic for _, topic in report.stored_questions()])


# ------------------------------------------------------------------------------------------------------- quality bar


def test_committed_questions_find_their_topic(outcomes):
    assert len(outcomes) == 10
    missed = [(x.topic, x.tree) for x in outcomes if not x.hit]
    assert len(missed) <= 2, missed


def test_mass_overlaps_with_dense_attention(outcomes):
    shared = [x.overlap for x in outcomes]
    assert np.mean(shared) >= 0.7, shared
    assert all(0.0 <= x <= 1 + 1e-6 for x in shared)


def test_the_tree_prunes(python_search, outcomes):
    document, engine = python_search
    assert len(document) > 80_000
    assert len(engine.layer_sizes) == 3
    assert all(x.visited < 0.03 * len(document) for x in outcomes)


def test_committed_topics_exist_in_this_python():
    names = {topic.name for topic in text.python_topics()}
    for kind in ("committed", "tuning"):
        assert {topic for _, topic in report.stored_questions(kind)} <= names
    committed, tuning = (
        {question for question, _ in report.stored_questions(kind)} for kind in ("committed", "tuning")
    )
    assert not committed & tuning


# ------------------------------------------------------------------------------------------- probabilities and leaves


@pytest.mark.parametrize(
    "T, t, rate, top_k, G",
    [(1, 0, 2, 1, 1), (7, 6, 2, 1, 2), (97, 96, 4, 2, 3), (530, 333, 4, 4, 2), (1111, 1110, 16, 8, 1)],
)
def test_rebuilt_leaves_are_the_softmax_of_forward(T, t, rate, top_k, G):
    """Their probabilities sum to 1 against the returned lse, and weigh the values to the returned output."""
    K, V, H_kv, scale, base = 8, 5, 2, 0.7, 100.0
    q = torch.randn(1, 1, H_kv * G, K)
    k, v = torch.randn(1, T, H_kv, K), torch.randn(1, T, H_kv, V)
    out, lse, selection = htree_cuda.forward(
        q, k, v, q_start=t, compression_rate=rate, top_k_per_layer=top_k, scale=scale, rope_base=base,
        return_lse=True, return_selection=True,
    )  # fmt: skip
    layers = selection.shape[0] + 1
    for h in range(H_kv):
        heads = slice(h * G, (h + 1) * G)
        views = leaves(
            q[0, 0, heads], pool_layers(k[0, :, h], rate, layers), selection[:, 0, 0, h], lse[0, 0, heads],
            t=t, rate=rate, scale=scale, rope_base=base,
        )  # fmt: skip
        assert [view.layer for view in views] == list(reversed(range(layers)))
        total = sum(view.probability.sum(1) for view in views)
        np.testing.assert_allclose(total, 1.0, atol=1e-5)
        values = pool_layers(v[0, :, h], rate, layers)
        rebuilt = sum(view.probability @ values[view.layer][view.nodes].double().numpy() for view in views)
        np.testing.assert_allclose(rebuilt, out[0, 0, heads].numpy(), atol=1e-5)
        assert all(not view.probability[:, view.expanded].any() for view in views)

        mass = spread(views, t + 1, rate)
        assert mass.shape == (G, t + 1)
        np.testing.assert_allclose(mass.sum(1), total, atol=1e-12)


def test_probabilities_of_a_real_search_sum_to_one(answers):
    for answer in answers:
        assert answer.mass_error < 1e-4
        assert 0.9 < answer.tree.sum() <= 1 + 1e-4
        assert 0.9 < answer.dense.sum() <= 1 + 1e-4


def test_dense_is_ordinary_softmax_attention():
    """The baseline: one layer, against PyTorch's own attention with keys and query rotated by hand."""
    document = Document("tiny", [Topic("a", "red green blue red\n\nyellow green " * 9)], max_tokens=1 << 19)
    engine = Search(Embedding(document, CPU, torch.float32))
    q, k, v = engine._inputs([engine.embedding.question("green and yellow")])
    out = engine._dense_forward(q, k, v)
    T, H = k.shape[1], q.shape[2]
    rotated_q = search._rotate(q[0], torch.full((1, 1), T - 1), embedding.ROPE_BASE)
    rotated_k = search._rotate(k[0], torch.arange(T)[:, None], embedding.ROPE_BASE)
    expected = torch.nn.functional.scaled_dot_product_attention(
        rotated_q.transpose(0, 1)[None],
        rotated_k.transpose(0, 1).repeat_interleave(H // 2, 0)[None],
        v[0].transpose(0, 1).repeat_interleave(H // 2, 0)[None],
        scale=1.0,
    )
    torch.testing.assert_close(out[0, 0], expected[0, :, 0], atol=1e-5, rtol=1e-5)


def test_one_call_for_many_questions_gives_what_single_calls_give(python_search, answers):
    _, engine = python_search
    [alone] = engine.ask([answers[0].question])
    assert np.minimum(answers[0].tree, alone.tree).sum() > 0.99
    assert abs(answers[0].visited - alone.visited) <= engine.rate * len(engine.layer_sizes)


# ---------------------------------------------------------------------------------------------------------- embedding


def test_stem_joins_forms_of_a_word():
    assert len({stem(w) for w in ("format", "formats", "formatted", "formatting", "Formatting")}) == 1
    assert stem("string") == "string"
    assert stem("class") == stem("classes")
    assert content_word("the") is None
    assert content_word("***") is None


def test_embedding_is_the_same_every_time():
    document = Document("d", text.python_topics()[:6], max_tokens=1 << 19)
    first, second = (Embedding(document, CPU, torch.float32) for _ in range(2))
    for a, b in zip(first.keys_and_values(1), second.keys_and_values(1), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.question("assignment statement").heads, second.question("assignment statement").heads)


def test_keys_are_the_smoothed_sum_of_word_vectors():
    """In the middle and at both ends, across the chunks that features are made in."""
    words = [f"word{i}" for i in range(300)]
    document = Document("d", [Topic("d", " ".join(words))], max_tokens=1 << 19)
    model = Embedding(document, CPU, torch.float32)
    for window, features in zip(embedding.WINDOWS, model.windows, strict=True):
        for token in (0, 3, 150, 299):
            expected = sum(
                (2 * window + 1 - abs(i - token)) / (2 * window + 1) * model.word_keys[i]
                for i in range(300)
                if abs(i - token) <= 2 * window
            )
            torch.testing.assert_close(features[token], expected, atol=1e-4, rtol=1e-4)


def test_features_do_not_depend_on_the_chunk(monkeypatch):
    document = Document("d", text.python_topics()[:4], max_tokens=3000)
    whole = Embedding(document, CPU, torch.float32).windows
    monkeypatch.setattr(embedding, "CHUNK", 257)
    for a, b in zip(whole, Embedding(document, CPU, torch.float32).windows, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_content_lies_in_the_slow_pairs():
    document = Document("d", text.python_topics()[:2], max_tokens=1 << 19)
    k, v = Embedding(document, CPU, torch.float32).keys_and_values(2)
    half, first = embedding.K // 2, embedding.FIRST_PAIR
    assert not k[..., :first].any() and not k[..., half : half + first].any()
    assert k[..., first:half].any() and k[..., half + first :].any()
    assert not k[:, -2:].any() and not v[:, -2:].any()
    assert embedding.ROPE_BASE ** (-first / half) * (1 << 22) < 0.2  # radians over 4M positions


# ---------------------------------------------------------------------------------------------------------- documents


def test_passages_cover_every_token_once_and_stay_within_topics():
    document = Document("topics", text.python_topics(), max_tokens=1 << 19)
    assert [p.first for p in document.passages] == [0, *(p.last for p in document.passages[:-1])]
    assert document.passages[-1].last == len(document)
    for p in document.passages:
        assert 0 < p.last - p.first <= text.PASSAGE_MOST
        assert document.topic_first[p.topic] <= p.first < p.last <= document.topic_first[p.topic + 1]
        line = document.topics[p.topic].text.split("\n")[p.line - 1]
        assert document.words[p.first] in text.tokenize(line)


def test_long_texts_are_cut():
    document = Document("topics", text.python_topics(), max_tokens=1000)
    assert len(document) == 1000 and document.full_length > 80_000
    assert document.passages[-1].last == 1000


def test_text_without_blank_lines_is_cut_into_passages():
    document = Document("d", [Topic("d", "word " * 2000)], max_tokens=1 << 19)
    assert len(document.passages) == -(-2000 // text.PASSAGE_MOST)


def test_cjk_characters_are_tokens():
    assert text.tokenize("树注意力 tree_1") == ["树", "注", "意", "力", "tree", "_", "1"]


def test_repeated_passages_are_one_group():
    repeated = "The same sentence about lions stands here. " * 8
    document = Document("d", [Topic("a", repeated), Topic("b", "other words"), Topic("c", repeated)], max_tokens=999)
    assert [len(members) for members in document.group_members] == [2, 1]
    assert document.group_is_about(0, "a") and document.group_is_about(0, "c")
    assert not document.group_is_about(0, "b") and not document.group_is_about(1, "a")


def test_default_top_k_grows_with_the_document():
    assert search.default_top_k(100_000, 16) == 32
    assert search.default_top_k(131_073, 16) == 64
    assert search.default_top_k(1 << 22, 16) == 512


# ------------------------------------------------------------------------------------------------------------ command

NOTES = """\
# Notes

Cats and dogs live here.

## Feeding

Cats eat fish twice a day. Dogs eat meat in the morning.

```
# no heading
```

## Walking

Dogs walk in the park; cats do not walk on a leash.
"""


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_text_file_finds_the_passage_and_writes_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "notes.md").write_text(NOTES * 40)
    png = tmp_path / "picture.png"
    file = str(tmp_path / "notes.md")
    query = "What do dogs eat in the morning? $x$ zebra"
    status, out, err = run(capsys, "--text", file, "--query", query, "--png", str(png), "--device", "cpu")
    assert (status, err) == (0, "")
    first = out.split("passage (topic:line)")[1].strip().splitlines()[0]
    assert "Feeding:" in first
    for expected in ("nodes visited", "time", "memory beyond inputs", "output error", "zebra", "backend", "«Dogs»"):
        assert expected in out
    assert png.read_bytes().startswith(PNG) and png.stat().st_size > 20_000
    assert all(len(line) <= 100 for line in out.splitlines() if str(tmp_path) not in line)


@pytest.mark.parametrize("content", ["hello", "hello hello\n", "one two three hello"])
def test_tiny_files(tmp_path, capsys, content):
    pytest.importorskip("matplotlib")
    (tmp_path / "tiny.txt").write_text(content)
    arguments = ("--text", str(tmp_path / "tiny.txt"), "--query", "hello", "--png", str(tmp_path / "p.png"))
    status, out, _ = run(capsys, *arguments, "--device", "cpu")
    assert status == 0
    assert "nan" not in out
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)


def test_undecodable_bytes_are_replaced_and_counted(tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait costs \xa33")
    arguments = ("--text", str(tmp_path / "latin.txt"), "--query", "costs", "--no-png", "--device", "cpu")
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "2 undecodable bytes replaced" in out


def test_utf16_and_byte_order_marks(tmp_path):
    for codec in ("utf-16", "utf-8-sig", "utf-8"):
        (tmp_path / "a.txt").write_bytes("grün und blau".encode(codec))
        [topic], _, note = text.read_file(str(tmp_path / "a.txt"))
        assert (topic.text, note) == ("grün und blau", "")


@pytest.mark.parametrize(
    "name, content, query, message",
    [
        ("missing.txt", None, "x", "no such file"),
        ("missing.txt", None, None, "no such file"),
        ("empty.txt", b"", "x", "the file is empty"),
        ("blank.txt", b" \n\t\n", "x", "the file is empty"),
        ("binary.bin", b"ab\0cd", "x", "binary file"),
        ("marks.txt", b"... --- !!!", "x", "no words"),
        ("function.txt", b"the of and", "x", "function words only"),
        ("good.txt", b"lions and tigers", "zebra", "none of its words occurs in the document (zebra)"),
        ("good.txt", b"lions and tigers", "how do I", "holds no word"),
        ("good.txt", b"lions and tigers", None, "--query"),
        (".", None, "x", "this is a folder"),
    ],
)
def test_text_errors_are_one_precise_line(tmp_path, capsys, name, content, query, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    arguments = ["--text", str(path), "--no-png", "--device", "cpu"] + ([] if query is None else ["--query", query])
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith("htree_cuda demo: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--top-k", "33"], "--top-k must be a power of two, 1 to 2^30, got 33"),
        (["--top-k", "4294967296"], "--top-k must be a power of two, 1 to 2^30, got 4294967296"),
        (["--rate", "1"], "--rate must be a power of two, 2 to 2^30, got 1"),
        (["--rate", "2147483648"], "--rate must be a power of two, 2 to 2^30, got 2147483648"),
        (["--passages", "0"], "--passages must be at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--evaluate", "--query", "x"], "no --query"),
    ],
)
def test_option_errors(capsys, arguments, message):
    status, _, err = run(capsys, *arguments, "--device", "cpu")
    assert status == 2 and message in err


@pytest.mark.parametrize("name", ["", "folder"])
def test_a_picture_has_a_file(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "folder").mkdir()
    png = str(tmp_path / name) if name else ""
    status, _, err = run(capsys, "--text", str(tmp_path / "a.txt"), "--query", "hello", "--png", png, "--device", "cpu")
    assert status == 2 and f"--png must name a file, got {png!r}" in err


def test_a_picture_with_too_long_a_name_is_an_error(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.txt").write_text("hello world")
    png = str(tmp_path / ("a" * 300))
    status, _, err = run(capsys, "--text", str(tmp_path / "a.txt"), "--query", "hello", "--png", png, "--device", "cpu")
    assert status == 2 and f"--png {png}: cannot be written" in err


def test_a_picture_is_where_it_was_wanted(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.txt").write_text("hello world")
    png = tmp_path / "picture"
    arguments = ("--text", str(tmp_path / "a.txt"), "--query", "hello", "--png", str(png), "--device", "cpu")
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and str(png) in out and png.read_bytes().startswith(PNG)


def test_unwritable_picture_is_an_error(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.txt").write_text("hello world")
    png = tmp_path / "no" / "such" / "folder.png"
    arguments = ("--text", str(tmp_path / "a.txt"), "--query", "hello", "--png", str(png), "--device", "cpu")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and f"--png {png}: cannot be written" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_cuda_without_a_gpu(capsys):
    status, _, err = run(capsys, "--device", "cuda")
    assert status == 2 and "no CUDA device" in err


def test_evaluate_prints_the_table_and_the_misses(capsys, monkeypatch, python_search, answers):
    document, engine = python_search
    monkeypatch.setattr(cli, "_topics", lambda max_tokens: document)
    monkeypatch.setattr(cli, "Embedding", lambda *_: engine.embedding)
    monkeypatch.setattr(Search, "ask", lambda self, questions: answers)
    status, out, _ = run(capsys, "--evaluate", "--device", "cpu")
    assert status == 0
    assert "10 committed questions" in out
    found = int(out.split(" of 10 found")[0].split()[-1])
    assert found >= 8
    assert out.count("\nmiss") == 10 - found == out.count("\nMissed: ")


def test_a_backend_without_kernels_is_chosen_aloud(monkeypatch, python_search):
    """Where backend "auto" is refused, the torch backend is asked for by name, and the report says why."""
    document = Document("d", [Topic("d", "lions and tigers " * 30)], max_tokens=999)
    engine = Search(Embedding(document, CPU, torch.float32))
    real, asked = htree_cuda.forward, []

    def refuse(*tensors, backend, **options):
        asked.append(backend)
        if backend == "auto":
            raise htree_cuda.UnsupportedError('forward: no kernels here; pass backend="torch" to run it')
        return real(*tensors, backend=backend, **options)

    monkeypatch.setattr(htree_cuda, "forward", refuse)
    engine.ask([engine.embedding.question("tigers")])
    assert asked[:2] == ["auto", "torch"]
    assert (engine.backend, engine.why_torch) == ("torch", "forward: no kernels here")


def test_missing_documentation_is_explained(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DemoError, match="no pydoc_data"):
        text.python_topics()
