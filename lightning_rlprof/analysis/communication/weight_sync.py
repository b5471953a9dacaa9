"""A weight sync in parts: time, bytes, bandwidth, and how far each is from its lower bound."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import mean
from lightning_rlprof.analysis.steps.partition import Segments, divide, partition, rows_on_ranks
from lightning_rlprof.analysis.steps.step_selection import counted, in_included
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS, Kind
from lightning_rlprof.records.stage_aliases import plain_names
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, Mask, differs, group_starts
from lightning_rlprof.tables.intervals import (
    NONE,
    Enclosing,
    covered_before,
    edges,
    nested_order,
    parents,
    unions,
)
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

PROBE = "bandwidth_probe"
"""Name of the spans that measure the link: a raw transfer that counts its ``bytes``."""

GATHER, CONVERT, TRANSFER, LOAD = "gather/reshard", "convert/quantize", "transfer", "load"
REST, WHOLE = "rest", "whole sync"
PARTS = {
    "drain/pause": """
        abort abort_all abort_all_requests abort_requests drain drain_requests generation_pause
        interrupt_generation pause pause_engine pause_engines pause_generation rollout_pause
        rollout_pause_generation stop_generation suspend wait_for_requests""",
    GATHER: """
        all_gather all_gather_into_tensor all_gather_params allgather collect_params export_weights
        full_state_dict full_tensor gather gather_full_params gather_params gather_weights
        get_full_state_dict get_state_dict materialize merge_lora redistribute reshard state_dict
        summon_full_params unshard""",
    CONVERT: """
        cast cast_dtype cast_weights convert convert_params convert_to_hf convert_to_vllm
        convert_weights dequantize fp8_quantize pack pack_weights quantise quantize quantize_params
        quantize_weights rename_weights to_bf16 to_fp8 to_hf""",
    TRANSFER: """
        all_to_all broadcast broadcast_bucket broadcast_params broadcast_to_vllm broadcast_weights
        disk download fetch_weights ipc nccl_broadcast p2p publish_weights pull_weights push_weights
        rdma_write receive receive_weights recv recv_weights scatter send send_bucket send_recv
        send_weights transfer transfer_params transfer_weights upload""",
    LOAD: """
        apply_weights copy_params load load_model_weights load_params load_state_dict load_weights
        process_weights_after_loading set_weights update_params weight_loader""",
    "cache flush": """
        clear_cache clear_kv_cache empty_cache flush flush_cache invalidate_cache
        invalidate_kv_cache reset_cache reset_kv_cache reset_prefix_cache""",
    "resume": """
        continue_generation generation_resume resume resume_engine resume_engines
        resume_generation rollout_continue_generation rollout_resume unpause""",
}
"""Usual names of the parts, in the order in which a sync has them."""

_PART_OF = {name: part for part, names in PARTS.items() for name in names.split()}
PATHS = {
    "p2p": "all_to_all p2p rdma_write send_recv",
    "nccl": "broadcast broadcast_bucket broadcast_params nccl_broadcast",
    "ipc": "ipc",
    "disk": "disk download upload",
}
"""Names of transfers that tell the way of the weights, the fastest one first."""
_LOCAL = (CONVERT, LOAD)  # These parts move nothing over a link.
_WORK: tuple[Kind, ...] = ("stage", "region")
_KINDS = [KINDS.index(kind) for kind in _WORK]
_STAGE = KINDS.index("stage")
_WAITS = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.COLLECTIVE_WAIT)

_COLUMNS = (
    *columns_of("text", "part", "role"),
    Column("time per sync", "duration", "ns"),
    Column("share", "share"),
    Column("bandwidth", "number", "GB/s"),
    Column("x of bound", "ratio"),
    *columns_of("duration", "exposed", "hidden", unit="ns"),
    Column("bytes", "count", "bytes"),
    *columns_of("duration", "bound", "total", unit="ns"),
    Column("count", "count"),
)
_NO_SYNC = "This run has no weight sync. Mark it with stage('weight_sync'), and its parts inside it"
_NO_BYTES = "No bandwidth: call count(bytes=...) in the part that moves the weights."
_NO_PROBE = (
    "No lower bound: once in the run, broadcast a tensor of known size inside "
    f"annotate('{PROBE}'), with count(bytes=...)."
)


class _Pieces(NamedTuple):
    """One entry per sync and part, and per whole sync; ``moved`` is `UNKNOWN` without bytes."""

    sync: Int64s
    part: Int64s
    ns: Int64s
    hidden: Int64s
    begun: Int64s
    moved: Int64s


def weight_sync(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Divide weight syncs into parts by role; the parts' ``total`` adds up to the whole exactly.

    A sync is a span named as a weight sync, outside other ones of its thread. Each instant belongs
    to the innermost span in it. That one's name tells the part, else the spans around it do, else
    the name itself is the part. What has no part is ``rest``.

    ``hidden`` is the time on threads without steps in which the rank's training thread is in a
    stage, other than a weight sync or waiting; ``exposed`` is the rest. ``bytes`` are per sync,
    ``bandwidth`` is the median of bytes by time. ``bound`` is bytes by the median bandwidth of
    spans named ``bandwidth_probe``. Excluded steps are left out.

    Args:
        spans: The run.
        ranks: Only these; None for all.

    Abstains without a weight sync.
    """
    if ranks is None:
        return spans.once("weight sync", _analyze, ("clocks",))
    return _analyze(spans, ranks)


