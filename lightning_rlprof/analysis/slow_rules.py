"""The rule on ranks that make the others wait: each verdict of `stragglers` that accuses one."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.claims import HIGH, MEDIUM, Claim, place_of, quoted
from lightning_rlprof.analysis.stragglers import stragglers
from lightning_rlprof.analysis.verdicts import INSUFFICIENT, NOBODY, SLOW_OR_UNEVEN, UNEVEN
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["slow_claims"]

_SILENT = (INSUFFICIENT, NOBODY, UNEVEN)


def slow_claims(spans: Spans) -> Iterator[Claim]:
    """Yield a claim per rank, or group of which one is meant, that surely makes others wait."""
    table = stragglers(spans)
    names = [column.name for column in table.columns]
    for row in table.rows:
        one = dict(zip(names, row, strict=True))
        if one["verdict"] not in _SILENT:
            yield _claim(spans, one)


def _claim(spans: Spans, one: dict[str, Any]) -> Claim:
    single, lost = one["rank"] is not None, one["lost by others"]
    ranks = [one["rank"]] if single else _ranks(str(one["group"]))
    who = f"rank {one['rank']}" if single else f"one of ranks {', '.join(map(str, ranks))}"
    first, last = map(int, str(one["steps"]).split("-"))
    rows, condition = _seen(spans, ranks, first, last, str(one["stages"]))
    chance = "" if one["chance"] is None else f", chance {one['chance']:.2g}"
    sure = HIGH if single and one["verdict"] != SLOW_OR_UNEVEN else MEDIUM
    return Claim(
        f"{who} makes the others wait: {one['verdict']}",
        *(lost, *_bounds(one), sure),
        f"move the work of {who} to another machine for some steps",
        "whoever takes its place is slow as well: then it is the work, and not the machine",
        f"steps {one['steps']}, stages {one['stages']}{chance}",
        f"select * from spans where kind = 'stage' and {condition} order by rank, start_ns",
        place_of(spans, rows),
        "rlprof stragglers RUN --json",
    )


def _ranks(group: str) -> list[int]:
    """Return the ranks that a group's name ends with."""
    return [int(rank) for rank in group.rpartition("ranks ")[2].split(", ")]


def _bounds(one: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return what was lost where the effect is as small or as large as it may be."""
    lost, effect = one["lost by others"], one["effect"]
    if lost is None or not effect:
        return None, None
    low, high = (
        None if one[name] is None else int(lost * one[name] / effect) for name in ("low", "high")
    )
    return low, high


def _seen(spans: Spans, ranks: list[int], first: int, last: int, stages: str) -> tuple[Int64s, str]:
    """Return the stages that a verdict is about, all where it names none, and their condition."""
    rows = spans.rows(kind="stage")
    step = spans.step[rows]
    rows = rows[np.isin(spans.rank[rows], ranks) & (step >= first) & (step <= last)]
    condition = f"rank in ({', '.join(map(str, ranks))}) and step between {first} and {last}"
    named = [spans.names.index(name) for name in stages.split(", ") if name in spans.names]
    if named:
        rows = rows[np.isin(spans.name[rows], named)]
        texts = ", ".join(quoted(spans.names[code]) for code in named)
        condition += f" and name in ({texts})"
    return rows, condition
