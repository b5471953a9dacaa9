import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.comparability import comparability
from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.comparison.trace_diff import trace_diff
from lightning_rlprof.loaders.load import load
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
    assert "0.50x faster" in " ".join(out.split())
    assert "comparability" not in out
    assert out.endswith(f"Next: rlprof report {b}\n")


def test_a_run_beside_itself_is_said(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "runs" / "a", 8)
    status, out, _ = rlprof("compare", tmp_path / "runs" / "a", tmp_path / "runs")
    assert status == 0
    assert "They are one run: nothing changed in it." in out


def test_json_holds_both_tables_and_the_score(rlprof: Run, pair: tuple[Path, Path]) -> None:
    a, b = pair
    data = json.loads(rlprof("compare", a, b, "--json")[1])
    runs = load(a), load(b)
    assert (data["a"]["run"], data["b"]["run"]) == (str(a), str(b))
    tables = compare(*runs), comparability(*runs)
    assert data["tables"] == [_plain(table.to_dict()) for table in tables]
    assert data["comparability"] == math.prod(tables[1].column("score"))  # type: ignore[arg-type]
    assert "fail_over" not in data


def test_too_few_steps_abstain(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, 2)
    status, out, _ = rlprof("compare", tmp_path, tmp_path)
    assert status == 0
    assert "compare: not told, Run A has 2 complete steps; a comparison needs 3.\n" in out


def test_a_regression_fails_in_ci_and_says_by_how_much(
    rlprof: Run, pair: tuple[Path, Path]
) -> None:
    status, out, err = rlprof("compare", *pair, "--fail-over", "3%")
    assert (status, err) == (1, "")
    assert "fail-over: slower at equal work by more than 3 %: actor_update by 1" in out
    data = json.loads(rlprof("compare", *pair, "--fail-over", "0.03", "--json")[1])["fail_over"]
    assert (data["status"], data["slower"]) == (1, ["actor_update"])


def test_the_same_code_passes(rlprof: Run, pair: tuple[Path, Path]) -> None:
    for runs in ((pair[0], pair[0]), pair[::-1]):
        status, out, _ = rlprof("compare", *runs, "--fail-over", "5%")
        assert status == 0
        assert "fail-over: the step is not slower at equal work by more than 5 %" in out
    assert rlprof("compare", *pair, "--fail-over", "25%")[0] == 0
    assert rlprof("compare", *pair)[0] == 0


@pytest.mark.parametrize("steps", [2, 6])
def test_what_cannot_be_excluded_is_status_two(rlprof: Run, tmp_path: Path, steps: int) -> None:
    grpo_run(tmp_path, steps)
    status, out, _ = rlprof("compare", tmp_path, tmp_path, "--fail-over", "3%")
    assert status == 2
    assert "fail-over: inconclusive: " in out


def test_runs_that_hardly_compare_are_status_two_and_a_warning(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path / "a", header(device="NVIDIA H100"), grpo_rows(STEPS))
    write_rank(tmp_path / "b", header(device="Ascend 910B"), _renamed(grpo_rows(STEPS)))
    status, out, _ = rlprof("compare", tmp_path / "a", tmp_path / "b", "--fail-over", "3%")
    assert status == 2
    assert "! these runs are hardly comparable: 0." in out
    assert "inconclusive: runs hardly compare" in out
    assert "Ascend 910B" in out


def _renamed(rows: list[Row]) -> list[Row]:
    return [row._replace(name="x") if row.name == "actor_generate" else row for row in rows]


@pytest.mark.parametrize("given", ["3x", "-1%", "nan", "100%", "3", "3%%", ""])
def test_a_limit_that_is_none_is_refused_in_a_line(rlprof: Run, tmp_path: Path, given: str) -> None:
    status, _, err = rlprof("compare", tmp_path, tmp_path, f"--fail-over={given}")
    assert status == 1
    words = f"rlprof: --fail-over {given}: takes 0% to below 100%, for instance 3% or 0.03"
    assert err.split() == words.split()


