"""What the demo prints: plain text, aligned, at most 100 columns."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .embedding import content_word
from .search import Answer, Cost, Search
from .text import Document, Passage

SNIPPET = 34  # tokens of a snippet
BEST = 3  # "within the top 3"


def columns() -> int:
    return min(100, max(72, shutil.get_terminal_size((100, 24)).columns))


def cut_line(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 4] + " ..."


def _marks() -> tuple[str, str]:
    """How matching words are marked: bold on a terminal, guillemets elsewhere."""
    return ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("«", "»")


# --------------------------------------------------------------------------------------------- passage masses


def group_mass(document: Document, mass: np.ndarray) -> np.ndarray:
    """[groups] attention per passage; a passage that the document repeats word for word is one group."""
    return np.bincount(document.group_of_token, weights=mass[: len(document)], minlength=len(document.group_members))


def ranking(masses: np.ndarray) -> np.ndarray:
    """Groups by falling mass; on equal mass the earlier passage first."""
    return np.argsort(-masses, kind="stable")


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Of two distributions over passages (what they lack to 1 is on the question itself): the mass they share."""
    return float(np.minimum(a, b).sum() + max(0.0, min(1 - a.sum(), 1 - b.sum())))


def found_at(document: Document, masses: np.ndarray, topic: str) -> int | None:
    """The place (from 1) of the first passage that answers for the topic, None beyond 99."""
    for place, group in enumerate(ranking(masses)[:99].tolist()):
        if document.group_is_about(group, topic):
            return place + 1
    return None


# ----------------------------------------------------------------------------------------------- one question


def place_name(document: Document, passage: Passage) -> str:
    return f"{document.names[passage.topic]}:{passage.line}"


def best_passage(document: Document, answer: Answer, group: int | None = None) -> Passage:
    """Of the passages of a group (default: the first in rank) the one with the most attention."""
    if group is None:
        group = int(ranking(group_mass(document, answer.tree))[0])
    return max(document.group_members[group], key=lambda p: answer.tree[p.first : p.last].sum())


def short_name(document: Document, group: int) -> str:
    """The topic of a group; of several the one with the shortest text, which is the most specific."""
    topics = {p.topic for p in document.group_members[group]}
    return document.names[min(topics, key=lambda i: (len(document.topics[i].text), i))]


def snippet(document: Document, passage: Passage, mass: np.ndarray, words: set[str], width: int) -> list[str]:
    """The stretch of a passage that received the most attention, matching words marked, in at most two lines."""
    first, last = passage.first, passage.last
    size = min(SNIPPET, last - first)
    sums = np.concatenate([[0.0], mass[first:last].cumsum()])
    begin = first + int(np.argmax(sums[size:] - sums[:-size]))
    pieces, position = [], int(document.starts[begin])
    for i in range(begin, begin + size):
        start, end = int(document.starts[i]), int(document.ends[i])
        token = document.words[i]
        if len(token) > 3 and not token[0].isalnum():
            token = token[0] * 3  # a line of 70 dashes
        blank = document.text[position:start]
        gap = " " if blank and not ("\n" in blank and pieces[-1:] == ["-"]) else ""  # a word hyphenated at a line's end
        pieces.append(gap + (f"\1{token}\2" if content_word(token) in words else token))
        position = end
    text = " ".join("".join(pieces).split())
    lines = textwrap.wrap(f"... {text} ...", width, max_lines=2, placeholder=" ...", break_long_words=True)
    on, off = _marks()
    return [line.replace("\1", on).replace("\2", off) for line in lines]


def print_question(document: Document, search: Search, answer: Answer, count: int) -> None:
    width = columns()
    tree, dense = group_mass(document, answer.tree), group_mass(document, answer.dense)
    dense_place = np.empty(len(dense), dtype=np.int64)
    dense_place[ranking(dense)] = np.arange(1, len(dense) + 1)
    print()
    print(textwrap.fill(answer.question.text, width, initial_indent="question   ", subsequent_indent=" " * 11))
    embedding = search.embedding
    ids = [embedding.vocabulary[word] for word in answer.question.known]
    known = ", ".join(f"{embedding.spelling[i]}\xa0{embedding.count[i]}x" for i in ids)
    print(textwrap.fill(known, width, initial_indent="words      ", subsequent_indent=" " * 11))
    if answer.question.unknown:
        unknown = f"not in the document: {', '.join(answer.question.unknown)}"
        print(textwrap.fill(unknown, width, initial_indent=" " * 11, subsequent_indent=" " * 11))
    print()
    print(f"{'place':>5}  {'tree':>6}  {'dense':>6}  {'dense place':>11}   passage (topic:line)")
    for place, group in enumerate(ranking(tree)[:count].tolist()):
        members = document.group_members[group]
        best = best_passage(document, answer, group)
        others = sorted({place_name(document, p) for p in members} - {place_name(document, best)})
        name = place_name(document, best) + (f"   (repeated at {', '.join(others)})" if others else "")
        numbers = f"{place + 1:>5}  {tree[group]:6.3f}  {dense[group]:6.3f}  {dense_place[group]:>11}   "
        print(cut_line(numbers + name, width))
        for line in snippet(document, best, answer.tree, set(answer.question.known), width - 7):
            print(f"       {line}")
    rest = ranking(tree)[count:]
    if len(rest):
        print(f"{'rest':>5}  {tree[rest].sum():6.3f}  {dense[rest].sum():6.3f}  {'':>11}   {len(rest):,} passages")


