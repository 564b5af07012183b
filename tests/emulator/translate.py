"""PTX to C++: every kernel of a PTX file becomes a C++ function that one emulated thread runs.

Only the instructions that the kernels of this package use are known; another one is an error that names it. What an
instruction does to registers and plain memory is written out here; what needs other threads, time or a check is a
call into `runtime.h`.

Source: PTX ISA 9.0 (NVIDIA), the sections on each instruction.
"""

from __future__ import annotations

import re
import struct
import sys
from dataclasses import dataclass, field

_WIDTH_TYPE = {"b8": "uint8_t", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t"}
_TYPES = {
    **_WIDTH_TYPE,
    **{f"u{n}": f"uint{n}_t" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"int{n}_t" for n in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "f16": "half",
    "bf16": "bfloat",
    "f16x2": "half2",
    "bf16x2": "bfloat2",
    "pred": "bool",
}
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
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_ROUND_TO_INTEGER = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


class UnknownPtx(Exception):
    """An instruction or form that the translator does not know."""


@dataclass
class _Scope:
    types: dict[str, str] = field(default_factory=dict)  # PTX register name -> C++ type
    ranges: list[tuple[str, str]] = field(default_factory=list)  # prefix of %r<N> -> C++ type


def _identifier(name: str) -> str:
    return "v_" + name.replace("%", "").replace("$", "L").replace(".", "_")


def _split_operands(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    return parts


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


class _Function:
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
                        self.used[_identifier(name)] = ctype
                        return ctype
        return None

    def value(self, ctype: str, text: str) -> str:
        """`text` as an expression of `ctype`."""
        if text in _SPECIAL:
            return f"as<{ctype}>({_SPECIAL[text]})"
        if text.startswith("!"):
            return f"!{self.value('bool', text[1:])}"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"as<{ctype}>(from_bits<float>(0x{text[2:]}u))"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"as<{ctype}>(from_bits<double>(0x{text[2:]}ull))"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            number = int(text.rstrip("U"), 0)
            return f"constant<{ctype}>({number & 0xFFFFFFFFFFFFFFFF}ull)"
        if self.register_type(text) is not None:
            return f"as<{ctype}>({_identifier(text)})"
        return f"as<{ctype}>({self.symbol(text)})"

    def symbol(self, text: str) -> str:
        name, _, offset = text.partition("+")
        if name in self.params:
            base = f"reinterpret_cast<uint64_t>({self.params[name]})"
        elif name in self.local_arrays:
            base = f"reinterpret_cast<uint64_t>({_identifier(name)})"
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

    def put(self, target: str, expression: str, guard: str = "") -> None:
        if target == "_":
            self.emit(f"{guard}(void)({expression});")
            return
        if self.register_type(target) is None:
            raise UnknownPtx(f"{self.name}: target {target!r}")
        self.emit(f"{guard}put({_identifier(target)}, {expression});")

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
            self.emit(f"{_identifier(text[:-1])}:;")
        elif ".branchtargets" in text:
            label, targets = re.fullmatch(r"([$\w]+): ?\.branchtargets (.*)", text).groups()
            self.tables[label] = _split_operands(targets)
        elif text.startswith("."):
            self.directive(text)
        else:
            guard = ""
            match = re.match(r"@(!?)(%?\w+)\s+(.*)", text)
            if match:
                guard = f"if ({match[1]}{_identifier(match[2])}) "
                self.register_type(match[2])
                text = match[3]
            opcode, _, rest = text.partition(" ")
            self.instruction(line, guard, opcode.split("."), rest.strip())

    def directive(self, text: str) -> None:
        if text.startswith((".pragma ", ".loc ", ".file ", ".callprototype ")):
            return
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        if match:
            ctype = _TYPES[match[1]] if match[1] not in ("f16", "bf16") else "uint16_t"
            for name in _split_operands(match[2]):
                ranged = re.fullmatch(r"(%\w+?)<\d+>", name)
                if ranged:
                    self.scopes[-1].ranges.append((ranged[1], ctype))
                else:
                    self.scopes[-1].types[name] = ctype
                    self.emit(f"{ctype} {_identifier(name)};")
            return
        match = re.fullmatch(r"\.(param|local)(?: \.align (\d+))? \.(\w+) ([\w$]+)(?:\[(\d+)\])?", text)
        if match:
            space, align, kind, name, count = match.groups()
            size = int(count) if count else struct.calcsize({"8": "B", "16": "H", "32": "I", "64": "Q"}[kind[1:]])
            self.emit(f"alignas({max(int(align or 8), 8)}) char {_identifier(name)}[{max(size, 8)}];")
            if space == "param":
                self.params[name] = _identifier(name)
            else:
                self.local_arrays.add(name)
            return
        match = re.fullmatch(r"\.shared \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", text)
        if match:
            self.module.add_static_shared(match[2], int(match[1]), int(match[3]), self.name)
            return
        raise UnknownPtx(f"{self.name}: directive {text!r}")

    def instruction(self, line: int, guard: str, op: list[str], rest: str) -> None:
        name = op[0]
        handler = getattr(self, f"op_{name}", None)
        if handler is None:
            raise UnknownPtx(f"{self.name}, line {line}: {'.'.join(op)} {rest}")
        self.line, self.guard, self.op = line, guard, op
        handler(op, _split_operands(rest) if name != "call" else rest)

    def call(self, expression: str) -> str:
        """A call into the runtime, which may report where it was made."""
        return f"(t.at = {self.line}, {expression})"

    def run(self, expression: str) -> None:
        self.emit(f"{self.guard}{{ t.at = {self.line}; {expression}; }}")

    def set(self, target: str, expression: str) -> None:
        self.put(target, expression, self.guard)

    def unknown(self, args) -> UnknownPtx:
        return UnknownPtx(f"{self.name}, line {self.line}: {'.'.join(self.op)} {args}")

    def ctype(self, op: list[str]) -> str:
        return _TYPES[op[-1]]

    # ---- moves and conversions -----------------------------------------------------------------------------------

    def op_mov(self, op, args):
        target, source = args
        if target.startswith("{"):
            parts = _split_operands(target[1:-1])
            whole = self.value("uint32_t" if op[-1] == "b32" else "uint64_t", source)
            bits = (32 if op[-1] == "b32" else 64) // len(parts)
            for i, part in enumerate(parts):
                if part != "_":
                    self.set(part, f"static_cast<uint{bits}_t>({whole} >> {bits * i})")
        elif source.startswith("{"):
            parts = _split_operands(source[1:-1])
            bits = (32 if op[-1] == "b32" else 64) // len(parts)
            wide = "uint32_t" if op[-1] == "b32" else "uint64_t"
            joined = " | ".join(
                f"static_cast<{wide}>({self.value(f'uint{bits}_t', p)}) << {bits * i}" for i, p in enumerate(parts)
            )
            self.set(target, f"static_cast<{wide}>({joined})")
        else:
            self.set(target, self.value(self.ctype(op), source))

    def op_cvta(self, op, args):
        target, source = args
        value = self.value("uint64_t", source)
        if "shared" in op:
            value = f"t.generic_to_shared({value})" if "to" in op else f"t.shared_to_generic({value})"
        self.set(target, value)

    def op_cvt(self, op, args):
        target_type, source_type = op[-2], op[-1]
        if target_type in ("f16x2", "bf16x2"):
            high, low = (self.value("float", x) for x in args[1:])
            maker = "half" if target_type == "f16x2" else "bfloat"
            self.set(args[0], f"pair<{maker}>({low}, {high})")
            return
        if "sat" in op or any(m in op for m in ("rz", "rm", "rp", "rna")):
            raise self.unknown(args)
        source, target = _TYPES[source_type], _TYPES[target_type]
        value = self.value(source, args[1])
        if "ftz" in op and source_type == "f32":
            value = f"flush({value})"
        floats = ("f16", "bf16", "f32", "f64")
        rounding = next((f for m, f in _ROUND_TO_INTEGER.items() if m in op), None)
        if source_type in floats and target_type not in floats:
            self.set(args[0], f"to_integer<{target}>(std::{rounding}(wide({value})))")
        elif rounding:
            self.set(args[0], f"narrow<{target}>(std::{rounding}(wide({value})))")
        else:
            self.set(args[0], f"narrow<{target}>({value})")

    def op_selp(self, op, args):
        ctype = self.ctype(op)
        a, b = (self.value(ctype, x) for x in args[1:3])
        self.set(args[0], f"({self.value('bool', args[3])} ? {a} : {b})")

    # ---- arithmetic ----------------------------------------------------------------------------------------------

    def binary(self, symbol):
        def handler(op, args):
            ctype = self.ctype(op)
            a, b = (self.value(ctype, x) for x in args[1:3])
            self.set(
                args[0],
                f"{symbol}({a}, {b})" if symbol.isidentifier() else f"arithmetic<{ctype}>({a}, {b}, '{symbol}')",
            )

        return handler

    def op_add(self, op, args):
        if "cc" in op:
            a, b = (self.value("uint32_t", x) for x in args[1:])
            self.set(args[0], f"add_carry({a}, {b}, 0, carry)")
        else:
            self.binary("add")(op, args)

    def op_addc(self, op, args):
        a, b = (self.value("uint32_t", x) for x in args[1:])
        self.set(args[0], f"add_carry({a}, {b}, carry, {'carry' if 'cc' in op else 'ignored_carry'})")

    def op_sub(self, op, args):
        if "cc" in op:
            a, b = (self.value("uint32_t", x) for x in args[1:])
            self.set(args[0], f"sub_borrow({a}, {b}, 0, carry)")
        else:
            self.binary("sub")(op, args)

    def op_subc(self, op, args):
        a, b = (self.value("uint32_t", x) for x in args[1:])
        self.set(args[0], f"sub_borrow({a}, {b}, carry, {'carry' if 'cc' in op else 'ignored_carry'})")

    def product(self, op, a, b):
        ctype = self.ctype(op)
        if "wide" in op:
            wide = ctype.replace("32", "64").replace("16", "32")
            return wide, f"static_cast<{wide}>({self.value(ctype, a)}) * static_cast<{wide}>({self.value(ctype, b)})"
        if "hi" in op:
            return ctype, f"mul_high({self.value(ctype, a)}, {self.value(ctype, b)})"
        return ctype, f"mul({self.value(ctype, a)}, {self.value(ctype, b)})"

    def op_mul(self, op, args):
        self.set(args[0], self.product(op, args[1], args[2])[1])

    def op_mad(self, op, args):
        if "cc" in op:
            self.set(
                args[0],
                f"add_carry({self.product(op, args[1], args[2])[1]}, {self.value('uint32_t', args[3])}, 0, carry)",
            )
            return
        ctype, product = self.product(op, args[1], args[2])
        self.set(args[0], f"add({product}, {self.value(ctype, args[3])})")

    def op_madc(self, op, args):
        target = "carry" if "cc" in op else "ignored_carry"
        self.set(
            args[0],
            f"add_carry({self.product(op, args[1], args[2])[1]}, {self.value('uint32_t', args[3])}, carry, {target})",
        )

    def op_fma(self, op, args):
        ctype = self.ctype(op)
        if "rn" not in op or "relu" in op or "sat" in op:
            raise self.unknown(args)
        self.set(args[0], f"fused({', '.join(self.value(ctype, x) for x in args[1:])})")

    def op_div(self, op, args):
        if op[-1] == "f32" and "rn" not in op:
            raise self.unknown(args)
        self.binary("divide")(op, args)

    def op_rem(self, op, args):
        self.binary("remainder_of")(op, args)

    def op_min(self, op, args):
        self.binary("minimum_nan" if "NaN" in op else "minimum")(op, args)

    def op_max(self, op, args):
        self.binary("maximum_nan" if "NaN" in op else "maximum")(op, args)

    def unary(self, function, op, args):
        ctype = self.ctype(op)
        value = self.value(ctype, args[1])
        if "ftz" in op and ctype == "float":
            value = f"flush({value})"
            self.set(args[0], f"flush({function}({value}))")
        else:
            self.set(args[0], f"{function}({value})")

    def op_abs(self, op, args):
        self.unary("absolute", op, args)

    def op_neg(self, op, args):
        self.unary("negative", op, args)

    def op_ex2(self, op, args):
        self.unary("std::exp2", op, args)

    def op_lg2(self, op, args):
        self.unary("std::log2", op, args)

    def op_rcp(self, op, args):
        self.unary("reciprocal", op, args)

    def op_sqrt(self, op, args):
        self.unary("std::sqrt", op, args)

    def op_rsqrt(self, op, args):
        self.unary("reciprocal_sqrt", op, args)

    # ---- bits ----------------------------------------------------------------------------------------------------

    def bits(self, symbol, op, args):
        ctype = self.ctype(op)
        a, b = (self.value(ctype, x) for x in args[1:])
        self.set(args[0], f"static_cast<{ctype}>({a} {symbol} {b})")

    def op_and(self, op, args):
        self.bits("&", op, args)

    def op_or(self, op, args):
        self.bits("|", op, args)

    def op_xor(self, op, args):
        self.bits("^", op, args)

    def op_not(self, op, args):
        ctype = self.ctype(op)
        value = self.value(ctype, args[1])
        self.set(args[0], f"!{value}" if ctype == "bool" else f"static_cast<{ctype}>(~{value})")

    def op_shl(self, op, args):
        self.set(args[0], f"shift_left({self.value(self.ctype(op), args[1])}, {self.value('uint32_t', args[2])})")

    def op_shr(self, op, args):
        self.set(args[0], f"shift_right({self.value(self.ctype(op), args[1])}, {self.value('uint32_t', args[2])})")

    def op_shf(self, op, args):
        low, high, amount = (self.value("uint32_t", x) for x in args[1:])
        self.set(args[0], f"funnel_{op[1]}_{op[2]}({low}, {high}, {amount})")

    def op_lop3(self, op, args):
        a, b, c = (self.value("uint32_t", x) for x in args[1:4])
        self.set(args[0], f"logic3({a}, {b}, {c}, {args[4]})")

    def op_bfe(self, op, args):
        a = self.value(self.ctype(op), args[1])
        self.set(args[0], f"bit_field({a}, {self.value('uint32_t', args[2])}, {self.value('uint32_t', args[3])})")

    def op_bfi(self, op, args):
        ctype = self.ctype(op)
        a, b = (self.value(ctype, x) for x in args[1:3])
        self.set(args[0], f"bit_insert({a}, {b}, {self.value('uint32_t', args[3])}, {self.value('uint32_t', args[4])})")

    def op_prmt(self, op, args):
        if len(op) != 2:
            raise self.unknown(args)
        self.set(args[0], f"permute({', '.join(self.value('uint32_t', x) for x in args[1:])})")

    def op_popc(self, op, args):
        self.set(args[0], f"static_cast<uint32_t>(__builtin_popcountll({self.value(self.ctype(op), args[1])}))")

    def op_clz(self, op, args):
        self.set(args[0], f"leading_zeros({self.value(self.ctype(op), args[1])})")

    def op_brev(self, op, args):
        self.set(args[0], f"reverse_bits({self.value(self.ctype(op), args[1])})")

    def op_bfind(self, op, args):
        if op[-1] not in ("u32", "b32"):
            raise self.unknown(args)
        zeros = f"leading_zeros({self.value('uint32_t', args[1])})"
        found = zeros if "shiftamt" in op else f"31u - {zeros}"
        self.set(args[0], f"({self.value('uint32_t', args[1])} ? {found} : 0xffffffffu)")

    # ---- comparisons ---------------------------------------------------------------------------------------------

    def op_setp(self, op, args):
        ctype, comparison = self.ctype(op), op[1]
        a, b = (self.value(ctype, x) for x in args[1:3])
        if comparison in ("num", "nan"):
            result = f"(is_nan({a}) || is_nan({b}))"
            result = f"!{result}" if comparison == "num" else result
        elif ctype in ("float", "double") and comparison.endswith("u") and comparison[:-1] in _COMPARE:
            result = f"(is_nan({a}) || is_nan({b}) || {a} {_COMPARE[comparison[:-1]]} {b})"
        elif ctype in ("float", "double"):
            result = f"(!is_nan({a}) && !is_nan({b}) && {a} {_COMPARE[comparison]} {b})"
        elif ctype in ("half", "bfloat", "half2", "bfloat2"):
            raise self.unknown(args)
        else:
            if comparison in ("lo", "ls", "hi", "hs"):
                a, b = (self.value(ctype.replace("int", "uint").replace("uuint", "uint"), x) for x in args[1:3])
            result = f"({a} {_COMPARE[comparison]} {b})"
        target, _, complement = args[0].partition("|")
        combine = next((x for x in op[2:-1] if x in ("and", "or", "xor")), None)
        symbol = {"and": "&&", "or": "||", "xor": "!="}.get(combine)
        third = self.value("bool", args[3]) if combine else None
        self.set(target, f"({result} {symbol} {third})" if combine else result)
        if complement:
            self.set(complement, f"(!{result} {symbol} {third})" if combine else f"!{result}")

    # ---- control -------------------------------------------------------------------------------------------------

    def op_bra(self, op, args):
        self.emit(f"{self.guard}goto {_identifier(args[0])};")

    def op_brx(self, op, args):
        cases = " ".join(f"case {i}: goto {_identifier(x)};" for i, x in enumerate(self.tables[args[1]]))
        self.emit(f"{self.guard}switch ({self.value('uint32_t', args[0])}) {{ {cases} default: __builtin_trap(); }}")

    def op_ret(self, op, args):
        self.emit(f"{self.guard}return;")

    def op_exit(self, op, args):
        self.emit(f"{self.guard}{{ t.exit(); }}")

    def op_trap(self, op, args):
        self.run('t.fail("trap")')

    def op_call(self, op, rest):
        returns, name, params = re.fullmatch(r"(?:\(([^)]*)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?", rest).groups()
        arguments = [self.params[x.strip()] for group in (params, returns) if group for x in group.split(",")]
        if name not in self.module.functions:
            raise UnknownPtx(f"{self.name}: call of {name}")
        self.emit(f"{self.guard}{self.module.functions[name]}({', '.join(['t', *arguments])});")

    # ---- memory --------------------------------------------------------------------------------------------------

    def space(self, op):
        for part in op[1:]:
            space = part.split("::")[0]
            if space in ("global", "shared", "param", "local", "const"):
                if part == "shared::cluster":
                    return "cluster"
                return "direct" if space in ("param", "local", "const") else space
        return "generic"

    def op_ld(self, op, args):
        ctype, space = self.ctype(op), self.space(op)
        targets = _split_operands(args[0][1:-1]) if args[0].startswith("{") else [args[0]]
        n = len(targets)
        address = self.address(args[1])
        load = f"t.load_{space}<{ctype}, {n}>({address})"
        if n == 1:
            self.set(targets[0], self.call(f"{load}[0]"))
        else:
            body = " ".join(f"put({_identifier(x)}, loaded[{i}]);" for i, x in enumerate(targets) if x != "_")
            for x in targets:
                self.register_type(x)
            self.emit(f"{self.guard}{{ t.at = {self.line}; auto const loaded = {load}; {body} }}")

    def op_st(self, op, args):
        ctype, space = self.ctype(op), self.space(op)
        values = _split_operands(args[1][1:-1]) if args[1].startswith("{") else [args[1]]
        items = ", ".join(self.value(ctype, x) for x in values)
        self.run(f"t.store_{space}<{ctype}, {len(values)}>({self.address(args[0])}, {{{items}}})")

    def op_atom(self, op, args):
        ctype = self.ctype(op)
        action = next(x for x in op if x in ("add", "or", "and", "xor", "min", "max", "exch", "cas", "inc", "dec"))
        operands = ", ".join(self.value(ctype, x) for x in args[2:])
        self.set(
            args[0],
            self.call(
                f"t.atomic_{self.space(op)}<{ctype}>({self.address(args[1])}, atomic_{action}<{ctype}>{{{operands}}})"
            ),
        )

    def op_red(self, op, args):
        ctype = self.ctype(op)
        action = next(x for x in op if x in ("add", "or", "and", "xor", "min", "max"))
        n = len(_split_operands(args[1][1:-1])) if args[1].startswith("{") else 1
        values = _split_operands(args[1][1:-1]) if n > 1 else [args[1]]
        for i, value in enumerate(values):
            self.run(
                f"t.atomic_{self.space(op)}<{ctype}>({self.address(args[0])} + {i} * sizeof({ctype}), "
                f"atomic_{action}<{ctype}>{{{self.value(ctype, value)}}})"
            )

    def op_prefetch(self, op, args):
        pass

    def op_createpolicy(self, op, args):
        self.set(args[0], "uint64_t{0}")

    def op_mapa(self, op, args):
        if "shared::cluster" not in op:
            raise self.unknown(args)
        self.set(
            args[0], self.call(f"t.map_to_rank({self.value('uint32_t', args[1])}, {self.value('uint32_t', args[2])})")
        )

    # ---- warps ---------------------------------------------------------------------------------------------------

    def op_shfl(self, op, args):
        target, _, predicate = args[0].partition("|")
        if predicate:
            self.register_type(predicate)
        a, b, c, mask = (self.value("uint32_t", x) for x in args[1:])
        where = f"&{_identifier(predicate)}" if predicate else "nullptr"
        self.set(target, self.call(f"t.shuffle(Shuffle::{op[2]}, {a}, {b}, {c}, {mask}, {where})"))

    def op_vote(self, op, args):
        self.set(
            args[0], self.call(f"t.vote_{op[2]}({self.value('bool', args[1])}, {self.value('uint32_t', args[2])})")
        )

    def op_redux(self, op, args):
        self.set(
            args[0],
            self.call(f"t.reduce_{op[2]}({self.value(self.ctype(op), args[1])}, {self.value('uint32_t', args[2])})"),
        )

    def op_activemask(self, op, args):
        raise self.unknown(args)

    def op_elect(self, op, args):
        target, _, predicate = args[0].partition("|")
        chosen = f"t.elect({self.value('uint32_t', args[1])})"
        if target != "_":
            self.set(target, "uint32_t{0}")
        self.set(predicate, self.call(chosen))

    def op_ldmatrix(self, op, args):
        targets = _split_operands(args[0][1:-1])
        if "m8n8" not in op or len(targets) != 4:
            raise self.unknown(args)
        for x in targets:
            self.register_type(x)
        pointers = ", ".join(f"&{_identifier(x)}" for x in targets)
        self.run(f"t.load_matrix({self.address(args[1])}, {'true' if 'trans' in op else 'false'}, {{{pointers}}})")

    def op_stmatrix(self, op, args):
        sources = _split_operands(args[1][1:-1])
        if "m8n8" not in op or len(sources) != 4:
            raise self.unknown(args)
        values = ", ".join(self.value("uint32_t", x) for x in sources)
        self.run(f"t.store_matrix({self.address(args[0])}, {'true' if 'trans' in op else 'false'}, {{{values}}})")

    def op_mma(self, op, args):
        if "m16n8k16" not in op or op[-4] != "f32" or op[-1] != "f32":
            raise self.unknown(args)
        d, a, b, c = (_split_operands(x[1:-1]) for x in args)
        element = "half" if op[-3] == "f16" else "bfloat"
        for x in d:
            self.register_type(x)
        values = ", ".join(
            f"{{{', '.join(self.value(k, x) for x in xs)}}}"
            for k, xs in (("uint32_t", a), ("uint32_t", b), ("float", c))
        )
        self.run(f"t.mma_m16n8k16<{element}>({{{', '.join('&' + _identifier(x) for x in d)}}}, {values})")

    # ---- barriers and fences -------------------------------------------------------------------------------------

    def op_bar(self, op, args):
        if op[1] == "warp":
            self.run(f"t.warp_sync({self.value('uint32_t', args[0])})")
        elif op[1] in ("sync", "arrive"):
            count = self.value("uint32_t", args[1]) if len(args) > 1 else "0u"
            self.run(f"t.named_{op[1]}({self.value('uint32_t', args[0])}, {count})")
        else:
            raise self.unknown(args)

    def op_barrier(self, op, args):
        if op[1] == "cluster":
            self.run(f"t.cluster_{op[2]}()")
        elif "red" in op:
            operation = next(x for x in op if x in ("or", "and", "popc"))
            identifier, count = (self.value("uint32_t", x) for x in args[1:3])
            mine = self.value("bool", args[3])
            self.set(args[0], self.call(f"t.named_reduce_{operation}({identifier}, {count}, {mine})"))
        else:
            self.op_bar(["bar", *[x for x in op[1:] if x not in ("cta", "aligned")]], args)

    def op_membar(self, op, args):
        pass

    def op_fence(self, op, args):
        if "proxy" in op:
            self.run("t.fence_proxy_async()")

    def op_nanosleep(self, op, args):
        self.run("t.yield()")

    def op_setmaxnreg(self, op, args):
        self.run(f"t.set_registers('{op[1]}', {int(args[0])})")

    def op_griddepcontrol(self, op, args):
        pass

    def op_mbarrier(self, op, args):
        space = "cluster" if "shared::cluster" in op else "shared"
        barrier = next(x for x in args if x.startswith("["))
        where = f"t.resolve({self.address(barrier)})" if space == "cluster" else f"t.own({self.address(barrier)})"
        rest = args[args.index(barrier) + 1 :]
        if op[1] == "init":
            self.run(f"t.mbarrier_init({where}, {self.value('uint32_t', rest[0])})")
        elif op[1] == "inval":
            self.run(f"t.mbarrier_invalidate({where})")
        elif op[1] == "expect_tx":
            self.run(f"t.mbarrier_expect({where}, {self.value('uint32_t', rest[0])})")
        elif op[1] == "arrive":
            if args[0] != "_" and not args[0].startswith("["):
                raise self.unknown(args)
            expect = "expect_tx" in op
            if expect:
                self.run(f"t.mbarrier_expect({where}, {self.value('uint32_t', rest[0])})")
            count = self.value("uint32_t", rest[0]) if rest and not expect else "1u"
            self.run(f"t.mbarrier_arrive({where}, {count})")
        elif op[1] in ("try_wait", "test_wait") and "parity" in op:
            self.set(args[0], self.call(f"t.mbarrier_{op[1]}({where}, {self.value('uint32_t', rest[0])})"))
        else:
            raise self.unknown(args)

    # ---- asynchronous copies -------------------------------------------------------------------------------------

    def op_cp(self, op, args):
        if "bulk" in op:
            self.bulk(op, args)
        elif op[2] == "commit_group":
            self.run("t.copy_commit()")
        elif op[2] == "wait_group":
            self.run(f"t.copy_wait({int(args[0])})")
        elif op[2] == "wait_all":
            self.run("t.copy_wait_all()")
        elif op[2] == "mbarrier" and "noinc" in op:
            self.run(f"t.copy_arrive_noinc(t.own({self.address(args[0])}))")
        elif op[2] in ("ca", "cg"):
            size = int(args[2])
            kept = f"uint32_t{{{size}}}"
            if len(args) > 3:
                is_predicate = self.register_type(args[3].lstrip("!")) == "bool"
                kept = (
                    f"({self.value('bool', args[3])} ? 0u : {size}u)"
                    if is_predicate
                    else self.value("uint32_t", args[3])
                )
            self.run(f"t.copy_async(t.own({self.address(args[0])}), {self.address(args[1])}, {size}, {kept})")
        else:
            raise self.unknown(args)

    def bulk(self, op, args):
        def size():
            return self.value("uint32_t", args[2])

        if "commit_group" in op:
            self.run("t.bulk_commit()")
        elif "wait_group" in op:
            self.run(f"t.bulk_wait({int(args[0])}, {'true' if 'read' in op else 'false'})")
        elif "prefetch" in op:
            pass
        elif "multicast::cluster" in op or "reduce" in op or "im2col" in op:
            raise self.unknown(args)
        elif "tensor" in op:
            load = op.index("global") > op.index("shared::cluster") if "shared::cluster" in op else False
            tensor = args[1] if load else args[0]
            map_name, _, coordinates = tensor[1:-1].partition(",")
            coordinates = [self.value("int32_t", x) for x in _split_operands(coordinates.strip()[1:-1])]
            packed = f"{self.value('uint64_t', map_name.strip())}, {{{', '.join(coordinates)}}}"
            if load:
                self.run(
                    f"t.tensor_load(t.resolve({self.address(args[0])}), {packed}, t.resolve({self.address(args[2])}))"
                )
            else:
                self.run(f"t.tensor_store({packed}, t.own({self.address(args[1])}))")
        elif op[3] == "global" and op[4] == "shared::cta":
            self.run(f"t.bulk_store({self.address(args[0])}, t.own({self.address(args[1])}), {size()})")
        elif op[3] == "shared::cluster" and op[4] in ("global", "shared::cta"):
            source = self.address(args[1])
            name, source = ("bulk_load", source) if op[4] == "global" else ("bulk_share", f"t.own({source})")
            to, barrier = self.address(args[0]), self.address(args[3])
            self.run(f"t.{name}(t.resolve({to}), {source}, {size()}, t.resolve({barrier}))")
        else:
            raise self.unknown(args)

    # ---- warpgroup matrix products -------------------------------------------------------------------------------

    def op_wgmma(self, op, args):
        if op[1] == "fence":
            self.run("t.wgmma_fence()")
        elif op[1] == "commit_group":
            self.run("t.wgmma_commit()")
        elif op[1] == "wait_group":
            self.run(f"t.wgmma_wait({int(args[0])})")
        else:
            shape = re.fullmatch(r"m64n(\d+)k16", op[4])
            if shape is None or op[5] != "f32":
                raise self.unknown(args)
            element = {"f16": "half", "bf16": "bfloat"}[op[6]]
            accumulators = _split_operands(args[0][1:-1])
            for x in accumulators:
                if self.register_type(x) != "float":
                    raise self.unknown(args)
            pointers = ", ".join(f"&{_identifier(x)}" for x in accumulators)
            if args[1].startswith("{"):
                fragment = ", ".join(self.value("uint32_t", x) for x in _split_operands(args[1][1:-1]))
                a = f"Operand::registers({fragment})"
                scales, transposed_a, transposed_b = args[4:6], "0", args[6]
            else:
                a = f"Operand::shared({self.value('uint64_t', args[1])})"
                scales, transposed_a, transposed_b = args[4:6], args[6], args[7]
            if scales != ["1", "1"] or transposed_a != "0":
                raise self.unknown(args)
            self.emit(
                f"{self.guard}{{ t.at = {self.line}; float* acc[] = {{{pointers}}}; "
                f"t.wgmma<{element}>({shape[1]}, acc, {a}, {self.value('uint64_t', args[2])}, "
                f"{self.value('bool', args[3])}, {transposed_b}); }}"
            )

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
                f"alignas({max(int(align), 8)}) [[maybe_unused]] {_TYPES[kind]} g_{name}[{count or 1}]{contents};\n"
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
            names = [re.sub(r"\[\d+\]$", "", p.split()[-1]) for p in _split_operands(params_text)]
            returns = [re.sub(r"\[\d+\]$", "", p.split()[-1]) for p in _split_operands((head[2] or "()")[1:-1])]
            line = self.ptx.count("\n", 0, brace)
            sizes = [_parameter_layout(p) for p in _split_operands(params_text)]
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
                f'[[maybe_unused]] static Registration const r_{name}("{name}", &k_{name}, {{{layout}}}, {shared});\n'
            )
        return "".join(out)


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


if __name__ == "__main__":
    with open(sys.argv[1]) as source, open(sys.argv[2], "w") as target:
        target.write(translate(source.read()))
