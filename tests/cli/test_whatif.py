"""`rlprof whatif`: what it prints, keeps, scores and refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_stragglers import recorded

Run = Callable[..., tuple[int, str, str]]


def slow_run(folder: Path) -> Path:
    return recorded(folder / "slow", steps=20, slow={2: 0.15})


def rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (table,) = data["tables"]
    names = [column["name"] for column in table["columns"]]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table["rows"]}


def test_predictions_are_kept_beside_the_run_and_scored_by_a_later_one(
    rlprof: Run, tmp_path: Path
) -> None:
    run, later = slow_run(tmp_path), recorded(tmp_path / "later", steps=20, slow={})
    status, out, err = rlprof("whatif", run, "--faster", "actor_generate=2")

    assert (status, err) == (0, "")
    assert "actor_generate 2x faster" in out
    kept = run / "predictions.jsonl"
    assert f"Kept in {kept}" in "".join(out.split("\n"))
    assert [json.loads(line)["change"] for line in kept.read_text().splitlines()]

    with kept.open("a") as stream:
        stream.write('{"change": "cut off')  # by a crash
    data = json.loads(rlprof("whatif", run, "--score", later, "--json")[1])
    assert abs(rows(data)["no straggler"]["error"]) < 0.05
    assert rows(data)["actor_generate 2x faster"]["error"] < -0.3


def test_nothing_is_kept_where_that_is_not_wanted(rlprof: Run, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    data = json.loads(rlprof("whatif", run, "--no-keep", "--json", "--removed", "actor_update")[1])
    assert data["kept"] is None
    assert not (run / "predictions.jsonl").exists()
    assert "actor_update removed" in rows(data)


def test_what_is_wrong_is_one_line(rlprof: Run, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    status, _, err = rlprof("whatif", run, "--faster", "fast")
    assert (status, "takes STAGE=TIMES" in err) == (1, True)
    status, _, err = rlprof("whatif", run, "--removed", "nonsense")
    assert (status, "unknown stage" in err) == (1, True)
    status, _, err = rlprof("whatif", run, "--score", run)
    assert (status, "rlprof whatif RUN writes it" in err) == (1, True)
    status, _, err = rlprof("whatif", run, "--cut", "0.9")
    assert (status, "need a span per request" in err) == (1, True)
    (run / "predictions.jsonl").write_text("\n")
    status, _, err = rlprof("whatif", run, "--score", run)
    assert (status, "holds no prediction" in err) == (1, True)


def test_predictions_that_cannot_be_kept_are_shown_all_the_same(
    rlprof: Run, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", steps=20, slow={2: 0.15})
    (run / "predictions.jsonl").mkdir()
    status, out, err = rlprof("whatif", run)
    assert (status, "the predictions are not kept" in err) == (0, True)
    assert "no straggler" in out


def test_predictions_of_a_run_elsewhere_are_kept_here(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    url = f"file://{slow_run(tmp_path)}"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert rlprof("whatif", url)[::2] == (0, "")
    assert [path.name for path in Path().iterdir()] == ["slow-predictions.jsonl"]
    assert rlprof("whatif", url, "--score", url)[::2] == (0, "")
