"""The log of verl's file logger, in the form that it writes."""

import json
from pathlib import Path

from lightning_rlprof.run import load

MS = 1_000_000


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


def test_a_time_that_cannot_be_moves_no_other_step(tmp_path: Path) -> None:
    path = tmp_path / "experiment.jsonl"
    rows = [{"step": at, "data": {"timing_s/gen": 1e8 if at < 9 else 1.0}} for at in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load(path)
    assert [span.step for span in run if span.kind == "stage"] == [9, 10, 11]
    assert int(run.end_ns.max()) == 3 * 10**9
