"""Logs of AReaL's perf tracer and of verl's file logger, in the forms that these write."""

import json
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.run import load

MS = 1_000_000


def areal(path: Path, rank: int = 0, role: str = "actor") -> None:
    lines = [
        {"name": "process_name", "ph": "M", "pid": 8455, "args": {"name": f"[{role}] Rank {rank}"}}
    ]
    for step in range(3):
        for name, start, length in (("train.rollout", 0, 10), ("train.ppo_update", 12, 6)):
            lines.append(
                {
                    "name": name, "ph": "X", "ts": (20 * step + start) * 1000, "dur": length * 1000,
                    "pid": 8455, "tid": 8455, "cat": "compute",
                    "args": {"global_step": step, "rank": rank, "role": role},
                }
            )  # fmt: skip
    lines.append({"name": "x", "ph": "i", "ts": 35671, "pid": 8455, "args": {"k": 1}, "s": "t"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_areals_events_are_stages_and_its_steps_follow_one_another(tmp_path: Path) -> None:
    areal(tmp_path / "traces-r0.jsonl")
    run = load(tmp_path / "traces-r0.jsonl")
    assert [
        (span.name, span.step, span.start_ns // MS, span.end_ns // MS)
        for span in run
        if span.step == 2
    ] == [
        ("actor_generate", 2, 20, 30),
        ("step", 2, 20, 40),
        ("actor_update", 2, 32, 38),
    ]
    assert run.headers[0].role == "actor"
    table = run.stages()
    assert dict(zip(table.column("stage"), table.column("total"), strict=True)) == {
        "actor_generate": 30 * MS,
        "actor_update": 18 * MS,
        "untraced": 10 * MS,
    }
    assert any("lacks a wall clock" in note.text for note in run.notes)


def test_a_folder_of_areals_traces_is_one_run(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        areal(tmp_path / f"traces-r{rank}.jsonl", rank)
    run = load(tmp_path)
    assert run.ranks == (0, 1, 2)
    assert len(run.rows(kind="step")) == 9
    assert not run.warnings


def test_verls_timings_are_laid_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "experiment.jsonl"
    rows = [
        {
            "step": step,
            "data": {
                "timing_s/update_actor": 0.03, "timing_s/gen": 0.05, "timing_s/step": 0.1,
                "timing_s/adv": 0.001, "perf/throughput": 12.0, "timing_s/old": "nan",
            },
        }
        for step in (7, 8)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "da')
    run = load(path)
    assert [
        (span.name, span.start_ns // MS, span.end_ns // MS) for span in run if span.step == 8
    ] == [
        ("actor_generate", 100, 150),
        ("step", 100, 200),
        ("compute_advantage", 150, 151),
        ("actor_update", 151, 181),
    ]
    assert any("order in a step is assumed" in note.text for note in run.notes)
    assert [warning.text for warning in run.warnings] == ["1 of its lines can't be read"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"step": 1, "data": {"loss": 1.0}}\n', "has no timings of a step"),
        ('{"name": "x", "ph": "M", "pid": 1, "args": {}}\n', "has no timings of a step"),
        ('{"a": 1}\n', "is not a rank file of rlprof"),
        ("[1]\n", "is not a rank file of rlprof"),
    ],
)
def test_another_file_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=reason):
        load(path)
