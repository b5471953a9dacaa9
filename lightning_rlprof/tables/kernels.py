"""The table of device kernels, the same whatever recorded them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.table import Column, columns_of

UNKNOWN = -(2**63) + 1
"""Stands for an integer that was not recorded."""

HIDDEN_IN_GRAPHS = "kernels inside CUDA graphs aren't visible"
"""Marks in the table's note that each replay of a graph was recorded as a whole."""

COLLECTIVES = re.compile(
    r"[nrxh]ccl|hcom_|msccl|oneccl|nvshmem|rocshmem|all_?reduce|all_?gather|reduce_?scatter"
    r"|all_?to_?all|cross_device_reduce|deep_ep|multimem|symm_?mem|userbuffers|quick_?reduce"
    r"|moe_?distribute_?(?:dispatch|combine)|pplx|\bep_?(?:dispatch|combine)|distribute_?barrier",
    re.IGNORECASE,
)
"""Finds names of communication. Libraries have prefixes; fused kernels say what they do."""

_LAUNCH = re.compile(
    r"(cuda|cu|hip)\w*Launch(Cooperative)?Kernel\w*|urEnqueueKernelLaunch\w*"
    r"|zeCommandListAppendLaunch\w*Kernel\w*"
)

_QUEUED = 0.01
"""Work lasts until the recording ends if it ends less than this share of it before."""

Coded = tuple[Int64s, Sequence[str]]
"""A column of texts: a code per row and the text of each code; below 0 is "not known"."""

COLUMNS = (
    *columns_of("count", "rank", "device", "stream"),
    Column("kernel", "text"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("range", "text"),
    Column("launch", "time", "ns"),
    Column("launch duration", "duration", "ns"),
    *columns_of("count", "thread", "graph"),
)
"""Of the table."""

NPU_COLUMNS = (
    *columns_of("text", "op type", "input shapes"),
    Column("block dim", "count"),
    *columns_of("duration", "aicore time", "vector time", unit="ns"),
)
"""More columns of it, of kernels on Ascend: CANN's name of the operator, the shapes of its inputs,
the number of cores, and how long its matrix and its vector cores were busy."""


def distinct(codes: Int64s, texts: Sequence[str]) -> Coded:
    """Return the same column with each text kept once.

    Example::

        >>> distinct(np.array([2, 0, -1, 1]), ["gemm", "copy", "gemm"])
        (array([ 0,  0, -1,  1]), ['gemm', 'copy'])
    """
    place: dict[str, int] = {}
    own = [place.setdefault(text, len(place)) for text in texts]
    return np.array([*own, -1], dtype=np.int64)[codes], list(place)


def matches(column: Coded, test: Callable[[str], object]) -> Mask:
    """Return which rows of a column have a text that passes a test.

    Example::

        >>> matches((np.array([1, 0, -1]), ["gemm", "copy"]), lambda text: text == "gemm").tolist()
        [False, True, False]
    """
    codes, texts = column
    return np.array([*(bool(test(text)) for text in texts), False])[codes]


def find(keys: Int64s, numbers: Int64s) -> Int64s:
    """Return the first row of the keys that equals each number, -1 without and for `UNKNOWN`.

    Example::

        >>> find(np.array([7, 5, 7]), np.array([5, 7, 6, UNKNOWN])).tolist()
        [1, 0, -1, -1]
    """
    order = np.argsort(keys, kind="stable")
    ordered = np.append(keys[order], UNKNOWN)
    at = np.searchsorted(ordered[:-1], numbers)
    found = (ordered[at] == numbers) & (numbers != UNKNOWN)
    return np.where(found, np.append(order, -1)[at], -1)


def end_to_end(columns: Sequence[Coded]) -> Coded:
    """Return columns of texts as one, each text kept once.

    Example::

        >>> end_to_end([(np.array([0]), ["gemm"]), (np.array([-1, 1]), ["copy", "gemm"])])
        (array([ 0, -1,  0]), ['gemm', 'copy'])
    """
    place: dict[str, int] = {}
    found, last = np.empty(sum(len(codes) for codes, _ in columns), np.int64), 0
    for codes, texts in columns:
        own = np.array([*(place.setdefault(text, len(place)) for text in texts), -1], np.int64)
        found[last : (last := last + len(codes))] = own[np.where(codes < 0, -1, codes)]
    return found, list(place)


def is_launch(name: str) -> bool:
    """Return whether a call of a driver with this name launches one kernel.

    Example::

        >>> [is_launch(name) for name in ("cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000")]
        [True, False]
    """
    return _LAUNCH.fullmatch(name) is not None


def lost_launches(launch: Int64s, matched: Mask, work_end: int, record: tuple[int, int]) -> Mask:
    """Return which launches have no kernel although it must have begun.

    If work lasts until the recording ends, the last launches were still queued then.

    Args:
        launch: When each kernel was launched.
        matched: Whether its kernel was recorded.
        work_end: When the last work ended.
        record: When the recording began and ended.

    Example::

        >>> launch, matched = np.array([1, 2, 3]), np.array([False, True, False])
        >>> [lost_launches(launch, matched, 90, (0, end)).tolist() for end in (90, 200)]
        [[True, False, False], [True, False, True]]
    """
    lost = ~matched
    if matched.any() and record[1] - work_end <= _QUEUED * (record[1] - record[0]):
        lost &= launch < launch[matched].max()
    return lost


def known(numbers: Int64s, nothing: int = UNKNOWN) -> Any:
    """Return a column for `ColumnRows` that reads as None where a number stands for nothing."""
    missing = numbers == nothing
    return np.ma.masked_array(numbers, missing) if missing.any() else numbers
