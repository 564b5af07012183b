"""The command: `python -m htree_cuda demo`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import textwrap
import time
from pathlib import Path

import torch

from ..checks.common import MAX_POWER
from .embedding import Embedding, K, V
from .picture import draw
from .report import columns, evaluate, print_comparison, print_outcomes, print_question
from .search import Answer, Search
from .text import DemoError, Document, Topic, python_sources, python_topics, read_file

QUESTION = "Is the default value of a function parameter created again on every call?"
PICTURE = Path("demo_out") / "htree_demo.png"
MOST_TOKENS = {"cpu": 1 << 19, "cuda": 1 << 22}

DESCRIPTION = """\
Searches a long document by htree attention: the document's tokens are keys and values in a tree, the question is a
query that descends it. Prints the passages that received the most attention, compares with dense attention, and draws
the descent. Without arguments: one question and the table of the 10 committed ones."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m htree_cuda demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--query", metavar="TEXT", help="the question (default: one of the Python language)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="search this text file instead")
    source.add_argument(
        "--corpus", choices=("topics", "stdlib"),
        help="topics: the language reference in this Python (default on a CPU); stdlib: that and the sources of the "
        "standard library (default with a Hopper GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--evaluate", nargs="?", const="committed", choices=("committed", "tuning"),
        help="only the table of the 10 committed questions (or of the 20 others that the embedding was tuned on)",
    )  # fmt: skip
    parser.add_argument("--passages", type=int, default=5, metavar="N", help="passages to print (default 5)")
    parser.add_argument("--png", metavar="FILE", help=f"the picture (default {PICTURE})")
    parser.add_argument("--no-png", action="store_true", help="draw no picture")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a Hopper GPU")
    parser.add_argument("--rate", type=int, default=16, help="children per node, a power of two (default 16)")
    parser.add_argument("--top-k", type=int, help="nodes expanded per layer, a power of two (default 32 to 512)")
    parser.add_argument("--max-tokens", type=int, help="cut longer texts (default 524,288, with a GPU 4,194,304)")
    return parser


def _device(wanted: str | None) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: PyTorch sees no CUDA device")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return torch.device(wanted or ("cuda" if hopper else "cpu"))


def _topics(max_tokens: int) -> Document:
    title = f"the Python {platform.python_version()} language reference (pydoc_data.topics)"
    return Document(title, python_topics(), max_tokens=max_tokens)


def _document(arguments: argparse.Namespace, device: torch.device, max_tokens: int) -> tuple[Document, str]:
    """(document, note)."""
    if arguments.text is not None:
        topics, markdown, note = read_file(arguments.text)
        return Document(arguments.text, topics, max_tokens=max_tokens, markdown=markdown), note
    if (arguments.corpus or ("stdlib" if device.type == "cuda" else "topics")) == "topics":
        return _topics(max_tokens), ""
    topics = [Topic(f"topic {topic.name}", topic.text) for topic in python_topics()] + python_sources()
    title = f"the Python {platform.python_version()} language reference and standard library"
    return Document(title, topics, max_tokens=max_tokens), ""


def _print_field(name: str, text: str) -> None:
    print(textwrap.fill(text, columns(), initial_indent=f"{name:<11}", subsequent_indent=" " * 11))


def _prepare(document: Document, device: torch.device, arguments: argparse.Namespace) -> Search:
    started = time.perf_counter()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    search = Search(Embedding(document, device, dtype), rate=arguments.rate, top_k=arguments.top_k)
    taken = time.perf_counter() - started
    words = len(search.embedding.vocabulary)
    cut = f", cut from {document.full_length:,}" if document.full_length > len(document) else ""
    what = f"{len(document.names)} topics, " if len(document.names) > 1 else ""
    passages = f"{len(document.passages):,} passage{'s' * (len(document.passages) > 1)}"
    _print_field(
        "document",
        f"{document.title}: {what}{passages}, {len(document):,} tokens{cut}, {words:,} "
        f"different words; embedded in {taken:.1f} s",
    )
    return search


