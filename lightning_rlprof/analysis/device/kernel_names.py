"""Short names and classes of kernels and copies: the one place that judges a kernel by its name.

A short name says what a kernel does, on which type, in which tile and from which library:
``gemm bf16 128x128x64 tn (cublas sm90)``. It depends on the full name alone, so that two traces can
be compared. Spellings of torch.profiler and of Nsight Systems give the same short name.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from lightning_rlprof.analysis.device.cpp_names import (
    CppName,
    integers,
    product_type,
    snake_case,
    type_of,
)
from lightning_rlprof.tables.kernels import COLLECTIVES

CLASSES = (
    *("matmul", "attention", "elementwise", "reduction", "data movement", "communication"),
    "other",
)
"""Classes of kernels and copies."""

MATMUL, ATTENTION, ELEMENTWISE, REDUCTION, MOVEMENT, COMMUNICATION, OTHER = CLASSES

_MAX_CHARACTERS = 40  # Of an identifier without a rule of its own.
_MAX_SIZE = 1 << 20  # A larger number is a code.
_MAX_CACHED = 65_536
_COPY = re.compile(r"memcpy|memset\b|copy(?:host|device)to|__amd_rocclr_(?:copy|fill)", re.I)

# The first rule that fits a part of the name in snake case decides.
_RULES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (MATMUL, r"marlin(?!.*repack)"),
        (
            MOVEMENT,
            r"(?:reshape|concat|quant|append|store|set|write|copy|gather|swap)_"
            r"(?:and_|to_|\w*paged_)*\w*(?:cache|kv_?buffer|blocks)|repack|nchw_?to|nhwc_?to"
            r"|kv_indices|kv_?cache_(?:copy|update|store|write)|block_?tables?|slot_mapping",
        ),
        (ELEMENTWISE, r"rotary|(?:^|_)m?rope(?:_|$)|de_?quantize|bias_?act"),
        (
            ATTENTION,
            r"attn|attention|^flash$|flash_(?:fwd|bwd|mla|decod|prefill|combine)|fmha|sdpa"
            r"|(?:^|_)(?:m?mha|mla|nsa|kda)(?:_|$)|(?:batch|single)_(?:prefill|decode)"
            r"|prefill_(?:with|fwd)|decode_(?:with|grouped)|merge_(?:attn_)?states?|mqa_logits"
            r"|variable_length_merge|delta_rule|fused_recurrent|(?:^|_)pa_(?:bf|f|fp|decode|prefill)"
            r"|^_?(?:fwd|bwd)(?:_grouped)?_kernel(?!_ep_)|bwd_preprocess"
            r"|(?<!bmm_)chunk_(?:fwd|bwd)",
        ),
        (
            REDUCTION,
            r"^_?(?:moe_)?finalize|moe_align|gating|fused_gate|moe_sum|nonzero|top_?k(?:_|$)"
            r"|gamma_beta|moments|log_?sum_?exp|select_sweep|compute_grad_input"
            r"|linear_cross_entropy",
        ),
        (
            MATMUL,
            r"gemm|gemv|mat_?mul|(?:^|_)(?:[a-z]+_)?(?:b|add|baddb|int\d)?mm(?:_|$)|cijk|nvjet|xmma"
            r"|winograd|wgrad|dgrad|fprop|[sh]?c(?:u)?dnn_conv|scudnn|hcudnn|fft2d_|wmma"
            r"|(?:^|_)(?:causal_|depthwise_)?[sh]?conv(?:\d|_|$|olution|olve)|awq|gptq"
            r"|f(?:used_)?moe|moe_kernel|(?:^|_)gmm(?:_|$)|[sb]gmv|lora_(?:shrink|expand)|tinygemm"
            r"|(?:^|_)linear(?:_fwd|_bwd|_kernel\w*)?$",
        ),
        (
            MOVEMENT,
            r"gather|scatter|(?:^|_)cat(?:_|$)|concat|permute|transpose|trans_data|layout|embedding"
            r"|(?:^|_)embs?(?:_|$)|index_?(?:select|put|copy|fill|add|_kernel|$)|(?:^|_)index(?:_|$)"
            r"|upsample|interpolate|^_?(?:write|store)_|copy|memset|mem_set|tensor_move|convert"
            r"|(?:^|_)(?:cast|pad|roll|flip|slice|strided_slice|split|stack|repeat|expand|broadcast_to"
            r"|as_strided|view_copy|clone|take|unpack|pack|shuffle|identity|im2col|col2im"
            r"|vol2col|col2vol|transfer)(?:_|$)|^tile$|expand_input|init_routing|src_dst",
        ),
        (
            REDUCTION,
            r"norm|soft_?max|reduc|sort|scan|welford|pooling|(?:avg|max|average|lp)_?pool|qparam"
            r"|(?:^|_)(?:cum|bn_|nll)|top_?p(?:_|$)|cross_?entropy|_loss|sampl|histogram|unique"
            r"|compact_init|arg_?(?:max|min)|bincount|run_?length|multinomial|searchsorted"
            r"|(?:^|_)(?:sum|mean|max|min|prod|all|any|var|std|dot|asum|nrm2|i?amax|i?amin|kth)(?:_|$)",
        ),
        (
            ELEMENTWISE,
            r"element_?wise|point_?wise|act_and_mul|activation|relu|sigmoid|tanh|swish|drop_?out|adam"
            r"|quant|fp8_?(?:row|to)|to_h?fp8|lamb|sgd|lion|optimizer|multi_tensor|fill|cvt_|penalt"
            r"|(?:^|_)(?:silu|gelu|swi_?glu|ge_?glu|glu)|(?:op|generic)_tensor|zeros_like|ones_like"
            r"|(?:^|_)(?:foreach|add|mul|div|sub|exp|log\w*|sqrt|rsqrt|pow|neg|abs|where|clamp|bias"
            r"|scale\w*|scal|axpy|arange|range|zeros?|ones|cos|sin|eq|equal|ne|lt|le|gt|ge|real_div"
            r"|muls|adds|divs|subs|minimum|maximum|lerp|masked|greater|less|select|not|sign|erf|round"
            r"|floor|ceil|subtract|multiply|true_divide|compare\w*|threshold|logical\w*|bitwise\w*"
            r"|linspace|square|reciprocal|tril|triu|axpby|addcmul|addcdiv)(?:_|$)|for_each"
            r"|parallel_for|device_for|transform_kernel|bernoulli|uniform|normal_|random|bit_?mask"
            r"|global_kernel|unscale",
        ),
    )
)
_SPLIT_K = re.compile(r"split_?k_?reduce|reduce_?split_?k")
_GENERIC = re.compile(
    r"(?:kentry|[Kk]ernel2?|device_kernel|trampoline_kernel|_kernel_agent|static_kernel|run|call)?"
)
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
    r"(?!Cijk)(?:aclnn(?P<api>[A-Z]\w*?)_(?:\w*_)?(?P<own>[A-Za-z]\w*?)"
    r"|trans_(?P<trans>[A-Z][a-zA-Z]*)(?:_\d+)?"
    r"|(?:[\w./-]+/)?(?P<type>[A-Z][A-Za-z0-9]*?)(?:(?<![V\d])\d+)?(?:_(?P<part>[A-Z][A-Za-z0-9]*))?"
    r"(?:-op\d+)?)"
)
_INDUCTOR = re.compile(
    r"triton_(?P<how>poi|red|per|tem|for|mix|spl|unk)_(?:fused_*)?(?P<fused>.*?)_?(?P<number>\d+)?"
    r"(?:d[\dde]+)?"
)
_MOVES = re.compile(
    r"(?:_*(?:to_copy|clone|copy|cat|stack|permute|transpose|t|view|slice|expand|squeeze|unsqueeze"
    r"|index_select|index|embedding|gather|select|reshape|as_strided|unbind|split|roll|flip"
    r"|repeat|constant_pad_nd)(?=_|$))+"
)
_LOOP = re.compile(
    r"(?P<vec>vectorized_(?:templated_)?element_?wise)|(?P<unrolled>unrolled_element_?wise)"
    r"|(?P<indexed>element_?wise_kernel_with_index)|(?P<index>index_elementwise)"
    r"|(?P<scatter>_?scatter_gather_elementwise)|(?P<random>distribution_elementwise)"
    r"|(?P<manual>elementwise_kernel_manual_unroll)|(?P<strided>^elementwise_kernel)"
    r"|(?P<foreach>multi_tensor_apply)|(?P<reduce>^reduce_kernel)"
)
_WRAPPERS = re.compile(
    r"(?:gpu|xpu)_\w*kernel(?:_impl\w*)?|(?:Binary|AUnary|BUnary|Unary)Functor"
    r"|(?:Binary|Unary|Ternary|Pointwise)Op\w*|lambda|call|func_wrapper_t|ReduceOp|[Aa]rray"
    r"|\w*TensorListMetadata|OpaqueType|complex|_cuda_scatter_gather_internal_kernel"
    r"|distribution_\w+|opmath_\w+|TrivialOffsetCalculator"
)
_USUAL = {
    **{"plus": "add", "multiplies": "mul", "divides": "div", "minus": "sub", "direct_copy": "copy"},
    **{"arg_max": "argmax", "arg_min": "argmin", "norm_two": "norm2", "lp_norm": "norm"},
    **{"l2_norm": "norm", "uniform_and_transform": "uniform", "normal_and_transform": "normal"},
}
_CASTS = re.compile(r"(?:(\w+?\d+)to)?(\w+?\d+\w*?)_copy")
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
_TILE = re.compile(
    r"(\d+x\d+x\d+)_\d+x\d+x\d+_|(?:_|size)(\d+x\d+(?:x\d+)?)(?:_(\d+)x(\d+)(?![x\d]))?"
)
_DETAILS = re.compile(
    r"(?<=_)(?:relu|gelu|tile\d+t|nhwc|nchw|sliced\d+x\d+|stridedB|interior|small|medium|large"
    r"|xregs|exp|3dconv|unity_stride|coop[AB]*|cooperative|pingpong|\d+x\d+x1(?=_0)|\dx\d(?=_[hv])"
    r"|[hv](?=_b)|bias\w?)(?=_|$)"
)
_TENSILE = re.compile(r"Cijk_A(\w)\w+?_B(\w)\w+?_([^_]+)_(?:.*?_)?MT(\d+x\d+x\d+)")
_TENSILE_TYPES = {"B": "bf16", "H": "f16", "S": "f32", "D": "f64", "F": "f8", "C": "c64", "I": "i8"}
_GROUPED = re.compile(r"_matmul_ogs_[NT]+_(\w+?)_(\d+x\d+x\d+)\w*?(?:_(\w+))?$")
_LIBRARIES = {
    **{"fbgemm_gpu": "fbgemm", "ck_tile": "ck", "pytorch_flash": "flash 2"},
    **dict.fromkeys(("at", "std", "c10", "internal"), ""),
}
_EMBEDDINGS = (
    *((r"split_embedding|codegen_|_kernel|_\d+$|rowwise_", ""), ("backward", "bwd")),
    *(("forward", "fwd"), ("_per_row", "/row"), ("_+", " ")),
)


class KernelName(NamedTuple):
    """What a table or a picture shows of a kernel.

    Attributes:
        short: Its short name.
        kind: One of `CLASSES`.
    """

    short: str
    kind: str


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
    cpp = CppName.of(name)
    for rule in (_cann, _inductor, _collective, _loop):
        found = rule(cpp)
        if found is not None:
            return found
    word, kind = _subject(cpp)
    rename = {ATTENTION: _attention, MATMUL: _matmul}.get(kind, _special)
    return KernelName(rename(cpp) or _general(cpp, word), kind)


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


def is_collective(name: str) -> bool:
    """Return whether a kernel exchanges data between devices."""
    return kernel_name(name).kind == COMMUNICATION


def _identity(name: str, own: KernelName) -> str:
    """Return what spellings and instances of one kernel share."""
    if own.kind == COMMUNICATION or _CANN.fullmatch(name) or is_copy(name):
        return own.short
    return name if name.startswith("_Z") else re.sub(r"\W", "", CppName.of(name).whole)


def _digits(name: str, own: KernelName) -> str:
    return hashlib.sha1(_identity(name, own).encode(), usedforsecurity=False).hexdigest()[:3]


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))


def _cut(word: str) -> str:
    half = _MAX_CHARACTERS // 2
    return word if len(word) <= _MAX_CHARACTERS else f"{word[:half]}…{word[1 - half :]}"


def _kind_of(word: str) -> str | None:
    snake = snake_case(word)
    return next((kind for kind, pattern in _RULES if pattern.search(snake)), None)


def _subject(cpp: CppName) -> tuple[str, str]:
    """Return the word that tells what a kernel does, and its class.

    The function decides, else its namespaces, else its arguments in their order.
    """
    if _SPLIT_K.search(snake_case(cpp.whole)):
        return cpp.base, MATMUL
    words = (cpp.base, *reversed(cpp.path), *re.findall(r"[A-Za-z_]\w+", cpp.inner))
    for word in words:
        kind = None if word in _LIBRARIES else _kind_of(word)
        if kind is not None:
            return (word if _GENERIC.fullmatch(cpp.base) else cpp.base), kind
    return cpp.base, OTHER


def _cann(cpp: CppName) -> KernelName | None:
    """Rename a kernel of CANN: its type, and the function that was called if it differs."""
    found = _CANN.fullmatch(cpp.whole) if cpp.is_plain else None
    if found is None:
        return None
    if found["type"] and not found["part"] and _kind_of(found["type"]) is None:
        return None  # Another library's name may end in a number that tells it from others.
    own = found["own"] or found["part"] or found["trans"] or found["type"]
    api = found["api"] or (found["part"] and found["type"]) or own
    api, plain = api.removeprefix("Inplace").split("_")[0], re.sub(r"V\d+$", "", own)
    kind = COMMUNICATION if COLLECTIVES.search(plain) else _kind_of(plain) or OTHER
    a, b = api.lower(), plain.lower()
    return KernelName(own if a.startswith(b) or b.startswith(a) else f"{own} ← {api}", kind)


def _inductor(cpp: CppName) -> KernelName | None:
    """Rename a kernel that torch.compile wrote: what it fuses, and its number."""
    found = _INDUCTOR.fullmatch(cpp.whole)
    if found is None:
        return None
    how, fused = found["how"], found["fused"].strip("_")
    kind = {"poi": ELEMENTWISE, "for": ELEMENTWISE, "unk": _kind_of(fused) or OTHER}.get(
        how, REDUCTION
    )
    if how == "poi" and _MOVES.fullmatch(fused):
        kind = MOVEMENT
    elif how == "tem":
        kind = ATTENTION if _kind_of(fused) == ATTENTION else MATMUL
    number = f"#{found['number']}" if found["number"] else ""
    how = "" if how == "poi" else how
    return KernelName(_joined("triton", how, _cut(fused or "fused"), number), kind)


def _collective(cpp: CppName) -> KernelName | None:
    """Rename a collective: operation, type, algorithm and protocol, library if it isn't NCCL."""
    if not COLLECTIVES.search("::".join((*cpp.path, cpp.base))):
        return None
    base = snake_case(cpp.base)
    operation = next((each for known, each in _OPERATIONS.items() if re.search(known, base)), None)
    if operation is None and "nccl" not in base:
        return KernelName(_general(cpp, cpp.base), COMMUNICATION)
    algorithm = _ALGORITHM.search(cpp.base)
    own = type_of(cpp.base.replace("_", " "), cpp.inner) if operation != "send_recv" else ""
    library = "(hccl)" if "hcom" in base else _library(cpp) if cpp.path else ""
    words = (operation or "collective", own, algorithm[0] if algorithm else "", library)
    return KernelName(_joined(*words), COMMUNICATION)


