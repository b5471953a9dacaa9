"""Short names and classes of kernels and copies: the one place that judges a kernel by its name.

A short name says what the kernel does, on which type, in which tile and from which library:
``gemm bf16 128x128x64 tn (cublas sm90)``. It depends on the full name alone, so that two traces can
be compared. Spellings of torch.profiler and of Nsight Systems give the same short name.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

CLASSES = (
    *("matmul", "attention", "elementwise", "reduction", "data movement", "communication"),
    "other",
)
"""Classes of kernels and copies."""

MATMUL, ATTENTION, ELEMENTWISE, REDUCTION, MOVEMENT, COMMUNICATION, OTHER = CLASSES

_MAX_CHARACTERS = 40  # Of an identifier without a rule of its own.
_MAX_CACHED = 65_536
# The longer spelling of two comes first.
_TYPES = {
    "u64": r"unsigned long(?: long)?|uint64(?:_t)?",
    "u8": r"unsigned char|uint8(?:_t)?",
    "i8": r"signed char|char|int8(?:_t)?",
    "u32": r"unsigned(?: int)?|uint32(?:_t)?",
    "i64": r"long(?: long)?|int64(?:_t)?",
    "i32": r"int|int32(?:_t)?",
    "i16": r"short|int16(?:_t)?",
    "bf16": r"(?:__)?(?:nv_|hip_)?bfloat16(?:_t)?|(?:__nv_|__hip_)bfloat162|BFloat16|bf16(?:_t)?",
    "f16": r"Half|(?:__)?half(?:_t|2)?|_Float16|float16|fp16(?:_t)?",
    "tf32": r"tfloat32(?:_t)?|tf32",
    "f32": r"float|float32|fp32(?:_t)?|float[24]",
    "f64": r"double|float64|double2",
    "f8": r"Float8_\w+|__nv_fp8\w*|float_e[45]m\d\w*|fp8\w*|e[45]m[23]\w*",
    "f4": r"__nv_fp4\w*|float_e2m1\w*|mxfp4|nvfp4|fp4\w*|e2m1\w*",
    "c64": r"complex<float>|float2_complex",
    "bool": r"bool",
}
_TYPE = re.compile(
    r"(?<!\w)(?:\w+::)*(?:" + "|".join(f"(?P<{k}>{v})" for k, v in _TYPES.items()) + r")(?!\w|::)"
)
# ---- classes: the first rule that fits a part of the name decides. Parts are in snake case.

_COMMUNICATES = re.compile(
    r"nccl|rccl|hccl|hcom_|xccl|msccl|oneccl|nvshmem|rocshmem|all_?reduce|all_?gather"
    r"|reduce_?scatter|all_?to_?all|cross_device_reduce|deep_ep|multimem|symm_?mem|userbuffers"
    r"|moe_distribute_(?:dispatch|combine)|quick_?reduce"
)
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (MATMUL, r"split_?k_?reduce|reduce_?split_?k|marlin(?!.*repack)|flash_?infer_?gemm"),
        (
            MOVEMENT,
            r"(?:reshape|concat|quant|append|store|set|write|copy|gather|swap)_(?:and_|to_|\w*paged_)*"
            r"\w*(?:cache|kv_?buffer|blocks)|kv_indices|kv_?cache_(?:copy|update|store|write)"
            r"|repack|nchw_?to|nhwc_?to|block_?tables?|slot_mapping",
        ),
        (ELEMENTWISE, r"rotary|(?:^|_)m?rope(?:_|$)|de_?quantize|apply_rotary|bias_?act"),
        (
            ATTENTION,
            r"attn|attention|flash_(?:fwd|bwd|mla|decod|prefill|attn|combine)|fmha|(?:^|_)m?mha(?:_|$)"
            r"|(?:^|_)mla(?:_|$)|sdpa|batch_(?:prefill|decode)|single_(?:prefill|decode)"
            r"|(?:prefill|decode)_with|merge_(?:attn_)?states?|delta_rule|(?:^|_)pa_(?:bf|f|fp)\d"
            r"|^_?(?:fwd|bwd)(?:_grouped)?_kernel(?:_stage\d|_dkdv|_dq)?$|variable_length_merge",
        ),
        (REDUCTION, r"finalize|moe_align|gating|moe_sum|nonzero"),
        (
            MATMUL,
            r"gemm|gemv|mat_?mul|(?:^|_)(?:[a-z]*_)?(?:b|add|baddb)?mm(?:_|$)|cijk|nvjet|xmma|winograd"
            r"|wgrad|dgrad|fprop|(?:^|_)(?:causal_|depthwise_)?[sh]?conv(?:\d|_|$|olution|olve)|awq"
            r"|gptq|fused_moe|moe_kernel|scudnn|hcudnn|(?:^|_)gmm(?:_|$)|[sb]gmv"
            r"|lora_(?:shrink|expand)|tinygemm|(?:^|_)linear(?:_fwd|_bwd|_kernel)?$|wmma|fft2d_",
        ),
        (
            MOVEMENT,
            r"gather|scatter|(?:^|_)cat(?:_|$)|concat|permute|transpose|trans_data|layout|embedding"
            r"|(?:^|_)embs?(?:_|$)|index_?(?:select|put|copy|fill|add|_kernel|$)|(?:^|_)index(?:_|$)"
            r"|copy|memcpy|memset|mem_set|tensor_move|(?:^|_)cast(?:_|$)|convert|(?:^|_)pad(?:_|$)"
            r"|(?:^|_)(?:roll|flip|slice|strided_slice|split|chunk|stack|tile|repeat|expand|broadcast_to"
            r"|as_strided|view_copy|to_copy|clone|take|unpack|pack|shuffle|im2col|col2im)(?:_|$)",
        ),
        (
            REDUCTION,
            r"norm|soft_?max|reduc|sort|scan|(?:^|_)cum|top_?[kp](?:_|\d|$)|pool|(?:^|_)bn_|welford"
            r"|cross_?entropy|(?:^|_)nll|nllloss|_loss|sampl|histogram|unique|compact_init|qparam"
            r"|arg_?(?:max|min)|bincount|non_?zero|run_?length|multinomial|searchsorted|bucketize"
            r"|(?:^|_)(?:sum|mean|max|min|prod|all|any|var|std|dot|asum|nrm2|amax|amin|kth)(?:_|$)",
        ),
        (
            ELEMENTWISE,
            r"element_?wise|point_?wise|act_and_mul|activation|(?:^|_)(?:silu|gelu|swi_?glu|ge_?glu|glu)"
            r"|relu|sigmoid|tanh|drop_?out|quant|fp8|adam|lamb|sgd|lion|optimizer|multi_tensor|fill"
            r"|(?:^|_)(?:foreach|add|mul|div|sub|exp|log\w*|sqrt|rsqrt|pow|neg|abs|where|clamp|bias"
            r"|scale\w*|scal|axpy|rope|arange|range|zeros?|ones|cos|sin|eq|equal|ne|lt|le|gt|ge|real_div"
            r"|muls|adds|divs|subs|minimum|maximum|lerp|masked|greater|less|select|not|sign|erf|round"
            r"|floor|ceil|subtract|multiply|true|compare\w*|threshold|logical\w*|bitwise\w*|linspace"
            r"|square|reciprocal|tril|triu|triu_tril|axpby|addcmul|addcdiv)(?:_|$)|zeros_like|ones_like"
            r"|for_each|parallel_for|device_for|transform_kernel|bernoulli|uniform|normal_|random"
            r"|bit_?mask|global_kernel|unscale",
        ),
    )
)


class KernelName(NamedTuple):
    """What a table or a picture shows of a kernel.

    Attributes:
        short: Its short name.
        kind: One of `CLASSES`.
    """

    short: str
    kind: str


class _Parts(NamedTuple):
    """A full name, cut.

    Attributes:
        text: All of it in one spelling, without what it returns and its parameters.
        path: Namespaces, outermost first.
        base: The function.
        inner: Its template arguments.
        parameters: The types of its parameters; None if the name has no list of them.
    """

    text: str
    path: tuple[str, ...]
    base: str
    inner: str
    parameters: str | None


@lru_cache(maxsize=_MAX_CACHED)
def kernel_name(name: str) -> KernelName:
    """Return the short name and the class of a kernel or copy, from its full name alone.

    Example::

        >>> kernel_name("ampere_sgemm_128x64_nn")
        KernelName(short='gemm f32 128x64 nn (cublas ampere)', kind='matmul')
        >>> kernel_name("hcom_allReduce__586_0_1").short
        'all_reduce (hccl)'
    """
    if is_copy(name):
        return KernelName(name.partition("(")[0].strip(), MOVEMENT)
    parts = _parts_of(name)
    for rule in (_cann, _triton, _collective, _pointwise):
        found = rule(parts)
        if found is not None:
            return found
    kind = _class_of(parts)
    short = _attention(parts) if kind == ATTENTION else None
    if kind == MATMUL:
        short = _matmul(parts)
    return KernelName(short or _special(parts) or _general(parts), kind)


def kernel_names(names: Iterable[str]) -> list[KernelName]:
    """Return the same of many names, such that different kernels look different.

    Those that would look alike carry three hex digits of the full name's hash. Spellings of one
    name, nodes of a graph and calls of a collective stay alike: they are one kernel.
    """
    names = list(names)
    found = [kernel_name(name) for name in names]
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for name, own in zip(names, found, strict=True):
        alike[own.short].add(_identity(name, own))
    return [
        own._replace(short=f"{own.short} ~{_digits(name, own)}")
        if len(alike[own.short]) > 1
        else own
        for name, own in zip(names, found, strict=True)
    ]


def is_copy(name: str) -> bool:
    """Return whether a name is that of a copy, or of setting memory, which no kernel does.

    Example::

        >>> is_copy("Memcpy HtoD (Pinned -> Device)"), is_copy("direct_copy_kernel")
        (True, False)
    """
    return _COPY.match(name) is not None


def _identity(name: str, own: KernelName) -> str:
    """Return what two spellings of one kernel share."""
    if own.kind == COMMUNICATION or _CANN.match(name):
        return own.short
    return re.sub(r"\W", "", _parts_of(name).text)


def _digits(name: str, own: KernelName) -> str:
    return hashlib.sha1(_identity(name, own).encode(), usedforsecurity=False).hexdigest()[:3]


# ---- the parts of a name

_COPY = re.compile(r"memcpy|memset\b|copy(?:host|device)to|__amd_rocclr_(?:copy|fill)", re.I)
_SPELLINGS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\(anonymous namespace\)::|<unnamed>::|typeinfo name for |\[SIMD.*|\.kd$", ""),
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
    r"(?P<size>\d+)|(?P<literal>L(?P<kind>[a-z])(?P<value>n?\d+)E)|S(?:[0-9A-Z]*_|[tabsiod])"
    r"|T[0-9]*_|Tn|DF16b|DF16_|Dh|D[npt]|Ul|(?P<open>[NIJFL])|(?P<expression>X[a-z]{2})|X"
    r"|(?P<close>E)|(?P<type>[a-z])|."
)
_BUILTINS = {
    **{"DF16b": "bfloat16", "DF16_": "half", "Dh": "half", "b": "bool", "c": "char", "a": "int8_t"},
    **{
        "h": "uint8_t",
        "s": "short",
        "i": "int",
        "j": "unsigned",
        "l": "long",
        "m": "unsigned long",
    },
    **{"x": "long long", "y": "unsigned long long", "f": "float", "d": "double"},
}


def _demangled(name: str) -> str:
    """Return a mangled C++ name as text, without its parameters: enough to read it by.

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
        if token["size"] and not (frames and frames[-1] == "L" and last == "E"):
            word, at = name[at : at + int(text)], at + int(text)
        elif token["literal"]:
            value = token["value"]
            word = ("false", "true")[value != "0"] if token["kind"] == "b" else value
        elif token["open"] or text[0] == "X" or text == "Ul":
            frames.append(text[0])
            if text == "I":
                found, fresh = found + "<", True
        elif token["close"] and frames:
            found, fresh = found + ">" * (frames.pop() == "I"), False
        if word:
            joint = "" if fresh else "::" if frames and frames[-1] == "N" and last != ">" else ", "
            found, fresh = found + joint + word, False
        elif text == "N" and not fresh:
            found, fresh = found + ", ", True
        last = text
    return found


