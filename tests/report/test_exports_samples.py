"""The log of samples: one JSON line each, beside what a person wrote into the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.samples.sample_book import sample_book
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.exports import write_sample_log
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, header, loaded, write_rank

MS = 10**6
STEP = Row("step", "step", 1, 0, 100 * MS)


def phase(number: int, start: int, end: int, name: str = "actor_generate", **told: Any) -> Row:
    counters = {"sample": number, **told}
    return Row(name, "region", 1, start * MS, end * MS, counters=counters)


def fate(number: int, what: str, at: int, **told: Any) -> Row:
    return Row(f"sample {what}", "mark", 1, at * MS, at * MS, counters={"sample": number, **told})


def log(spans: Spans, folder: Path) -> list[dict[str, Any]]:
    path = folder / "samples.jsonl"
    number = write_sample_log(spans, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == number
    assert [each.name for each in folder.iterdir() if each.name.endswith(".tmp")] == []
    return lines


def test_a_line_has_identity_phases_fate_and_update(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = [
        STEP,
        phase(7, 0, 30, tokens=120, version=3, version_end=4),
        Row("first token", "mark", 1, 5 * MS, 5 * MS, counters={"sample": 7}),
        phase(7, 40, 45, "compute_reward"),
        Row("actor_update", "stage", 1, 60 * MS, 90 * MS),
        fate(7, "trained", 70, reward=0.5, advantage=-1.0, trainer_version=4),
    ]
    path = write_rank(run, header(), rows)
    with path.open("a") as file:
        file.write(json.dumps(["sample", 7, "gsm8k/1", "group 1", 2]) + "\n")
    (line,) = log(load(run), tmp_path)
    where = {"rank": 0, "role": "actor", "step": 1}
    assert line == {
        "id": 7,
        "prompt": "gsm8k/1",
        "group": "group 1",
        "attempt": 2,
        "fate": "trained",
        "fate_ns": 70 * MS,
        "tokens": 120,
        "reward": 0.5,
        "advantage": -1.0,
        "version": 3,
        "version_end": 4,
        "trainer_version": 4,
        "unix_ns": 1_700_000_000_000_000_000,
        "phases": [
            {"name": "actor_generate", **where, "start_ns": 0, "end_ns": 30 * MS}
            | {"tokens": 120, "version": 3, "version_end": 4},
            {"name": "first token", **where, "start_ns": 5 * MS, "end_ns": 5 * MS},
            {"name": "compute_reward", **where, "start_ns": 40 * MS, "end_ns": 45 * MS},
        ],
        "update": {"name": "actor_update", **where, "start_ns": 60 * MS, "end_ns": 90 * MS},
    }


def test_what_was_not_recorded_is_null(tmp_path: Path) -> None:
    rows = [STEP, phase(1, 0, 9), fate(2, "unknown", 20), fate(3, "stale", 30, tokens=5)]
    first, second, third = log(loaded(rows), tmp_path)
    absent = ("prompt", "group", "attempt", "fate", "tokens", "reward", "version", "update")
    assert {key: first[key] for key in absent} == dict.fromkeys(absent)
    assert (second["fate"], second["phases"], second["unix_ns"]) == (None, [], None)
    assert (third["fate"], third["tokens"]) == ("stale", 5)


def test_phases_of_several_ranks_are_in_order_of_time(tmp_path: Path) -> None:
    rollout = [STEP, phase(1, 5, 20)]
    trainer = [STEP, phase(1, 0, 4, "queue"), phase(1, 30, 40, "compute_reward")]
    (line,) = log(loaded(rollout, [*trainer, fate(1, "filtered", 41)]), tmp_path)
    assert [(each["name"], each["rank"]) for each in line["phases"]] == [
        ("queue", 1),
        ("actor_generate", 0),
        ("compute_reward", 1),
    ]


def test_a_counter_of_the_users_own_replaces_no_field_and_infinity_is_null(tmp_path: Path) -> None:
    told: dict[str, Any] = {"rank": 99, "start_ns": 1, "score": float("inf")}
    (line,) = log(loaded([STEP, phase(1, 2, 3, **told), fate(1, "trained", 4)]), tmp_path)
    (only,) = line["phases"]
    assert (only["rank"], only["start_ns"]) == (0, 2 * MS)
    assert only.get("score") is None


def test_every_sample_has_a_line_by_number(tmp_path: Path) -> None:
    rows = [fate(number, "trained", 1 + number % 90) for number in range(2_500, 0, -1)]
    spans = loaded([STEP, *rows])
    assert [line["id"] for line in log(spans, tmp_path)] == sample_book(spans).id.tolist()


def test_a_run_without_samples_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No samples were recorded"):
        log(loaded([STEP]), tmp_path)
    assert [*tmp_path.iterdir()] == []
