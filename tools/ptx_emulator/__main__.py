"""Builds the emulated library: python -m tools.ptx_emulator [--only TEXT ...]"""

import argparse

from . import build

parser = argparse.ArgumentParser(prog="python -m tools.ptx_emulator", description=__doc__)
parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="of the .cu files to translate")
print(build(parser.parse_args().only))
