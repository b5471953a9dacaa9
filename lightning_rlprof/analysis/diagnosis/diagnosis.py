"""What is wrong with a run: its problems by price with their remedies, ideas, and what is unknown.

`diagnose` answers once per run. The terminal, the end of a training, the report, JSON and metrics
ask it, so the first problem is the same everywhere.
"""

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from lightning_rlprof.analysis.findings.data_quality import data_quality
from lightning_rlprof.analysis.findings.finding import rows_of
from lightning_rlprof.analysis.findings.findings import findings
from lightning_rlprof.tables.spans import Spans

Kind = Literal["ended", "distorts", "problem", "idea"]


@dataclass(frozen=True)
class Price:
    """What a problem costs, or what a change would save; always of the job's time.

    Attributes:
        kind: ``lost``, time that the job spent on it; ``saves``, what a replay of recorded steps
            predicts.
        share: Of the job's time.
        ns: The same in nanoseconds, ranks summed.
        low: Lower bound of the share, of what is predicted or taken from captured steps.
        high: Upper bound of the share.
    """

    kind: Literal["lost", "saves"]
    share: float
    ns: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Finding:
    """One problem or idea that this run shows.

    Attributes:
        id: Of the problem.
        title: What is wrong, without values.
        heading: The title with the values of this run, for one line.
        kind: ``ended`` (it ended the run), ``distorts`` (it makes other times untrue), ``problem``
            or ``idea``.
        price: What it costs; None if that is no time.
        act: What to do about it first, in one sentence.
        look: The command that shows more.
    """

    id: str
    title: str
    heading: str
    kind: Kind
    price: Price | None
    act: str
    look: str


@dataclass(frozen=True)
class Check:
    """One check of the recording: ``state`` is ``ok``, ``warn`` or ``not checked``."""

    name: str
    state: str
    detail: str


@dataclass(frozen=True)
class Quality:
    """Whether the recording is complete, in one line, with every check."""

    line: str
    checks: tuple[Check, ...]

    @property
    def doubts(self) -> tuple[Check, ...]:
        """The checks that warn."""
        return tuple(each for each in self.checks if each.state == "warn")


@dataclass(frozen=True)
class Undecided:
    """A problem that could not be decided, why, and what to record; ``how`` may be empty."""

    id: str
    why: str
    how: str


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `diagnose`.

    Attributes:
        quality: Whether the recording is complete.
        problems: What ended the run, what makes other times untrue, then problems by price.
        ideas: What might be saved by another design or other hardware.
        undecided: What could not be decided.
        abstained: Why there is no answer at all; None if there is one.
    """

    quality: Quality
    problems: tuple[Finding, ...]
    ideas: tuple[Finding, ...]
    undecided: tuple[Undecided, ...]
    abstained: str | None = None


_LAST: "WeakKeyDictionary[Spans, Diagnosis]" = WeakKeyDictionary()


def diagnose(spans: Spans, framework: str | None = None) -> Diagnosis:
    """Return the problems of a run; the answer is kept as long as the run is.

    Args:
        spans: The run.
        framework: Show the settings of this framework, not of those that the run names.
    """
    found = _LAST.get(spans)
    if found is None:
        found = _LAST[spans] = _diagnose(spans)
    return found


def _diagnose(spans: Spans) -> Diagnosis:
    checks = tuple(Check(*map(str, row)) for row in data_quality(spans).rows)
    doubts = [each.detail for each in checks if each.state == "warn"]
    quality = Quality(f"Recording: {doubts[0] if doubts else 'complete'}", checks)
    table = findings(spans)
    made = [
        Finding(
            "-".join(row["finding"].lower().split()),
            row["finding"],
            row["finding"],
            "idea" if row["kind"] == "idea" else "problem",
            None if row["cost"] is None else Price("lost", row["share"] or 0.0, row["cost"]),
            row["try"],
            row["reproduce"],
        )
        for row in rows_of(table)
    ]
    return Diagnosis(
        quality,
        tuple(each for each in made if each.kind != "idea"),
        tuple(each for each in made if each.kind == "idea"),
        (Undecided("", table.note, ""),) * bool(table.note),
        table.abstained,
    )
