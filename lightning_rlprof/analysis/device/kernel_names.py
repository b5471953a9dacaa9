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
_MAX_SIZE = 1 << 20  # A larger number is a code.
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
    "f16": r"Half|(?:__)?half(?:_t|2)?|_Float16|float16|fp16(?:_t)?|f16",
    "tf32": r"tfloat32(?:_t)?|tf32",
    "f32": r"float|float32|fp32(?:_t)?|f32|float[24]",
    "f64": r"double2?|float64|f64",
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
        (MATMUL, r"marlin(?!.*repack)"),
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
        (REDUCTION, r"finalize|moe_align|gating|moe_sum|nonzero|top_?k(?:_|$)|gamma_beta|moments"),
        (
            MATMUL,
            r"gemm|gemv|mat_?mul|(?:^|_)(?:[a-z]*_)?(?:b|add|baddb)?mm(?:_|$)|cijk|nvjet|xmma|winograd"
            r"|wgrad|dgrad|fprop|(?:^|_)(?:causal_|depthwise_)?[sh]?conv(?:\d|_|$|olution|olve)|awq"
            r"|gptq|f(?:used_)?moe|moe_kernel|scudnn|hcudnn|(?:^|_)gmm(?:_|$)|[sb]gmv"
            r"|lora_(?:shrink|expand)|tinygemm|(?:^|_)linear(?:_fwd|_bwd|_kernel)?$|wmma|fft2d_",
        ),
        (
            MOVEMENT,
            r"gather|scatter|(?:^|_)cat(?:_|$)|concat|permute|transpose|trans_data|layout|embedding"
            r"|(?:^|_)embs?(?:_|$)|index_?(?:select|put|copy|fill|add|_kernel|$)|(?:^|_)index(?:_|$)"
            r"|upsample|interpolate|^_?(?:write|store)_|copy|memcpy|memset|mem_set|tensor_move|(?:^|_)cast(?:_|$)|convert|(?:^|_)pad(?:_|$)"
            r"|(?:^|_)(?:roll|flip|slice|strided_slice|split|chunk|stack|repeat|expand|broadcast_to"
            r"|as_strided|view_copy|to_copy|clone|take|unpack|pack|shuffle|im2col|col2im)(?:_|$)|^tile$",
        ),
        (
            REDUCTION,
            r"norm|soft_?max|reduc|sort|scan|(?:^|_)cum|top_?p(?:_|$)|(?:avg|max|average|lp)_?pool|pooling|(?:^|_)bn_|welford"
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
            r"|floor|ceil|subtract|multiply|true_divide|compare\w*|threshold|logical\w*|bitwise\w*|linspace"
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
    word, kind = _subject(parts)
    rename = {ATTENTION: _attention, MATMUL: _matmul}.get(kind, _special)
    return KernelName(rename(parts) or _general(parts, word), kind)


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
    start, end, cuts = 0, len(text), [0]
    opened: list[str] = []
    for at, sign in enumerate(text):
        if sign in "<({[":
            if sign == "(" and not opened and at > start:
                end = at
                break
            opened.append(sign)
        elif sign in ")}]" or (sign == ">" and opened[-1:] == ["<"] and text[at - 1] != "-"):
            del opened[-1:]
        elif sign == " " and not opened:
            start, cuts = at + 1, [at + 1]
        elif text.startswith("::", at) and not opened:
            cuts.append(at + 2)
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
    """Return the template arguments that are integers.

    Example::

        >>> _integers("4, Array<char*, 2>, 64, int")
        [4, 64]
    """
    flat, outer = inner, ""
    while flat != outer:
        flat, outer = re.sub(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}", "", flat), flat
    return [int(each) for each in flat.split(",") if each.strip().isdigit()]


def _product_type(inner: str) -> str:
    """Return the first type that is no integer, else the first."""
    types = [found.lastgroup or "" for found in _TYPE.finditer(inner)]
    return next((each for each in types if not re.match(r"[iu]\d|bool", each)), "".join(types[:1]))


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))


def _cut(word: str) -> str:
    half = _MAX_CHARACTERS // 2
    return word if len(word) <= _MAX_CHARACTERS else f"{word[:half]}…{word[1 - half :]}"


# ---- classes


def _kind_of(word: str) -> str | None:
    snake = _snake(word)
    return next((kind for kind, pattern in _RULES if pattern.search(snake)), None)


