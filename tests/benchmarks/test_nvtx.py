"""The benchmark of NVTX ranges: each bound can break, and it runs with and without a compiler."""

import argparse
import importlib
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def ranges() -> Iterator[ModuleType]:
    """Import the benchmark as it is imported when it runs as a file."""
    names = ("_measure", "_contenders", "_timing", "_ranges", "ranges")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("ranges")
    for name in names:
        sys.modules.pop(name, None)


def costs(
    ranges: ModuleType, no_tool: float = 200.0, again: float = 200.0, **tool: float
) -> object:
    """Costs that keep every bound but for the changes, ``MOVING=601`` and so on."""
    under = {name: tool.get(name, 600.0) for name in ("OURS", "AGAIN", "MOVING", "INSIDE")}
    columns = {
        ranges.NO_TOOL: {ranges.OURS: no_tool, ranges.AGAIN: again},
        ranges.TOOL: {getattr(ranges, name): value for name, value in under.items()},
    }
    return ranges.Costs(columns, tool.get("core", 1.0))


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"no_tool": 201.0}, ["NvtxRecorder, no tool"]),
        ({"OURS": 601.0}, ["NvtxRecorder, a tool that does nothing"]),
        ({"MOVING": 601.0}, ["NvtxRecorder, another step each time, a tool that does nothing"]),
        ({"INSIDE": 601.0}, ["NvtxRecorder, inside an asyncio loop, a tool that does nothing"]),
    ],
)
def test_each_bound_of_a_range_can_break(
    ranges: ModuleType, change: dict[str, float], broken: list[str]
) -> None:
    bounds = ranges.bounds(costs(ranges, **change))
    assert [bound.text for bound in bounds if not bound.holds] == broken


@pytest.mark.parametrize(
    ("change", "quiet"),
    [({}, True), ({"again": 170.0}, False), ({"AGAIN": 670.0}, False), ({"core": 0.4}, False)],
)
def test_each_control_of_a_range_can_fail(
    ranges: ModuleType, change: dict[str, float], quiet: bool
) -> None:
    assert ranges.Costs.quiet.fget(costs(ranges, **change)) is quiet


def chosen() -> argparse.Namespace:
    return argparse.Namespace(quick=True, markdown=False, json=None)


@pytest.fixture
def _small(ranges: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent), prepend=":")


@pytest.mark.usefixtures("_small")
def test_it_runs_with_and_without_a_tool(
    ranges: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here to build the NVTX tool with")
    assert ranges.main(chosen()) == 0
    printed = capsys.readouterr().out
    assert "| no tool | a tool that does nothing |" in printed
    assert printed.count("NvtxRecorder again") == 1


@pytest.mark.usefixtures("_small")
def test_without_a_compiler_the_missing_column_is_named(
    ranges: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ranges.main(chosen()) == 0
    printed = capsys.readouterr()
    assert "NOT MEASURED: a tool that does nothing" in printed.out
    assert "NOT MEASURED" in printed.err
    assert printed.out.count("≤ 0.6 µs") == 0
