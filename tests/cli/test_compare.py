import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.comparison.run_pair import comparability
from lightning_rlprof.analysis.comparison.settings import settings_diff
from lightning_rlprof.analysis.comparison.trace_diff import trace_diff
from lightning_rlprof.cli.compare import _print_undecided
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.table import Column, Table
from tests.builders.chrome import PID, ChromeTrace
from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]
STEPS = 40


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs, of which the second takes a fifth longer for its updates."""
    a, b = tmp_path / "a", tmp_path / "b"
    write_rank(a, header(), grpo_rows(STEPS, 1))
    write_rank(b, header(), grpo_rows(STEPS, 2, slow={"actor_update": 1.2}))
    return a, b


def _plain(table: object) -> object:
    return json.loads(json.dumps(table))


def test_compare_shows_both_runs_and_what_changed(rlprof: Run, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    grpo_run(a, 8)
    grpo_run(b, 8, slow={"actor_generate": 0.5})

    status, out, _ = rlprof("compare", a, b)
    assert status == 0
    assert f"A: {a}\nB: {b}\n" in out
    assert re.search(
        r"actor_generate .* 0\.\d\dx \(0\.\d\d–0\.\d\d\) faster", " ".join(out.split())
    )
    assert "comparability" not in out
    assert "adjusted (CI)" in out


def test_a_run_compared_with_itself(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "runs" / "a", 8)
    status, out, _ = rlprof("compare", tmp_path / "runs" / "a", tmp_path / "runs")
    assert status == 0
    assert out.endswith("A and B are the same run, so nothing changed.\n")


def test_json_has_both_tables_and_the_score(rlprof: Run, pair: tuple[Path, Path]) -> None:
    a, b = pair
    data = json.loads(rlprof("compare", a, b, "--json")[1])
    runs = load(a), load(b)
    assert (data["a"]["run"], data["b"]["run"]) == (str(a), str(b))
    tables = compare(*runs), comparability(*runs), settings_diff(*runs)
    assert data["tables"] == [_plain(table.to_dict()) for table in tables]
    assert data["comparability_score"] == math.prod(tables[1].column("score"))  # type: ignore[arg-type]
    assert "fail_if_slower" not in data


def test_too_few_steps_have_no_data(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "a", 2)
    grpo_run(tmp_path / "b", 2)
    status, out, _ = rlprof("compare", tmp_path / "a", tmp_path / "b")
    assert status == 0
    assert "compare: no data. Run A has 2 complete steps; a comparison needs 3.\n" in out


def test_a_regression_fails_in_ci_and_says_by_how_much(
    rlprof: Run, pair: tuple[Path, Path]
) -> None:
    status, out, err = rlprof("compare", *pair, "--fail-if-slower", "3%")
    assert (status, err) == (1, "")
    assert re.match(
        r"FAIL: actor_update \+\d+\.\d% \(99% CI \d+\.\d% to \d+\.\d%\); the limit", out
    )
    data = json.loads(rlprof("compare", *pair, "--fail-if-slower", "0.03", "--json")[1])[
        "fail_if_slower"
    ]
    assert (data["result"], data["slower"]) == ("FAIL", ["actor_update"])


def test_the_same_code_passes(rlprof: Run, pair: tuple[Path, Path]) -> None:
    for runs in ((pair[0], pair[0]), pair[::-1]):
        status, out, _ = rlprof("compare", *runs, "--fail-if-slower", "5%")
        assert status == 0
        assert out.startswith("PASS: step is at most 5% slower at equal work; no stage is ")
    assert rlprof("compare", *pair, "--fail-if-slower", "25%")[0] == 0
    assert rlprof("compare", *pair)[0] == 0


@pytest.mark.parametrize("steps", [2, 6])
def test_an_inconclusive_check_is_exit_code_3(rlprof: Run, tmp_path: Path, steps: int) -> None:
    grpo_run(tmp_path, steps)
    status, out, _ = rlprof("compare", tmp_path, tmp_path, "--fail-if-slower", "3%")
    assert status == 3
    assert out.startswith("INCONCLUSIVE: ")


def test_runs_that_are_not_comparable_are_inconclusive(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path / "a", header(device="NVIDIA H100"), grpo_rows(STEPS))
    write_rank(tmp_path / "b", header(device="Ascend 910B"), _renamed(grpo_rows(STEPS)))
    status, out, _ = rlprof("compare", tmp_path / "a", tmp_path / "b", "--fail-if-slower", "3%")
    assert status == 3
    assert "warning: comparability score 0." in out
    assert out.startswith("INCONCLUSIVE: comparability score 0.")
    assert "Ascend 910B" in out


def _renamed(rows: list[Row]) -> list[Row]:
    return [row._replace(name="x") if row.name == "actor_generate" else row for row in rows]


@pytest.mark.parametrize("given", ["3x", "-1%", "nan", "100%", "3", "3%%", ""])
def test_a_wrong_limit_is_refused(rlprof: Run, tmp_path: Path, given: str) -> None:
    status, _, err = rlprof("compare", tmp_path, tmp_path, f"--fail-if-slower={given}")
    assert status == 2
    words = f"rlprof: error: --fail-if-slower {given} is not between 0% and 100%"
    assert err.split() == f"{words} hint: For example 3% or 0.03".split()


def test_markdown_is_a_table_and_nothing_else(rlprof: Run, pair: tuple[Path, Path]) -> None:
    status, out, _ = rlprof("compare", *pair, "--format", "markdown", "--fail-if-slower", "3%")
    lines = out.splitlines()
    assert status == 1
    assert lines[0].startswith("FAIL: actor\\_update +")
    assert lines[1:3] == ["", "**compare**"]
    assert lines[4] == "| stage | A | B | work B/A | adjusted (CI) | verdict |"
    assert lines[6].startswith("| actor\\_update | ")
    assert lines[6].endswith(" | slower |")
    assert len({line.replace("\\|", "").count("|") for line in lines[4:12]}) == 1


def test_hostile_names_stay_in_their_cell(rlprof: Run, tmp_path: Path) -> None:
    name = "a|b\n<img src=x>\x1b[2J`[x](y)"
    rows = grpo_rows(STEPS)
    rows = [row._replace(name=name) if row.name == "compute_reward" else row for row in rows]
    write_rank(tmp_path, header(), rows)
    out = rlprof("compare", tmp_path, tmp_path, "--format", "markdown")[1]
    line = next(line for line in out.splitlines() if "img" in line)
    assert line.replace("\\|", "").count("|") == 7
    assert not {"<", "\x1b"} & set(out)


def test_markdown_without_data_says_why(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, 2)
    out = rlprof("compare", tmp_path, tmp_path, "--format", "markdown")[1]
    assert out.startswith(
        "**compare**: no data. Run A has 2 complete steps; a comparison needs 3.\n"
    )


def test_csv_is_the_whole_table(rlprof: Run, pair: tuple[Path, Path]) -> None:
    lines = rlprof("compare", *pair, "--format", "csv")[1].splitlines()
    assert lines[0] == (
        "stage,A,B,adjusted,verdict,raw B/A,work B/A,CI low,CI high,relative low,relative high,"
        "changed,detectable,steps needed,delta,adjusted by"
    )
    assert lines[1].startswith("actor_update,")


def test_a_similar_change_of_all_stages_is_said(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path / "a", header(), grpo_rows(STEPS, 1))
    names = {row.name for row in grpo_rows(1, 1) if row.kind == "stage"}
    slow = dict.fromkeys(names, 1.4)
    write_rank(tmp_path / "b", header(), grpo_rows(STEPS, 2, slow=slow))
    said = "all stages changed alike: the machine rather than the code"
    assert said in rlprof("compare", tmp_path / "a", tmp_path / "b")[1]
    write_rank(tmp_path / "c", header(), grpo_rows(STEPS, 2, slow={"actor_update": 1.4}))
    assert said not in rlprof("compare", tmp_path / "a", tmp_path / "c")[1]


def test_an_untraced_change_alone_fails_nothing(rlprof: Run, tmp_path: Path) -> None:
    """Time between stages shows in the step, where it counts."""
    noise = np.random.default_rng(0)
    for name, gap in (("a", 100_000), ("b", 200_000)):
        rows, at = [], 0
        for step in range(1, STEPS + 1):
            stage = int(1e8 * noise.uniform(0.99, 1.01))
            rows.append(Row("a", "stage", step, at, at + stage))
            rows.append(Row("step", "step", step, at, at + stage + gap))
            at += stage + gap
        write_rank(tmp_path / name, header(), rows)
    status, out, _ = rlprof("compare", tmp_path / "a", tmp_path / "b", "--fail-if-slower", "3%")
    assert status == 0
    assert re.search(r"untraced .* 2\.00x \S+ slower", " ".join(out.split()))


def test_several_runs_a_side_are_judged_by_the_spread_between_them(
    rlprof: Run, tmp_path: Path
) -> None:
    runs = {name: tmp_path / name for name in ("a1", "a2", "b1", "b2")}
    for seed, (name, path) in enumerate(runs.items()):
        slow = {"actor_update": 1.5, "actor_generate": 1.5} if name[0] == "b" else {}
        write_rank(path, header(), grpo_rows(STEPS, seed, slow=slow))
    sides = [each for name in ("a1", "a2") for each in ("--baseline", runs[name])]
    sides += [each for name in ("b1", "b2") for each in ("--candidate", runs[name])]
    status, out, _ = rlprof("compare", *sides, "--fail-if-slower", "3%")
    assert status == 1
    assert out.startswith("FAIL: ")
    assert f"A: {runs['a1']}\nA: {runs['a2']}\nB: {runs['b1']}\nB: {runs['b2']}\n" in out
    data = json.loads(rlprof("compare", *sides, "--json")[1])
    assert [run["run"] for run in data["a"]] == [str(runs["a1"]), str(runs["a2"])]
    assert rlprof("compare", *sides[:4], "--candidate", runs["a1"])[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--baseline", "R"), "give A and B, or --baseline and --candidate"),
        (("R", "R", "--baseline", "R"), "give A and B, or --baseline and --candidate"),
        (("R",), "Missing argument 'A' or 'B'"),
        (("R", "R", "--run-noise", "1%"), "--run-noise applies to --fail-if-slower"),
        (
            ("R", "R", "--fail-if-slower", "3%", "--run-noise", "x"),
            "--run-noise x is not between 0% and 100%",
        ),
    ],
)
def test_wrong_sides_are_refused(
    rlprof: Run, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    run = tmp_path / "a"
    grpo_run(run, 8)
    status, _, err = rlprof("compare", *(run if each == "R" else each for each in options))
    assert status == 2
    assert said in err


def test_what_an_inconclusive_comparison_would_have_shown_is_said(
    rlprof: Run, tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_rank(tmp_path / name, header(), grpo_rows(9, seed))
    out = rlprof("compare", tmp_path / "a", tmp_path / "b")[1]
    assert re.search(r"compute_reward: only a change of \d+\.\d% or more would have shown", out)


def test_a_change_that_could_not_have_shown_has_no_absurd_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = (Column("stage", "text"), Column("verdict", "text"), Column("detectable", "share"))
    rows = [("weight_sync", "inconclusive", 823.6, None)]
    _print_undecided(Table("compare", (*heads, Column("steps needed", "count")), rows))
    assert "weight_sync: not even a doubling would have shown" in capsys.readouterr().out


@pytest.mark.parametrize(("step", "first"), [("inconclusive", "step"), ("faster", "update")])
def test_the_step_and_the_largest_stages_are_named_first(
    capsys: pytest.CaptureFixture[str], step: str, first: str
) -> None:
    heads = (Column("stage", "text"), Column("verdict", "text"), Column("detectable", "share"))
    names = ("update", "reward", "log_prob", "weight_sync")
    rows = [*((name, "inconclusive", 0.3, None) for name in names), ("step", step, 0.2, None)]
    _print_undecided(Table("compare", (*heads, Column("steps needed", "count")), rows))
    lines = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [first, *[name for name in names if name != first][: len(lines) - 1]]


def test_noise_between_runs_makes_the_gate_more_careful(rlprof: Run, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_rank(tmp_path / name, header(), grpo_rows(STEPS, seed))
    command = ("compare", tmp_path / "a", tmp_path / "b", "--fail-if-slower", "3%")
    assert rlprof(*command)[0] == 0
    assert rlprof(*command, "--run-noise", "5%")[0] == 3


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Two traces of a step, of which the second has a longer kernel, and another one."""
    found = []
    for name, length in (("a", 10), ("b", 15)):
        trace = ChromeTrace()
        trace.mark("ProfilerStep#1", 0, 100)
        trace.mark("actor_update", 1, 90)
        trace.event("cpu_op", "aten::mm", 5, 60, PID, 1)
        trace.call(1, 10)
        trace.kernel(1, 20, 20 + length)
        if name == "b":
            trace.launched(2, 70, name="copy")
        found.append(trace.write(tmp_path / f"{name}.json"))
    return found[0], found[1]


