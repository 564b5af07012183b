"""Links an emulated library: link.py OUT CXX SONAME OBJECT...

Launchers refer to kernels of every shape, of which a test translates a few. Each of the others becomes a function
that throws its name, where the linker would leave a library that cannot be loaded.
"""

import subprocess
import sys
import tempfile
from pathlib import Path


def symbols(objects: list[str], *options: str) -> set[str]:
    done = subprocess.run(["nm", "--format=posix", *options, *objects], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if len(line.split()) > 1}


def main(argv: list[str]) -> int:
    out, cxx, soname, *objects = argv
    missing = symbols(objects, "--undefined-only") - symbols(objects, "--defined-only", "--extern-only")
    missing = sorted(name for name in missing if name.startswith("_Z") and "htree_cuda" in name)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "missing.cpp"
        lines = ["#include <stdexcept>"]
        for number, name in enumerate(missing):
            lines.append(f'extern "C" void missing_{number}() asm("{name}");')
            message = f"not translated for the emulator: {name}"
            lines.append(f'void missing_{number}() {{ throw std::runtime_error("{message}"); }}')
        code.write_text("\n".join(lines) + "\n")
        shared = [cxx, "-shared", "-fPIC", f"-Wl,-soname={soname}", "-Wl,--no-undefined"]
        subprocess.run([*shared, "-o", out, *objects, str(code)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