def _loop(cpp: CppName) -> KernelName | None:
    """Rename PyTorch's loop over elements: operation, type, and how it reads."""
    loop = _LOOP.search(snake_case(cpp.base)) if cpp.inner else None
    if loop is None:
        return None
    how, numbers, functor = loop.lastgroup or "", integers(cpp.inner), cpp.inner
    wrapped = re.search(r"gpu_kernel_impl(_nocast)?<", functor)
    if wrapped is not None:
        functor = _inside(functor[wrapped.end() :])
    operation, own, number = _functor(functor)
    if how == "reduce":
        sizes = "" if numbers[:2] == [512, 1] else f" {'x'.join(map(str, numbers[:2]))}"
        operation = {"and": "all", "or": "any"}.get(operation, operation)
        own = type_of(functor.partition("ReduceOp<")[2])
        return KernelName(_joined(operation, own, f"(reduce{sizes})"), REDUCTION)
    if how == "foreach":
        kind = {"norm": REDUCTION, "copy": MOVEMENT}.get(operation, ELEMENTWISE)
        scalar = "scalar" * ("Scalar" in functor)
        return KernelName(_joined("foreach", operation, scalar, own), kind)
    if how == "scatter":
        words = ("scatter" if "kernel<true" in functor else "gather", "add" * ("Add" in functor))
        return KernelName(_joined(*words, own), MOVEMENT)
    casts = "LoadWithCast" in cpp.inner or (wrapped is not None and not wrapped[1])
    if operation == "copy" and casts:
        operation, casts = "cast to", False
    scalar = "scalar" if re.search(r"AUnaryFunctor|CUDAFunctorOnS", functor) else ""
    scalar = "scalar rhs" if re.search(r"BUnaryFunctor|CUDAFunctorOnO", functor) else scalar
    reads = {"vec": f"vec{numbers[:1]}", "manual": f"strided ×{numbers[-1:]}"}.get(how, how)
    reads = f"({re.sub(r'[][]', '', reads)}{', cast' * casts})"
    kind = MOVEMENT if re.match("copy|cast|index|flip|roll|take|put", operation) else ELEMENTWISE
    return KernelName(_joined(operation, scalar, own, reads, number), kind)


