"""Compares the machine code of two builds kernel by kernel, with every name stripped.

python tools/sass_diff.py OLD NEW [--rename PATTERN=TEXT] [--markdown] [--all]

OLD and NEW are libraries (.so), objects (.o) or cubins; a folder stands for every object below it. The comparison
reads the device ELF images themselves. A kernel is its instructions, its constants, its relocations and what the
driver is told about it (registers, barriers, shared memory, parameters). Names of symbols and sections and line
tables take no part. A renamed kernel is therefore found again by its content, and only then by its structure.
Exit status: 0 where every kernel of OLD has an identical one in NEW and the reverse, 1 where not, 2 on an error.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ELF = b"\x7fELF"
FATBIN = bytes.fromhex("50ed55ba")
ZSTD = bytes.fromhex("28b52ffd")
EM_CUDA = 190
INSTRUCTION_BYTES = 16  # since Volta
# The low 12 bits of an instruction are its opcode. Local memory holds spills and arrays that are indexed at run time.
LOCAL_LOAD, LOCAL_STORE = 0x983, 0x387
# Attributes of .nv.info that hold symbol numbers: PARAM_CBANK, EXTERNS.
SYMBOL_ATTRIBUTES = {0x0A, 0x0F}
REGCOUNT, FRAME_SIZE = 0x2F, 0x11
# Kernels with less in common than this are two kernels, not one that changed.
LEAST_SIMILARITY = 0.7


class ReadError(RuntimeError):
    """A file that cannot be read as a build with machine code."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of one build."""

    name: str  # mangled
    content: str  # hash of everything that the hardware sees
    opcodes: collections.Counter
    registers: int
    shared: int  # static shared memory, bytes
    frame: int  # stack, bytes
    parameters: int  # bytes

    @property
    def instructions(self) -> int:
        return self.opcodes.total()

    @property
    def spills(self) -> int:
        """Instructions that load from or store to local memory."""
        return self.opcodes[LOCAL_LOAD] + self.opcodes[LOCAL_STORE]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kernel of OLD with its counterpart in NEW; None where there is none."""

    old: Kernel | None
    new: Kernel | None

    @property
    def state(self) -> str:
        if self.old is None or self.new is None:
            return "only in old" if self.new is None else "only in new"
        return "identical" if self.old.content == self.new.content else "changed"


class Elf:
    """Sections, symbols and relocations of a 64-bit ELF image."""

    def __init__(self, image: bytes):
        self.image = image
        offset = struct.unpack_from("<Q", image, 0x28)[0]
        size, count, names = struct.unpack_from("<HHH", image, 0x3A)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        self.headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
        self.names = [self.string(names, header[0]) for header in self.headers]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.symbols = []
        if ".symtab" in self.index:
            table = self.data(".symtab")
            link = self.headers[self.index[".symtab"]][6]
            for entry in range(0, len(table), 24):
                name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", table, entry)
                self.symbols.append((self.string(link, name), info & 15, section, value))

    def string(self, section: int, offset: int) -> str:
        start = self.headers[section][4] + offset
        return self.image[start : self.image.index(b"\0", start)].decode()

    def data(self, name: str) -> bytes:
        """Content of a section; empty where there is no such section or it holds no bytes."""
        if name not in self.index or self.headers[self.index[name]][1] == 8:  # SHT_NOBITS
            return b""
        _, _, _, _, offset, size, *_ = self.headers[self.index[name]]
        return self.image[offset : offset + size]

    def size(self, name: str) -> int:
        return self.headers[self.index[name]][5] if name in self.index else 0

    def relocations(self, name: str, kernel: str) -> list[tuple]:
        """Relocations of a section, each symbol by what it is: a place in a section, or an import's own name."""
        found = []
        table = self.data(".rela" + name)
        for entry in range(0, len(table), 24):
            offset, info, addend = struct.unpack_from("<QQq", table, entry)
            symbol, _, section, value = self.symbols[info >> 32]
            place = self.names[section].replace(kernel, "") if 0 < section < len(self.names) else symbol
            found.append((offset, info & 0xFFFFFFFF, place, value, addend))
        return sorted(found)


