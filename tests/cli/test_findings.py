"""`rlprof findings`: problems with remedies and commands that run, and one text per id."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli import console
from tests.cli.test_stragglers import recorded
from tests.test_run import recorded as short

Run = Callable[..., tuple[int, str, str]]


def test_one_line_of_data_quality_then_problems_with_price_and_next_step(
    rlprof: Run, tmp_path: Path, hints: None
) -> None:
    status, out, err = rlprof("findings", recorded(tmp_path / "a run", steps=20, slow={2: 0.15}))

    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}/a run: findings"
    assert lines[1] == "Recording: complete"
    assert any("rank 2" in line and line.endswith("[straggler]") for line in lines)
    assert any(line.startswith("   remedy: ") for line in lines)
    assert f"   rlprof stragglers '{tmp_path}/a run' --json" in lines
    assert any(line.startswith("   see rank 2, step ") for line in lines)
    first = next(line for line in lines if line.startswith("   rlprof "))
    assert f"next: {first.strip()}\n" in err


def test_json_has_problems_with_remedies_as_facts(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path / "a run", steps=20, slow={2: 0.15})
    text = rlprof("findings", run, "--json")[1]
    data = json.loads(text)
    assert data["ranks"] == [0, 1, 2, 3]
    assert data["recording"]["complete"]
    [own] = [each for each in data["problems"] if each["id"] == "straggler"]
    facts = {each["name"]: each["value"] for each in own["facts"]}
    assert (facts["rank"], own["price"]["kind"]) == (2, "lost")
    assert own["remedies"][0]["settings"]
    assert own["look"] == f"rlprof stragglers '{tmp_path}/a run' --json"
    assert "RUN" not in text


def test_without_a_problem_it_says_so_of_what_was_recorded(rlprof: Run, tmp_path: Path) -> None:
    run = short(tmp_path).path
    _, out, err = rlprof("findings", run)
    assert "1 of 2 present; missing: 1" in out
    hint = next(line for line in (err + out).splitlines() if " not decided. " in line)
    command = hint.partition("what to record: ")[2]
    assert command == f"rlprof findings {shlex.quote(str(run))} --all"
    _, out, _ = rlprof(*shlex.split(command)[1:])
    assert "Not decided" in out
    assert "  weight-sync: " in out


def test_markdown_is_a_list_that_names_what_was_not_decided_if_asked(
    rlprof: Run, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "a run", steps=20, slow={2: 0.15})
    out = rlprof("findings", run, "--format", "markdown")[1]
    assert all(re.match(r" *(-|\d+\.) ", line) for line in out.splitlines())
    data = json.loads(rlprof("findings", run, "--json")[1])
    assert re.findall(r"^\d+\. .*\\\[(.*)\\\]", out, re.M)[0] == data["problems"][0]["id"]
    assert f"   - `{data['problems'][0]['look']}`" in out.splitlines()
    assert data["problems"][0]["query"] not in out
    every = rlprof("findings", run, "--format", "markdown", "--all")[1]
    assert data["problems"][0]["query"] in every
    assert all(f"  - {each['id']}: " in every for each in data["undecided"])


def test_every_printed_command_runs(rlprof: Run, tmp_path: Path) -> None:
    _, out, _ = rlprof("findings", recorded(tmp_path / "a run", steps=20, slow={2: 0.15}))
    commands = [line for line in out.splitlines() if line.startswith("   rlprof ")]
    assert len(commands) >= 2
    for command in commands:
        status, answer, err = rlprof(*shlex.split(command)[1:])
        assert (status, err) == (0, ""), command
        if " sql " in command:
            assert "actor" in answer


def test_an_id_is_explained_in_one_text_without_a_run(rlprof: Run) -> None:
    status, out, _ = rlprof("findings", "--explain", "straggler")
    assert (status, out.count("straggler: ")) == (0, 1)
    assert "{" not in out
    assert "\nPage of the documentation, in a clone: docs/reference/problems.md#straggler\n" in out
    remedy = rlprof("findings", "--explain", "data-workers")[1]
    assert "DataLoader(num_workers=)" in remedy
    facts = json.loads(rlprof("findings", "--explain", "straggler", "--json")[1])
    assert facts["id"] == "straggler"


def test_all_ids_are_listed_and_a_typo_is_met_with_the_nearest(rlprof: Run) -> None:
    assert "data-workers" in rlprof("findings", "--explain", "all")[1]
    listed = json.loads(rlprof("findings", "--explain", "all", "--json")[1])
    assert any(each["id"] == "straggler" for own in listed.values() for each in own)
    status, _, err = rlprof("findings", "--explain", "stragler")
    assert status != 0
    assert "did you mean 'straggler'?" in err


def test_the_framework_may_be_another_than_that_of_the_run(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path, steps=20, slow={2: 0.15})
    assert rlprof("findings", run, "--framework", "verl")[0] == 0
    status, _, err = rlprof("findings", run, "--framework", "jax")
    assert (status != 0, "frameworks: verl" in err) == (True, True)


def test_an_id_that_no_problem_has_is_named(rlprof: Run, tmp_path: Path) -> None:
    file = tmp_path / "rlprof.yaml"
    file.write_text("ignore_findings: [data-workers, straggler]")
    assert rlprof("config", "check", file)[0] == 0
    file.write_text("ignore_findings: [data-worker]")
    status, _, err = rlprof("config", "check", file)
    assert (status, "did you mean 'data-workers'?" in err) == (1, True)


def _at(run: Path, start: int, slow: float, **more: Any) -> Path:
    """Record a run that starts at a time; rank 2 may be slow."""
    return recorded(run, steps=40, slow={2: slow}, unix_ns=10**18 + start, **more)


def _step(rlprof: Run, a: Path, b: Path) -> dict[str, Any]:
    """Return what compare says of the step."""
    table = json.loads(rlprof("compare", a, b, "--json")[1])["tables"][0]
    names = [column["name"] for column in table["columns"]]
    row = dict(zip(names, table["rows"][-1], strict=True))
    return {name: row[name] for name in ("adjusted", "CI low", "CI high", "verdict")}


def test_it_says_what_an_applied_remedy_brought(rlprof: Run, tmp_path: Path) -> None:
    """By the verdict of compare, beside the run that started last before it."""
    _at(tmp_path / "older", 0, 0.0)
    b = _at(tmp_path / "b", 1, 0.5)
    a = _at(tmp_path / "a", 2, 0.0, config={"applied": ["swap-ranks"]})
    alone = _at(tmp_path / "alone" / "a", 3, 0.0, config={"applied": ["x"]})
    found = json.loads(rlprof("findings", a, "--json")[1])["change"]
    assert (found["applied"], found["settings"]) == (["swap-ranks"], [])
    assert (found["baseline"], found["verdict"]) == (str(b), "faster")
    assert _step(rlprof, b, a).items() <= found.items()
    assert "Applied swap-ranks: faster, step 0." in rlprof("findings", a)[1]
    assert json.loads(rlprof("findings", alone, "--json")[1])["change"] == {
        "applied": ["x"],
        "baseline": None,
    }
    assert "Applied x: no run before this one" in rlprof("findings", alone)[1]


def test_it_says_what_other_settings_brought(rlprof: Run, tmp_path: Path) -> None:
    """No remedy was named: what differs from the run before is what both recorded."""
    engine = {"max_num_seqs": 128, "eager": 1}
    b = _at(tmp_path / "b", 1, 0.5, facts=engine, versions={"torch": "2.12.0", "nvtx": "1"})
    a = _at(tmp_path / "a", 2, 0.0, facts=engine | {"max_num_seqs": 256, "group": 8})
    found = json.loads(rlprof("findings", a, "--json")[1])["change"]
    assert found["settings"] == [
        {"setting": "max_num_seqs", "A": "128", "B": "256"},
        {"setting": "torch", "A": "2.12.0", "B": "2.13.0"},
    ]
    listed = rlprof("compare", b, a, "--format", "markdown")[1].replace("\\", "")
    assert "| max_num_seqs | 128 | 256 |" in listed
    assert (found["applied"], found["baseline"], found["verdict"]) == ([], str(b), "faster")
    assert _step(rlprof, b, a).items() <= found.items()
    for form in ("table", "markdown"):
        out = rlprof("findings", a, "--format", form)[1].replace("\\", "")
        line = out.splitlines()[1].removeprefix("- ")
        assert line.startswith(
            "Changed max_num_seqs 128 → 256, torch 2.12.0 → 2.13.0: faster, step 0."
        )
        assert line.endswith(f"beside {b}")
    assert len(rlprof("findings", a, "--format", "markdown")[1]) < 1_500


def test_without_another_setting_or_a_run_before_it_says_nothing(
    rlprof: Run, tmp_path: Path
) -> None:
    b, a = _at(tmp_path / "b", 1, 0.5), _at(tmp_path / "a", 2, 0.0, config={"steps": [3]})
    other = _at(tmp_path / "other", 3, 0.0, versions={"torch": "3.0.0"})
    for run in (b, a, a / "rank-00000.jsonl"):
        assert "change" not in json.loads(rlprof("findings", run, "--json")[1])
    assert "change" in json.loads(rlprof("findings", other, "--json")[1])


def test_a_run_before_that_cannot_be_read_does_not_stop_it(rlprof: Run, tmp_path: Path) -> None:
    b, a = _at(tmp_path / "b", 1, 0.5), _at(tmp_path / "a", 2, 0.0, versions={"torch": "3.0.0"})
    for file in b.iterdir():
        file.write_text(file.read_text().split("\n", 1)[0] + "\n")
    assert rlprof("findings", a)[0] == 0


def test_a_server_compares_with_what_it_may_read_only(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = _at(tmp_path / "b", 1, 0.5)
    a = _at(tmp_path / "root" / "a", 2, 0.0, versions={"torch": "3.0.0"})
    for root, linked in ((a, False), (tmp_path / "root", True)):
        if linked:
            (tmp_path / "root" / "b").symlink_to(b)
        monkeypatch.setattr(console._output, "root", root)
        assert "Changed" not in rlprof("findings", a)[1]
    (tmp_path / "root" / "b").unlink()
    b.rename(tmp_path / "root" / "b")
    assert "Changed torch 2.13.0 → 3.0.0: " in rlprof("findings", a)[1]


def test_a_run_that_hardly_compares_is_no_baseline(rlprof: Run, tmp_path: Path) -> None:
    short(tmp_path)  # Its only stage is not one of the other run, and it has 2 ranks.
    a = _at(tmp_path / "a", 2, 0.0)
    assert json.loads(rlprof("compare", tmp_path / "run", a, "--json")[1])["tables"][2]["rows"]
    assert "change" not in json.loads(rlprof("findings", a, "--json")[1])


def test_too_few_steps_are_inconclusive_with_the_reason(rlprof: Run, tmp_path: Path) -> None:
    for start, (name, seqs) in enumerate((("b", 128), ("a", 256))):
        changes = {"unix_ns": 10**18 + start, "facts": {"max_num_seqs": seqs}}
        recorded(tmp_path / name, steps=2, slow={}, **changes)
    text = f"Changed max_num_seqs 128 → 256: inconclusive beside {tmp_path / 'b'}. "
    [line] = [each for each in rlprof("findings", tmp_path / "a")[1].splitlines() if text in each]
    assert "steps" in line.removeprefix(text)