def _functor(functor: str) -> tuple[str, str, str]:
    """Return what a functor does, on which type, and its number if a function has several."""
    names = (found[1] for found in re.finditer(r"(\w+)[<(]", functor))
    operation = next((_operation(each) for each in names if not _WRAPPERS.fullmatch(each)), "op")
    lambdas = re.findall(r"\{lambda\(([^(){}]+)\)#(\d+)\}", functor)
    operands, number = lambdas[-1] if lambdas else ("", "1")
    own = type_of(operands.removeprefix("bool, "), functor)
    if cast := _CASTS.fullmatch(operation):
        own = f"{type_of(cast[1] or 'float')}→{type_of(cast[2]) or cast[2]}"
        operation = "cast"
    return operation, own, f"#{number}" if number != "1" else ""


def _operation(functor: str) -> str:
    """Return what a functor, or the function around it, does.

    Example::

        >>> [_operation(name) for name in ("MulFunctor", "neg_kernel_cuda", "GeluCUDAKernelImpl")]
        ['mul', 'neg', 'gelu']
    """
    word = re.sub(r"^CUDAFunctor(?:On[A-Z][a-z]+)?_|^launch_|^_+", "", functor)
    ends = r"_?(?:CUDA)?[Kk]ernel.*$|(?:Math)?_?[Ff]unctor.*$|Ops$|_cuda.*$|_gpu$|_impl$|_out$"
    word = re.sub(r"(?:_tensor)?_scalar$", " scalar", snake_case(re.sub(ends, "", word)))
    return _USUAL.get(word, word) or functor


