"""The benchmark of reading: its traces, its bounds and controls, and a run at a small size."""

import gzip
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lightning_rlprof import load
from tests.places import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = (
    "_measure",
    "_peers",
    "_read_tile",
    "_read_traces",
    "_read_spans",
    "_read_parse",
    "_read_columns",
    "_read_asked",
    "_read_tables",
    "_read_ranks",
    "read",
)


@pytest.fixture(scope="module")
def rooms() -> Iterator[dict[str, ModuleType]]:
    """Import the benchmark as it imports its neighbours when it is run as a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def trace(rooms: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("trace") / "rank-0.json.gz"
    rooms["_read_traces"].tiled_trace(path, 1.0)
    return path


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_a_trace_is_the_same_each_time_and_as_large_as_was_asked_for(
    rooms: dict[str, ModuleType], trace: Path, tmp_path: Path
) -> None:
    size = rooms["_read_traces"].tiled_trace(tmp_path / "plain.json", 1.0)
    assert 1.0e6 <= size < 1.5e6
    assert (tmp_path / "plain.json").read_bytes() == gzip.decompress(trace.read_bytes())
    rooms["_read_traces"].tiled_trace(tmp_path / "other.json", 1.0, seed=1)
    assert (tmp_path / "other.json").read_bytes() != (tmp_path / "plain.json").read_bytes()


def test_every_kernel_of_a_trace_has_one_launch_and_two_ends_of_a_flow(trace: Path) -> None:
    events = events_of(trace)
    by_kind: dict[str, list[int]] = {"kernel": [], "cuda_runtime": [], "s": [], "f": []}
    for event in events:
        kind = event["ph"] if event["ph"] in "sf" else event.get("cat")
        if kind in by_kind and event["name"] not in ("cudaMemcpyAsync", "cudaDeviceSynchronize"):
            by_kind[kind].append(event["id"] if "id" in event else event["args"]["correlation"])
    kernels = Counter(by_kind["kernel"])
    assert len(kernels) > 500
    assert set(kernels.values()) == {1}
    assert all(Counter(numbers) == kernels for numbers in by_kind.values())


def test_calls_of_a_trace_nest_and_its_steps_follow_each_other(trace: Path) -> None:
    events = [event for event in events_of(trace) if event["ph"] == "X" and event["pid"] != 0]
    opened: list[tuple[float, str]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while opened and opened[-1][0] <= event["ts"]:
            opened.pop()
        if opened:
            assert event["ts"] + event["dur"] <= opened[-1][0], event
        opened.append((event["ts"] + event["dur"], event["name"]))
    names = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    assert names == [f"ProfilerStep#{number}" for number in range(len(names))]


def test_we_read_of_a_trace_what_is_in_it(trace: Path) -> None:
    spans, kinds = load(trace), Counter(event.get("cat") for event in events_of(trace))
    assert len(spans) == kinds["user_annotation"]
    kernels = spans.table("kernels")
    assert len(kernels.rows) == kinds["kernel"]
    assert set(kernels.column("stage")) == {
        "actor_generate",
        "actor_compute_log_prob",
        "actor_update",
    }
    assert {problem.text for problem in spans.warnings} == set()


def test_a_complete_table_has_every_stage_of_every_step_once(
    rooms: dict[str, ModuleType],
) -> None:
    spans = rooms["_read_spans"].complete_table(3, 4, 5)
    stages = spans.rows(kind="stage")
    keys = zip(spans.rank[stages], spans.step[stages], spans.name[stages], strict=True)
    assert len(set(keys)) == len(stages) == 3 * 4 * 5
    np.testing.assert_array_equal(spans.rank, np.sort(spans.rank))
    assert (spans.duration_ns > 0).all()


def runs_of(rooms: dict[str, ModuleType], **seconds: list[float]) -> Any:
    """A trace of 300 MB, and each round's seconds: ``orjson``, ``hta``, ``ours``, ``again``."""
    ways = {"ours": "rlprof", "again": "rlprof again (A/A)", "orjson": "gzip + orjson"}
    own = {"ours": [2.0, 2.0, 2.0], "again": [2.0, 2.0, 2.0], "orjson": [8.0, 9.0, 1.0]}
    own |= {"hta": [18.0, 18.0, 18.0]} | seconds
    make = rooms["_peers"].Run
    found = rooms["_read_parse"].Trace("a trace", [Path("a.json.gz")], 300.0)
    found.runs = {
        ways.get(way, "HTA:json"): [make(each, each, 1, 100.0, 60.0) for each in times]
        for way, times in own.items()
    }
    return found


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"ours": [2.1, 2.1, 2.1], "hta": [30.0] * 3, "orjson": [9.0] * 3}, ["JSON by core"]),
        ({"hta": [17.0, 17.0, 30.0]}, ["HTA's fastest"]),
        ({"orjson": [7.0, 7.0, 20.0]}, ["gzip + orjson"]),
    ],
)
def test_each_bound_of_parsing_can_break_and_is_about_medians_of_rounds(
    rooms: dict[str, ModuleType], change: dict[str, list[float]], broken: list[str]
) -> None:
    bounds = rooms["_read_parse"].bounds([runs_of(rooms, **change)])
    failed = [bound.text.removeprefix("a trace: ") for bound in bounds if not bound.holds]
    assert [any(text.startswith(each) for each in broken) for text in failed] == [True] * len(
        broken
    )