def paths(spans: Spans, code: int) -> list[str]:
    """Return the ways of the weights that the spans inside a stage tell, the fastest first."""
    syncs, rows = np.flatnonzero(spans.name == code), np.flatnonzero(np.isin(spans.kind, _KINDS))
    within = Enclosing(*_times(spans, syncs)).at(spans.thread[rows], spans.start_ns[rows])
    inside = np.unique(spans.name[rows[within != NONE]]).tolist()
    told = {name for each in inside for name in plain_names(spans.names[each])}
    return [path for path, names in PATHS.items() if told & {*names.split()}]


def _analyze(spans: Spans, ranks: Collection[int] | None = None) -> Table:
    syncs = _syncs(spans, ranks)
    if not len(syncs):
        return Table("weight_sync", _COLUMNS, abstained=_NO_SYNC)
    remarks = [counted(spans, spans.rows(kind="step")).note]
    parts, pieces = _pieces(spans, syncs)
    ranks_of, place = np.unique(spans.rank[syncs], return_inverse=True)
    role = [spans.headers[rank].role for rank in ranks_of.tolist()]
    rate = _probed(spans)
    rows: list[tuple[Cell, ...]] = []
    for each in sorted(set(role)):
        own = np.array([other == each for other in role])[place[pieces.sync]]
        rows += _rows(each, rate, parts, _Pieces(*(column[own] for column in pieces)))
    if (pieces.moved == UNKNOWN).all():
        remarks.append(_NO_BYTES)
    remarks.append(_NO_PROBE if rate is None else f"Measured bandwidth: {rate:.4g} GB/s.")
    return Table("weight_sync", _COLUMNS, rows, " ".join(filter(None, remarks)))


def _syncs(spans: Spans, ranks: Collection[int] | None) -> Int64s:
    """Return the weight syncs in no other one of their thread, and not in excluded steps."""
    moves = categories_of(spans.names) == Category.WEIGHT_SYNC
    found = [rows_on_ranks(spans, kind, ranks) for kind in _WORK]
    rows = np.concatenate([rows[moves[spans.name[rows]]] for rows in found])
    rows = np.sort(rows[in_included(spans, rows)])
    rows = rows[nested_order(*_times(spans, rows))]
    return np.sort(rows[parents(*_times(spans, rows)) == NONE])


def _times(spans: Spans, rows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    return spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]


