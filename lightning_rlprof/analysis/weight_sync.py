"""A weight sync in parts: time, bytes, bandwidth, and how far each is from its lower bound."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.collectives import calls_of
from lightning_rlprof.analysis.partition import Segments, divide, partition, rows_on_ranks
from lightning_rlprof.analysis.statistics.group_summary import mean
from lightning_rlprof.analysis.step_selection import counted, in_included
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import Kind
from lightning_rlprof.records.stage_aliases import plain_names
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s
from lightning_rlprof.tables.interval_nesting import NONE, Enclosing, parents
from lightning_rlprof.tables.intervals import covered_before, unions
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
        download fetch_weights ipc nccl_broadcast p2p publish_weights pull_weights push_weights
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
_LOCAL = (CONVERT, LOAD)  # which move nothing over a link
_WORK: tuple[Kind, ...] = ("stage", "region")
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


class _Groups(NamedTuple):
    """Sums by rank and part; arrays of shape (ranks, parts).

    ``moved`` is `UNKNOWN` where no bytes are known, and ``whole`` the same of whole syncs, by rank.
    """

    parts: list[str]
    syncs: Int64s
    begun: Int64s
    ns: Int64s
    hidden: Int64s
    moved: Int64s
    whole: Int64s


def weight_sync(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Divide weight syncs into parts by role; the parts' ``total`` adds up to the whole exactly.

    A sync is a span named as a weight sync, outside other ones of its thread. Each instant belongs
    to the innermost span in it. That one's name tells the part, else the spans around it do, else
    the name itself is the part. What has no part is ``rest``.

    ``hidden`` is the time on threads without steps in which the rank's training thread is in a
    stage, other than a weight sync or waiting; ``exposed`` is the rest. ``bytes`` are per sync,
    ``bandwidth`` is bytes by time. ``bound`` is bytes by the median bandwidth of spans named
    ``bandwidth_probe``. Excluded steps are left out.

    Args:
        spans: The run.
        ranks: Only these; None for all.

    Abstains without a weight sync.
    """
    syncs = _syncs(spans, ranks)
    if not len(syncs):
        return Table("weight_sync", _COLUMNS, abstained=_NO_SYNC)
    remarks = [counted(spans, spans.rows(kind="step")).note]
    found = _groups(spans, syncs, remarks)
    by_role: dict[str, list[int]] = {}
    for at, rank in enumerate(spans.ranks):
        if found.syncs[at]:
            by_role.setdefault(spans.headers[rank].role, []).append(at)
    rates = _probes(spans)
    rows: list[tuple[Cell, ...]] = []
    for role, own in sorted(by_role.items(), key=lambda item: -int(found.ns[item[1]].sum())):
        rate = rates.get(role, rates.get(""))
        rows += _rows(role, rate, _Groups(found.parts, *(column[own] for column in found[1:])))
    if (found.whole == UNKNOWN).all() and (found.moved == UNKNOWN).all():
        remarks.append(_NO_BYTES)
    remarks.append(f"Measured bandwidth: {rates['']:.4g} GB/s." if rates else _NO_PROBE)
    return Table("weight_sync", _COLUMNS, rows, " ".join(filter(None, remarks)))


def _syncs(spans: Spans, ranks: Collection[int] | None) -> Int64s:
    """Return the weight syncs in no other one of their thread, and not in excluded steps."""
    rows = _work(spans, ranks)
    rows = rows[categories_of(spans.names)[spans.name[rows]] == Category.WEIGHT_SYNC]
    rows = rows[in_included(spans, rows)]
    return np.sort(rows[_around(spans, rows) == NONE])


def _work(spans: Spans, ranks: Collection[int] | None) -> Int64s:
    """Return stages and regions in the order that `parents` needs."""
    rows = np.concatenate([rows_on_ranks(spans, kind, ranks) for kind in _WORK])
    order = np.lexsort((rows, -spans.end_ns[rows], spans.start_ns[rows], spans.thread[rows]))
    found: Int64s = rows[order]
    return found


def _around(spans: Spans, rows: Int64s) -> Int64s:
    return parents(spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows])