def test_two_traces_are_compared_by_kernel_and_by_operator(
    rlprof: Run, traces: tuple[Path, Path], hints: None
) -> None:
    a, b = traces
    status, out, _ = rlprof("compare", a, b, "--level", "kernels")
    assert status == 0
    assert out.startswith(f"A: {a}\nB: {b}\n")
    assert "gemm (triton) 10 ns 15 ns 5 ns 0 ns 5 ns 1.50x 1 1" in " ".join(out.split())
    assert rlprof("compare", a, b)[2] == f"next: rlprof compare {a} {b} --level operators\n"
    for by in ("kernels", "operators"):
        options = ("--level", by, "--stage", "update_actor", "--json")
        data = json.loads(rlprof("compare", a, b, *options)[1])
        runs = load(a), load(b)
        assert (data["a"]["run"], data["b"]["run"]) == (str(a), str(b))
        table = trace_diff(*runs, by=by, stage="update_actor")  # type: ignore[arg-type]
        assert data["tables"] == [_plain(table.to_dict())]
    rows = json.loads(rlprof("compare", a, b, "--level", "kernels", "--limit", 1, "--json")[1])
    assert [row[0] for row in rows["tables"][0]["rows"]] == ["copy (triton)", "others", "total"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--level", "modules"), "invalid value for '--level'"),
        (
            ("--level", "kernels", "--stage", "critic"),
            "no launches in stage 'critic'. Stages in these traces: ",
        ),
        (("--level", "kernels", "--fail-if-slower", "3%"), "--fail-if-slower applies to --level"),
        (("--stage", "actor_update"), "--stage applies to --level operators and --level kernels"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    rlprof: Run, traces: tuple[Path, Path], options: tuple[str, ...], said: str
) -> None:
    status, out, err = rlprof("compare", *traces, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"rlprof: error: {said}")
