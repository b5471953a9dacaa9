"""`rlprof show`: which analyses there are, and one of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.analysis.catalog import ANALYSES
from tests.test_run import recorded

Run = Callable[..., tuple[int, str, str]]


def test_without_a_name_all_analyses_are_listed_with_what_they_answer(
    rlprof: Run, tmp_path: Path
) -> None:
    status, out, _ = rlprof("show", tmp_path)

    assert status == 0
    for name in ANALYSES:
        assert f"\n{name} " in f"\n{out}"
    assert "`" not in out
    assert list(json.loads(rlprof("show", tmp_path, "--json")[1])) == list(ANALYSES)


@pytest.mark.parametrize("name", list(ANALYSES))
def test_each_analysis_is_shown_and_told_as_json(name: str, rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)

    status, out, err = rlprof("show", run.path, name)
    (table,) = json.loads(rlprof("show", run.path, name, "--json")[1])["tables"]

    assert (status, err) == (0, "")
    assert out.startswith(f"{run.path}\n\n{table['name']}")
    assert f"Next: rlprof show {run.path}" in out.replace("\n", " ")
    assert table == json.loads(json.dumps(ANALYSES[name].run(run).to_dict()))


def test_rows_are_of_one_rank_and_as_many_as_wanted(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)

    def rows(*words: str) -> list[list[object]]:
        (table,) = json.loads(rlprof("show", run.path, *words, "--json")[1])["tables"]
        return list(table["rows"])

    assert len(rows("stages")) == 2
    assert len(rows("stages", "--rows", "1")) == 1
    assert len(rows("rank_status", "--rank", "0")) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nonsense",), "nonsense: is no analysis (there are: data_quality, findings, "),
        (("ledger", "--rank", "0"), "--rank 0: ledger has no rows of single ranks"),
        (("stages", "--rank", "7"), "--rank 7: is not in this run, which has 0"),
        (("rank_status", "--rank", "7"), "--rank 7: is not in this run, which has 0"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words: tuple[str, ...], text: str, rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("show", recorded(tmp_path).path, *words)

    assert (status, out) == (1, "")
    assert err.startswith(f"rlprof: {text}")
    assert err.count("\n") == 1
