"""What each PTX instruction becomes in C++: a statement over the thread's registers, or a call into runtime.h."""

from __future__ import annotations

import re

_WIDTH_TYPE = {"b8": "uint8_t", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t"}
TYPES = {
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
INTEGERS = {f"{sign}int{n}_t": n // 8 for sign in ("", "u") for n in (8, 16, 32, 64)}  # bytes
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


def identifier(name: str) -> str:
    return "v_" + name.replace("%", "").replace("$", "L").replace(".", "_")


def split_operands(text: str) -> list[str]:
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


class Instructions:
    """One method for each opcode; operands and targets are the business of the class that inherits."""

    # ---- moves and conversions -----------------------------------------------------------------------------------

    def op_mov(self, op, args):
        target, source = args
        if target.startswith("{"):
            parts = split_operands(target[1:-1])
            whole = self.value("uint32_t" if op[-1] == "b32" else "uint64_t", source)
            bits = (32 if op[-1] == "b32" else 64) // len(parts)
            for i, part in enumerate(parts):
                if part != "_":
                    self.set(part, f"static_cast<uint{bits}_t>({whole} >> {bits * i})")
        elif source.startswith("{"):
            parts = split_operands(source[1:-1])
            bits = (32 if op[-1] == "b32" else 64) // len(parts)
            wide = "uint32_t" if op[-1] == "b32" else "uint64_t"
            joined = " | ".join(
                f"static_cast<{wide}>({self.value(f'uint{bits}_t', p)}) << {bits * i}" for i, p in enumerate(parts)
            )
            self.set(target, f"static_cast<{wide}>({joined})")
        else:
            self.set(target, self.value(self.ctype(op), source), self.ctype(op))

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
            self.set(args[0], f"pair<{maker}>({low}, {high})", TYPES[target_type])
            return
        if target_type == "tf32" or (source_type == "f32" and "tf32" in op):
            if op[1:] != ["rna", "tf32", "f32"]:
                raise self.unknown(args)
            self.set(args[0], f"round_tf32({self.value('float', args[1])})", "uint32_t")
            return
        if "sat" in op or any(m in op for m in ("rz", "rm", "rp", "rna")):
            raise self.unknown(args)
        source, target = TYPES[source_type], TYPES[target_type]
        value = self.value(source, args[1])
        if "ftz" in op and source_type == "f32":
            value = f"flush({value})"
        floats = ("f16", "bf16", "f32", "f64")
        rounding = next((f for m, f in _ROUND_TO_INTEGER.items() if m in op), None)
        if source_type in floats and target_type not in floats:
            self.set(args[0], f"to_integer<{target}>(std::{rounding}(wide({value})))", target)
        elif rounding:
            self.set(args[0], f"narrow<{target}>(std::{rounding}(wide({value})))", target)
        elif source in INTEGERS and target in INTEGERS:
            self.set(args[0], f"static_cast<{target}>({value})", target)
        else:
            self.set(args[0], f"narrow<{target}>({value})", target)

    def op_selp(self, op, args):
        ctype = self.ctype(op)
        a, b = (self.value(ctype, x) for x in args[1:3])
        self.set(args[0], f"({self.value('bool', args[3])} ? {a} : {b})", ctype)

    # ---- arithmetic ----------------------------------------------------------------------------------------------

    def binary(self, symbol):
        def handler(op, args):
            ctype = self.ctype(op)
            a, b = (self.value(ctype, x) for x in args[1:3])
            self.set(
                args[0],
                f"{symbol}({a}, {b})" if symbol.isidentifier() else f"arithmetic<{ctype}>({a}, {b}, '{symbol}')",
                ctype,
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
        ctype, product = self.product(op, args[1], args[2])
        self.set(args[0], product, ctype)

    def op_mad(self, op, args):
        if "cc" in op:
            self.set(
                args[0],
                f"add_carry({self.product(op, args[1], args[2])[1]}, {self.value('uint32_t', args[3])}, 0, carry)",
            )
            return
        ctype, product = self.product(op, args[1], args[2])
        self.set(args[0], f"add({product}, {self.value(ctype, args[3])})", ctype)

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
        self.set(args[0], f"fused({', '.join(self.value(ctype, x) for x in args[1:])})", ctype)

    def op_div(self, op, args):
        if op[-1] == "f32" and "rn" not in op:
            raise self.unknown(args)
        self.binary("divide")(op, args)

    def op_rem(self, op, args):
        self.binary("remainder_of")(op, args)

    def op_min(self, op, args):
        self.binary("minimum_nan" if "NaN" in op else "minimum")(op, args)

    def op_max(self, op, args):
        if "u16x2" in op:
            a, b = (self.value("uint32_t", x) for x in args[1:])
            self.set(args[0], f"maximum_of_halves({a}, {b})")
            return
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
        self.set(args[0], f"static_cast<{ctype}>({a} {symbol} {b})", ctype)

    def op_and(self, op, args):
        self.bits("&", op, args)

    def op_or(self, op, args):
        self.bits("|", op, args)

    def op_xor(self, op, args):
        self.bits("^", op, args)

    def op_not(self, op, args):
        ctype = self.ctype(op)
        value = self.value(ctype, args[1])
        self.set(args[0], f"!{value}" if ctype == "bool" else f"static_cast<{ctype}>(~{value})", ctype)

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
        self.set(target, f"({result} {symbol} {third})" if combine else result, "bool")
        if complement:
            self.set(complement, f"(!{result} {symbol} {third})" if combine else f"!{result}", "bool")

    # ---- control -------------------------------------------------------------------------------------------------

    def op_bra(self, op, args):
        self.emit(f"{self.guard}goto {identifier(args[0])};")

    def op_brx(self, op, args):
        cases = " ".join(f"case {i}: goto {identifier(x)};" for i, x in enumerate(self.tables[args[1]]))
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
        targets = split_operands(args[0][1:-1]) if args[0].startswith("{") else [args[0]]
        n = len(targets)
        address = self.address(args[1])
        load = f"t.load_{space}<{ctype}, {n}>({address})"
        if n == 1:
            self.set(targets[0], self.call(f"{load}[0]"), ctype)
        else:
            self.emit(f"{self.guard}{{ t.at = {self.line}; auto const loaded = {load};")
            for i, x in enumerate(targets):
                if x != "_":
                    self.put(x, f"loaded[{i}]", ctype=ctype)
            self.emit("}")

    def op_st(self, op, args):
        ctype, space = self.ctype(op), self.space(op)
        values = split_operands(args[1][1:-1]) if args[1].startswith("{") else [args[1]]
        items = ", ".join(self.value(ctype, x) for x in values)
        if op[1] == "async":
            to, barrier = (f"t.resolve({self.address(x)})" for x in (args[0], args[2]))
            self.run(f"t.store_async<{ctype}, {len(values)}>({to}, {{{items}}}, {barrier})")
            return
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
        n = len(split_operands(args[1][1:-1])) if args[1].startswith("{") else 1
        values = split_operands(args[1][1:-1]) if n > 1 else [args[1]]
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
        where = f"&{identifier(predicate)}" if predicate else "nullptr"
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
        targets = split_operands(args[0][1:-1])
        if "m8n8" not in op or len(targets) != 4:
            raise self.unknown(args)
        for x in targets:
            self.register_type(x)
        pointers = ", ".join(f"&{identifier(x)}" for x in targets)
        self.run(f"t.load_matrix({self.address(args[1])}, {'true' if 'trans' in op else 'false'}, {{{pointers}}})")

    def op_stmatrix(self, op, args):
        sources = split_operands(args[1][1:-1])
        if "m8n8" not in op or len(sources) != 4:
            raise self.unknown(args)
        values = ", ".join(self.value("uint32_t", x) for x in sources)
        self.run(f"t.store_matrix({self.address(args[0])}, {'true' if 'trans' in op else 'false'}, {{{values}}})")

    def op_movmatrix(self, op, args):
        if "m8n8" not in op or "trans" not in op:
            raise self.unknown(args)
        self.set(args[0], self.call(f"t.transpose_matrix({self.value('uint32_t', args[1])})"))

    def op_mma(self, op, args):
        if op[3:] == ["m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"]:
            d, a, b, c = (split_operands(x[1:-1]) for x in args)
            for x in d:
                self.register_type(x)
            values = ", ".join(
                f"{{{', '.join(self.value(k, x) for x in xs)}}}"
                for k, xs in (("uint32_t", a), ("uint32_t", b), ("float", c))
            )
            self.run(f"t.mma_m16n8k8_tf32({{{', '.join('&' + identifier(x) for x in d)}}}, {values})")
            return
        sums = {"f32": "float", "f16": "uint32_t"}.get(op[-1])
        short = "m16n8k8" in op and op[-3] == op[-1] == "f16"  # the first eight of sixteen products, the others zero
        if not (short or "m16n8k16" in op) or op[-4] != op[-1] or not sums:
            raise self.unknown(args)
        d, a, b, c = (split_operands(x[1:-1]) for x in args)
        if short:
            a, b = [*a, "0", "0"], [*b, "0"]
        element = "half" if op[-3] == "f16" else "bfloat"
        for x in d:
            self.register_type(x)
        values = ", ".join(
            f"{{{', '.join(self.value(k, x) for x in xs)}}}" for k, xs in (("uint32_t", a), ("uint32_t", b), (sums, c))
        )
        self.run(f"t.mma_m16n8k16<{element}>({{{', '.join('&' + identifier(x) for x in d)}}}, {values})")

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
        self.run(f"t.set_registers({'true' if op[1] == 'inc' else 'false'}, {int(args[0])})")

    def op_griddepcontrol(self, op, args):
        if op[1] == "wait":
            self.run("t.waited_for_grids = true")
        else:
            self.run("t.let_next_grid_begin()")

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
            coordinates = [self.value("int32_t", x) for x in split_operands(coordinates.strip()[1:-1])]
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
            accumulators = split_operands(args[0][1:-1])
            for x in accumulators:
                if self.register_type(x) != "float":
                    raise self.unknown(args)
            pointers = ", ".join(f"&{identifier(x)}" for x in accumulators)
            if args[1].startswith("{"):
                fragment = ", ".join(self.value("uint32_t", x) for x in split_operands(args[1][1:-1]))
                a = f"Operand::registers({fragment})"
                scales, transposed_a, transposed_b = args[4:6], "0", args[6]
            else:
                a = f"Operand::shared({self.value('uint64_t', args[1])})"
                scales, transposed_a, transposed_b = args[4:6], args[6], args[7]
            if scales != ["1", "1"]:
                raise self.unknown(args)
            self.emit(
                f"{self.guard}{{ t.at = {self.line}; float* acc[] = {{{pointers}}}; "
                f"t.wgmma<{element}>({shape[1]}, acc, {a}, {self.value('uint64_t', args[2])}, "
                f"{self.value('bool', args[3])}, {transposed_a}, {transposed_b}); }}"
            )