def _inside(text: str) -> str:
    """Return what comes before the bracket that closes."""
    depth = 1
    for found in re.finditer("<|(?<!-)>", text):
        depth += 1 if found[0] == "<" else -1
        if not depth:
            return text[: found.start()]
    return text


def _attention(cpp: CppName) -> str | None:
    """Rename attention: pass, type, head size, tile, causal."""
    own = product_type(cpp.inner)
    if traits := re.search(r"kernel_traits<(\d+), (\d+), (\d+)", cpp.inner):
        flags = re.findall(r"true|false", cpp.inner.rpartition(">")[2])
        causal = "causal" * (flags["splitkv" not in cpp.base :][:1] == ["true"])
        base = re.sub(r"_?kernel|_loop_seqk_parallel", "", cpp.base)
        return _joined(base, own, f"d{traits[1]}", f"{traits[2]}x{traits[3]}", causal, "(flash 2)")
    if hopper := re.search(r"FlashAttn(Fwd|Bwd)\w*", cpp.inner):
        return _joined(f"flash_{hopper[1].lower()}", own, _tile(cpp.inner), "(flash 3)")
    if cpp.base.startswith("cudnn"):
        return _library_product(cpp.base)
    if cpp.base.startswith("paged_attention"):
        size = next((f"d{each}" for each in integers(cpp.inner) if each >= 32), "")
        return _joined(re.sub(r"_?kernel|ll4mi_", "", cpp.base), own, size, _library(cpp))
    return None


