"""Documents: where the text comes from, its tokens, its passages.

A document is a list of topics (named texts) in a fixed order. A token is a run of letters and digits, a run of one
repeated punctuation mark, a run of underscores, or one CJK character; blanks are no tokens. A passage is what a result
line shows: it starts at a heading, or at the first blank line after PASSAGE tokens, and never crosses a topic.
"""

from __future__ import annotations

import codecs
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .progress import progress

PASSAGE = 160  # tokens after which the next blank line ends a passage
PASSAGE_LEAST = 24  # a heading ends a passage only if it has this many tokens (a title stays with its subtitle)
PASSAGE_MOST = 480  # text without blank lines is cut here

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+|_+|([^\w\s])\1*")
_UNDERLINE = re.compile(r"([*=\-~^])\1{2,}\s*$")
_MARKDOWN_HEADING = re.compile(r"#{1,6}\s+(.*\S)")


def tokenize(text: str) -> list[str]:
    return [match.group() for match in _TOKEN.finditer(text)]


class DemoError(Exception):
    """What the user can put right; the command prints it as one line and returns 2."""


@dataclass(frozen=True)
class Topic:
    """A named text; `line` is the line of its source it starts at, from 1."""

    name: str
    text: str
    line: int = 1


@dataclass(frozen=True)
class Passage:
    """Tokens [first, last) of a document; `line` is the line of its topic's source it starts at."""

    topic: int
    first: int
    last: int
    line: int


def heading_lines(lines: Sequence[str], markdown: bool = False) -> dict[int, str]:
    """{line number: title} of the headings: underlined lines, in Markdown also lines that start with '#'."""
    found = {}
    fenced = False  # '#' starts a comment, not a heading, inside a Markdown code block
    for i, line in enumerate(lines):
        title = line.strip()
        fenced ^= markdown and title.startswith("```")
        if markdown and not fenced and (match := _MARKDOWN_HEADING.match(line)):
            found[i] = match.group(1)
        elif (
            i + 1 < len(lines)
            and any(c.isalnum() for c in title)
            and _UNDERLINE.match(lines[i + 1])
            and len(lines[i + 1].strip()) >= len(title) - 1
        ):
            found[i] = title
    return found


