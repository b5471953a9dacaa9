"""`rlprof advise` and `rlprof explain`: cards, what to record, ids that are refused, JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof import ProfilerConfig
from lightning_rlprof.cli.completion import complete_advice
from lightning_rlprof.errors import ConfigError
from tests.builders.runs import grpo_rows, header, write_rank

Run = Callable[..., tuple[int, str, str]]


def recorded(path: Path, steps: int = 12, **config: object) -> Path:
    """Write a run whose rollout takes two thirds of the time."""
    run = path / "a run"
    write_rank(run, header(config={"integrated": {}, **config}), grpo_rows(steps))
    return run


def test_advice_has_evidence_settings_effect_and_risk(
    rlprof: Run, tmp_path: Path, hints: None
) -> None:
    status, out, err = rlprof("advise", recorded(tmp_path))
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}/a run: advice"
    assert lines[1] == "1. Generate the next batch during the update (rollout-overlap)"
    assert lines[2].startswith("   saves 35% of the step, by a replay (95% CI ")
    assert lines[3].startswith("   evidence: rollout, of the step time: 64% (95% CI ")
    assert "   set: TRL: AsyncGRPOTrainer: use this trainer" in lines
    assert any(line.startswith("   effect: ") for line in lines)
    assert any(line.startswith("   risk: ") for line in lines)
    assert "To decide more:" in lines
    assert any("profile_with_memory: true (" in line for line in lines)
    assert f" See all: rlprof show '{tmp_path}/a run' advice" in out
    assert err == "next: rlprof explain rollout-overlap\n"


def test_ignored_advice_is_not_listed(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)
    _, out, _ = rlprof("advise", run, "--ignore", "rollout-overlap")
    assert "No advice is given." in out
    assert "Ignored: rollout-overlap." in out
    status, _, err = rlprof("advise", run, "--ignore", "rollout-overlp")
    assert status == 2
    assert "unknown advice 'rollout-overlp'" in err
    assert "did you mean 'rollout-overlap'?" in err


def test_the_configuration_of_the_run_ignores_advice(rlprof: Run, tmp_path: Path) -> None:
    _, out, _ = rlprof("advise", recorded(tmp_path, ignore_advice=["rollout-overlap"]))
    assert "No advice is given." in out


def test_json_has_every_rule_and_csv_has_rows(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)
    data = json.loads(rlprof("advise", run, "--json")[1])
    (table,) = data["tables"]
    assert table["name"] == "advice"
    verdicts = [row[1] for row in table["rows"]]
    assert {"given", "undecided", "not given"} == {*verdicts}
    assert (
        rlprof("advise", run, "--format", "csv")[1]
        .splitlines()[1]
        .startswith("rollout-overlap,given,")
    )
    assert rlprof("show", run, "advice", "--json")[1] == rlprof("show", run, "advice", "--json")[1]


def test_the_summary_has_the_first_advice_in_a_line(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)
    lines = rlprof("summary", run)[1].splitlines()
    line = f"Set: Generate the next batch during the update. See: rlprof advise '{run}'"
    assert line in lines
    other = recorded(tmp_path / "other", ignore_advice=["rollout-overlap"])
    assert "Set: " not in rlprof("summary", other)[1]


def test_a_run_without_steps_has_no_data(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path / "empty", header(), [])
    assert "No data. no complete step was recorded" in rlprof("advise", tmp_path / "empty")[1]


def test_a_rule_is_explained(rlprof: Run) -> None:
    _, out, _ = rlprof("explain", "clipped-responses")
    lines = out.splitlines()
    assert lines[:3] == [
        "clipped-responses: Allow longer responses: many reach the limit",
        "Given if:",
        "  responses that reach the limit of their length: above 10%",
    ]
    assert "  verl: data.max_response_length (default 512): raise it" in lines
    assert lines[-1] == "Guide: docs/guides/tuning.md#clipped-responses"


def test_a_finding_is_explained_and_both_if_they_have_one_id(rlprof: Run) -> None:
    _, out, _ = rlprof("explain", "training-mfu")
    assert out.splitlines()[:2] == [
        "training-mfu (finding): Training MFU is low: {mfu:.0%} in {stages}",
        "Reported below 20%.",
    ]
    _, out, _ = rlprof("explain", "garbage-collection")
    assert "garbage-collection: Collect garbage at the same step on all ranks" in out
    assert "garbage-collection (finding): Python GC pauses the ranks" in out


def test_without_an_id_all_are_listed(rlprof: Run) -> None:
    _, out, _ = rlprof("explain")
    assert "Rollout (advice)" in out.splitlines()
    assert "Findings" in out.splitlines()
    data = json.loads(rlprof("explain", "--json")[1])
    assert "clipped-responses" in [each["id"] for each in data["advice"]]
    assert "straggler" in [each["id"] for each in data["findings"]]


def test_an_explanation_as_json(rlprof: Run) -> None:
    data = json.loads(rlprof("explain", "garbage-collection", "--json")[1])
    assert data["advice"]["guide"] == "docs/guides/tuning.md#garbage-collection"
    assert data["advice"]["settings"][0] == {
        "framework": "PyTorch",
        "knob": "gc.freeze",
        "change": "after setup",
        "default": "",
    }
    assert data["findings"][0]["threshold"] == 0.02
    assert json.loads(rlprof("explain", "training-mfu", "--json")[1])["advice"] is None


def test_an_unknown_id_is_refused_with_the_nearest_one(rlprof: Run) -> None:
    status, out, err = rlprof("explain", "clipped-response")
    assert (status, out) == (2, "")
    assert err == (
        "rlprof: error: unknown advice or finding 'clipped-response'\n"
        "  hint: did you mean 'clipped-responses'? List all: rlprof explain\n"
    )


def test_the_shell_completes_ids() -> None:
    assert complete_advice("clipped") == ["clipped-responses", "clipped-prompts"]


def test_the_configuration_refuses_unknown_ids() -> None:
    assert ProfilerConfig.build(ignore_advice=["data-workers"]).ignore_advice == ["data-workers"]
    with pytest.raises(ConfigError, match="'data-worker', which is not an id of advice; did you"):
        ProfilerConfig.build(ignore_advice=["data-worker"])
    with pytest.raises(ConfigError, match="`rlprof explain` lists them"):
        ProfilerConfig.build(ignore_advice=["xyz"])
