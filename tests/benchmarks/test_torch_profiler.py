"""The verdict of benchmarks/torch_profiler.py: each bound and each control can break."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = ("_measure", "_contenders", "_timing", "spans", "torch_profiler")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """Import the benchmark as it is when it is run as a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("torch_profiler")
    for name in NAMES:
        sys.modules.pop(name, None)


def costs(benchmark: ModuleType, **changes: float) -> Any:
    """Costs that keep every bound but for the changes."""
    values = {"plain": 1.5, "again": 1.0, "torch": 32.0, "gzip": 5.0, "isal_size": 1.5, "core": 1.0}
    values |= changes
    return benchmark.Costs(
        steps={
            benchmark.NO_PROFILER: 1.0,
            benchmark.AGAIN: values["again"],
            benchmark.PLAIN: values["plain"],
        },
        parts={
            benchmark.WRITE: 3.0,
            benchmark.ISAL: 1.0,
            benchmark.GZIP: values["gzip"],
            benchmark.TORCH: values["torch"],
        },
        sizes={benchmark.ISAL: values["isal_size"], benchmark.GZIP: 1.0},
        core=values["core"],
    )


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"plain": 1.51}, ["loop with host activity"]),
        ({"torch": 31.9}, ["torch's own export, by plain and isal"]),
        ({"gzip": 4.9}, ["gzip by isal"]),
        ({"isal_size": 1.51}, ["isal's file by gzip's"]),
    ],
)
def test_each_bound_can_break(
    benchmark: ModuleType, change: dict[str, float], broken: list[str]
) -> None:
    bounds = benchmark.bounds(costs(benchmark, **change))
    assert [bound.text for bound in bounds if not bound.holds] == broken


@pytest.mark.parametrize(
    ("change", "quiet"), [({}, True), ({"again": 1.2}, False), ({"core": 0.4}, False)]
)
def test_each_control_can_fail(
    benchmark: ModuleType, change: dict[str, float], quiet: bool
) -> None:
    assert costs(benchmark, **change).quiet is quiet