class Document:
    """Topics, the tokens of all of them in one row, and passages.

    Args:
        title: str, what the report calls the document.
        topics: in order.
        max_tokens: int, the text is cut after so many tokens; `full_length` is what it had.
        markdown: bool, lines that start with '#' are headings.
    """

    def __init__(self, title: str, topics: Sequence[Topic], *, max_tokens: int, markdown: bool = False):
        self.title = title
        self.topics = topics
        self.names = [topic.name for topic in topics]
        starts, ends, words, firsts = [], [], [], []
        pieces, offset = [], 0
        for topic in progress(topics, len(topics), "reading"):
            firsts.append(len(words))
            for match in _TOKEN.finditer(topic.text):
                words.append(match.group())
                starts.append(match.start() + offset)
                ends.append(match.end() + offset)
            pieces.append(topic.text)
            offset += len(topic.text) + 1
        self.text = "\n".join(pieces)
        self.full_length = len(words)
        self.words = words[:max_tokens]
        self.starts = np.array(starts[:max_tokens], dtype=np.int64)
        self.ends = np.array(ends[:max_tokens], dtype=np.int64)
        T = len(self.words)
        self.topic_first = np.minimum(np.array([*firsts, T], dtype=np.int64), T)
        self.passages = list(self._passages(markdown))

    def __len__(self) -> int:
        return len(self.words)

    def _passages(self, markdown: bool):
        offset = 0
        for number, topic in enumerate(self.topics):
            first, last = int(self.topic_first[number]), int(self.topic_first[number + 1])
            lines = topic.text.split("\n")
            # The first token of each line of the topic.
            line_starts = offset + np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
            tokens = np.clip(np.searchsorted(self.starts, line_starts), first, last)
            offset += len(topic.text) + 1
            headings = heading_lines(lines, markdown)
            begin, begin_line = first, 0
            for i in range(1, len(lines)):
                here = int(tokens[i])
                held = here - begin
                after_blank = not lines[i - 1].strip() and bool(lines[i].strip())
                if (i in headings and held >= PASSAGE_LEAST) or (after_blank and held >= PASSAGE):
                    yield from self._pieces(number, begin, here, begin_line, tokens)
                    begin, begin_line = here, i
            yield from self._pieces(number, begin, last, begin_line, tokens)

    def _pieces(self, topic: int, first: int, last: int, line: int, tokens: np.ndarray):
        """[first, last) as passages of at most PASSAGE_MOST tokens, about equally long."""
        count = -(-(last - first) // PASSAGE_MOST)
        for i in range(count):
            a, b = (first + (last - first) * x // count for x in (i, i + 1))
            at = line if i == 0 else int(np.searchsorted(tokens, a, side="right")) - 1
            yield Passage(topic, a, b, at + self.topics[topic].line)

    def passage_text(self, passage: Passage) -> str:
        return self.text[self.starts[passage.first] : self.ends[passage.last - 1]]

    def passage_words(self, passage: Passage) -> str:
        """Its words alone: equal for passages that the document repeats with other underlines or indents."""
        return " ".join(w for w in self.words[passage.first : passage.last] if w[0].isalnum())

    @cached_property
    def group_of_passage(self) -> np.ndarray:
        """[number of passages]: passages with the same words have the same group; groups number from 0 in order."""
        known: dict[str, int] = {}
        return np.array([known.setdefault(self.passage_words(p), len(known)) for p in self.passages], dtype=np.int64)

    @cached_property
    def group_of_token(self) -> np.ndarray:
        return np.repeat(self.group_of_passage, [p.last - p.first for p in self.passages])

    @cached_property
    def group_members(self) -> list[list[Passage]]:
        members: list[list[Passage]] = [[] for _ in range(int(self.group_of_passage.max()) + 1)]
        for group, passage in zip(self.group_of_passage.tolist(), self.passages, strict=True):
            members[group].append(passage)
        return members

    @cached_property
    def _topic_words(self) -> dict[str, str]:
        spans = zip(self.names, self.topic_first[:-1].tolist(), self.topic_first[1:].tolist(), strict=True)
        return {name: " ".join(w for w in self.words[a:b] if w[0].isalnum()) for name, a, b in spans}

    def group_is_about(self, group: int, topic: str) -> bool:
        """A passage answers for a topic if it lies in it, or if its words stand in that topic, one by one in order.

        The Python documentation repeats whole sections: `compound` contains `if`, `try`, `with`.
        """
        first = self.group_members[group][0]
        if any(self.names[p.topic] == topic for p in self.group_members[group]):
            return True
        words = self.passage_words(first)
        return len(words.split()) >= PASSAGE_LEAST and words in self._topic_words[topic]


# ------------------------------------------------------------------------------------------------------------ sources


def python_topics() -> list[Topic]:
    """The language reference inside every CPython (`pydoc_data.topics`), sorted by topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError(f"this Python has no pydoc_data.topics ({error}); give a text with --text FILE") from None
    return [Topic(name, topics[name]) for name in sorted(topics)]


def python_sources() -> list[Topic]:
    """The standard library's sources (tests and installed packages left out), sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - skip)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return [
        Topic(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(found)
    ]


def _decode(raw: bytes, name: str) -> tuple[str, str]:
    """(text, note): UTF-8, or UTF-16 where a byte order mark says so; what does not decode is replaced and counted."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text, own = raw.decode("utf-16", errors="replace"), 0
    elif b"\0" in raw:
        raise DemoError(f"--text {name}: this is a binary file (it contains NUL bytes), not a text")
    else:
        text, own = raw.decode("utf-8-sig", errors="replace"), raw.count("\ufffd".encode())
    bad = text.count("\ufffd") - own
    return text, f"{bad:,} undecodable bytes replaced" if bad else ""


def read_file(name: str) -> tuple[list[Topic], bool, str]:
    """(topics, is it Markdown, note) of a text file; its headings, if it has any, are the topics."""
    path = Path(name)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DemoError(f"--text {name}: no such file") from None
    except IsADirectoryError:
        raise DemoError(f"--text {name}: this is a folder; give one text file") from None
    except OSError as error:
        raise DemoError(f"--text {name}: cannot be read ({error.strerror or error})") from None
    if not raw.strip():
        raise DemoError(f"--text {name}: the file is empty")
    text, note = _decode(raw, name)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not any(c.isalnum() for c in text):
        raise DemoError(f"--text {name}: the file holds no words")
    markdown = path.suffix.lower() in (".md", ".markdown")
    lines = text.split("\n")
    headings = heading_lines(lines, markdown)
    cuts = [(0, path.name), *((i, title) for i, title in headings.items())]
    ends = [i for i, _ in cuts[1:]] + [len(lines)]
    topics = [
        Topic(title[:60], "\n".join(lines[begin:end]), begin + 1)
        for (begin, title), end in zip(cuts, ends, strict=True)
    ]
    return [topic for topic in topics if topic.text.strip()], markdown, note
