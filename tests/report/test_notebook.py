"""Charts of `run.plot`: what is drawn, in which color, with which values."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html import step_charts
from lightning_rlprof.report.html.step_charts import LATE, StepCharts, paints
from lightning_rlprof.report.notebook import Plots
from lightning_rlprof.tables.spans import Spans
from tests.builders.ingest_traces import write_trace
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play

HOSTILE = r"$\frac{$ _<b>" + "x" * 90


@pytest.fixture(scope="module")
def spans() -> Spans:
    return play(Script(ranks=4, steps=60, slow={2: 0.4}, when=(30, 60)), 3).spans


@pytest.fixture(autouse=True)
def no_side_effects() -> Iterator[None]:
    """No chart changes a setting, and no test leaves a figure."""
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before
    plt.close("all")


def on_figure() -> Any:
    """Return axes that pyplot does not know."""
    return Figure().subplots()


def legend_of(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def patches_of(ax: Any) -> list[StepPatch]:
    return [patch for patch in ax.patches if isinstance(patch, StepPatch)]


def test_steps_are_stacked_parts_in_the_colors_of_the_report(spans: Spans) -> None:
    ax, series = Plots(spans).steps(ax=on_figure()), StepCharts(spans)
    parts = series.drawn
    colors = paints({part.stage for part in parts} - {"untraced"})
    assert len(patches_of(ax)) == len(parts)
    assert legend_of(ax) == [part.name for part in reversed(parts)]
    below = np.zeros(60)
    for part, patch in zip(parts, patches_of(ax), strict=True):
        top, edges, base = patch.get_data()
        assert np.allclose(np.asarray(top) - below, part.ns / 1e9, atol=1e-6)
        assert np.allclose(np.asarray(base), below)
        assert (edges[0], edges[-1]) == (0.5, 60.5)
        if part.kind != "untraced":
            assert to_hex(patch.get_facecolor()) == colors[part.stage].fill
        assert bool(patch.get_hatch()) == (part.kind != "stage")
        below = np.asarray(top)
    assert np.allclose(below, series.wall_ns / 1e9, atol=1e-5)
    assert [text.get_text() for text in ax.texts] == ["1.36x"]
    assert "waiting in actor_update 11%" in ax.get_label()


def test_steps_that_are_not_recorded_are_a_gap_and_excluded_ones_pale() -> None:
    ms, rows = 10**6, []
    for n in (1, 2, 3, 4, 8, 9):
        counters = {"capture": 1} if n == 8 else None
        start = 100 * n * ms
        rows.append(Row("step", "step", n, start, start + 90 * ms, counters=counters))
        rows.append(Row("a", "stage", n, start, start + 80 * ms))
    first, _, pale = patches_of(Plots(loaded(rows)).steps(ax=on_figure()))
    top, edges, _ = first.get_data()
    assert list(edges) == [0.5, 1.5, 2.5, 3.5, 4.5, 7.5, 8.5, 9.5]
    assert np.isnan(top).tolist() == [False, False, False, False, True, False, False]
    hidden = np.isfinite(pale.get_data().values)
    assert hidden.tolist() == [False, False, False, False, False, True, False]
    assert to_hex(pale.get_facecolor()) == "#ffffff"


def test_many_steps_share_bars(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_charts, "_MAX_COLUMNS", 6)
    ax = Plots(spans).steps(ax=on_figure())
    assert len(patches_of(ax)[0].get_data().values) == 6
    heat = Plots(spans).ranks(ax=on_figure())
    assert heat.collections[0].get_array().shape == (4, 6)


def test_ranks_are_a_heat_map_of_late_arrivals_or_another_value(spans: Spans) -> None:
    ax, series = Plots(spans).ranks(ax=on_figure()), StepCharts(spans)
    image = ax.collections[0]
    assert np.allclose(image.get_array(), series.by_rank[LATE] / 1e9)
    late = series.by_rank[LATE]
    assert image.get_clim() == pytest.approx((0, np.percentile(late[late > 0], 97) / 1e9))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "2", "3"]
    assert "rank 2 has the largest median" in ax.get_label()
    other = Plots(spans).ranks("actor_generate", ax=on_figure())
    generated = series.by_rank["actor_generate"] / 1e9
    assert np.allclose(other.collections[0].get_array(), generated)
    with pytest.raises(RlprofError, match="unknown value 'late'") as caught:
        Plots(spans).ranks("late", ax=on_figure())
    assert "'arrives late by', 'waits', 'actor_generate'" in caught.value.hint


def test_compare_draws_ratio_interval_and_verdict(spans: Spans) -> None:
    base, slower = (
        play(Script(ranks=2, steps=40, slow=slow), 3).spans for slow in ({}, {0: 0.5, 1: 0.5})
    )
    ax = Plots(base).compare(slower, ax=on_figure())
    texts = [label.get_text() for label in ax.get_yticklabels()]
    assert any(text.startswith("step: ") for text in texts)
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    bars = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert len(dots) == len(bars) == len(texts)
    at = next(at for at, text in enumerate(texts) if text.startswith("actor_generate: "))
    assert dots[at].get_xdata()[0] == pytest.approx(1.5, rel=0.1)
    assert dots[at].get_color() == paints(["actor_generate"])["actor_generate"].fill
    assert ax.lines[-1].get_xdata() == [1.0, 1.0]
    few = Plots(base).compare(play(Script(ranks=2, steps=1), 3).spans, ax=on_figure())
    assert few.get_label().startswith("No data: Run B has 1 complete steps")


def test_device_time_of_a_trace_adds_up(tmp_path: Path) -> None:
    ax = Plots(load(write_trace(tmp_path / "rank0.pt.trace.json"))).device(ax=on_figure())
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows[-1] == "total"
    widths = [[bar.get_width() for bar in bars] for bars in ax.containers]
    assert np.allclose(np.sum(widths, axis=0), 1)
    assert {"compute", "idle"} <= {*legend_of(ax)}
    assert len(ax.containers) == len(legend_of(ax))


@pytest.mark.parametrize("name", ["steps", "ranks", "device"])
def test_a_chart_without_data_says_why(name: str) -> None:
    ax = getattr(Plots(loaded([])), name)(ax=on_figure())
    assert ax.get_label().startswith("No data: ")
    assert ax.texts[0].get_text() == ax.get_label()
    assert not ax.axison


def test_names_of_a_run_are_text_and_not_formulas() -> None:
    rows = [Row("step", "step", n, 1000000 * n, 1000000 * n + 900000) for n in range(1, 9)]
    rows += [Row(HOSTILE, "stage", n, 1000000 * n, 1000000 * n + 800000) for n in range(1, 9)]
    rows += [
        Row("_a\x1b", "stage", n, 1000000 * n + 810000, 1000000 * n + 850000) for n in range(1, 9)
    ]
    plots = Plots(loaded(rows, rows))
    for chart in (plots.steps, plots.ranks):
        figure = Figure()
        chart(ax=figure.subplots())
        FigureCanvasAgg(figure).draw()
    assert "\\x1b" in plots.steps(ax=on_figure()).get_label()
    assert max(map(len, legend_of(plots.steps(ax=on_figure())))) == 40


def test_without_axes_a_figure_is_made_and_with_axes_none(spans: Spans) -> None:
    Plots(spans).steps(ax=on_figure())
    assert plt.get_fignums() == []
    ax = Plots(spans).steps()
    assert plt.get_fignums() == [ax.figure.number]
    assert legend_of(ax) == legend_of(Plots(spans).steps(ax=on_figure()))


def test_without_matplotlib_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RlprofError, match=r'pip install "lightning-rlprof\[plot\]"'):
        Plots(loaded([])).steps()


def test_reading_a_run_does_not_import_matplotlib() -> None:
    code = "import sys, lightning_rlprof.run; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