_SPLIT_K = re.compile(r"split_?k_?reduce|reduce_?split_?k")
_GENERIC = re.compile(
    r"(?:kentry|[Kk]ernel2?|device_kernel|trampoline_kernel|_kernel_agent|static_kernel|run|call|launch)?"
)


def _subject(parts: _Parts) -> tuple[str, str]:
    """Return the word that tells what a kernel does, and its class.

    The function decides, else its namespaces, else its arguments in their order.
    """
    if _SPLIT_K.search(_snake(parts.text)):
        return parts.base, MATMUL
    words = (parts.base, *reversed(parts.path), *re.findall(r"[A-Za-z_]\w+", parts.inner))
    for word in words:
        kind = None if word in _NAMESPACES else _kind_of(word)
        if kind is not None:
            return (word if _GENERIC.fullmatch(parts.base) else parts.base), kind
    return parts.base, OTHER


# ---- collectives, CANN, Triton

_OPERATIONS = {
    "all_?reduce|cross_device_reduce": "all_reduce",
    "all_?gather": "all_gather",
    "reduce_?scatter": "reduce_scatter",
    "all_?to_?all": "all_to_all",
    "send_?recv": "send_recv",
    "recv|receive": "recv",
    **{each: each for each in ("broadcast", "barrier", "send", "gather", "scatter", "reduce")},
}
_ALGORITHM = re.compile(
    r"(?:RING|TREE|NVLS|COLLNET|PAT)\w*?_(?:LL128|LL|SIMPLE)|\dstage|(?:one|two)_?shot", re.I
)
_CANN = re.compile(
    r"(?!Cijk)(?:aclnn(?P<api>[A-Z]\w*?)_(?:\w*_)?(?P<own>[A-Za-z]\w*?)|trans_(?P<trans>[A-Z][a-zA-Z]*)(?:_\d+)?"
    r"|(?:[\w./-]+/)?(?P<type>[A-Z][A-Za-z0-9]*?)(?:(?<![V\d])\d+)?(?:_(?P<part>[A-Z][A-Za-z0-9]*))?(?:-op\d+)?)"
)


def _collective(parts: _Parts) -> KernelName | None:
    """Rename a collective: operation, type, algorithm and protocol, library if it isn't NCCL."""
    path = _snake("::".join((*parts.path, parts.base)))
    if not _COMMUNICATES.search(path):
        return None
    base = _snake(parts.base)
    operation = next((each for known, each in _OPERATIONS.items() if re.search(known, base)), None)
    if operation is None and "nccl" not in base:
        return KernelName(_general(parts, parts.base), COMMUNICATION)
    algorithm = _ALGORITHM.search(parts.base)
    own = _type_of(parts.base.replace("_", " "), parts.inner)
    words = (operation or "collective", own if operation != "send_recv" else "")
    library = "(hccl)" if "hcom" in base else _library(parts) if parts.path else ""
    return KernelName(_joined(*words, algorithm[0] if algorithm else "", library), COMMUNICATION)


def _cann(parts: _Parts) -> KernelName | None:
    """Rename a kernel of CANN: its type, and the function that was called if it differs."""
    found = _CANN.fullmatch(parts.text)
    if found is None or parts.parameters is not None or parts.inner:
        return None
    own = found["own"] or found["part"] or found["trans"] or found["type"]
    api = found["api"] or (found["part"] and found["type"]) or own
    api = api.removeprefix("Inplace").split("_")[0]
    plain = re.sub(r"V\d+$", "", own)
    kind = COMMUNICATION if _COMMUNICATES.search(_snake(plain)) else _kind_of(plain)
    a, b = api.lower(), plain.lower()
    same = a.startswith(b) or b.startswith(a)
    return KernelName(own if same else f"{own} ← {api}", kind or OTHER)


_INDUCTOR = re.compile(
    r"triton_(?P<how>poi|red|per|tem|for|mix|spl|unk)_(?:fused_*)?(?P<fused>.*?)_?(?P<number>\d+)?"
    r"(?:d[\dde]+)?"
)
_MOVES = re.compile(
    r"(?:_*(?:to_copy|clone|copy|cat|stack|permute|transpose|t|view|slice|expand|squeeze|unsqueeze"
    r"|index_select|index|embedding|gather|select|reshape|as_strided|unbind|split|roll|flip"
    r"|repeat|constant_pad_nd)(?=_|$))+"
)