def _matmul(cpp: CppName) -> str | None:
    """Rename a product or a convolution: type, tile, stages, transposes, split-k, library."""
    own = product_type(cpp.inner)
    if _SPLIT_K.search(snake_case(cpp.whole)):
        return _joined("split-k reduce", own, _library(cpp) or "(cublas)")
    if found := _GROUPED.match(cpp.base):
        types = "·".join(dict.fromkeys(re.split(r"(?<!m)x", found[1])[1:]))
        return _joined("moe gemm", types, found[2], found[3] or "", "(triton)")
    if found := _TENSILE.match(cpp.whole):
        layout = ("t" if found[1] == "l" else "n") + ("n" if found[2] == "l" else "t")
        isa = re.search(r"_ISA(\w+?)_", cpp.whole)
        library = f"(tensile{f' gfx{isa[1]}' if isa else ''})"
        return _joined("gemm", _TENSILE_TYPES.get(found[3][0], ""), found[4], layout, library)
    if found := re.search(r"gemv(?:2?([TN]))?", cpp.whole):
        return _joined("gemv", (found[1] or "").lower(), own, "(cublas)")
    if "GemmShape<" in cpp.inner or cpp.base == "device_kernel":
        conv = re.search(r"Conv\dd(Fprop|Dgrad|Wgrad)", cpp.inner)
        what = f"conv {conv[1].lower()}" if conv else "gemm"
        return _joined(what, own, _tile(cpp.inner), "(cutlass)")
    text = cpp.inner if cpp.inner.startswith("cutlass") else cpp.base
    is_named = re.search(r"xmma|nvjet|cudnn_|cutlass\w*_|_\d+x\d+_", text)
    return _library_product(text) if is_named else None