def attributes(info: bytes):
    """(attribute, payload) of a .nv.info section."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        payload = info[at : at + value] if form == 4 else struct.pack("<H", value)
        at += value if form == 4 else 0
        yield attribute, payload


def kernels_of_image(image: bytes) -> list[Kernel]:
    """The kernels of one device image."""
    elf = Elf(image)
    registers, frames = {}, {}
    for attribute, payload in attributes(elf.data(".nv.info")):
        if attribute in (REGCOUNT, FRAME_SIZE):
            symbol, value = struct.unpack("<II", payload[:8])
            (registers if attribute == REGCOUNT else frames)[elf.symbols[symbol][0]] = value
    found = []
    for section in elf.names:
        if not section.startswith(".text."):
            continue
        name = section.removeprefix(".text.")
        code = elf.data(section)
        kept = [
            (attribute, payload)
            for attribute, payload in attributes(elf.data(f".nv.info.{name}"))
            if attribute not in SYMBOL_ATTRIBUTES
        ]
        parts = (
            code,
            elf.relocations(section, name),
            elf.data(f".nv.constant2.{name}"),
            elf.relocations(f".nv.constant2.{name}", name),
            elf.data(".nv.constant3"),
            kept,
            registers.get(name),
            frames.get(name),
            elf.size(f".nv.shared.{name}"),
            elf.size(f".nv.constant0.{name}"),
        )
        opcodes = collections.Counter(
            word & 0xFFF for (word,) in struct.iter_unpack(f"<Q{INSTRUCTION_BYTES - 8}x", code)
        )
        found.append(
            Kernel(
                name,
                hashlib.sha256(repr(parts).encode()).hexdigest(),
                opcodes,
                registers.get(name, 0),
                elf.size(f".nv.shared.{name}"),
                frames.get(name, 0),
                elf.size(f".nv.constant0.{name}"),
            )
        )
    return found


def images_of_fatbin(data: bytes, path: Path) -> list[bytes]:
    """The device images in a section of fatbins, which follow one another with padding between."""
    images, at = [], 0
    while (at := data.find(FATBIN, at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + header, at + header + size
        while entry + 64 <= end:
            kind, _, entry_header, payload_size = struct.unpack_from("<HHIQ", data, entry)
            if entry_header == 0:
                break
            payload = data[entry + entry_header : entry + entry_header + payload_size]
            if kind == 2 and payload.startswith(ZSTD) and (tool := shutil.which("zstd")):
                (compressed,) = struct.unpack_from("<I", data, entry + 16)  # without the padding of the payload
                done = subprocess.run([tool, "-dc"], input=payload[:compressed], capture_output=True, check=True)
                payload = done.stdout
            if kind == 2 and not payload.startswith(ELF):
                return images_by_cuobjdump(path)
            if kind == 2:
                images.append(payload)
            entry += entry_header + payload_size
        at = end
    return images


def images_by_cuobjdump(path: Path) -> list[bytes]:
    """The device images of a file whose fatbins are compressed."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        raise ReadError(
            f"{path}: its device code is compressed: put zstd, or cuobjdump of the CUDA toolkit, on the PATH"
        )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "-xelf", "all", str(path.resolve())], cwd=folder, check=True, capture_output=True)
        return [cubin.read_bytes() for cubin in sorted(Path(folder).glob("*.cubin"))]