def _parts_of(name: str) -> _Parts:
    text = _demangled(name) if name.startswith("_Z") else name
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    depth, start, end, cuts = 0, 0, len(text), [0]
    for at, sign in enumerate(text):
        if sign in "<({[":
            if sign == "(" and not depth and at > start:
                end = at
                break
            depth += 1
        elif sign in ">)}]":
            depth -= text[at - 1] != "-"
        elif sign == " " and not depth:
            start, cuts = at + 1, [at + 1]
        elif sign == ":" and not depth and text[at - 1] == ":":
            cuts.append(at + 1)
    pieces = [text[a:b].rstrip(":") for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
    path = tuple(piece.partition("<")[0] for piece in pieces[:-1])
    base, _, inner = pieces[-1].partition("<")
    if not inner and len(pieces) > 1:
        inner = pieces[-2].partition("<")[2]
    parameters = text[end:] if end < len(text) or name.startswith("_Z") else None
    return _Parts(text[start:end], path, base, inner.removesuffix(">"), parameters)


def _snake(word: str) -> str:
    """Return a word in snake case.

    Example::

        >>> _snake("FlashAttnFwdSm90"), _snake("RMSNormKernel"), _snake("max_pool_nchw")
        ('flash_attn_fwd_sm90', 'rms_norm_kernel', 'max_pool_nchw')
    """
    return re.sub(
        r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word
    ).lower()


def _type_of(*texts: str | None) -> str:
    """Return the first type that a text names, empty for none."""
    for text in texts:
        found = _TYPE.search(text or "")
        if found is not None and found.lastgroup:
            return found.lastgroup
    return ""


def _integers(inner: str) -> list[int]:
    """Return the template arguments that are integers."""
    depth, found = 0, []
    for item in re.split(r"(?=[<({])|(?<=[>)}])|,", inner):
        depth += item[:1] in ("<", "(", "{")
        if not depth and item.strip().isdigit():
            found.append(int(item))
        depth -= item[-1:] in (">", ")", "}")
    return found


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))