def _bytes(n: int | None) -> str:
    if n is None:
        return "not measured"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if n >= size:
            return f"{n / size:,.3g} {unit}"
    return f"{n / 1e3:,.0f} KB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def print_comparison(
    document: Document, search: Search, answer: Answer, tree: Cost, dense: Cost, pooling: float
) -> None:
    T, visited = search.tokens + 1, answer.visited  # the question is a token too
    same = overlap(group_mass(document, answer.tree), group_mass(document, answer.dense))
    layers = " + ".join(f"{len(view.nodes):,}" for view in answer.views[0])
    print()
    print(f"{'':<24}{'tree':>14}{'dense':>14}")
    pooled = f"{_time(min(pooling, tree.seconds))} of the tree's to pool keys, values"
    rows = [
        ("nodes visited, per head", f"{visited:,}", f"{T:,}", f"{visited / T:.1%} of T: {layers}"),
        ("time", _time(tree.seconds), _time(dense.seconds), pooled),
        ("memory beyond inputs", _bytes(tree.bytes), _bytes(dense.bytes), "peak, the pooled tree included"),
    ]
    for name, left, right, remark in rows:
        print(cut_line(f"{name:<24}{left:>14}{right:>14}   {remark}", columns()))
    print()
    print(f"passage mass shared with dense attention    {same:.3f}   (1: the same distribution)")
    print(f"output error against dense attention        {answer.output_error:.3f}   (|out - dense| / |dense|)")
    for label, out in (("tree", answer.out), ("dense", answer.dense_out)):
        words = ", ".join(search.embedding.read_back(out)) or "nothing stands out"
        print(cut_line(f"the {label + ' output':<13} read back as words   {words}", columns()))


# -------------------------------------------------------------------------------------- the stored questions


@dataclass(frozen=True)
class Outcome:
    """One committed question. tree, dense: place of the first passage of its topic (None: beyond 99)."""

    question: str
    topic: str
    tree: int | None
    dense: int | None
    overlap: float
    error: float
    visited: int
    first: str

    @property
    def hit(self) -> bool:
        return self.tree is not None and self.tree <= BEST


def stored_questions(name: str = "committed") -> list[tuple[str, str]]:
    """(question, topic) of queries.json: the 10 that were fixed first, or the 20 the embedding was tuned on."""
    stored = json.loads(Path(__file__).with_name("queries.json").read_text(encoding="utf-8"))
    return [(entry["question"], entry["topic"]) for entry in stored[name]]


def evaluate(document: Document, search: Search, name: str = "committed") -> list[Outcome]:
    """The stored questions, all in one call, judged."""
    questions = [search.embedding.question(text) for text, _ in stored_questions(name)]
    return judge(document, search.ask(questions), [topic for _, topic in stored_questions(name)])


def judge(document: Document, answers: list[Answer], topics: list[str]) -> list[Outcome]:
    """How well each answer finds its topic."""
    outcomes = []
    for topic, answer in zip(topics, answers, strict=True):
        tree, dense = group_mass(document, answer.tree), group_mass(document, answer.dense)
        outcomes.append(
            Outcome(
                question=answer.question.text,
                topic=topic,
                tree=found_at(document, tree, topic),
                dense=found_at(document, dense, topic),
                overlap=overlap(tree, dense),
                error=answer.output_error,
                visited=answer.visited,
                first=short_name(document, int(ranking(tree)[0])),
            )
        )
    return outcomes


def print_outcomes(outcomes: list[Outcome], name: str = "committed") -> None:
    width = columns()
    room = width - 54
    print()
    print(f"{len(outcomes)} {name} questions, and the topic each should find")
    print()
    print(f"      {'question':<{room}}  {'topic':<15}  {'place':>5}  {'dense':>5}  {'shared':>6}  {'error':>5}")
    for outcome in outcomes:
        lines = textwrap.wrap(outcome.question, room)
        places = [">99" if place is None else str(place) for place in (outcome.tree, outcome.dense)]
        print(
            f"{'ok' if outcome.hit else 'miss':<6}{lines[0]:<{room}}  {outcome.topic:<15}  "
            f"{places[0]:>5}  {places[1]:>5}  {outcome.overlap:6.3f}  {outcome.error:5.3f}"
        )
        for line in lines[1:]:
            print(f"      {line}")
    hits = sum(outcome.hit for outcome in outcomes)
    shared = [outcome.overlap for outcome in outcomes]
    print()
    print(
        f"{hits} of {len(outcomes)} found within the first {BEST} passages; passage mass shared with dense attention: "
        f"mean {np.mean(shared):.3f}, least {min(shared):.3f}."
    )
    for outcome in outcomes:
        if not outcome.hit:
            where = "beyond place 99" if outcome.tree is None else f"at place {outcome.tree}"
            print(f"Missed: {outcome.topic}, {where}; the most attention went to {outcome.first}.")
