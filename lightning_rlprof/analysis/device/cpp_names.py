"""Names of C++ functions, cut into what tells one kernel from another."""

import re
from functools import cache
from typing import NamedTuple

# The longer spelling of two comes first.
_TYPES = {
    "u64": r"unsigned long(?: long)?|uint64(?:_t)?",
    "u8": r"unsigned char|uint8(?:_t)?",
    "i8": r"signed char|char|int8(?:_t)?",
    "u32": r"unsigned(?: int)?|uint32(?:_t)?",
    "i64": r"long(?: long)?|int64(?:_t)?",
    "i32": r"int|int32(?:_t)?",
    "i16": r"short|int16(?:_t)?",
    "bf16": r"(?:__)?(?:nv_|hip_)?bfloat16(?:_t|2)?|BFloat16|bf16(?:_t)?",
    "f16": r"Half|(?:__)?half(?:_t|2)?|_Float16|float16|fp16(?:_t)?|f16",
    "tf32": r"tfloat32(?:_t)?|tf32",
    "f32": r"float|float32|fp32(?:_t)?|f32|float[24]",
    "f64": r"double2?|float64|f64",
    "f8": r"Float8_\w+|__nv_fp8\w*|float_e[45]m\d\w*|fp8\w*|e[45]m[23]\w*",
    "f4": r"__nv_fp4\w*|float_e2m1\w*|mxfp4|nvfp4|fp4\w*|e2m1\w*",
    "c64": r"complex<float>",
    "bool": r"bool",
}
_TYPE = re.compile(
    r"(?<!\w)(?:\w+::)*(?:" + "|".join(f"(?P<{k}>{v})" for k, v in _TYPES.items()) + r")(?!\w|::)"
)
_SPELLINGS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\(anonymous namespace\)::|<unnamed>::|^typeinfo name for |^void |\[SIMD.*|\.kd$", ""),
        (r"\(bool\)0", "false"),
        (r"\(bool\)1", "true"),
        (r"\((?:unsigned )?(?:int|long|short|char)\)(?=-?\d)", ""),
        (r"(?<=\d)(?:ull|ul|u|l)\b", ""),
        (r"\[lambda\(([^()]*)\) \(instance (\d+)\)\]", r"{lambda(\1)#\2}"),
        (r"'lambda(\d*)'\(([^()]*)\)", r"{lambda(\2)#\1}"),
        (r"operator ?\(\)", "call"),
        (r"(?<=[<,])( ?)void (?=\w)", r"\1"),
        (r" (?=[&*>])", ""),
    )
)
_MANGLED = re.compile(
    r"(?P<size>\d+)|L(?P<kind>[a-z])(?P<value>n?\d+)E|S(?:[0-9A-Z]*_|[tabsiod])|T[0-9]*_|Tn|DF16[b_]"
    r"|D[hnpt]|(?P<open>[NIJFL]|X[a-z]{2}|X|Ul)|(?P<close>E)|."
)
_SIGNS = re.compile(r"[<>(){}\[\] ]|::")
_BUILTINS = {
    **{"DF16b": "bfloat16", "DF16_": "half", "Dh": "half", "b": "bool", "c": "char", "a": "int8_t"},
    **{"h": "uint8_t", "s": "short", "i": "int", "j": "unsigned", "l": "long", "m": "uint64_t"},
    **{"x": "long", "y": "uint64_t", "f": "float", "d": "double"},
}