def test_markdown_is_a_table_and_nothing_else(rlprof: Run, pair: tuple[Path, Path]) -> None:
    status, out, _ = rlprof("compare", *pair, "--markdown", "--fail-over", "3%")
    lines = out.splitlines()
    assert status == 1
    assert lines[0] == "| stage | A | B | raw B/A | work B/A | adjusted | 99% CI | verdict |"
    assert lines[2].startswith("| actor\\_update | ")
    assert lines[2].endswith(" | slower |")
    assert len({line.replace("\\|", "").count("|") for line in lines[:8]}) == 1
    assert lines[8:10] == ["", "Comparability 1.00 of 1."]
    assert lines[-1].startswith("**fail-over**: slower at equal work by more than 3 %")


def test_hostile_names_stay_in_their_cell(rlprof: Run, tmp_path: Path) -> None:
    name = "a|b\n<img src=x>\x1b[2J`[x](y)"
    rows = grpo_rows(STEPS)
    rows = [row._replace(name=name) if row.name == "compute_reward" else row for row in rows]
    write_rank(tmp_path, header(), rows)
    out = rlprof("compare", tmp_path, tmp_path, "--markdown")[1]
    line = next(line for line in out.splitlines() if "img" in line)
    assert line.replace("\\|", "").count("|") == 9
    assert not {"<", "\x1b"} & set(out)


def test_markdown_of_too_few_steps_says_why(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, 2)
    out = rlprof("compare", tmp_path, tmp_path, "--markdown")[1]
    assert out.startswith("Not told: Run A has 2 complete steps; a comparison needs 3..\n")


def test_two_forms_of_output_are_refused(rlprof: Run, tmp_path: Path) -> None:
    status, out, err = rlprof("compare", tmp_path, tmp_path, "--json", "--markdown")
    assert (status, out) == (1, "")
    assert "leave one out" in err


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
    status, out, _ = rlprof("compare", tmp_path / "a", tmp_path / "b", "--fail-over", "3%")
    assert status == 0
    assert "2.00x slower" in " ".join(out.split())


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
    rlprof: Run, traces: tuple[Path, Path]
) -> None:
    a, b = traces
    status, out, _ = rlprof("compare", a, b, "--by", "kernels")
    assert status == 0
    assert out.startswith(f"A: {a}\nB: {b}\n")
    assert "gemm 10 ns 15 ns 5 ns 0 ns 5 ns 1.50x 1 1" in " ".join(out.split())
    assert out.endswith(f"Next: rlprof show {b} kernels\n")
    assert rlprof("compare", a, b)[1].endswith(f"Next: rlprof compare {a} {b} --by operators\n")
    for by in ("kernels", "operators"):
        options = ("--by", by, "--stage", "update_actor", "--json")
        data = json.loads(rlprof("compare", a, b, *options)[1])
        runs = load(a), load(b)
        assert (data["a"]["run"], data["b"]["run"]) == (str(a), str(b))
        table = trace_diff(*runs, by=by, stage="update_actor")  # type: ignore[arg-type]
        assert data["tables"] == [_plain(table.to_dict())]
    rows = json.loads(rlprof("compare", a, b, "--by", "kernels", "--rows", 1, "--json")[1])
    assert [row[0] for row in rows["tables"][0]["rows"]] == ["copy", "others", "total"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--by", "modules"), "unknown by='modules'. Use operators or kernels."),
        (
            ("--by", "kernels", "--stage", "critic"),
            "no launches in stage 'critic'. Stages in these traces: ",
        ),
        (("--by", "kernels", "--markdown"), "--by: takes neither --markdown nor --fail-over"),
        (("--by", "kernels", "--fail-over", "3%"), "--by: takes neither"),
        (("--stage", "actor_update"), "--stage, --rows: take --by operators or --by kernels"),
        (("--rows", "3"), "--stage, --rows: take --by"),
    ],
)
def test_what_cannot_be_compared_by_is_one_line(
    rlprof: Run, traces: tuple[Path, Path], options: tuple[str, ...], said: str
) -> None:
    status, out, err = rlprof("compare", *traces, *options)
    assert (status, out) == (1, "")
    assert err.startswith(f"rlprof: {said}")
    assert err.count("\n") == 1
