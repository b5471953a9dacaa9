"""How evenly tokens are spread over experts and over the ranks that hold them."""

from collections.abc import Mapping

import numpy as np

from lightning_rlprof.analysis.steps.step_selection import in_included
from lightning_rlprof.records.records import Header, expert_in_name
from lightning_rlprof.tables.arrays import Float64s, Int64s, distinct_tuples
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Table, columns_of

_COLUMNS = (
    *columns_of("text", "stage", "of"),
    *columns_of("count", "layer", "rank", "expert", "tokens"),
    *columns_of("ratio", "rank load", "expert load"),
    *columns_of("share", "saved", "idle"),
)
_NO_COUNTS = (
    "No stage counted the tokens of experts. Call count(tokens_per_expert=...) with the tokens "
    "that each expert of the rank computed, of layers and experts."
)
_NOTE = (
    "rank load, expert load: tokens of the most loaded one over the mean, in rows of a rank those "
    "of its own. saved: share of the time of experts, dispatch and combine that even "
    "ranks would save, as a layer ends with its most loaded rank. idle: experts without a token."
)
_ONE_RANK = "Only one rank counted: balance between ranks is unknown."
_ONE_GROUP = (
    "All ranks are taken as one expert-parallel group. For several, set parallel: {ep: N} in the "
    "configuration."
)

_Row = tuple[Cell, ...]


def experts(spans: Spans) -> Table:
    """Show the balance of tokens over experts: of all layers, by layer, and by rank.

    From ``count(tokens_per_expert=...)``. A load is relative to the mean: of the ranks of an
    expert-parallel group, and of the experts of a layer, in each step. Even ranks would save
    ``1 - sum(mean) / sum(max)`` of the experts' time, summed over layers, groups and steps.
    Excluded steps are left out.
    """
    rows, layer, expert, tokens = _counted(spans)
    if not len(rows):
        return Table("experts", _COLUMNS, abstained=_NO_COUNTS)
    notes = [_NOTE]
    ranks = np.unique(spans.rank[rows])
    groups = _groups(spans.headers, spans.rank[rows])
    group = np.zeros(len(rows), np.int64) if groups is None else groups
    if len(ranks) == 1:
        notes.append(_ONE_RANK)
    elif groups is None:
        notes.append(_ONE_GROUP)
    found: list[_Row] = []
    for code in np.unique(spans.name[rows]).tolist():
        own = spans.name[rows] == code
        keys = np.stack([spans.step[rows], group, spans.rank[rows], layer, expert])[:, own]
        heads, place = distinct_tuples(keys)  # The spans of a step are summed.
        found += _of_stage(spans.names[code], heads, _sums(place, tokens[own]))
    return Table("experts", _COLUMNS, found, " ".join(notes))


def _counted(spans: Spans) -> tuple[Int64s, Int64s, Int64s, Float64s]:
    """Return the span, layer, expert and tokens of each count, of included steps."""
    parts = []
    for name in spans.counters:
        place = expert_in_name(name)
        if place is not None:
            rows, values = spans.amounts(name)
            parts.append((rows, *(np.full(len(rows), number) for number in place), values))
    if not parts:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing, np.empty(0)
    rows, layer, expert, tokens = (np.concatenate(each) for each in zip(*parts, strict=True))
    keep = in_included(spans, rows)
    return rows[keep], layer[keep], expert[keep], tokens[keep]


def _groups(headers: Mapping[int, Header], rank: Int64s) -> Int64s | None:
    """Return the expert-parallel group of each rank, None if the configuration does not tell.

    Ranks are ordered as in Megatron: tensor, context and expert parallel first.
    """
    given = [header.config.get("parallel") for header in headers.values()]
    sizes = given[0] if given and isinstance(given[0], Mapping) else {}
    ep = sizes.get("ep", 1)
    share = sizes.get("tp", 1) * sizes.get("cp", 1)
    if any(each != given[0] for each in given) or ep < 2:
        return None
    return np.asarray(rank // (share * ep) * share + rank % share)


def _sums(place: Int64s, amounts: Float64s) -> Float64s:
    return np.bincount(place, amounts).astype(np.float64)


def _of_stage(stage: str, keys: Int64s, tokens: Float64s) -> list[_Row]:
    """Return the rows of a stage: all layers, each layer, and ranks."""
    rank, layer = keys[2], keys[3]
    by_rank, of_rank = distinct_tuples(keys[:4])
    load = _sums(of_rank, tokens)
    # Ranks share a place if their step, group and layer are the same.
    _, place = distinct_tuples(by_rank[[0, 1, 3]])
    even = (_sums(place, load) / np.bincount(place))[place]
    layers = [
        _layers_row(stage, "layer", number, keys[:, layer == number], tokens[layer == number])
        for number in np.unique(layer).tolist()
    ]
    rows = [_layers_row(stage, "all layers", None, keys, tokens)]
    rows += sorted(layers, key=lambda row: (-float(row[8] or 0), row[2]))
    several = len(np.unique(by_rank[2])) > 1
    for number in np.unique(rank).tolist():
        own = by_rank[2] == number
        part = float(load[own].sum() / max(even[own].sum(), 1)) if several else None
        total, idle = round(tokens[rank == number].sum()), _share_of_zeros(tokens[rank == number])
        rows.append((stage, "rank", None, number, None, total, part, None, None, idle))
    return rows


def _layers_row(stage: str, of: str, number: int | None, keys: Int64s, tokens: Float64s) -> _Row:
    """Return the balance of some layers, and their most loaded rank and expert."""
    by_rank, of_rank = distinct_tuples(keys[:4])
    load = _sums(of_rank, tokens)
    most_rank, mean_rank = _most_and_mean(by_rank[[0, 1, 3]], load)
    most_expert, mean_expert = _most_and_mean(keys[[0, 1, 3]], tokens)
    several = len(np.unique(by_rank[2])) > 1 and mean_rank > 0
    hottest = None
    if number is not None:
        each, place = distinct_tuples(keys[[2, 4]])
        hottest = int(each[1, int(np.argmax(_sums(place, tokens)))])
    ranks, place = np.unique(by_rank[2], return_inverse=True)
    busiest = int(ranks[int(np.argmax(_sums(place, load)))]) if several else None
    return (
        *(stage, of, number, busiest, hottest, round(tokens.sum())),
        most_rank / mean_rank if several else None,
        most_expert / mean_expert if mean_expert > 0 else None,
        1 - mean_rank / most_rank if several else None,
        _share_of_zeros(tokens),
    )


def _most_and_mean(places: Int64s, amounts: Float64s) -> tuple[float, float]:
    """Return the largest amount of each place, summed over places, and so the mean."""
    heads, place = distinct_tuples(places)
    most = np.zeros(heads.shape[1])
    np.maximum.at(most, place, amounts)
    return float(most.sum()), float((np.bincount(place, amounts) / np.bincount(place)).sum())


def _share_of_zeros(tokens: Float64s) -> float:
    return float(np.count_nonzero(tokens == 0) / len(tokens))