def test_without_peers_nothing_is_promised_of_them_and_real_traces_are_not_judged(
    rooms: dict[str, ModuleType],
) -> None:
    trace = runs_of(rooms)
    for way in ("HTA:json", "gzip + orjson"):
        del trace.runs[way]
    assert len(rooms["_read_parse"].bounds([trace])) == 2
    trace.judged = False
    assert rooms["_read_parse"].bounds([trace]) == []


def test_a_second_reading_that_takes_longer_is_a_noisy_machine(
    rooms: dict[str, ModuleType],
) -> None:
    assert rooms["_read_parse"].report([runs_of(rooms)], []).quiet
    assert not rooms["_read_parse"].report([runs_of(rooms, again=[2.6] * 3)], []).quiet


def test_a_round_in_which_a_slow_peer_sat_out_counts_for_nothing(
    rooms: dict[str, ModuleType],
) -> None:
    trace = runs_of(rooms)
    trace.runs["HTA:json"][1:] = [None, None]
    assert trace.ratio("HTA:json") == 9.0
    assert trace.typical("HTA:json") == 18.0


@pytest.mark.parametrize(("seconds", "broken"), [(0.1, 0), (0.11, 1)])
def test_each_table_may_take_its_time(
    rooms: dict[str, ModuleType], seconds: float, broken: int
) -> None:
    costs = rooms["_read_tables"].Costs((1, 1, 1), {"gaps": 0.1}, {"gaps": seconds})
    assert sum(not bound.holds for bound in rooms["_read_tables"].bounds(costs)) == broken


def test_a_table_that_abstains_is_no_result(
    rooms: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = rooms["_read_tables"]
    with pytest.raises(AssertionError, match="stages: no complete step was recorded"):
        tables.measure((1, 0, 3), 1)


def test_a_run_of_many_ranks_is_one_in_which_ranks_wait(
    rooms: dict[str, ModuleType], tmp_path: Path
) -> None:
    run = rooms["_read_ranks"].write_run(tmp_path, 3, 30)
    spans = load(run)
    assert (spans.ranks, len(spans), spans.warnings) == ((0, 1, 2), 3 * 30 * 7, ())
    assert "waiting in actor_update" in spans.stages().column("stage")


def test_no_real_trace_is_reported_and_nothing_is_left_beside_one(
    rooms: dict[str, ModuleType], trace: Path, tmp_path: Path
) -> None:
    assert rooms["_read_parse"].real(tmp_path / "none", tmp_path) is None
    found = rooms["_read_parse"].real(trace.parent, tmp_path)
    assert [path.parents[2] for path in found.paths] == [tmp_path]
    assert found.megabytes == pytest.approx(len(gzip.decompress(trace.read_bytes())) / 1e6)


@pytest.mark.deep
def test_it_runs_at_a_small_size(
    rooms: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = rooms["read"]
    monkeypatch.setattr("lightning_rlprof.analysis.catalog.ANALYSES", {"stages": None})
    monkeypatch.setattr(rooms["_read_asked"], "ANALYSES", {"stages": None})
    words = ["--quick", "--real", str(tmp_path / "none"), "--folder", str(tmp_path)]
    file = tmp_path / "found.json"

    assert read.main(read.parsed([*words, "--json", str(file)])) == 0

    printed = capsys.readouterr().out
    assert printed.count("it runs; --quick is too short to judge") == len(read.PARTS)
    assert "The peers are left out" in printed
    for part in read.PARTS:
        assert json.loads((tmp_path / f"found-{part}.json").read_text())["rows"]
