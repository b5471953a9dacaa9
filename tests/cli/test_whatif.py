"""`rlprof whatif` and `rlprof whatif check`: predictions printed, saved and checked."""

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


def test_saved_predictions_are_checked_with_a_later_run(rlprof: Run, tmp_path: Path) -> None:
    run, later = slow_run(tmp_path), recorded(tmp_path / "later", steps=20, slow={})
    status, out, err = rlprof("whatif", run, "--speedup", "actor_generate=2", "--save")

    assert (status, err) == (0, "")
    assert "actor_generate 2x faster" in out
    saved = run / "predictions.jsonl"
    assert f"Saved predictions to {saved}. After the change: rlprof whatif check {run} NEW" in out
    assert [json.loads(line)["change"] for line in saved.read_text().splitlines()]

    with saved.open("a") as stream:
        stream.write('{"change": "cut off')  # by a crash
    data = json.loads(rlprof("whatif", "check", run, later, "--json")[1])
    assert abs(rows(data)["no straggler"]["error"]) < 0.05
    assert rows(data)["actor_generate 2x faster"]["error"] < -0.3


def test_nothing_is_saved_by_default(rlprof: Run, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    data = json.loads(rlprof("whatif", run, "--json", "--remove", "actor_update")[1])
    assert data["predictions_file"] is None
    assert not (run / "predictions.jsonl").exists()
    assert "actor_update removed" in rows(data)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--speedup", "fast"), "--speedup fast is not STAGE=N\n  hint: For example --speedup"),
        (("--remove", "actor_generat"), "\n  hint: did you mean 'actor_generate'?"),
        (("--remove", "nonsense"), "unknown stage 'nonsense'. Stages in this run: actor_gen"),
        (("--stop-rollout-at", "0.9"), "request"),
    ],
)
def test_errors_say_what_to_do(
    words: tuple[str, ...], text: str, rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("whatif", slow_run(tmp_path), *words)
    assert (status, out) == (2, "")
    assert text in err


def test_without_saved_predictions_there_is_nothing_to_check(rlprof: Run, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    file, hint = (
        run / "predictions.jsonl",
        "  hint: Save predictions first: rlprof whatif RUN --save",
    )
    for error in (f"no predictions: {file} does not exist", f"no predictions in {file}"):
        assert rlprof("whatif", "check", run, run)[::2] == (2, f"rlprof: error: {error}\n{hint}\n")
        file.write_text("\n")


def test_predictions_that_cannot_be_saved_are_an_error(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", steps=20, slow={2: 0.15})
    (run / "predictions.jsonl").mkdir()
    status, _, err = rlprof("whatif", run, "--save")
    assert (status, "cannot save predictions to" in err) == (2, True)
    assert rlprof("whatif", run)[0] == 0


def test_predictions_of_a_remote_run_are_saved_here(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    url = f"file://{slow_run(tmp_path)}"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert rlprof("whatif", url, "--save")[::2] == (0, "")
    assert [path.name for path in Path().iterdir()] == ["slow-predictions.jsonl"]
    assert rlprof("whatif", "check", url, url)[::2] == (0, "")
