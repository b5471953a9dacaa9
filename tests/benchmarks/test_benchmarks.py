"""The benchmarks' verdicts: a bound that does not hold, and a noisy machine, end in an error."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def rooms() -> Iterator[dict[str, ModuleType]]:
    """Import the benchmarks as they import each other when they are run as files."""
    names = ("_measure", "_contenders", "_timing", "_switch", "spans", "loop")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def measure(rooms: dict[str, ModuleType]) -> ModuleType:
    return rooms["_measure"]


def chosen(**options: object) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": False, "markdown": False, "json": None, **options})


def report(measure: ModuleType, value: float, quiet: bool = True) -> object:
    bound = measure.Bound("a span", value, 1.0, "µs")
    return measure.Report("spans", ["name", "ns"], [["floor", 434]], [bound], "1.00", quiet)


@pytest.mark.parametrize(
    ("value", "at_least", "holds"),
    [(1.0, False, True), (1.01, False, False), (2.0, True, True), (0.9, True, False)],
)
def test_a_bound_holds_up_to_its_limit(
    measure: ModuleType, value: float, at_least: bool, holds: bool
) -> None:
    assert measure.Bound("a span", value, 1.0, "µs", at_least).holds is holds


@pytest.mark.parametrize("at_least", [False, True])
def test_a_bound_on_nothing_does_not_hold(measure: ModuleType, at_least: bool) -> None:
    bound = measure.Bound("a span", float("nan"), 1.0, "µs", at_least)
    assert not bound.holds
    assert str(bound).startswith("DOES NOT HOLD")


@pytest.mark.parametrize(
    ("value", "quiet", "options", "status", "says"),
    [
        (0.9, True, {}, 0, "all 1 bounds hold"),
        (1.1, True, {}, 1, "1 of 1 bounds do not hold"),
        (0.9, False, {}, 1, "too noisy"),
        (1.1, False, {"quick": True}, 0, "too short to judge"),
    ],
)
def test_the_exit_status_and_the_last_line_say_what_was_found(
    measure: ModuleType,
    capsys: pytest.CaptureFixture[str],
    value: float,
    quiet: bool,
    options: dict[str, object],
    status: int,
    says: str,
) -> None:
    assert measure.verdict(report(measure, value, quiet), chosen(**options)) == status
    assert says in capsys.readouterr().out.splitlines()[-1]


def test_without_a_bound_none_is_said_to_hold(
    measure: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    unjudged = replace(report(measure, 0.9), bounds=[])
    assert measure.verdict(unjudged, chosen()) == 0
    assert capsys.readouterr().out.endswith("measured; it has no bound to judge\n")


def test_markdown_is_a_page_and_json_is_everything(
    measure: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "spans.json"
    assert measure.verdict(report(measure, 1.1), chosen(markdown=True, json=file)) == 1
    printed = capsys.readouterr()
    assert "| floor | 434 |" in printed.out
    assert "do not hold" not in printed.out
    assert printed.err.endswith("spans: 1 of 1 bounds do not hold\n")
    found = json.loads(file.read_text())
    assert found["rows"] == [["floor", 434]]
    assert found["bounds"][0]["limit"] == 1.0
    assert {"machine", "command", "control", "quiet"} <= found.keys()


def test_a_noisy_machine_is_measured_again_until_the_tries_are_used_up(
    measure: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter([1, 2, 3, 4])
    assert measure.quiet_enough(lambda: next(results), lambda one: one == 2, 3) == 2
    assert measure.quiet_enough(lambda: next(results), lambda one: False, 2) == 4
    assert "giving up" in capsys.readouterr().err


def test_the_bootstrap_interval_holds_the_median_and_shrinks(measure: ModuleType) -> None:
    low, high = measure.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0] * 3)
    assert low <= 3.0 <= high
    narrow = measure.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0] * 300)
    assert narrow[1] - narrow[0] < high - low


def test_interleaved_gives_medians_less_the_empty_control(rooms: dict[str, ModuleType]) -> None:
    contender = rooms["_contenders"].Contender("ours", lambda name: None)
    timed = rooms["_timing"].Timed(contender)
    times = {"ours": iter([9.0, 5.0, 7.0]), "": iter([2.0, 3.0, 1.0])}
    found = rooms["_timing"].interleaved([timed], lambda one: [next(times[one.name])], 3)
    assert found == {"ours": 5.0}


def span_costs(rooms: dict[str, ModuleType], **changes: float) -> object:
    """Costs that keep every bound of spans.py but for the changes, ``warm_OURS=1001`` and so on."""
    names = {
        name: getattr(rooms["_contenders"], name) for name in ("OFF", "OURS", "VERL", "SIMPLE")
    }
    names |= {name: getattr(rooms["_contenders"], name) for name in ("FLOOR", "AGAIN")}
    good = {"OFF": 150.0, "OURS": 1000.0, "VERL": 2000.0, "SIMPLE": 1000.0}
    good |= {"FLOOR": 400.0, "AGAIN": 400.0}
    columns = {
        column: {names[key]: changes.get(f"{column}_{key}", good[key]) for key in names}
        for column in ("warm", "cold")
    }
    return rooms["spans"].Costs(columns, core=changes.get("core", 1.0))


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"warm_OFF": 151.0}, ["not recording, warm"]),
        ({"warm_OURS": 1001.0}, ["recording, async-safe, warm"]),
        ({"cold_FLOOR": 399.0}, ["recording, cold, by the floor"]),
        ({"cold_VERL": 1999.0}, ["verl's formula, cold, by recording"]),
        ({"cold_SIMPLE": 999.0}, ["recording, cold, by SimpleProfiler"]),
    ],
)
def test_each_bound_of_a_span_can_break(
    rooms: dict[str, ModuleType], change: dict[str, float], broken: list[str]
) -> None:
    bounds = rooms["spans"].bounds(span_costs(rooms, **change))
    assert [bound.text for bound in bounds if not bound.holds] == broken


@pytest.mark.parametrize(
    ("change", "quiet"),
    [
        ({}, True),
        ({"cold_AGAIN": 450.0}, False),
        ({"warm_AGAIN": 350.0}, False),
        ({"core": 0.4}, False),
    ],
)
def test_each_control_of_a_span_can_fail(
    rooms: dict[str, ModuleType], change: dict[str, float], quiet: bool
) -> None:
    assert rooms["spans"].Costs.quiet.fget(span_costs(rooms, **change)) is quiet


@pytest.mark.parametrize(
    ("ours", "simple", "broken"), [(120.0, 121.0, 0), (121.0, 122.0, 1), (90.0, 80.0, 1)]
)
def test_each_bound_of_a_step_can_break(
    rooms: dict[str, ModuleType], ours: float, simple: float, broken: int
) -> None:
    loop, switch = rooms["loop"], rooms["_switch"]
    one = loop.Difference(0.0, 0.0, 0.0, us=ours, cpu_us=ours, after_us=ours)
    by_name = {
        switch.OURS: one,
        switch.SIMPLE: replace(one, us=simple),
        switch.AGAIN: replace(one, us=0.0),
    }
    costs = loop.Costs(7.0, by_name, core=1.0)
    assert costs.quiet
    assert sum(not bound.holds for bound in loop.bounds(costs)) == broken
    noisy = {**by_name, switch.AGAIN: replace(one, us=-16.0)}
    assert not loop.Costs(7.0, noisy, core=1.0).quiet


def test_the_first_step_of_a_turn_does_not_count(rooms: dict[str, ModuleType]) -> None:
    loop = rooms["loop"]
    steps = [9_000, 7, 9_000, 9_000, *[2] * (loop.STEPS_PER_TURN - 4)] * 3
    assert loop._per_step(steps, loop._LATER) == [2.0] * 3
    assert loop._per_step(steps, loop._AFTER) == [7.0] * 3