def _tile(inner: str) -> str:
    """Return the tile MxNxK of a template of CUTLASS."""
    sizes = re.findall(r"C<(\d+)>, (?:\w+::)*C<(\d+)>, (?:\w+::)*C<(\d+)>", inner)
    sizes += re.findall(r"GemmShape<(\d+), (\d+), (\d+)", inner)
    return next(("x".join(each) for each in sizes if int(each[0]) >= 16), "")


def _library_product(name: str) -> str:
    """Rename a kernel of cuBLAS, cuDNN or CUTLASS whose name lists its parameters."""
    own = next((each for each, sign in _PRODUCT_TYPES.items() if re.search(sign, name)), "")
    way = re.search(r"fprop|bprop|dgrad|wgrad", name)
    what = "sdpa" if "sdpa" in name else "conv" if way or "cudnn" in name else "gemm"
    size = stages = ""
    if tile := _TILE.search(name):
        depth, count = tile[3], tile[4]
        if stage := re.search(r"stages_(\d+)x(\d+)", name):
            depth, count = stage.groups()
        size = tile[1] or (f"{tile[2]}x{depth}" if depth else tile[2])
        stages = f"s{count}" if count else ""
    details = "" if "xmma" in name else " ".join(_DETAILS.findall(name)).replace("_", " ")
    layout = re.search(r"_([nt]{2})n?(?=_|$)|_([NT]{2})[NT](?=_|$)", name)
    split = "split-k" * bool(re.search(r"split_?k", name, re.I))
    align = re.search(r"align\d+", name) if "cutlass" in name else None
    library = next((each for each in ("cutlass", "cudnn") if each in name), "cublas")
    chip = re.search(r"sm\d+|ampere|volta|turing|maxwell|hopper|cutlass_(\d\d)", name)
    where = (f"sm{chip[1]}" if chip[1] else chip[0]) if chip else "sm90" * ("nvjet" in name)
    words = (what, way[0] if way else "", own, "winograd" * ("winograd" in name), size, stages)
    ends = (layout[1] or layout[2].lower() if layout else "", split, align[0] if align else "")
    return _joined(*words, details, *ends, f"({_joined(library, where)})")


