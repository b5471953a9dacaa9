"""What the benchmarks share: options, bounds and their verdict, medians, tables, the machine."""

import argparse
import json
import os
import platform
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = [
    "CORE",
    "Bound",
    "Report",
    "bootstrap",
    "fresh",
    "machine",
    "options",
    "quiet_enough",
    "table",
    "verdict",
]

CORE = 0.5
"""The share of a core that a process must have had for its wall times to mean anything."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Bound:
    """One promise: a measured value and the limit that it must keep.

    Attributes:
        text: What is promised.
        value: What was measured.
        limit: The highest allowed value, or the lowest with ``at_least``.
        unit: Unit of both, printed behind them.
        at_least: The limit is a lower one.
    """

    text: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; NaN keeps none."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign, state = "≥" if self.at_least else "≤", "holds" if self.holds else "DOES NOT HOLD"
        return (
            f"{state}: {self.text}: {self.value:.4g} {sign} {self.limit:.4g} {self.unit}".rstrip()
        )


@dataclass
class Report:
    """Everything that one benchmark has to say.

    Attributes:
        name: The benchmark.
        columns: Headings of the table; the first column holds names.
        rows: The table.
        bounds: What must hold.
        control: What the A/A control gave, in words.
        quiet: Whether the control stayed in its band.
        facts: Further findings, a sentence each.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    bounds: Sequence[Bound]
    control: str
    quiet: bool
    facts: Sequence[str] = field(default_factory=list)


def options(about: str | argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line that every benchmark has, and what a parser of its own adds."""
    parser = argparse.ArgumentParser(description=about) if isinstance(about, str) else about
    parser.add_argument("--quick", action="store_true", help="see that it runs, judge nothing")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables of docs/internals/performance.md"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    return parser.parse_args()


def quiet_enough(measure: Callable[[], T], is_quiet: Callable[[T], bool], tries: int) -> T:
    """Measure again while the controls say that the machine was too noisy; return the last try."""
    for attempt in range(1, tries + 1):
        found = measure()
        if is_quiet(found):
            break
        again = "measuring again" if attempt < tries else "giving up"
        print(f"machine too noisy in try {attempt} of {tries}: {again}", file=sys.stderr)
    return found


def verdict(report: Report, chosen: argparse.Namespace) -> int:
    """Print the report as it was asked for, its summary last; return the exit status."""
    broken = [bound for bound in report.bounds if not bound.holds]
    if chosen.json:
        about = {"machine": machine(), "command": _command(), **asdict(report)}
        chosen.json.write_text(json.dumps(about, indent=1) + "\n")
    print("\n".join(_markdown(report) if chosen.markdown else _plain(report)))
    if chosen.quick:
        state = "it runs; --quick is too short to judge"
    elif not report.quiet:
        state = "the machine was too noisy to judge"
    elif not report.bounds:
        state = "measured; it has no bound to judge"
    elif broken:
        state = f"{len(broken)} of {len(report.bounds)} bounds do not hold"
    else:
        state = f"all {len(report.bounds)} bounds hold"
    # The summary does not belong on a page.
    print(f"{report.name}: {state}", file=sys.stderr if chosen.markdown else sys.stdout)
    return 0 if chosen.quick or (report.quiet and not broken) else 1


def machine() -> str:
    """Describe the machine in a line: processor, cores, versions, load."""
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    versions = " ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "pytorch-lightning")
    )
    python = f"Python {platform.python_version()}"
    return f"{_processor()}, {os.cpu_count()} cores; {python}, {versions}; load average {load}"


def bootstrap(values: Sequence[float], rounds: int = 1000) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling with a fixed seed."""
    random = np.random.default_rng(0)
    data = np.asarray(values)
    medians = [np.median(random.choice(data, len(data))) for _ in range(rounds)]
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def fresh(function: F) -> F:
    """Copy a function so that the interpreter specialises it for one contender alone."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__)  # type: ignore[return-value]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lay a table out in Markdown, readable as plain text too; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = [value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(columns), line(rule), *(line(row) for row in cells)]


def _plain(report: Report) -> list[str]:
    lines = [f"{_command()}", machine(), "", *table(report.columns, report.rows), ""]
    lines += [*report.facts, f"A/A control: {report.control}", *map(str, report.bounds), ""]
    return lines


def _markdown(report: Report) -> list[str]:
    lines = ["```text", _command(), machine(), "```", "", *table(report.columns, report.rows), ""]
    lines += [f"- {fact}" for fact in [*report.facts, f"A/A control: {report.control}"]]
    return [*lines, *(f"- {bound}" for bound in report.bounds)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)


def _command() -> str:
    """Name the command that gives the same numbers: options of the output are left out."""
    quick = ["--quick"] if "--quick" in sys.argv else []
    return " ".join(["python", os.path.relpath(sys.argv[0]), *quick])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{statistics.mode(names) if names else platform.processor()} ({platform.machine()})"
