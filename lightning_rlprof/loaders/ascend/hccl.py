"""What HCCL's names and counts mean: operations, groups, and the bytes of a collective."""

import re
from collections.abc import Sequence

import numpy as np

from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN

BYTES = {
    **dict.fromkeys(("INT8", "UINT8", "HIF8", "FP8E4M3", "FP8E5M2", "FP8E8M0"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BFP16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
    "INT128": 16,
}
"""Bytes of one element, by its type."""
# hcom_allReduce__586_0_1: of the group whose hash ends in 586, its collective 0.
_NAME = re.compile(r"(?:hcom_|hccl)?([a-z]+)_*(?:(\d+)_(\d+)_\d+)?$", re.IGNORECASE)
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "receive": "recv",
    "batchsendrecv": "batch_send_recv",
}
# HCCL counts what one rank gives (HcclAllGather's sendCount) or gets (HcclReduceScatter's
# recvCount); the other side of it is as many times as large as the group.
_OF_ONE_RANK = re.compile("(all_gather|reduce_scatter|all_to_all)(_.*)?")


def group_hash(name: str) -> str:
    """Return the number that the analysis of CANN makes of a communicator's name.

    Example::

        >>> group_hash("90.91.105.46%enp189s0f0_60000_0_1736410538306028")
        '17148521525495523210'
    """
    if name.isdecimal():
        return name
    high = low = 0
    for character in name:
        high = (high * 29 + ord(character)) & 0xFFFFFFFF
        low = (low * 131 + ord(character)) & 0xFFFFFFFF
    return str(high << 32 | low) if name else ""


def operation_in(name: str) -> tuple[str, str, int]:
    """Return the operation in an operator's name, the end of its group's hash, and its number.

    Example::

        >>> operation_in("hcom_allReduce__586_3_1")
        ('all_reduce', '586', 3)
        >>> operation_in("HcclAlltoAllV")[0], operation_in("hcom_receive_")[0]
        ('all_to_all_v', 'recv')
    """
    found = _NAME.match(name)
    if found is None:
        return name, "", UNKNOWN
    word = found[1].lower()
    for known, operation in _OPERATIONS.items():
        if word.startswith(known):
            word = "_".join(filter(None, (operation, word[len(known) :])))
            break
    number = int(found[3]) if found[3] and len(found[3]) < 18 else UNKNOWN
    return word, found[2] or "", number


def payload(operation: Sequence[str], dtype: Sequence[str], count: Int64s, size: Int64s) -> Int64s:
    """Return how many bytes each collective carried: the larger of what this rank gave and got.

    `UNKNOWN` where type or count is, where it takes the size of a group that is not known, and
    where each peer gets another count.

    Args:
        operation: As `operation_in` spells them; shape (collectives,), as all others.
        dtype: Type of the elements in HCCL's words.
        count: Number of elements.
        size: Number of ranks in the group, `UNKNOWN` without.

    Example::

        >>> counts, ranks = np.array([10, 10, 10]), np.array([8, 8, UNKNOWN])
        >>> names, types = ("all_reduce", "all_gather", "reduce_scatter"), ["FP16"] * 3
        >>> payload(names, types, counts, ranks)[:2].tolist()
        [20, 160]
    """
    each = np.array([BYTES.get(name, 0) for name in dtype], np.int64)
    times = np.ones_like(each)
    for row, found in enumerate(map(_OF_ONE_RANK.fullmatch, operation)):
        if found:
            times[row] = 0 if found[2] else max(int(size[row]), 0)
    sound = (count >= 0) & (count < 2**40) & (each > 0) & (times > 0) & (times < 2**20)
    return np.where(sound, count * each * times, UNKNOWN)