def _triton(parts: _Parts) -> KernelName | None:
    """Rename a kernel that torch.compile wrote: what it fuses, and its number."""
    found = _INDUCTOR.fullmatch(parts.text)
    if found is None:
        return None
    how, fused = found["how"], found["fused"].strip("_")
    kind = {"poi": ELEMENTWISE, "for": ELEMENTWISE, "unk": OTHER}.get(how, REDUCTION)
    if how == "poi" and _MOVES.fullmatch(fused):
        kind = MOVEMENT
    if how == "tem":
        kind = ATTENTION if _kind_of(fused) == ATTENTION else MATMUL
    number = f"#{found['number']}" if found["number"] else ""
    words = ("triton", "" if how == "poi" else how, _cut(fused or "fused"), number)
    return KernelName(_joined(*words), kind)


# ---- PyTorch's loops over elements

_LOOP = re.compile(
    r"(?P<vector>vectorized_(?:templated_)?element_?wise)|(?P<unrolled>unrolled_element_?wise)"
    r"|(?P<indexed>element_?wise_kernel_with_index)|(?P<index>index_elementwise)"
    r"|(?P<scatter>_?scatter_gather_elementwise)|(?P<random>distribution_elementwise)"
    r"|(?P<manual>elementwise_kernel_manual_unroll)|(?P<strided>^elementwise_kernel)"
    r"|(?P<foreach>multi_tensor_apply)|(?P<reduce>^reduce_kernel)"
)
_WRAPPERS = re.compile(
    r"(?:gpu|xpu)_\w*kernel(?:_impl\w*)?|(?:Binary|AUnary|BUnary|Unary)Functor|(?:Binary|Unary|Ternary|Pointwise)Op\w*"
    r"|lambda|call|func_wrapper_t|ReduceOp|[Aa]rray|\w+_and_transform|\w*TensorListMetadata|OpaqueType|complex"
    r"|_cuda_scatter_gather_internal_kernel|distribution_\w+|opmath_\w+|TrivialOffsetCalculator"
)
_USUAL = {
    **{"plus": "add", "multiplies": "mul", "divides": "div", "minus": "sub", "direct_copy": "copy"},
    **{
        "arg_max": "argmax",
        "arg_min": "argmin",
        "norm_two": "norm2",
        "lp_norm": "norm",
        "l2_norm": "norm",
    },
}
_CASTS = re.compile(r"(?:(\w+?\d+)to)?(\w+?\d+\w*?)_copy")


def _pointwise(parts: _Parts) -> KernelName | None:
    """Rename a loop over elements: operation, type, and how it reads."""
    loop = _LOOP.search(_snake(parts.base))
    if loop is None or not parts.inner:
        return None
    how, numbers, functor = loop.lastgroup, _integers(parts.inner), parts.inner
    wrapped = re.search(r"gpu_kernel_impl(_nocast)?<", functor)
    if wrapped is not None:
        functor = _inside(functor[wrapped.end() :])
    names = (
        each for each in re.findall(r"(\w+)(?=[<(])", functor) if not _WRAPPERS.fullmatch(each)
    )
    operation = next(map(_operation, names), "op")
    if how == "random" and (found := re.search(r"(\w+)_and_transform", functor)):
        operation = found[1]
    lambdas = re.findall(r"\{lambda\(([^(){}]+)\)#(\d+)\}", functor)
    own = _type_of(lambdas[-1][0].removeprefix("bool, ") if lambdas else "", functor)
    casts = "LoadWithCast" in parts.inner or (wrapped is not None and not wrapped[1])
    scalar = ""
    if how == "foreach":
        scalar = "scalar" * ("Scalar" in functor)
    elif re.search(r"AUnaryFunctor|OnSelf_", functor):
        scalar = "scalar"
    elif re.search(r"BUnaryFunctor|OnOther_", functor):
        scalar = "scalar rhs"
    cast = _CASTS.fullmatch(operation)
    if cast is not None:
        operation, own = "cast", f"{_type_of(cast[1] or 'float')}→{_type_of(cast[2]) or cast[2]}"
    elif operation == "copy" and casts:
        operation, casts = "cast to", False
    reads = {
        "vector": f"vec{numbers[0] if numbers else ''}",
        "manual": f"strided ×{numbers[-1] if numbers else ''}",
        "scatter": "scatter",
    }.get(how or "", how or "")
    kind = ELEMENTWISE
    if how == "scatter":
        scatters = "internal_kernel<true" in parts.inner
        operation = "scatter" if scatters else "gather"
        reads = "add" if "ReduceAdd" in parts.inner else ""
    if how == "reduce":
        operation = {"and": "all", "or": "any"}.get(operation, operation)
        reads = "reduce" if numbers[:2] == [512, 1] else f"reduce {'x'.join(map(str, numbers[:2]))}"
        kind, own = REDUCTION, _type_of(functor.partition("ReduceOp<")[2])
    elif how == "foreach":
        operation, reads = f"foreach {operation}", ""
        kind = REDUCTION if "norm" in operation else ELEMENTWISE
    elif how == "random":
        own = _type_of(parts.inner)
    if re.match(r"(?:foreach )?(?:copy|cast|index|scatter|gather|flip|roll|take|put)", operation):
        kind = MOVEMENT
    number = f"#{lambdas[-1][1]}" if lambdas and lambdas[-1][1] != "1" and how != "reduce" else ""
    reads = f"({reads}{', cast' * casts})" if reads else ""
    return KernelName(_joined(operation, scalar, own, reads, number), kind)


