"""`python -m htree_cuda {info,demo,explain,bench} ...`: each command is a module, imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys

from ._version import __version__

COMMANDS = {
    "info": "what is installed, what it was built with, what it runs on",
    "demo": "search a long document by htree attention",
    "explain": "which kernels a call runs, with which tile, why, and what share of the time each takes",
    "bench": "measure, and write the figures as JSON",
}


def main(argv: list[str] | None = None) -> int:
    """Dispatches to the command's own main(argv); returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m htree_cuda", description="Hierarchical tree attention.")
    parser.add_argument("--version", action="version", version=f"htree_cuda {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    try:
        module = importlib.import_module(f"htree_cuda.{arguments.command}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("htree_cuda"):
            raise
        sys.exit(f"python -m htree_cuda {arguments.command} needs {error.name}: pip install 'htree_cuda[demo]'")
    return module.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
