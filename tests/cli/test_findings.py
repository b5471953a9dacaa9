"""`rlprof findings`: problems with remedies and commands that run, and one text per id."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

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


def test_it_says_what_an_applied_remedy_brought(rlprof: Run, tmp_path: Path) -> None:
    """By the verdict of compare, beside the run that started last before it."""
    for at, (name, slow, applied) in enumerate(
        (("older", {}, []), ("b", {2: 0.5}, []), ("a", {}, ["swap-ranks"]), ("alone/a", {}, ["x"]))
    ):
        recorded(tmp_path / name, steps=40, slow=slow)
        for file in (tmp_path / name).iterdir():
            head, rest = file.read_text().split("\n", 1)
            facts = json.loads(head)
            facts |= {"unix_ns": facts["unix_ns"] + at, "config": {"applied": applied}}
            file.write_text(f"{json.dumps(facts)}\n{rest}")
    found = json.loads(rlprof("findings", tmp_path / "a", "--json")[1])["applied"]
    table = json.loads(rlprof("compare", tmp_path / "b", tmp_path / "a", "--json")[1])["tables"][0]
    names = [column["name"] for column in table["columns"]]
    step = dict(zip(names, table["rows"][-1], strict=True))
    assert (found["remedies"], found["verdict"]) == (["swap-ranks"], "faster")
    assert found["baseline"] == str(tmp_path / "b")
    assert {name: found[name] for name in ("adjusted", "CI low", "CI high", "verdict")} == {
        name: step[name] for name in ("adjusted", "CI low", "CI high", "verdict")
    }
    assert "Applied swap-ranks: faster, step 0." in rlprof("findings", tmp_path / "a")[1]
    assert "applied" not in json.loads(rlprof("findings", tmp_path / "b", "--json")[1])
    alone = json.loads(rlprof("findings", tmp_path / "alone" / "a", "--json")[1])["applied"]
    assert alone == {"remedies": ["x"], "baseline": None}