def _special(cpp: CppName) -> str | None:
    """Rename kernels whose function alone does not tell them apart."""
    numbers, own = integers(cpp.inner), type_of(cpp.inner, cpp.parameters)
    if found := re.match(r"CatArrayBatchedCopy(\w*)", cpp.base):
        size = re.search(r"OpaqueType<(\d+)", cpp.inner)
        dims = f"{numbers[0]}d ×{numbers[1]}" if numbers[1:] else ""
        what = f"{size[1]}-byte" if size else own
        return _joined("cat", what, dims, found[1].replace("_", " ").strip())
    if found := re.match(r"bn_([fb]w)(_tr)?\w*?(_singleread)?$|bn_([fb]w)(_tr)?_", cpp.base):
        words = (f"{found[1] or found[4]}d", "train" * bool(found[2] or found[5]))
        sizes = ("singleread" * bool(found[3]), "".join(map(str, numbers[:1])))
        return _joined("batch_norm", *words, *sizes, own, "(cudnn)")
    if cpp.base.startswith("split_embedding"):
        name = cpp.base
        for long, short in _EMBEDDINGS:
            name = re.sub(long, short, name)
        return _joined("emb", _cut(name.strip()), own, "(fbgemm)")
    if found := re.fullmatch(r"cupy_(\w+?)(?:__(\w+))?", cpp.base):
        return _joined(found[1], type_of((found[2] or "").replace("_", " ")), "(cupy)")
    if "act_and_mul" in cpp.base:
        act = re.search(r"silu|gelu\w*?(?=_kernel|\W|$)|relu", cpp.inner)
        return _joined(act[0] if act else "", "act_and_mul", own, _library(cpp))
    return None


def _general(cpp: CppName, word: str) -> str:
    """Return an identifier without "kernel", its type, its sizes and its library."""
    base = word if "_" in word else snake_case(word)
    base = re.sub(r"_?(?:[Cc][Uu][Dd][Aa])?_?[Kk]ernel(?=_|$)|_cuda$", "", base).strip("_")
    base = base.removeprefix("device_").replace("radix_sort_", "radix_sort ") or word
    tile = re.search(r"sequence<(\d+), (\d+)>", cpp.inner)
    sizes = [str(each) for each in integers(cpp.inner) if 1 < each < _MAX_SIZE][:2]
    size = "x".join(tile.groups() if tile else sizes)
    own = "" if cpp.is_plain else type_of(cpp.inner, cpp.parameters)
    return _joined(_cut(base), own, size, _library(cpp))


def _library(cpp: CppName) -> str:
    top = "triton" if cpp.is_plain else "".join(cpp.path[:1])
    top = _LIBRARIES.get(top, top)
    return f"({top})" if top else ""
