"""Kernels of matmuls, attention and experts, with the shapes that CANN records of them."""

import re
from math import prod
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.loaders.ascend.capture import KERNEL_SHEET, OpenCapture
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.ascend.table_reader import Frame, coded_texts, texts_of
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, find, matches

_TASKS, _INFO = "TASK", "COMPUTE_TASK_INFO"
_TEXTS = ("inputShapes", "inputDataTypes", "inputFormats", "outputShapes", "outputFormats")
_MATMUL = re.compile(r"(Batch)?MatMul(V\d)?|QuantBatchMatmulV3|WeightQuantBatchMatmulV2")
_ATTENTION = re.compile(r"FlashAttentionScore(Grad)?")
_INFERENCE = re.compile(r"(FusedInferAttentionScore|IncreFlashAttention|PromptFlashAttention)")
_GROUPED = re.compile(r"GroupedMatmul(SwigluQuant)?")
_FUSED = (_ATTENTION, _INFERENCE, _GROUPED)  # operators of torch_npu don't decide their work
_KINDS = (_MATMUL, *_FUSED)
_PLAIN = frozenset({"ND", "NCHW"})  # formats whose shapes are those of the matrices
_TYPES = {  # as torch's C++ names them
    "FLOAT": "float",
    "FLOAT16": "c10::Half",
    **dict.fromkeys(("BF16", "BFLOAT16"), "c10::BFloat16"),
    "INT8": "signed char",
    "INT32": "int",
}


def has_matmul_kernels(opened: OpenCapture) -> bool:
    """Return whether a capture may have kernels with shapes."""
    return opened.has(_INFO, "opType", *_TEXTS) or opened.file(KERNEL_SHEET) is not None


def read_matmul_kernels(opened: OpenCapture, *, fused_only: bool = False) -> Frame:
    """Read them by start: when they ran, and their shapes, without a thread.

    Matmuls are ``[m, k]`` times ``[k, n]``: CANN multiplies matrices as they lie in memory, so some
    are transposed, and the shape of the output tells. Shapes of blocked formats stay as they are.

    - Attention of training: the statistics of the softmax, query, key, value, mask.
    - Attention of inference: query, key, value.
    - Grouped matmuls: rows, weights, output.

    Args:
        opened: The capture.
        fused_only: Leave out plain matmuls.
    """
    if opened.database is not None:
        kind, start, end, texts = _from_database(opened.database)
    else:
        kind, start, end, texts = _from_sheet(opened)
    kinds = _FUSED if fused_only else _KINDS
    found = matches(kind, lambda text: any(each.fullmatch(text) for each in kinds))
    rows = np.flatnonzero(found & plausible(start, end) & (texts[0][0] >= 0))
    rows = rows[np.argsort(start[rows], kind="stable")]
    columns = [[text.strip('"') for text in texts_of((code[rows], own))] for code, own in texts]
    columns.insert(0, texts_of((kind[0][rows], kind[1])))
    known = {each: _as_json(*each) for each in set(zip(*columns, strict=True))}
    shapes = [known[each] for each in zip(*columns, strict=True)]
    return {
        "operator": (kind[0][rows], kind[1]),
        "start": start[rows],
        "duration": (end - start)[rows],
        "dims": coded_texts([dims for dims, _ in shapes]),
        "types": coded_texts([types for _, types in shapes]),
    }


def _from_sheet(opened: OpenCapture) -> tuple[Coded, Int64s, Int64s, list[Coded]]:
    times = dict.fromkeys(("starttime(us)", "duration(us)"), microseconds)
    headings = [name.lower() for name in _TEXTS]
    cells: dict[str, Any] = {"type": None, **dict.fromkeys(headings), **times}
    sheet = read_sheet(opened.file(KERNEL_SHEET), cells)  # type: ignore[arg-type]
    start = sheet.number("starttime(us)")
    length = sheet.number("duration(us)")
    end = np.where((start == UNKNOWN) | (length == UNKNOWN), UNKNOWN, start + length)
    return sheet.text("type"), start, end, [sheet.text(each) for each in headings]