def _groups(spans: Spans, syncs: Int64s, remarks: list[str]) -> _Groups:
    """Sum time, bytes and spans of the parts of syncs by rank and part."""
    rows = _work(spans, None)
    lane, start = spans.thread, spans.start_ns
    within = Enclosing(lane[syncs], start[syncs], spans.end_ns[syncs]).at(lane[rows], start[rows])
    inside = (within != NONE) & (spans.end_ns[rows] <= spans.end_ns[syncs[within]])
    rows = rows[inside | np.isin(rows, syncs)]
    parts, part, is_first, moved = _parts_of(spans, rows)
    cut = divide(spans, syncs, np.sort(rows))[0]
    of_row = np.full(len(spans), UNKNOWN)
    of_row[rows] = part
    ranks = np.array(spans.ranks)
    by_segment = (np.searchsorted(ranks, spans.rank[cut.stage]), of_row[cut.stage])
    by_span = (np.searchsorted(ranks, spans.rank[rows]), part)
    ns, hidden, count, size, known = np.zeros((5, len(ranks), len(parts)), np.int64)
    np.add.at(ns, by_segment, cut.end_ns - cut.start_ns)
    np.add.at(hidden, by_segment, _hidden(spans, cut, rows))
    np.add.at(count, by_span, is_first)
    np.add.at(size, by_span, np.maximum(moved, 0))
    np.add.at(known, by_span, moved != UNKNOWN)
    at_rest, transfer = len(parts) - 1, [*PARTS].index(TRANSFER)
    stated = np.where(known[:, at_rest] > 0, size[:, at_rest], UNKNOWN)
    amount = np.where(known > 0, size, _collectives(spans, cut, by_segment, ns.shape, remarks))
    whole = np.where(amount[:, transfer] == UNKNOWN, amount[:, at_rest], amount[:, transfer])
    whole = np.where(stated == UNKNOWN, whole, stated)
    amount[:, at_rest] = UNKNOWN
    times = np.bincount(np.searchsorted(ranks, spans.rank[syncs]), minlength=len(ranks))
    return _Groups(parts, times, count, ns, hidden, amount, whole)


def _parts_of(spans: Spans, rows: Int64s) -> tuple[list[str], Int64s, Int64s, Int64s]:
    """Return all parts, then per span its part, whether it begins one, and its bytes.

    Of spans inside one another in one part, the outer one has counted the bytes of both.
    """
    parts = {part: code for code, part in enumerate(PARTS)}
    categories = categories_of(spans.names)
    known: dict[int, int] = {}  # REST is -1 until all parts are known
    for code in np.unique(spans.name[rows]).tolist():
        names = plain_names(spans.names[code])
        usual = next((_PART_OF[name] for name in names if name in _PART_OF), None)
        if usual is not None:
            known[code] = parts[usual]
        elif categories[code] == Category.WEIGHT_SYNC:
            known[code] = UNKNOWN
    counts = np.full(len(spans), UNKNOWN)
    counter = spans.amounts("bytes", np.int64)
    counts[counter.rows] = counter.values
    of_span: list[int] = []
    has_bytes: list[bool] = []
    first, moved = [], []
    columns = (_around(spans, rows), spans.name[rows], counts[rows])
    for around, code, size in zip(*(column.tolist() for column in columns), strict=True):
        above = of_span[around] if around != NONE else UNKNOWN
        if code in known:
            part = known[code]
        elif 0 <= above < len(PARTS):
            part = above
        else:
            part = parts.setdefault(spans.names[code], len(parts))
        is_same = around != NONE and part == above
        is_counted = is_same and has_bytes[around]
        of_span.append(part)
        first.append(not is_same)
        moved.append(UNKNOWN if is_counted or size < 0 else size)
        has_bytes.append(is_counted or size >= 0)
    part_of = np.array(of_span, np.int64)
    part_of[part_of == UNKNOWN] = len(parts)
    return [*parts, REST], part_of, np.array(first, np.int64), np.array(moved, np.int64)


