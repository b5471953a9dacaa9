"""AReaL's sessions, in the lines that AReaL 1.0.4's own tracer wrote here."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_rlprof.analysis.samples.long_tail import long_tail
from lightning_rlprof.analysis.samples.sample_tables import samples
from lightning_rlprof.errors import TraceError
from lightning_rlprof.run import Run, load
from tests.loaders.framework_records import ZERO, session

MS = 1_000_000


def write(path: Path, records: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def fates(run: Run) -> dict[object, object]:
    table = samples(run)
    return dict(zip(table.column("fate"), table.column("samples"), strict=True))


def test_a_session_is_a_sample_and_its_task_the_group(tmp_path: Path) -> None:
    one = {"generate": [(0.0, 1.0), (1.5, 2.0)], "toolcall": [(1.0, 1.5)], "reward": [(2.0, 2.25)]}
    file = write(
        tmp_path / "sessions-r0.jsonl",
        [
            session(7, 0, 0, one),
            session(7, 1, 0, {"generate": [(0, 3)]}, "rejected"),
            session(8, 2, 0, {"generate": [(0, None)]}, "failed"),
            session(8, 3, 0, {"generate": [(0, 0.5)]}, "dropped"),
            session(9, 4, 0, {"generate": [(0, 0.5)]}, "pending"),
        ],
    )
    run = load(file)
    assert run.headers[0].role == "rollout"
    names = run.table("sample_names").rows
    assert [row[2:] for row in names] == [
        (f"rank 0, task {task}", f"rank 0, task {task}", 0) for task in (7, 7, 8, 8, 9)
    ]
    own = [span for span in run if (span.counters or {}).get("sample") == names[0][1]]
    assert [(span.name, span.kind, span.start_ns // MS, span.end_ns // MS) for span in own] == [
        ("actor_generate", "region", 0, 1000),
        ("tool_call", "region", 1000, 1500),
        ("actor_generate", "region", 1500, 2000),
        ("compute_reward", "region", 2000, 2250),
        ("sample unknown", "mark", 2500, 2500),
    ]
    others = [
        (span.name, span.end_ns // MS) for span in run if span not in own and span.kind != "step"
    ]
    assert sorted(others) == [
        ("actor_generate", 250),  # until its session failed
        ("actor_generate", 500),
        ("actor_generate", 500),
        ("actor_generate", 3000),
        ("actor_generate", 3000),  # the stage
        ("sample aborted", 250),
        ("sample aborted", 750),
        ("sample filtered", 3250),
    ]
    # What the update does with an accepted one is not known; a failed one ends with its session.
    assert fates(run) == {"generated": 5, "aborted": 2, "filtered": 1, "unknown": 2, "trained": 0}
    assert run.unix_ns == pytest.approx(ZERO * 1e9, abs=256)
    assert any("accepted sessions have an unknown fate" in note.text for note in run.notes)
    assert not run.warnings


def test_a_sample_has_one_number_in_all_files(tmp_path: Path) -> None:
    first = session(1, 0, 0, {"generate": [(0, 1)]})
    again = session(1, 0, 9, {"generate": [(9, 10)]})  # of a process that started again
    other = session(1, 0, 0, {"generate": [(0, 1)]}, rank=1)
    numbers = [
        load(write(tmp_path / f"{at}.jsonl", [each])).table("sample_names").rows[0][1]
        for at, each in enumerate([first, first, again, other])
    ]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
    assert all(0 <= int(each or 0) < 2**52 for each in numbers)


def test_a_step_of_sessions_begins_when_none_is_open_on_any_rank(tmp_path: Path) -> None:
    for rank, ends in ((0, (4.0, 14.0)), (1, (2.0, 19.0))):
        records = [
            session(step, at, 10 * step, {"generate": [(10 * step, end - at / 10)]}, rank=rank)
            for step, end in enumerate(ends)
            for at in range(4)
        ]
        write(tmp_path / f"sessions-r{rank}.jsonl", records)
    run = load(tmp_path)
    assert run.ranks == (0, 1)
    assert [
        (span.rank, span.step, span.start_ns // 10**9, round(span.end_ns / 1e9, 2))
        for span in run
        if span.kind == "step"
    ] == [(0, 1, 0, 10.0), (0, 2, 10, 19.25), (1, 1, 0, 10.0), (1, 2, 10, 19.25)]
    assert {span.step for span in run if span.start_ns >= 10**10} == {2}
    assert [
        (span.rank, span.step, span.start_ns // 10**9, span.end_ns // 10**9)
        for span in run
        if span.kind == "stage"
    ] == [(0, 1, 0, 4), (0, 2, 10, 14), (1, 1, 0, 2), (1, 2, 10, 19)]
    tail = long_tail(run).rows
    # Of eight responses in each step, the fourth ends at 2.0 and 14.0 s, the last at 4.0 and 19.0.
    assert [row[1] for row in tail if row[0] == 0.5] == [pytest.approx(3.5e9)]
    assert [row[5] for row in tail if row[0] == 0.5] == [8]


def test_evaluations_are_of_their_role(tmp_path: Path) -> None:
    records = [
        session(0, 0, 0, {"generate": [(0, 1)]}, role="eval-rollout"),
        session(0, 1, 0, {"generate": [(0, 1)]}, "rejected", role="eval-rollout"),
    ]
    run = load(write(tmp_path / "sessions-r0.jsonl", records))
    assert fates(run) == {"generated": 2, "evaluation": 1, "filtered": 1, "trained": 0}
    assert [span.name for span in run if span.kind == "stage"] == ["evaluation"]


def test_logs_of_two_frameworks_are_not_one_run(tmp_path: Path) -> None:
    write(tmp_path / "sessions-r0.jsonl", [session(0, 0, 0, {"generate": [(0, 1)]})])
    write(tmp_path / "metrics.jsonl", [{"step": 1, "data": {"timing_s/step": 1.0}}])
    with pytest.raises(TraceError, match="contains logs of verl and areal; pass those of one"):
        load(tmp_path)