def _pieces(spans: Spans, syncs: Int64s) -> tuple[list[str], _Pieces]:
    """Return the names of parts, whole syncs last, and what each sync has of each."""
    rows, within = _inside(spans, syncs)
    order = nested_order(*_times(spans, rows))
    parts, part, begins, moved = _parts_of(spans, rows[order])
    cut = divide(spans, syncs, rows)[0]
    of_row = np.empty_like(part)
    of_row[order] = part
    width, at_rest = len(parts) + 1, len(parts) - 1
    whole_keys = np.arange(len(syncs)) * width + width - 1
    by_segment = cut.step * width + of_row[np.searchsorted(rows, cut.stage)]
    by_span = within[order] * width + part
    keys = edges(by_segment, by_span, whole_keys)
    of_segment, of_span, of_whole = (
        np.searchsorted(keys, each) for each in (by_segment, by_span, whole_keys)
    )

    def summed(at: Int64s, values: Int64s | Mask) -> Int64s:
        found = np.zeros(len(keys), np.int64)
        np.add.at(found, at, values.astype(np.int64, copy=False))  # Of one type it is quick.
        return found

    def of_syncs(values: Int64s, code: int) -> Int64s:
        found = np.full(len(syncs), UNKNOWN)
        own = keys % width == code
        found[keys[own] // width] = values[own]
        return found

    def of_segments(values: Int64s) -> Int64s:
        return summed(of_segment, values) + summed(of_whole[cut.step], values)

    ns, hidden = of_segments(cut.end_ns - cut.start_ns), of_segments(_hidden(spans, cut, rows))
    counted_bytes = summed(of_span, moved != UNKNOWN) > 0
    size = np.where(counted_bytes, summed(of_span, np.maximum(moved, 0)), UNKNOWN)
    stated = of_syncs(size, at_rest)
    transfer, rest = (of_syncs(size, code) for code in ([*PARTS].index(TRANSFER), at_rest))
    whole = np.where(stated != UNKNOWN, stated, np.where(transfer != UNKNOWN, transfer, rest))
    size[keys % width == at_rest] = UNKNOWN
    size[of_whole] = whole
    begun = summed(of_span, begins) + summed(of_whole, np.ones_like(of_whole))
    found = _Pieces(keys // width, keys % width, ns, hidden, begun, size)
    return [*parts, WHOLE], found


def _inside(spans: Spans, syncs: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows of what is inside syncs, ascending, and which sync that is.

    A sync is in itself.
    """
    by_rank = np.split(syncs, group_starts(spans.rank[syncs])[1:])
    rows = np.concatenate([_during(spans, own) for own in by_rank])
    rows = rows[np.isin(spans.kind[rows], _KINDS)]
    lane, start, end = _times(spans, rows)
    within = Enclosing(*_times(spans, syncs)).at(lane, start)
    within[np.searchsorted(rows, syncs)] = np.arange(len(syncs))
    inside = (within != NONE) & (end <= spans.end_ns[syncs[within]])
    return rows[inside], within[inside]


def _during(spans: Spans, syncs: Int64s) -> Int64s:
    """Return the rows of what begins on a rank while one of its syncs runs, and of these."""
    low, high = np.searchsorted(spans.rank, spans.rank[syncs[0]] + np.array([0, 1])).tolist()
    begun, change = spans.start_ns[low:high], np.zeros(high - low + 1, np.int64)
    for column, by in ((spans.start_ns, 1), (spans.end_ns, -1)):
        np.add.at(change, np.searchsorted(begun, column[syncs]), by)
    during = np.cumsum(change[:-1]) > 0
    during[syncs - low] = True  # One that takes no time begins when it ends.
    found: Int64s = np.flatnonzero(during) + low
    return found


def _parts_of(spans: Spans, rows: Int64s) -> tuple[list[str], Int64s, Int64s, Int64s]:
    """Return all parts, then per span its part, whether it begins one, and its bytes.

    Of spans inside one another in one part, the outer one has counted the bytes of both.
    """
    parts = {part: code for code, part in enumerate(PARTS)}
    categories = categories_of(spans.names)
    known: dict[int, int] = {}  # REST is -1 until all parts are known.
    for code in np.unique(spans.name[rows]).tolist():
        names = plain_names(spans.names[code])
        usual = next((_PART_OF[name] for name in names if name in _PART_OF), None)
        if usual is not None:
            known[code] = parts[usual]
        elif categories[code] == Category.WEIGHT_SYNC:
            known[code] = UNKNOWN
    by_code = np.array([known.get(code, UNKNOWN) for code in range(len(spans.names))], np.int64)
    part_of = by_code[spans.name[rows]]
    moved = np.maximum(spans.per_row("bytes", UNKNOWN, rows), UNKNOWN)
    has_bytes, first = moved != UNKNOWN, np.ones(len(rows), np.int64)
    around = parents(*_times(spans, rows))
    # The others are whole syncs: nothing is around them, and their names say all.
    nested = (around != NONE) | ~np.isin(spans.name[rows], [*known])
    for at in np.flatnonzero(nested).tolist():
        code, outer = int(spans.name[rows[at]]), int(around[at])
        above = int(part_of[outer]) if outer != NONE else UNKNOWN
        if code not in known:
            inherits = 0 <= above < len(PARTS)
            part_of[at] = above if inherits else parts.setdefault(spans.names[code], len(parts))
        first[at] = outer == NONE or part_of[at] != above
        if not first[at] and has_bytes[outer]:
            moved[at], has_bytes[at] = UNKNOWN, True
    part_of[part_of == UNKNOWN] = len(parts)
    return [*parts, REST], part_of, first, moved


def _hidden(spans: Spans, cut: Segments, members: Int64s) -> Int64s:
    """Return how long the training thread was in stages during each segment of another thread."""
    steps, found = spans.rows(kind="step"), np.zeros(len(cut.stage), np.int64)
    aside = ~np.isin(spans.thread[cut.stage], spans.thread[steps])
    if not aside.any():
        return found
    waits = np.isin(categories_of(spans.names), _WAITS)
    divided = partition(spans).divided
    stage = divided.stage
    works = np.append(spans.kind == _STAGE, False)[stage] & ~waits[spans.name[stage]]
    works &= ~np.isin(stage, members)
    owner, first, last = unions(
        spans.rank[steps[divided.step[works]]], divided.start_ns[works], divided.end_ns[works]
    )
    rank = spans.rank[cut.stage]
    for each in np.unique(rank[aside]).tolist():
        at, own = np.flatnonzero(aside & (rank == each)), owner == each
        before = [covered_before(first[own], last[own], times[at]) for times in cut[:2]]
        found[at] = before[1] - before[0]
    return found


def _probed(spans: Spans) -> float | None:
    """Return the median bandwidth of the probes in GB/s; None without any."""
    rows, moved = spans.amounts("bytes")
    code = spans.names.index(PROBE) if PROBE in spans.names else UNKNOWN
    took = spans.took_ns(rows)
    some = (spans.name[rows] == code) & (took > 0) & (moved > 0)
    # Bytes per ns are GB/s.
    return float(np.median(moved[some] / took[some])) if some.any() else None


def _rows(role: str, rate: float | None, parts: list[str], own: _Pieces) -> list[tuple[Cell, ...]]:
    """Return the rows of a role: whole syncs, then their parts in order."""
    totals, counts = (np.bincount(own.part, each, len(parts)) for each in (own.ns, own.begun))
    custom = len(PARTS) + np.argsort(-totals[len(PARTS) : -2], kind="stable")
    order = [len(parts) - 1, *range(len(PARTS)), *custom.tolist(), len(parts) - 2]
    syncs = int(np.count_nonzero(differs(own.sync)))
    whole = int(own.ns[own.part == order[0]].sum())
    rows: list[tuple[Cell, ...]] = []
    for code in order:
        if not totals[code] and not counts[code]:
            continue
        some = own.part == code
        total, hidden, count = (int(each[some].sum()) for each in (own.ns, own.hidden, own.begun))
        speed, size, bound, ratio = None, None, None, None
        told = some & (own.moved != UNKNOWN)
        if told.any():
            size = mean(int(own.moved[told].sum()), int(np.count_nonzero(told)))
            fast = told & (own.ns > 0)
            speed = float(np.median(own.moved[fast] / own.ns[fast])) if fast.any() else None
            if rate is not None and parts[code] not in _LOCAL:
                bound = round(size / rate)
                ratio = rate / speed if speed else None
        share = total / whole if whole else None
        head = (parts[code], role, mean(total, syncs), share, speed, ratio)
        rows.append((*head, total - hidden, hidden, size, bound, total, count))
    return rows