def _from_database(database: SqliteTables) -> tuple[Coded, Int64s, Int64s, list[Coded]]:
    info = database.numbers(_INFO, "globalTaskId", "opType", *_TEXTS)
    tasks = database.numbers(_TASKS, "globalTaskId", "startNs", "endNs")
    at = find(tasks["globalTaskId"], info["globalTaskId"])
    start, end = (np.append(tasks[name], UNKNOWN)[at] for name in ("startNs", "endNs"))
    texts = [database.decode(info[name], STRINGS) for name in _TEXTS]
    return database.decode(info["opType"], STRINGS), start, end, texts


def _as_json(
    kind: str, shapes: str, types: str, formats: str, output: str, out: str
) -> tuple[str, str]:
    """Return shapes and types as JSON.

    Example::

        >>> _as_json("MatMul", "32,16;8,16;8", "FLOAT;FLOAT;FLOAT", "ND;ND;ND", "32,8", "FORMAT_ND")
        ('[[32,16],[16,8]]', '["float","float","float"]')
        >>> _as_json("MatMul", "2,1,16,16;8,16", "DT_BF16", "FRACTAL_NZ;ND", "32,8", "ND")[0]
        '2,1,16,16;8,16'
        >>> _as_json("GroupedMatmul", "32,16;4,16,8;", "DT_BF16", "ND;ND", "32,8", "ND")[0]
        '[[32,16],[4,16,8],[32,8]]'
    """
    names = [name.removeprefix("DT_") for name in types.split(";")]
    found = [_TYPES.get(name, name) for name in names] if types else []
    fits = [name.removeprefix("FORMAT_") in _PLAIN for name in formats.split(";")]
    if _MATMUL.fullmatch(kind):
        plain = all(fits[:2]) and out.removeprefix("FORMAT_") in _PLAIN
        dims = _matrices(shapes, output) if plain else None
    else:
        dims = _fused(kind, shapes, output, fits)
        if _ATTENTION.fullmatch(kind):
            found = found[:1] * 4  # the type of the statistics, which are float, does not matter
    text = shapes if dims is None else msgspec.json.encode(dims).decode()
    return text, msgspec.json.encode(found).decode() if found else ""


def _fused(kind: str, shapes: str, output: str, fits: list[bool]) -> list[list[int]] | None:
    """Return the shapes that decide the work of attention and grouped matmuls."""
    try:
        given, made = ([_sizes(each) for each in text.split(";")] for text in (shapes, output))
    except ValueError:
        return None
    if len(given) < 3 - (_GROUPED.fullmatch(kind) is not None) or not all(fits[:1]):
        return None
    if _GROUPED.fullmatch(kind):  # of several outputs the first may be one of many groups
        single = [each for each in made if each]
        weights = given[1] if fits[1:2] == [True] else []
        return [given[0], weights, single[0]] if single and len(single[0]) > 1 else None
    if _INFERENCE.fullmatch(kind):
        return given[:3]
    # [.., heads, length, 8] or, packed, [tokens, heads, 8]: an output, of gradients an input
    rest = [*made, *given[3:]]
    statistics = [each for each in rest if len(each) in (3, 4) and each[-1] == 8]
    masks = [each for each in given[3:] if len(each) > 1 and each not in statistics]
    if not statistics or prod(given[0]) % max(prod(statistics[0]) // 8, 1):
        return None
    if kind.endswith("Grad"):  # the gradient and the output are no masks
        masks = [each for each in masks if each[:-1] != given[0][:-1]]
    return [statistics[0], *given[:3], masks[0] if masks else []]


def _matrices(shapes: str, output: str) -> list[list[int]] | None:
    """Return the shapes of both matrices, None if they do not fit the output's."""
    try:
        first, second = (_sizes(each) for each in shapes.split(";")[:2])
        *_, rows, columns = _sizes(output)
    except ValueError:
        return None
    if min(len(first), len(second)) < 2:
        return None
    for inner in dict.fromkeys(first[-2:]):
        fits = sorted(first[-2:]) == sorted((rows, inner))
        if fits and sorted(second[-2:]) == sorted((inner, columns)):
            return [[*first[:-2], rows, inner], [*second[:-2], inner, columns]]
    return None


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")] if text.strip() else []
