"""Makes one object of a .cu file's host code and its emulated kernels: emulate.py OUT N CXX... NVCC...

The first N words after N compile C++; the others are an nvcc command that leaves PTX in an object. The PTX and the
C++ that it became are kept as OUT.ptx and OUT.cpp: the emulator's messages name their lines.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from translate import main as translate


def main(argv: list[str]) -> int:
    out, count = Path(argv[0]), int(argv[1])
    cxx, nvcc = argv[2 : 2 + count], argv[2 + count :]
    with tempfile.TemporaryDirectory() as folder:
        host, kernels = Path(folder) / "host.o", Path(folder) / "kernels.o"
        nvcc = [str(host) if argument == str(out) else argument for argument in nvcc]
        subprocess.run([*nvcc, "--keep", "--keep-dir", folder], check=True)
        (found,) = Path(folder).glob("*.ptx")
        text, code = Path(f"{out}.ptx"), Path(f"{out}.cpp")
        text.write_text(found.read_text())
        translate([str(text), str(code)])
        subprocess.run([*cxx, "-c", str(code), "-o", str(kernels)], check=True)
        subprocess.run([cxx[0], "-r", "-nostdlib", "-o", str(out), str(host), str(kernels)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
