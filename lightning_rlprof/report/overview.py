"""The first screen of the HTML report: step time, where it goes, what to fix first, and trust."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.analysis.steps.step_selection import FEWEST
from lightning_rlprof.report.step_series import Part, StepSeries, mean_parts
from lightning_rlprof.report.terminal import duration, percent
from lightning_rlprof.tables.table import figure

_SMALL = 0.01  # of the step: such parts are drawn, and listed together


@dataclass(frozen=True)
class Segment:
    """One part of the bar of a mean step.

    Attributes:
        name: The part.
        stage: The stage that gives its color.
        kind: ``stage``, ``waiting`` or ``untraced``.
        share: Of the step.
        time: Its mean, as text.
    """

    name: str
    stage: str
    kind: str
    share: float
    time: str


@dataclass(frozen=True)
class Overview:
    """The figures of the first screen.

    Attributes:
        median: Duration of the median step: number and unit; None with too few steps.
        spread: A sentence about the quartiles, or what is needed for one.
        mean: Mean step, of which the bar shows the parts.
        segments: The parts that are listed one by one, in the order of the bar.
        small: The other parts of it.
        small_time: What these take together.
        rate: Title of the chart of throughput.
    """

    median: tuple[str, str] | None
    spread: str
    mean: str
    segments: Sequence[Segment]
    small: Sequence[Segment]
    small_time: str
    rate: str


def overview(series: StepSeries) -> Overview:
    """Return the figures of the first screen; all are about included steps."""
    some, wall = series.included, series.wall_ns
    steps, whole = int(some.sum()), float(wall[some].mean()) if some.any() else 0.0
    parts = mean_parts(series, some)
    large = [_segment(part, ns, whole) for part, ns in parts if ns >= _SMALL * whole]
    small = [_segment(part, ns, whole) for part, ns in parts if 0 < ns < _SMALL * whole]
    rest = sum(ns for _, ns in parts if ns < _SMALL * whole)
    if steps < FEWEST:
        has = "no complete step" if not steps else "1 step" if steps == 1 else f"{steps} steps"
        median, spread = None, f"{has.capitalize()}; {FEWEST} are needed to show where time goes."
    else:
        low, middle, high = np.quantile(wall[some], (0.25, 0.5, 0.75))
        number, _, unit = duration(int(middle)).rpartition(" ")
        median = (number, unit)
        spread = f"Half of the steps take {duration(int(low))} to {duration(int(high))}"
    mean = duration(int(whole)) if steps else ""
    return Overview(median, spread, mean, large, small, duration(int(rest)), _rate(series))


def _segment(part: Part, ns: float, whole: float) -> Segment:
    share = ns / whole if whole else 0.0
    return Segment(part.name, part.stage, part.kind, share, duration(int(ns)))


def _rate(series: StepSeries) -> str:
    """Return the title of the chart over steps: tokens per second, or step time without tokens."""
    if series.tokens is None:
        return "Step time, mean of ranks"
    stage, tokens = series.tokens
    some = series.included & (series.training_ns > 0)
    if not some.any():
        return f"Tokens per second, all ranks ({stage})"
    rate = float(np.median(tokens[some] / series.training_ns[some]) * 1e9)
    return f"Tokens per second, all ranks ({stage}): median {figure(rate)}"


@dataclass(frozen=True)
class Headline:
    """One finding on the first screen.

    Attributes:
        title: What is wrong, or what might be saved.
        act: What to try.
        word: ``costs``, or ``takes`` of an idea.
        share: Of the job's time, as text; empty if it has no price.
        time: The same as rank time.
        anchor: Where its evidence is.
    """

    title: str
    act: str
    word: str
    share: str
    time: str
    anchor: str


def headlines(findings: Sequence[dict[str, Any]]) -> list[Headline]:
    """Return the first of the rows of findings, in their order: problems by cost, then ideas."""
    return [
        Headline(
            str(row["finding"]),
            str(row["try"]),
            "takes" if row["kind"] == "idea" else "costs",
            "" if row["share"] is None else percent(float(row["share"])),
            "" if row["cost"] is None else duration(int(row["cost"])),
            f"finding-{at}",
        )
        for at, row in enumerate(findings[:3], start=1)
    ]