def _hidden(spans: Spans, cut: Segments, members: Int64s) -> Int64s:
    """Return how long the training thread was in stages during each segment of another thread."""
    steps = partition(spans)
    waits = np.isin(categories_of(spans.names), _WAITS)
    divided = steps.divided
    stage = divided.stage
    works = (stage != UNKNOWN) & ~waits[spans.name[stage]] & ~np.isin(stage, members)
    owner, first, last = unions(
        spans.rank[steps.steps[divided.step[works]]], divided.start_ns[works], divided.end_ns[works]
    )
    found = np.zeros(len(cut.stage), np.int64)
    rank = spans.rank[cut.stage]
    aside = ~np.isin(spans.thread[cut.stage], spans.thread[steps.steps])
    for each in np.unique(rank[aside]).tolist():
        at, own = np.flatnonzero(aside & (rank == each)), owner == each
        before = [covered_before(first[own], last[own], times[at]) for times in cut[:2]]
        found[at] = before[1] - before[0]
    return found


def _collectives(
    spans: Spans,
    cut: Segments,
    groups: tuple[Int64s, Int64s],
    shape: tuple[int, ...],
    remarks: list[str],
) -> Int64s:
    """Sum the bytes of profiled collectives that start in each group; `UNKNOWN` without any."""
    found = np.full(shape, UNKNOWN)
    table = spans.try_table("collectives", remarks)
    if table is None or not len(table.rows):
        return found
    calls = calls_of(table)
    within = Enclosing(spans.rank[cut.stage], cut.start_ns, cut.end_ns)
    at = within.at(calls.rank, calls.start_ns)
    some = (at != NONE) & (calls.bytes != UNKNOWN)
    keys = tuple(codes[at[some]] for codes in groups)
    found[keys] = 0
    np.add.at(found, keys, calls.bytes[some])
    return found


def _probes(spans: Spans) -> dict[str, float]:
    """Return the median bandwidth of the probes of each role in GB/s, and of all under ""."""
    rows, moved = spans.amounts("bytes")
    code = spans.names.index(PROBE) if PROBE in spans.names else UNKNOWN
    took = spans.duration_ns[rows]
    some = (spans.name[rows] == code) & (took > 0) & (moved > 0)
    by_role: dict[str, list[float]] = {}
    for rank, rate in zip(spans.rank[rows[some]].tolist(), moved[some] / took[some], strict=True):
        for key in ("", spans.headers[rank].role):
            by_role.setdefault(key, []).append(float(rate))  # bytes per ns are GB/s
    return {role: float(np.median(own)) for role, own in by_role.items()}


def _rows(role: str, rate: float | None, own: _Groups) -> list[tuple[Cell, ...]]:
    """Return the rows of a role: whole syncs, then their parts in order."""
    whole, syncs = int(own.ns.sum()), int(own.syncs.sum())
    totals = own.ns.sum(axis=0)
    custom = len(PARTS) + np.argsort(-totals[len(PARTS) : -1], kind="stable")
    order = [*range(len(PARTS)), *custom.tolist(), len(own.parts) - 1]
    columns = [(WHOLE, own.ns.sum(axis=1), own.hidden.sum(axis=1), own.whole, own.syncs)]
    columns += [
        (own.parts[at], own.ns[:, at], own.hidden[:, at], own.moved[:, at], own.begun[:, at])
        for at in order
        if totals[at] or own.begun[:, at].any()
    ]
    rows: list[tuple[Cell, ...]] = []
    for part, ns, hidden, moved, count in columns:
        total, covered = int(ns.sum()), int(hidden.sum())
        speed, size, bound, ratio = None, None, None, None
        told = moved != UNKNOWN
        if told.any():
            size = mean(int(moved[told].sum()), int(own.syncs[told].sum()))
            took = int(ns[told].sum())
            speed = int(moved[told].sum()) / took if took else None
            if rate is not None and part not in _LOCAL:
                bound = round(size / rate)
                ratio = rate / speed if speed else None
        times = (total - covered, covered)
        share = total / whole if whole else None
        head = (part, role, mean(total, syncs), share, speed, ratio)
        rows.append((*head, *times, size, bound, total, int(count.sum())))
    return rows
