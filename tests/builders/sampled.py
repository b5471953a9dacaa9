"""Runs with background metrics that a test made up, as a rank writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import METRICS
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, header

S = 1_000_000_000
Metrics = Mapping[str, Sequence[float | None]]
"""Values of each metric, one per second from the first; None where there is none."""


def metric_lines(metrics: Metrics, device: int | None = None) -> list[tuple[object, ...]]:
    """Return the lines of a rank: rates of the second before, values of their time."""
    lines: list[tuple[object, ...]] = []
    for at in range(max(map(len, metrics.values()), default=0)):
        known = {
            name: values[at]
            for name, values in metrics.items()
            if at < len(values) and values[at] is not None
        }
        rates = {name: value for name, value in known.items() if METRICS[name].is_rate}
        values = {name: value for name, value in known.items() if name not in rates}
        lines.append(("metrics", at * S, (at + 1) * S, device, rates, values))
    return lines


def sampled_run(
    metrics: Sequence[tuple[int, int | None, Metrics]],
    rows: Sequence[Row] = (),
    *,
    ranks: int = 1,
    seconds: int = 100,
    counters: Mapping[str, int] | None = None,
) -> Spans:
    """Return a run of one step per second and rank, and metrics of (rank, device).

    Args:
        metrics: What was sampled on which rank and device.
        rows: Spans of rank 0 besides its steps, whose ids come after those of the steps.
        ranks: How many.
        seconds: How many steps.
        counters: Of each step.
    """
    with TemporaryDirectory() as folder:
        for rank in range(ranks):
            writer = TraceWriter(Path(folder), header(rank, ranks))
            steps = [
                Row("step", "step", at + 1, at * S, (at + 1) * S, counters=counters)
                for at in range(seconds)
            ]
            every = [*steps, *(rows if rank == 0 else ())]
            writer.write(
                [
                    ("span", *row[:6], at, row.parent, row.counters)
                    for at, row in enumerate(every, 1)
                ]
            )
            for whose, device, own in metrics:
                if whose == rank:
                    writer.write(metric_lines(own, device))
            writer.write([("end", 0, "finished")])
            writer.close()
        return load(Path(folder))