def _print_setting(search: Search, device: torch.device) -> None:
    sizes = search.layer_sizes
    counts = ", ".join(f"{n:,}" for n in reversed(sizes))
    top = f"layers of {counts} nodes" if len(sizes) > 1 else "one layer, so this is dense attention"
    _print_field("tree", f"{search.rate} children per node, {search.top_k} expanded per layer; {top}")
    cpu = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    heads = search.embedding.kv_heads * search.embedding.heads_per_kv
    _print_field(
        "attention",
        f"{heads} query heads, {search.embedding.kv_heads} KV heads, K = {K}, V = {V}, "
        f"{str(search.embedding.dtype).removeprefix('torch.')}, {where}",
    )


def _print_backend(search: Search, device: torch.device) -> None:
    if search.why_torch:
        text = f"torch (PyTorch operations), asked for because {search.why_torch}"
    elif device.type == "cpu":
        text = "torch (PyTorch operations): the tensors are on the CPU"
    else:
        text = "Hopper kernels; dense attention with PyTorch operations"
    _print_field("backend", text)


def _draw(path: str | None, asked: tuple[Document, Search], answer: Answer) -> str:
    """Writes the picture; returns where. The default folder is made, one that the user names has to exist."""
    if path is None:
        try:
            PICTURE.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise DemoError(f"{PICTURE.parent}: cannot be made ({error.strerror}); name a file with --png") from None
    path = path or str(PICTURE)
    draw(path, *asked, answer)
    return path


def _run(arguments: argparse.Namespace) -> None:
    device = _device(arguments.device)
    if arguments.passages < 1:
        raise DemoError(f"--passages must be at least 1, got {arguments.passages}")
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise DemoError(f"--max-tokens must be at least 1, got {arguments.max_tokens}")
    for name, value, least in (("--rate", arguments.rate, 2), ("--top-k", arguments.top_k, 1)):
        if value is not None and (not least <= value <= MAX_POWER or value & (value - 1)):
            raise DemoError(f"{name} must be a power of two, {least} to 2^{MAX_POWER.bit_length() - 1}, got {value}")
    if not arguments.no_png and arguments.png is not None and (not arguments.png or os.path.isdir(arguments.png)):
        raise DemoError(f"--png must name a file, got {arguments.png!r}")
    if arguments.evaluate and (arguments.text is not None or arguments.query is not None):
        raise DemoError("--evaluate asks its own questions of the Python documentation: no --text, no --query")
    if arguments.text is not None and arguments.query is None:
        read_file(arguments.text)  # What is wrong with the file comes before what is missing.
        raise DemoError(f"--text {arguments.text}: give a question about it with --query")
    max_tokens = arguments.max_tokens or MOST_TOKENS[device.type]
    search = answer = None
    if not arguments.evaluate:
        document, note = _document(arguments, device, max_tokens)
        search = _prepare(document, device, arguments)
        if note:
            _print_field("", note)
        question = search.embedding.question(arguments.query if arguments.query is not None else QUESTION)
        [answer] = search.ask([question])
        _print_setting(search, device)
        _print_backend(search, device)
        print_question(document, search, answer, arguments.passages)
        print_comparison(document, search, answer, *search.cost(question))
        asked = (document, search)
    if arguments.evaluate or (arguments.text is None and arguments.query is None):
        if search is None or document.names != [topic.name for topic in python_topics()]:
            document = _topics(max_tokens)
            search = _prepare(document, device, arguments)
            _print_setting(search, device)
        name = arguments.evaluate or "committed"
        outcomes = evaluate(document, search, name)
        if arguments.evaluate:
            _print_backend(search, device)
        print_outcomes(outcomes, name)
    if answer is not None and not arguments.no_png:
        print(f"\nThe descent and the attention over the document: {_draw(arguments.png, asked, answer)}")


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; 0, or 2 with one line on stderr where the user can put something right."""
    arguments = _parser().parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):  # the documents hold typographic quotes; a C locale shall not stop them
        sys.stdout.reconfigure(errors="replace")
    try:
        _run(arguments)
    except DemoError as error:
        sys.stdout.flush()
        print(f"htree_cuda demo: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`: what was asked for has been read; leave nothing for Python to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