def _operation(functor: str) -> str:
    """Return what a functor or the function around it does.

    Example::

        >>> _operation("MulFunctor"), _operation("neg_kernel_cuda"), _operation("GeluCUDAKernelImpl")
        ('mul', 'neg', 'gelu')
    """
    word = re.sub(r"^CUDAFunctor(?:OnSelf|OnOther)?_|^launch_|^_+", "", functor)
    word = re.sub(
        r"_?(?:CUDA)?[Kk]ernel.*$|(?:Math)?_?[Ff]unctor.*$|Ops$|_cuda.*$|_gpu$|_impl$|_out$",
        "",
        word,
    )
    word = re.sub(r"(?:_tensor)?_scalar$", " scalar", _snake(word))
    return _USUAL.get(word, word) or functor


def _inside(text: str) -> str:
    """Return what comes before the bracket that closes."""
    depth = 1
    for at, sign in enumerate(text):
        depth += (sign == "<") - (sign == ">" and text[at - 1] != "-")
        if not depth:
            return text[:at]
    return text


# ---- attention, matrix multiplication and convolution


def _attention(parts: _Parts) -> str | None:
    traits = re.search(r"kernel_traits<(\d+), (\d+), (\d+)", parts.inner)
    if traits is not None:
        flags = re.findall(r"true|false", parts.inner.rpartition(">")[2])
        causal = flags["splitkv" not in parts.base :][:1] == ["true"]
        base = re.sub(r"_?kernel|_loop_seqk_parallel", "", parts.base)
        size, rows, columns = traits.groups()
        words = (base, _product_type(parts.inner), f"d{size}", f"{rows}x{columns}")
        return _joined(*words, "causal" * causal, "(flash 2)")
    hopper = re.search(r"FlashAttn(Fwd|Bwd)\w*", parts.inner)
    if hopper is not None:
        tile = _tile(parts.inner)
        return _joined(f"flash_{hopper[1].lower()}", _product_type(parts.inner), tile, "(flash 3)")
    if parts.base.startswith("cudnn"):
        return _library_matmul(parts.base)
    if parts.base.startswith("paged_attention"):
        base = re.sub(r"_?kernel|ll4mi_", "", parts.base)
        size = next((f"d{each}" for each in _integers(parts.inner) if each >= 32), "")
        return _joined(base, _product_type(parts.inner), size, _library(parts))
    return None


def _tile(text: str) -> str:
    """Return the tile MxNxK of a template of CUTLASS."""
    sizes = re.findall(r"C<(\d+)>, (?:\w+::)*C<(\d+)>, (?:\w+::)*C<(\d+)>", text)
    sizes += re.findall(r"GemmShape<(\d+), (\d+), (\d+)", text)
    return next(("x".join(each) for each in sizes if int(each[0]) >= 16), "")


