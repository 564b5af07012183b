"""PTX to C++: every kernel of a PTX file becomes a C++ function that one emulated thread runs.

Only the instructions that the kernels of this package use are known; another one is an error that names it. What an
instruction does to registers and plain memory is written out in `instructions.py`; what needs other threads, time or a
check is a call into `runtime.h`.

Source: PTX ISA 9.0 (NVIDIA), the sections on each instruction.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from dataclasses import dataclass, field

if __package__:
    from .instructions import INTEGERS, TYPES, Instructions, UnknownPtx, identifier, split_operands
else:  # run as a script, by the build
    from instructions import INTEGERS, TYPES, Instructions, UnknownPtx, identifier, split_operands

_SPECIAL = {
    **{
        f"%{name}.{axis}": f"t.{name}[{i}]"
        for name in ("tid", "ntid", "ctaid", "nctaid")
        for i, axis in enumerate("xyz")
    },
    "%laneid": "t.lane",
    "%warpid": "t.warp",
    "%clock64": "t.clock()",
    "%clock": "static_cast<uint32_t>(t.clock())",
    "%globaltimer": "t.clock()",
    "%cluster_ctarank": "t.cluster_rank",
    "%cluster_nctarank": "t.cluster_size",
    "%cluster_ctaid.x": "t.cluster_rank",
    "%clusterid.x": "(t.ctaid[0] / t.cluster_size)",
    "%lanemask_lt": "((1u << t.lane) - 1u)",
    "%lanemask_le": "((2u << t.lane) - 1u)",
    "%lanemask_gt": "~((2u << t.lane) - 1u)",
    "%lanemask_eq": "(1u << t.lane)",
    "WARP_SZ": "32u",
}


_BYTES = {**INTEGERS, "float": 4, "double": 8, "half": 2, "bfloat": 2, "half2": 4, "bfloat2": 4}


def _read_as(to: str, ctype: str, expression: str) -> str:
    """What as<to>(expression) of runtime.h is, of a known type, without a template: g++ takes half as long."""
    if to == ctype:
        return expression
    if to in INTEGERS and ctype in INTEGERS:
        return f"static_cast<{to}>({expression})"
    if to in _BYTES and _BYTES[to] == _BYTES.get(ctype):
        return f"__builtin_bit_cast({to}, {expression})"
    return f"as<{to}>({expression})"


@dataclass
class _Scope:
    types: dict[str, str] = field(default_factory=dict)  # PTX register name -> C++ type
    ranges: list[tuple[str, str]] = field(default_factory=list)  # prefix of %r<N> -> C++ type


def _statements(body: str) -> list[tuple[int, str]]:
    """(line, text) of statements, labels (ending in ':') and the braces of scopes."""
    out, i, line = [], 0, 1
    while i < len(body):
        if body[i].isspace():
            line += body[i] == "\n"
            i += 1
        elif body[i] in "{}":
            out.append((line, body[i]))
            i += 1
        else:
            label = re.match(r"[$\w]+:(?!:)", body[i:])
            if label and ".branchtargets" not in body[i : i + 200].split(";")[0]:
                out.append((line, label[0]))
                i += label.end()
                continue
            end = body.index(";", i)
            text = " ".join(body[i:end].split())
            if text:
                out.append((line, text))
            line += body.count("\n", i, end)
            i = end + 1
    return out


class _Function(Instructions):
    """The translation of one .entry or .func."""

    def __init__(self, module: _Module, name: str, params: list[str], returns: list[str]):
        self.module, self.name = module, name
        self.scopes = [_Scope()]
        self.lines: list[str] = []
        self.used: dict[str, str] = {}  # ranged registers: identifier -> C++ type
        self.params = {p: f"p_{p}" for p in params + returns}
        self.local_arrays: set[str] = set()
        self.tables: dict[str, list[str]] = {}

    # ---- operands ------------------------------------------------------------------------------------------------

    def register_type(self, name: str) -> str | None:
        for scope in reversed(self.scopes):
            if name in scope.types:
                return scope.types[name]
            stem = re.fullmatch(r"(%[a-z]+)(\d+)", name)
            if stem:
                for prefix, ctype in scope.ranges:
                    if prefix == stem[1]:
                        self.used[identifier(name)] = ctype
                        return ctype
        return None

    def value(self, ctype: str, text: str) -> str:
        """`text` as an expression of `ctype`."""
        if text in _SPECIAL:
            return f"as<{ctype}>({_SPECIAL[text]})"
        if text.startswith("!"):
            return f"!{self.value('bool', text[1:])}"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            if ctype == "float":
                return f"__builtin_bit_cast(float, 0x{text[2:]}u)"
            return f"as<{ctype}>(from_bits<float>(0x{text[2:]}u))"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"as<{ctype}>(from_bits<double>(0x{text[2:]}ull))"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            number = int(text.rstrip("U"), 0)
            if ctype in INTEGERS:
                return f"static_cast<{ctype}>({number & 0xFFFFFFFFFFFFFFFF}ull)"
            return f"constant<{ctype}>({number & 0xFFFFFFFFFFFFFFFF}ull)"
        register = self.register_type(text)
        if register is not None:
            return _read_as(ctype, register, identifier(text))
        return f"as<{ctype}>({self.symbol(text)})"

    def symbol(self, text: str) -> str:
        name, _, offset = text.partition("+")
        if name in self.params:
            base = f"reinterpret_cast<uint64_t>({self.params[name]})"
        elif name in self.local_arrays:
            base = f"reinterpret_cast<uint64_t>({identifier(name)})"
        elif name in self.module.shared:
            base = f"uint64_t{{{self.module.shared[name]}}}"
        elif name in self.module.globals:
            base = f"reinterpret_cast<uint64_t>({self.module.globals[name]})"
        else:
            raise UnknownPtx(f"{self.name}: operand {text!r}")
        return f"({base} + {int(offset)})" if offset else base

    def address(self, text: str) -> str:
        """The expression of an address operand [a], [a+b]."""
        inner = text.strip()[1:-1].strip()
        match = re.fullmatch(r"([^+\s]+)\s*(?:\+\s*(-?\d+|0x[0-9a-f]+))?", inner)
        if match is None:
            raise UnknownPtx(f"{self.name}: address {text!r}")
        name, offset = match[1], int(match[2], 0) if match[2] else 0
        base = self.value("uint64_t", name)
        return f"({base} + {offset & 0xFFFFFFFFFFFFFFFF}ull)" if offset else base

    def put(self, target: str, expression: str, guard: str = "", ctype: str | None = None) -> None:
        """`ctype`: the type of the expression, where it is known."""
        if target == "_":
            self.emit(f"{guard}(void)({expression});")
            return
        register = self.register_type(target)
        if register is None:
            raise UnknownPtx(f"{self.name}: target {target!r}")
        if ctype is None:
            self.emit(f"{guard}put({identifier(target)}, {expression});")
        else:
            self.emit(f"{guard}{identifier(target)} = {_read_as(register, ctype, expression)};")

    def emit(self, text: str) -> None:
        self.lines.append(text)

    # ---- statements ----------------------------------------------------------------------------------------------

    def statement(self, line: int, text: str) -> None:
        if text == "{":
            self.scopes.append(_Scope())
            self.emit("{")
        elif text == "}":
            self.scopes.pop()
            self.emit("}")
        elif text.endswith(":") and " " not in text:
            self.emit(f"{identifier(text[:-1])}:;")
        elif ".branchtargets" in text:
            label, targets = re.fullmatch(r"([$\w]+): ?\.branchtargets (.*)", text).groups()
            self.tables[label] = split_operands(targets)
        elif text.startswith("."):
            self.directive(text)
        else:
            guard = ""
            match = re.match(r"@(!?)(%?\w+)\s+(.*)", text)
            if match:
                guard = f"if ({match[1]}{identifier(match[2])}) "
                self.register_type(match[2])
                text = match[3]
            opcode, _, rest = text.partition(" ")
            self.instruction(line, guard, opcode.split("."), rest.strip())

    def directive(self, text: str) -> None:
        if text.startswith((".pragma ", ".loc ", ".file ", ".callprototype ")):
            return
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        if match:
            ctype = TYPES[match[1]] if match[1] not in ("f16", "bf16") else "uint16_t"
            for name in split_operands(match[2]):
                ranged = re.fullmatch(r"(%\w+?)<\d+>", name)
                if ranged:
                    self.scopes[-1].ranges.append((ranged[1], ctype))
                else:
                    self.scopes[-1].types[name] = ctype
                    self.emit(f"{ctype} {identifier(name)};")
            return
        match = re.fullmatch(r"\.(param|local)(?: \.align (\d+))? \.(\w+) ([\w$]+)(?:\[(\d+)\])?", text)
        if match:
            space, align, kind, name, count = match.groups()
            size = int(count) if count else struct.calcsize({"8": "B", "16": "H", "32": "I", "64": "Q"}[kind[1:]])
            self.emit(f"alignas({max(int(align or 8), 8)}) char {identifier(name)}[{max(size, 8)}];")
            if space == "param":
                self.params[name] = identifier(name)
            else:
                self.local_arrays.add(name)
            return
        match = re.fullmatch(r"\.shared \.align (\d+) \.[a-z](\d+) ([\w$]+)(?:\[(\d+)\])?", text)
        if match:
            align, bits, name, count = match.groups()
            self.module.add_static_shared(name, int(align), int(bits) // 8 * int(count or 1), self.name)
            return
        raise UnknownPtx(f"{self.name}: directive {text!r}")

    def instruction(self, line: int, guard: str, op: list[str], rest: str) -> None:
        name = op[0]
        handler = getattr(self, f"op_{name}", None)
        if handler is None:
            raise UnknownPtx(f"{self.name}, line {line}: {'.'.join(op)} {rest}")
        self.line, self.guard, self.op = line, guard, op
        handler(op, split_operands(rest) if name != "call" else rest)

    def call(self, expression: str) -> str:
        """A call into the runtime, which may report where it was made."""
        return f"(t.at = {self.line}, {expression})"

    def run(self, expression: str) -> None:
        self.emit(f"{self.guard}{{ t.at = {self.line}; {expression}; }}")

    def set(self, target: str, expression: str, ctype: str | None = None) -> None:
        self.put(target, expression, self.guard, ctype)

    def unknown(self, args) -> UnknownPtx:
        return UnknownPtx(f"{self.name}, line {self.line}: {'.'.join(self.op)} {args}")

    def ctype(self, op: list[str]) -> str:
        return TYPES[op[-1]]

    # ---- the whole -----------------------------------------------------------------------------------------------

    def source(self, signature: str) -> str:
        declared = "".join(f"  {ctype} {name};\n" for name, ctype in sorted(self.used.items()))
        body = "\n".join(f"  {x}" for x in self.lines)
        carries = "  [[maybe_unused]] uint32_t carry = 0, ignored_carry = 0;\n"
        return f"{signature} {{\n{carries}{declared}{body}\n  return;\n}}\n"


class _Module:
    def __init__(self, ptx: str):
        self.shared: dict[str, int | str] = {}
        self.static_shared: dict[str, int] = {}  # kernel -> bytes
        self.globals: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.clusters: dict[str, int] = {}  # kernel -> blocks of a cluster, where the kernel says so itself
        self.registers: dict[str, int] = {}
        self.ptx = re.sub(r"//[^\n]*", "", ptx)

    def add_static_shared(self, name: str, align: int, size: int, kernel: str) -> None:
        start = -(-self.static_shared.get(kernel, 0) // align) * align
        self.shared[name] = start
        self.static_shared[kernel] = start + size

    def translate(self) -> str:
        out = ['#include "runtime.h"\n\nusing namespace emulator;\n\nnamespace {\n']
        variable = r"^(?:\.visible )?\.(?:global|const) \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?"
        for align, kind, name, count, values in re.findall(variable + r"(?: = (?:\{([^}]*)\}))?;", self.ptx, re.M):
            self.globals[name] = f"g_{name}"
            contents = f" = {{{values}}}" if values else "{}"
            out.append(
                f"alignas({max(int(align), 8)}) [[maybe_unused]] {TYPES[kind]} g_{name}[{count or 1}]{contents};\n"
            )
        for name in re.findall(r"^\.extern \.shared [^;]*?([\w$]+)\[\];", self.ptx, re.M):
            self.shared[name] = 0  # dynamic shared memory begins where the address space does
        heads = list(
            re.finditer(r"^(?:\.(?:visible|weak) )*\.(entry|func)\s*(\([^()]*\))?\s*([\w$]+)\s*\(?", self.ptx, re.M)
        )
        pieces = []
        for head in heads:
            start = head.end()
            params_text = ""
            if self.ptx[start - 1] == "(":
                end = self.ptx.index(")", start)
                params_text, start = self.ptx[start:end], end + 1
            brace, semicolon = self.ptx.find("{", start), self.ptx.find(";", start)
            if 0 <= semicolon < brace:
                continue  # a declaration
            depth, end = 1, brace + 1
            while depth:
                depth += {"{": 1, "}": -1}.get(self.ptx[end], 0)
                end += 1
            names = [re.sub(r"\[\d+\]$", "", p.split()[-1]) for p in split_operands(params_text)]
            returns = [re.sub(r"\[\d+\]$", "", p.split()[-1]) for p in split_operands((head[2] or "()")[1:-1])]
            line = self.ptx.count("\n", 0, brace)
            sizes = [_parameter_layout(p) for p in split_operands(params_text)]
            cluster = re.search(r"\.reqnctapercluster (\d+)", self.ptx[start:brace])
            self.clusters[head[3]] = int(cluster[1]) if cluster else 1
            self.registers[head[3]] = registers_at_launch(self.ptx[start:brace])
            pieces.append((head[1], head[3], names, returns, sizes, line, self.ptx[brace + 1 : end - 1]))
            if head[1] == "func":
                self.functions[head[3]] = f"f_{head[3]}"
        for kind, name, names, returns, _, _, _ in pieces:
            if kind == "func":
                out.append(f"void f_{name}({', '.join(['Thread& t', *(f'char* p_{p}' for p in names + returns)])});\n")
        entries = []
        for kind, name, names, returns, sizes, line, body in pieces:
            function = _Function(self, name, names, returns)
            for at, text in _statements(body):
                function.statement(line + at, text)
            if kind == "func":
                arguments = ", ".join(f"[[maybe_unused]] char* p_{p}" for p in names + returns)
                signature = f"void f_{name}([[maybe_unused]] Thread& t, {arguments})"
            else:
                offset, places = 0, []
                for size, align in sizes:
                    offset = -(-offset // align) * align
                    places.append(offset)
                    offset += size
                for p, place in zip(names, places, strict=True):
                    function.lines.insert(0, f"[[maybe_unused]] char* const p_{p} = params + {place};")
                signature = f"void k_{name}([[maybe_unused]] Thread& t, [[maybe_unused]] char* params)"
                layout = ", ".join(f"{{{p}, {size}}}" for p, (size, _) in zip(places, sizes, strict=True))
                entries.append((name, layout, self.static_shared.get(name, 0)))
            out.append(function.source(signature))
        out.append("}  // namespace\n\n")
        for name, layout, shared in entries:
            out.append(
                f'[[maybe_unused]] static Registration const r_{name}("{name}", &k_{name}, {{{layout}}}, '
                f"{shared}, {self.clusters[name]}, {self.registers[name]});\n"
            )
        return "".join(out)


def registers_at_launch(directives: str) -> int:
    """What ptxas may give a thread of a kernel, from its launch bounds; 0 where it has none.

    tools/ptx_emulator/tests/test_emulator.py compares this with what ptxas did give.
    """
    threads = re.search(r"\.maxntid ([\d, ]+)", directives)
    if threads is None:
        return 0
    blocks = re.search(r"\.minnctapersm (\d+)", directives)
    count = math.prod(int(x) for x in threads[1].split(",")) * int(blocks[1] if blocks else 1)
    return min(65536 // count // 8 * 8, 256)


def _parameter_layout(text: str) -> tuple[int, int]:
    """(bytes, alignment) of a kernel's parameter."""
    match = re.fullmatch(
        r"\.param(?: \.align (\d+))? \.(\w+) (?:\.ptr [^ ]+ )?[\w$]+(?:\[(\d+)\])?", " ".join(text.split())
    )
    if match is None:
        raise UnknownPtx(f"parameter {text!r}")
    element = int(match[2][1:]) // 8
    size = element * int(match[3] or 1)
    return size, int(match[1] or element)


def translate(ptx: str) -> str:
    """The C++ source of a PTX file's kernels; they register themselves by name when the object is loaded."""
    return _Module(ptx).translate()


def main(argv: list[str]) -> int:
    with open(argv[0]) as source, open(argv[1], "w") as target:
        target.write(translate(source.read()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
