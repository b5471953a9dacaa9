"""The benchmark of planted faults: what counts as found, and that one fault is."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import planted

    return planted


def test_a_fault_that_is_not_in_the_first_three_is_missed(planted: ModuleType) -> None:
    faults = [each for each in planted.FAULTS if each.program == "plain"]
    control = next(each for each in faults if not each.name)
    found = {each: ["x", each.expected.split(",")[-1]] for each in faults} | {control: ["rollout"]}
    report = planted.report(found, [])
    assert report.quiet
    assert report.bounds[0].value == len(faults) - 1
    assert {row[2] for row in report.rows} == {"line 2", ""}
    report = planted.report({each: ["x"] for each in faults}, ["left out: y"])
    assert not report.quiet
    assert not report.bounds[0].holds
    assert {row[2] for row in report.rows} == {"**missed**", ""}


def test_twelve_kinds_are_planted_in_four_kinds_of_programs(planted: ModuleType) -> None:
    assert len({each.expected for each in planted.FAULTS if each.name}) >= 12
    assert len({each.program for each in planted.FAULTS}) == 4
    files = {path.stem for path in (FOLDER / "planted_programs").glob("*.py")}
    assert {each.program for each in planted.FAULTS} - {"demo"} == files


@pytest.mark.deep
def test_a_slow_reward_of_a_plain_loop_is_found(planted: ModuleType, tmp_path: Path) -> None:
    fault = planted.Fault("plain", "reward", "reward")
    assert "reward" in planted.first_three(fault, tmp_path)