class CppName(NamedTuple):
    """A full name, cut. One without a namespace or arguments has a base alone.

    Attributes:
        whole: All of it in one spelling, without what it returns and its parameters.
        path: Namespaces, outermost first.
        base: The function.
        inner: Its template arguments.
        parameters: The types of its parameters; None if the name has no list of them.
    """

    whole: str
    path: tuple[str, ...]
    base: str
    inner: str
    parameters: str | None

    @classmethod
    def of(cls, name: str) -> "CppName":
        """Return the parts of a name as torch.profiler, Nsight Systems or a compiler spells it.

        Example::

            >>> CppName.of("void vllm::rms_norm<(int)8, float>(T1 *, int)")[:4]
            ('vllm::rms_norm<8, float>', ('vllm',), 'rms_norm', '8, float')
        """
        text = _demangled(name) if name.startswith("_Z") else name
        for pattern, plain in _SPELLINGS:
            text = pattern.sub(plain, text)
        start, end, cuts = 0, len(text), [0]
        opened: list[str] = []
        for found in _SIGNS.finditer(text):
            at, sign = found.start(), found[0]
            if sign in "<({[":
                if sign == "(" and not opened and at > start:
                    end = at
                    break
                opened.append(sign)
            elif sign in ")}]" or (sign == ">" and opened[-1:] == ["<"] and text[at - 1] != "-"):
                del opened[-1:]
            elif sign == " " and not opened and "(" in text:
                start, cuts = at + 1, [at + 1]
            elif sign == "::" and not opened:
                cuts.append(at + 2)
        pieces = [text[a:b].rstrip(":") for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
        path = tuple(piece.partition("<")[0] for piece in pieces[:-1])
        base, _, inner = pieces[-1].partition("<")
        inner = inner or "".join(pieces[-2:-1]).partition("<")[2]
        parameters = text[end:] if end < len(text) or name.startswith("_Z") else None
        return cls(text[start:end], path, base, inner.removesuffix(">"), parameters)

    @property
    def is_plain(self) -> bool:
        """Whether it is an identifier alone, as Triton and CANN name kernels."""
        return self.parameters is None and re.fullmatch(r"\w+", self.whole) is not None


def _demangled(name: str) -> str:
    """Return a mangled name as text, without its parameters: enough to read it by.

    https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling, without substitutions.
    """
    found, at, last = "", 2, ""
    frames: list[str] = []
    fresh = True  # Nothing of the innermost frame was written yet.
    while at < len(name) and (frames or not found or name[at] == "I"):
        token = _MANGLED.match(name, at)
        assert token is not None  # The last alternative is any character.
        at, text = token.end(), token[0]
        word = _BUILTINS.get(text) if found else None
        if token["size"]:
            word = text
            if not (frames[-1:] == ["L"] and last == "E"):
                word, at = name[at : at + int(text)], at + int(text)
        elif value := token["value"]:
            word = ("false", "true")[value != "0"] if token["kind"] == "b" else value
        elif token["open"]:
            frames.append(text[0])
            if text == "I":
                found, fresh = found + "<", True
        elif token["close"] and frames:
            found, fresh = found + ">" * (frames.pop() == "I"), False
        if word:
            joint = "" if fresh else "::" if frames[-1:] == ["N"] and last != ">" else ", "
            found, fresh = found + joint + word, False
        elif text == "N" and not fresh:
            found, fresh = found + ", ", True
        last = text
    return found


@cache
def snake_case(word: str) -> str:
    """Return a word in snake case.

    Example::

        >>> snake_case("FlashAttnFwdSm90"), snake_case("RMSNorm"), snake_case("max_pool_nchw")
        ('flash_attn_fwd_sm90', 'rms_norm', 'max_pool_nchw')
    """
    humps = r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(humps, "_", word).lower()


def type_of(*texts: str | None) -> str:
    """Return the first type of elements that a text names, empty for none.

    Example::

        >>> type_of("4, c10::BFloat16, float"), type_of("", "unsigned char const*"), type_of("T1")
        ('bf16', 'u8', '')
    """
    for text in texts:
        found = _TYPE.search(text or "")
        if found is not None and found.lastgroup:
            return found.lastgroup
    return ""


def product_type(inner: str) -> str:
    """Return the first type that is not an integer, else the first.

    Example::

        >>> product_type("int, int, double, double")
        'f64'
    """
    types = [found.lastgroup or "" for found in _TYPE.finditer(inner)]
    return next(
        (each for each in types if each[0] not in "iu" and each != "bool"), "".join(types[:1])
    )


def integers(inner: str) -> list[int]:
    """Return the template arguments that are integers.

    Example::

        >>> integers("4, Array<char*, 2>, 64, int")
        [4, 64]
    """
    flat, outer = inner, ""
    while flat != outer:
        flat, outer = re.sub(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}", "", flat), flat
    return [int(each) for each in flat.split(",") if each.strip().isdigit()]