def _cut(word: str) -> str:
    half = _MAX_CHARACTERS // 2
    return word if len(word) <= _MAX_CHARACTERS else f"{word[:half]}…{word[1 - half :]}"


# ---- classes


def _kind_of(word: str) -> str | None:
    snake = _snake(word)
    return next((kind for kind, pattern in _RULES if pattern.search(snake)), None)


def _class_of(parts: _Parts) -> str:
    """Return the class by the function, else its namespaces, else its arguments in order."""
    for word in (parts.base, *reversed(parts.path), *re.findall(r"[A-Za-z_]\w+", parts.inner)):
        kind = _kind_of(word)
        if kind is not None:
            return kind
    return OTHER


# ---- collectives, CANN, Triton

_OPERATIONS = {
    "all_?reduce|cross_device_reduce": "all_reduce", "all_?gather": "all_gather",
    "reduce_?scatter": "reduce_scatter", "all_?to_?all": "all_to_all", "send_?recv": "send_recv",
    "broadcast": "broadcast", "barrier": "barrier", "send": "send", "recv|receive": "recv",
    "gather": "gather", "scatter": "scatter", "reduce": "reduce", "dispatch": "dispatch",
    "combine": "combine",
}  # fmt: skip
_CANN = re.compile(
    r"(?:aclnn[A-Z]\w*|trans_[A-Z]\w*|(?:[\w./-]+/)?[A-Z][A-Za-z0-9]*(?:_[A-Z]\w*|-op\d+)?)$"
)