_PRODUCT_TYPES = {
    "f8": r"e4m3|e5m2|fp8|nvjet_(?:sm\d+_)?q",
    "bf16": r"bf16|nvjet_(?:sm\d+_)?t",
    "tf32": r"tf32|s1688(?!\w*fp?16)",
    "f16": r"fp16|f16|h\d{3,}|hgemm|hs?cudnn|nvjet_(?:sm\d+_)?h",
    "i8": r"_s8|_i8|igemm|i\d{4,}",
    "f64": r"d884|dgemm|f64|nvjet_(?:sm\d+_)?d",
    "c64": r"cgemm",
    "c128": r"zgemm",
    "f32": r"sgemm|scudnn|f32|nvjet_(?:sm\d+_)?s",
}
_DETAILS = re.compile(
    r"(?<=_)(?:relu|gelu|tile\d+t|nhwc|nchw|sliced\d+x\d+|stridedB|interior|small|medium|large|xregs|exp"
    r"|3dconv|unity_stride|coop[AB]*|cooperative|pingpong|\d+x\d+x1(?=_0)|\dx\d(?=_[hv])|[hv](?=_b)|bias\w?)(?=_|$)"
)


def _matmul(parts: _Parts) -> str | None:
    text = (
        parts.inner
        if re.match(r"Kernel2?$", parts.base) and "cutlass" in parts.inner
        else parts.base
    )
    if _SPLIT_K.search(_snake(parts.text)):
        library = parts.path[0] if parts.path else "cublas"
        return _joined("split-k reduce", _product_type(parts.inner), f"({library})")
    if found := re.match(r"_matmul_ogs_[NT]+_(\w+?)_(\d+x\d+x\d+)\w*?(?:_(\w+))?$", parts.base):
        types = "·".join(dict.fromkeys(re.split(r"(?<!m)x", found[1])[1:]))
        return _joined("moe gemm", types, found[2], found[3] or "", "(triton)")
    if found := re.match(r"Cijk_A(\w)\w+?_B(\w)\w+?_([^_]+)_(?:.*?_)?MT(\d+x\d+x\d+)", parts.text):
        a, b = ("t" if found[1] == "l" else "n"), ("n" if found[2] == "l" else "t")
        letters = {
            "B": "bf16",
            "H": "f16",
            "S": "f32",
            "D": "f64",
            "F": "f8",
            "C": "c64",
            "I": "i8",
        }
        isa = re.search(r"_ISA(\w+?)_", parts.text)
        library = f"(tensile{f' gfx{isa[1]}' if isa else ''})"
        return _joined("gemm", letters.get(found[3][0], ""), found[4], a + b, library)
    if found := re.search(r"gemv(?:2?([TN]))?|gemvx", parts.text):
        return _joined("gemv", (found[1] or "").lower(), _product_type(parts.inner), "(cublas)")
    if "GemmShape<" in parts.inner or "::device_kernel" in parts.text:
        conv = re.search(r"Conv\dd(Fprop|Dgrad|Wgrad)", parts.inner)
        what = f"conv {conv[1].lower()}" if conv else "gemm"
        return _joined(what, _product_type(parts.inner), _tile(parts.inner), "(cutlass)")
    if not re.search(r"xmma|nvjet|cudnn_|cutlass\w*_|_\d+x\d+_", text):
        return None
    return _library_matmul(text.partition("<")[0].partition(",")[0])


def _library_matmul(name: str) -> str:
    """Rename a kernel of cuBLAS, cuDNN or CUTLASS whose name tells its parameters."""
    own = next((each for each, sign in _PRODUCT_TYPES.items() if re.search(sign, name)), "")
    conv = re.search(r"fprop|bprop|dgrad|wgrad", name)
    what = f"conv {conv[0]}" if conv else "conv" if "cudnn" in name else "gemm"
    what = f"sdpa {what.removeprefix('conv ')}" if "sdpa" in name else what
    tile = re.search(
        r"(\d+x\d+x\d+)_\d+x\d+x\d+_|(?:_|size)(\d+x\d+(?:x\d+)?)(?:_(\d+)x(\d+)(?![x\d]))?", name
    )
    size, stages = "", ""
    if tile is not None:
        stage = re.search(r"stages_(\d+)x(\d+)", name)
        depth, count = (stage[1], stage[2]) if stage else (tile[3], tile[4])
        size = tile[1] or (f"{tile[2]}x{depth}" if depth else tile[2])
        stages = f"s{count}" if count else ""
    layout = re.search(r"_([nt]{2})n?(?=_|$)", name) or re.search(r"_([NT]{2})[NT](?=_|$)", name)
    align = re.search(r"align\d+", name) if "cutlass" in name else None
    details = "" if "xmma" in name else " ".join(_DETAILS.findall(name)).replace("_", " ")
    split = "split-k" if re.search(r"split_?k", name, re.I) else ""
    library = "cutlass" if "cutlass" in name else "cudnn" if "cudnn" in name else "cublas"
    known = re.search(r"sm_?\d+|ampere|volta|turing|maxwell|hopper|cutlass_(\d\d)", name)
    default = "sm90" if "nvjet" in name else ""
    where = f"sm{known[1]}" if known and known[1] else known[0] if known else default
    words = (what, own, "winograd" * ("winograd" in name), size, stages, details)
    end = (layout[1].lower() if layout else "", split, align[0] if align else "")
    return _joined(*words, *end, f"({_joined(library, where)})")