def read_build(path: Path) -> dict[str, Kernel]:
    """Every kernel of a file or folder, by mangled name; one that several objects hold alike counts once."""
    files = sorted(path.rglob("*.o")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ReadError(f"{path}: no such file, or a folder without objects")
    kernels: dict[str, Kernel] = {}
    for file in files:
        data = file.read_bytes()
        if not data.startswith(ELF):
            raise ReadError(f"{file}: no ELF file; expected a library, an object or a cubin")
        if struct.unpack_from("<H", data, 18)[0] == EM_CUDA:
            images = [data]
        else:
            images = images_of_fatbin(Elf(data).data(".nv_fatbin"), file)
        for kernel in (kernel for image in images for kernel in kernels_of_image(image)):
            name, copy = kernel.name, 1
            while name in kernels and kernels[name].content != kernel.content:
                copy += 1
                name = f"{kernel.name}#{copy}"
            kernels[name] = dataclasses.replace(kernel, name=name)
    if not kernels:
        raise ReadError(f"{path}: holds no kernels")
    return kernels


def demangle(names: list[str]) -> dict[str, str]:
    """Names as C++ writes them, return type and parameters left out; as they are where c++filt is missing."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return {name: name for name in names}
    plain = [name.partition("#")[0] for name in names]
    done = subprocess.run([tool], input="\n".join(plain), capture_output=True, text=True, check=True)
    found = {}
    for name, text in zip(names, done.stdout.splitlines(), strict=True):
        text = text.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
        text = re.sub(r"\((?:unsigned |[\w:])+\)(?=-?\d)", "", text)  # types of template values: (int)64
        found[name] = text.partition("(")[0] + (f" #{name.partition('#')[2]}" if "#" in name else "")
    return found


def similarity(old: Kernel, new: Kernel) -> float:
    """Share of instructions that two kernels have in common, by opcode."""
    common = (old.opcodes & new.opcodes).total()
    return common / max(old.instructions, new.instructions, 1)


def template_values(text: str) -> tuple[str, ...]:
    """The numbers and types among template arguments: what a rename leaves alone."""
    return tuple(re.findall(r"(?<![\w:])(?:\d+|true|false|__nv_bfloat16|__half|float)(?![\w:])", text))


def match(old: dict[str, Kernel], new: dict[str, Kernel], renames: list[tuple[str, str]] = ()) -> list[Pair]:
    """Every kernel of both builds, once: equal name and content, then content, then name, then structure."""
    names = demangle([*old, *(name for name in new if name not in old)])

    def identity(name: str) -> str:
        text = names[name]
        for pattern, replacement in renames:
            text = re.sub(pattern, replacement, text)
        return text

    left, right = dict(old), dict(new)
    pairs = []

    def take(old_name: str, new_name: str) -> None:
        pairs.append(Pair(left.pop(old_name), right.pop(new_name)))

    for name in old:
        if name in right and right[name].content == old[name].content:
            take(name, name)
    by_content = collections.defaultdict(list)
    for name, kernel in right.items():
        by_content[kernel.content].append(name)
    for name, kernel in list(left.items()):
        # Kernels of equal content are told apart by their template arguments, as far as those tell.
        same = by_content[kernel.content]
        if same:
            values = template_values(names[name])
            best = next((other for other in same if template_values(names[other]) == values), same[0])
            same.remove(best)
            take(name, best)
    by_name = {names[name]: name for name in right}
    for name in list(left):
        for wanted in (names[name], identity(name)):
            if wanted in by_name and by_name[wanted] in right:
                take(name, by_name[wanted])
                break
    scored = sorted(
        (
            (template_values(names[a]) == template_values(names[b]), similarity(left[a], right[b]), a, b)
            for a in left
            for b in right
        ),
        key=lambda entry: (not entry[0], -entry[1], entry[2], entry[3]),
    )
    for _, score, a, b in scored:
        if score >= LEAST_SIMILARITY and a in left and b in right:
            take(a, b)
    pairs += [Pair(kernel, None) for kernel in left.values()]
    pairs += [Pair(None, kernel) for kernel in right.values()]
    return pairs


def change(old: int | None, new: int | None) -> str:
    """A figure of both builds: one number where they agree."""
    if old is None or new is None or old == new:
        return str(new if old is None else old)
    return f"{old} -> {new}"


def table(pairs: list[Pair]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: kernel, state and figures."""
    names = demangle(sorted({kernel.name for pair in pairs for kernel in (pair.old, pair.new) if kernel}))
    rows = []
    for pair in pairs:
        old_name, new_name = (names[kernel.name] if kernel else None for kernel in (pair.old, pair.new))
        name = old_name or new_name
        if old_name and new_name and old_name != new_name:
            name = f"{old_name} -> {new_name}"
        figures = [
            change(*(getattr(kernel, field) if kernel else None for kernel in (pair.old, pair.new)))
            for field in ("instructions", "registers", "shared", "frame", "spills")
        ]
        rows.append([name, pair.state, *figures])
    return ["kernel", "state", "instructions", "registers", "shared B", "stack B", "local ld/st"], rows


def report(pairs: list[Pair], markdown: bool, everything: bool) -> str:
    """The counts of every state, and a row for each kernel that is not identical (`everything`: for each)."""
    counts = collections.Counter(pair.state for pair in pairs)
    renamed = sum(pair.state == "identical" and pair.old.name != pair.new.name for pair in pairs)
    order = ("identical", "changed", "only in old", "only in new")
    line = ", ".join(f"{counts[state]} {state}" for state in order)
    lines = [f"SASS of {len(pairs)} kernels: {line}; {renamed} of the identical ones have a new name."]
    shown = sorted((p for p in pairs if everything or p.state != "identical"), key=lambda p: order.index(p.state))
    head, rows = table(shown)
    if rows and markdown:
        lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(['`' + row[0] + '`', *row[1:]])} |" for row in rows]
    elif rows:
        for row in rows:
            lines.append(f"{row[1]:12}{row[0]}")
            lines.append(" " * 12 + ", ".join(f"{what} {value}" for what, value in zip(head[2:], row[2:], strict=True)))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="library, object, cubin, or folder of objects: before")
    parser.add_argument("new", type=Path, help="the same: after")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="PATTERN=TEXT",
        help="regular expression for the demangled names of OLD, and what it becomes; may be repeated",
    )
    parser.add_argument("--markdown", action="store_true", help="a table for a commit message")
    parser.add_argument("--all", action="store_true", help="identical kernels too")
    options = parser.parse_args(argv)
    if any("=" not in text for text in options.rename):
        parser.error("--rename takes PATTERN=TEXT")
    renames = [tuple(text.split("=", 1)) for text in options.rename]
    try:
        pairs = match(read_build(options.old), read_build(options.new), renames)
    except ReadError as error:
        print(f"sass_diff: {error}", file=sys.stderr)
        return 2
    print(report(pairs, options.markdown, options.all))
    return 0 if all(pair.state == "identical" for pair in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