def _collective(parts: _Parts) -> KernelName | None:
    snake = _snake("::".join((*parts.path, parts.base)))
    if not _COMMUNICATES.search(snake):
        return None
    operation = next(
        (each for known, each in _OPERATIONS.items() if re.search(known, snake)), snake
    )
    library = "hccl" if "hcom" in snake else ""
    algorithm = re.search(
        r"(?:RING|TREE|NVLS|COLLNET|PAT|LL)\w*?(?:LL128|LL|SIMPLE)|RING_\w+?(?=_Sum|$)", parts.base
    )
    kind = _TYPE.search(parts.base.replace("_", " "))
    own = algorithm[0] if algorithm else ""
    name = kind.lastgroup if kind is not None and operation != "send_recv" else ""
    return KernelName(
        _joined(operation, name or _type_of(parts.inner), own, f"({library})" * bool(library)),
        COMMUNICATION,
    )


def _cann(parts: _Parts) -> KernelName | None:
    return None


def _triton(parts: _Parts) -> KernelName | None:
    return None


def _pointwise(parts: _Parts) -> KernelName | None:
    return None


def _attention(parts: _Parts) -> str | None:
    return None


def _matmul(parts: _Parts) -> str | None:
    return None


def _special(parts: _Parts) -> str | None:
    return None


def _general(parts: _Parts) -> str:
    base = re.sub(r"_?kernel(?=_|$)", "", parts.base if "_" in parts.base else _snake(parts.base))
    base = re.sub(r"_cuda$|^device_", "", base.strip("_")) or "::".join(
        (*parts.path[-1:], parts.base)
    )
    numbers = "x".join(str(each) for each in _integers(parts.inner) if each > 1)[:12]
    return _joined(_cut(base), _type_of(parts.inner, parts.parameters), numbers, _library(parts))


def _library(parts: _Parts) -> str:
    if parts.parameters is None and not parts.path and not parts.inner:
        return "(triton)"
    top = parts.path[0] if parts.path else ""
    known = {"fbgemm_gpu": "fbgemm", "ck_tile": "ck"}
    return f"({known.get(top, top)})" if top and top not in ("at", "std", "c10", "internal") else ""