# ---- all others


def _special(parts: _Parts) -> str | None:
    numbers, own = _integers(parts.inner), _type_of(parts.inner)
    if found := re.match(r"CatArrayBatchedCopy(\w*)", parts.base):
        size = re.search(r"OpaqueType<(\d+)", parts.inner)
        what = f"{size[1]}-byte" if size else own
        detail = found[1].replace("_", " ").strip()
        return _joined("cat", what, f"{numbers[0]}d ×{numbers[1]}" if numbers[1:] else "", detail)
    if found := re.match(r"bn_(fw|bw)(?:_(tr|inf))?_\w*?(?:_(singleread|NCHW|NHWC))?", parts.base):
        mode = {"tr": "train", "inf": "infer"}.get(found[2] or "", "")
        one = "singleread" * ("singleread" in parts.base)
        size = str(numbers[0]) if numbers else ""
        return _joined(
            "batch_norm",
            found[1][0] + {"fw": "wd", "bw": "wd"}[found[1]],
            mode,
            one,
            size,
            own,
            "(cudnn)",
        )
    if parts.base.startswith("split_embedding"):
        name = re.sub(r"split_embedding|codegen_|_kernel|_\d+$", "", parts.base)
        for long, short in (
            ("backward", "bwd"),
            ("forward", "fwd"),
            ("rowwise_", ""),
            ("_per_row", "/row"),
        ):
            name = name.replace(long, short)
        return _joined(
            "emb",
            _cut(name.strip("_").replace("_", " ")),
            own or _type_of(parts.parameters),
            "(fbgemm)",
        )
    if found := re.fullmatch(r"cupy_(\w+?)(?:__(\w+))?", parts.base):
        return _joined(found[1], _type_of((found[2] or "").replace("_", " ")), "(cupy)")
    if "act_and_mul" in parts.base:
        act = re.search(r"silu|gelu\w*?(?=_kernel|\W|$)|relu", parts.inner)
        return _joined(act[0] if act else "", "act_and_mul", own, _library(parts))
    return None


def _general(parts: _Parts, word: str) -> str:
    """Return the identifier without "kernel", its type, its sizes and its library."""
    base = word if "_" in word else _snake(word)
    base = re.sub(r"_?(?:[Cc][Uu][Dd][Aa])?_?[Kk]ernel(?=_|$)|_cuda$", "", base).strip("_")
    base = base.removeprefix("device_").replace("radix_sort_", "radix_sort ") or word
    sizes = _integers(parts.inner)
    if tile := re.search(r"sequence<(\d+), (\d+)>", parts.inner):
        sizes = [int(tile[1]), int(tile[2])]
    else:
        sizes = [each for each in sizes if 1 < each < _MAX_SIZE][:2]
    if not parts.parameters and not parts.inner:
        return _joined(_cut(base), _library(parts))
    own = _type_of(parts.inner, parts.parameters)
    return _joined(_cut(base), own, "x".join(map(str, sizes)), _library(parts))


_NAMESPACES = {
    "fbgemm_gpu": "fbgemm",
    "ck_tile": "ck",
    "pytorch_flash": "flash 2",
    "flash": "flash",
}


def _library(parts: _Parts) -> str:
    if parts.parameters is None and not parts.path and not parts.inner:
        return "(triton)"
    top = parts.path[0] if parts.path else ""
    top = "" if top in ("at", "std", "c10", "internal") else _NAMESPACES.get(top, top)
    return f"({top})" if top else ""
