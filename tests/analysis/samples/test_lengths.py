"""Lengths are kept as a histogram, whatever they are given as, and shown by stage."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlprof.analysis.samples.sample_tables import lengths
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import count, stage
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.histograms import bin_of, bin_start
from lightning_rlprof.report.html.step_charts import StepCharts
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, loaded


def recorded(folder: Path, *given: Any) -> Spans:
    session = start_session(ProfilerConfig.build(profile_save_path=str(folder)))
    for number, values in enumerate(given, start=1):
        session.begin_step(number)
        with stage("actor_generate"):
            count(lengths=values)
        session.end_step()
    session.close("finished")
    return load(session.run)


@pytest.mark.parametrize(
    "values", [[3, 3, 900], (3, 3, 900), torch.tensor([3, 3, 900]), np.array([[3, 3], [900, 900]])]
)
def test_lists_and_tensors_of_any_shape_are_counted(values: Any, tmp_path: Path) -> None:
    spans = recorded(tmp_path, values)
    found = spans.histogram("lengths")
    assert dict(zip(found.bins.tolist(), found.counts.tolist(), strict=True)) == {
        bin_of(3): 2,
        bin_of(900): 2 if np.ndim(values) == 2 else 1,
    }
    assert spans.histogram("other").rows.size == 0


def test_a_step_takes_few_bytes_whatever_its_batch(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    batches = {n: random.integers(200, 2000, n) for n in (8, 4096)}
    runs = [recorded(tmp_path / str(n), *[batch] * 20) for n, batch in batches.items()]
    sizes = [sum(file.stat().st_size for file in each.path.iterdir()) for each in runs]
    assert (sizes[1] - sizes[0]) / 20 < 200


def test_what_is_no_length_is_left_out_and_nothing_raises(tmp_path: Path) -> None:
    wrong = [5, -1, None, "x", float("nan"), float("inf")]
    spans = recorded(tmp_path, wrong, object(), [], [[[7]]])
    found = spans.histogram("lengths")
    assert sorted(found.bins.tolist()) == [bin_of(5), bin_of(7)]


def rows(step: int, *values: int) -> list[Row]:
    counters: dict[str, float] = {}
    for value in values:
        name = f"lengths[{bin_of(value)}]"
        counters[name] = counters.get(name, 0) + 1
    start = 100 * step
    return [
        Row("actor_generate", "stage", step, start, start + 50, counters=counters),
        Row("step", "step", step, start, start + 100),
    ]


def test_quantiles_are_by_bins_and_the_last_bin_has_its_share() -> None:
    spans = loaded([*rows(1, 10, 10, 100), *rows(2, 10, 1000), *rows(3, 10, 10, 1000)])
    table = lengths(spans)
    (row,) = table.rows
    assert row[0] == "actor_generate"
    assert row[1:5] == (8, *(round(bin_start(bin_of(each))) for each in (10, 1000, 1000)))
    assert row[5] == 0.25
    drawn = StepCharts(spans).lengths()
    assert drawn is not None
    assert sum(drawn["counts"]) == 8
    assert drawn["p50"] == [bin_of(10)] * 3
    assert drawn["p95"] == [bin_of(100), bin_of(1000), bin_of(1000)]


def test_without_lengths_it_says_how_to_get_them() -> None:
    spans = loaded([Row("step", "step", 1, 0, 10)])
    assert "count(lengths=[...])" in str(lengths(spans).abstained)
    assert StepCharts(spans).lengths() is None


def test_bins_are_no_columns_of_spans(tmp_path: Path) -> None:
    spans = recorded(tmp_path, [1, 2, 3])
    assert not [each.name for each in spans.table("spans").columns if "lengths" in each.name]
