"""One name, one number: every screen that names a figure of a run shows the same figure."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.cli.serve.live_page import page
from lightning_rlprof.integrations.end_of_run import print_summary
from lightning_rlprof.loaders.live_run import LiveRun
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import render_report, report_tables
from lightning_rlprof.report.live_view import gauges, live_view
from lightning_rlprof.report.summary import summary
from lightning_rlprof.report.terminal import duration, percent
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import figure, rows_of
from tests.builders.browser import Page
from tests.builders.runs import MAIN, Row, header, write_rank

MS = 1_000_000
Figures = dict[tuple[str, str], float]
"""Figures by (row, name): ``("actor_update", "mean")`` in ns, shares of 1."""

SCREENS: dict[str, Callable[[Path, Spans], Figures]] = {}


def screen(read: Callable[[Path, Spans], Figures]) -> Callable[[Path, Spans], Figures]:
    SCREENS[read.__name__] = read
    return read


@screen
def table_of_stages(path: Path, spans: Spans) -> Figures:
    """`rlprof show RUN stages`."""
    names = ("share", "mean", "p50")
    return {(row["stage"], name): row[name] for row in rows_of(stages(spans)) for name in names}


@screen
def first_screen(path: Path, spans: Spans) -> Figures:
    """What `rlprof summary`, the end of fit, the page and a notebook draw."""
    found = summary(spans)
    figures: Figures = {(part.name, "mean"): part.mean_ns for part in found.parts}
    figures |= {(part.name, "share"): part.share for part in found.parts}
    figures["step", "mean"], figures["step", "p50"] = found.mean_ns or 0, found.median_ns or 0
    return figures | {("run", "tokens/s"): found.tokens_per_s or 0}


@screen
def report(path: Path, spans: Spans) -> Figures:
    source = render_report(spans, report_tables(spans))
    (_, data) = re.findall(r'<script type="application/json" id="(data)">(.*?)</script>', source)[0]
    steps = json.loads(data)["steps"]
    some = np.array(steps["included"], bool)
    figures: Figures = {("step", "mean"): float(np.mean(np.array(steps["wall"])[some]) * 1e3)}
    figures["step", "p50"] = float(np.median(np.array(steps["wall"])[some]) * 1e3)
    for part in steps["parts"]:
        own = np.array(part["us"])[some] * 1e3
        figures[part["name"], "mean"] = float(own.mean())
        figures[part["name"], "p50"] = float(np.median(own))
        figures[part["name"], "share"] = float(own.mean()) / figures["step", "mean"]
    tokens, trained = np.array(steps["tokens"])[some], np.array(steps["trained"])[some]
    figures["run", "tokens/s"] = float(tokens.sum() / trained.sum() * 1e6)
    return figures


@screen
def compared_with_itself(path: Path, spans: Spans) -> Figures:
    return {(row["stage"], "mean"): row["A"] for row in rows_of(compare(spans, spans))}


@screen
def time_ledger(path: Path, spans: Spans) -> Figures:
    """Its untraced time inside steps, by rank and step."""
    steps = len(spans.rows(kind="step"))
    return {
        (row["category"], "mean"): row["in steps"] / steps
        for row in rows_of(ledger(spans))
        if row["category"] == "untraced"
    }


def live(path: Path) -> LiveRun:
    run = LiveRun(path)
    run.refresh()
    return run


@screen
def watch(path: Path, spans: Spans) -> Figures:
    view = live_view(live(path))
    names = ("share", "mean", "p50")
    figures = {(row["stage"], name): row[name] for row in rows_of(view.stages) for name in names}
    assert view.found is not None
    figures["step", "mean"], figures["step", "p50"] = view.found.mean_ns, view.found.median_ns
    return figures | {("run", "tokens/s"): view.found.tokens_per_s}


@screen
def metrics(path: Path, spans: Spans) -> Figures:
    run = live(path)
    found: dict[str, list[float]] = {}
    for gauge in gauges(run, live_view(run)):
        if gauge.name == "rlprof_stage_duration_seconds":
            for sample in gauge.samples:
                found.setdefault(sample.labels["stage"], []).append(sample.value * 1e9)
    return {(stage, "mean"): sum(own) / len(run.ranks) for stage, own in found.items()}


def random_run(path: Path, seed: int, *, meets: bool) -> Spans:
    """Write a run of two ranks whose stages are called several times a step, beside other work.

    Data is fetched outside any stage. If they meet, ranks wait for each other in the update.
    """
    draw = random.Random(seed)
    ranks: tuple[list[Row], list[Row]] = ([], [])
    now = MS
    for step in range(1, draw.randint(6, 15)):
        calls, ends = draw.randint(2, 5), []
        came = []
        for rows in ranks:
            at = now
            for name, kind in (("data_fetch", "region"), ("actor_generate", "stage")):
                ns = draw.randint(2 * MS, 9 * MS)
                counters = {"tokens": draw.randint(100, 900)} if kind == "stage" else None
                rows.append(Row(name, kind, step, at, at + ns, MAIN, counters=counters))
                at += ns + draw.randint(0, MS)
            for call in range(calls):
                ns = draw.randint(MS, 4 * MS)
                if call < calls - 1:
                    rows.append(Row("actor_update", "stage", step, at, at + ns))
                    at += ns
            came.append((at, at + ns))
        last = max(end for _, end in came)
        for rows, (start, arrived) in zip(ranks, came, strict=True):
            end = last if meets else arrived
            rows.append(Row("actor_update", "stage", step, start, end))
            if meets:
                rows.append(Row("all_reduce", "region", step, arrived, last + 1000))
            ends.append(end + MS)
        last = max(ends)
        for rows in ranks:
            rows.append(Row("step", "step", step, now, last))
        now = last
    for rank, rows in enumerate(ranks):
        write_rank(path, header(rank, 2), rows)
    return load(path)


@pytest.fixture(params=[(seed, meets) for seed in range(4) for meets in (False, True)], ids=str)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Spans]:
    seed, meets = request.param
    path = tmp_path / "run"
    return path, random_run(path, seed, meets=meets)


@pytest.mark.parametrize("name", SCREENS)
def test_the_same_name_has_the_same_number_on_every_screen(
    name: str, run: tuple[Path, Spans]
) -> None:
    expected = table_of_stages(*run) | first_screen(*run)
    shown = SCREENS[name](*run)
    assert shown
    assert {key[0] for key in shown} <= {key[0] for key in expected}
    for key, number in shown.items():
        near = {"share": 1e-3, "tokens/s": 1e-3 * expected[key]}.get(key[1], 1_000)
        assert number == pytest.approx(expected[key], abs=near), key


def test_the_texts_draw_these_figures(
    run: tuple[Path, Spans],
    rlprof: Callable[..., tuple[int, str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, spans = run
    found = summary(spans)
    assert found.mean_ns is not None
    assert found.median_ns is not None
    print_summary(path, "finished")
    at_the_end = capsys.readouterr().err
    terminal = rlprof("summary", path)[1]
    report_page = Page(render_report(spans, report_tables(spans))).text()
    served = " ".join(Page(page(path, live_view(live(path)))).text().split())
    notebook = Page(Run.of(spans)._repr_html_()).text()
    for text in (at_the_end, terminal, notebook):
        assert f"median {duration(found.median_ns)}, mean {duration(found.mean_ns)}" in text
    for text in (report_page, served):
        number, _, unit = duration(found.median_ns).rpartition(" ")
        assert f"{number} {unit}" in " ".join(text.split())
        assert f"mean {duration(found.mean_ns)}" in text
        assert f"Tokens/s, all ranks (actor_generate): {figure(found.tokens_per_s)}" in text
    for part in [each for each in found.parts if each.share >= 0.01]:
        assert f"{percent(part.share)} {duration(part.mean_ns)}" in served, part.name
    for part in found.parts[:3]:
        for text in (at_the_end, terminal, report_page, notebook):
            assert duration(part.mean_ns) in text, part.name
