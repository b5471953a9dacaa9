"""`rlprof demo --async`: real Ray actors ahead of a trainer, one killed, and books that balance."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.analysis.ledger.accounts import compute_accounts
from lightning_rlprof.analysis.ledger.ledger import category_totals
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import load as load_run
from lightning_rlprof.tables.table import Table

Run = Callable[..., tuple[int, str, str]]


def counts(table: Table) -> dict[object, int]:
    return {row[0]: int(row[1] or 0) for row in table.rows}


@pytest.mark.deep
def test_a_killed_rollout_actor_leaves_books_that_balance_on_one_axis(
    rlprof: Run, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    status, out, err = rlprof(
        "demo", "--async", "--kill-rollout", "--steps", "12", "-o", tmp_path / "runs"
    )
    assert status == 0, err
    assert "One rollout actor was killed halfway." in out
    (path,) = (tmp_path / "runs").glob("2*")
    run, spans = load_run(path), load(path)

    assert execution_mode(spans) == Mode.ASYNCHRONOUS
    assert {row[0]: row[1] for row in run.roles().rows} == {"trainer": 1, "rollout": 2}
    fates = counts(run.samples())
    assert fates.pop("generated") == sum(fates.values())
    assert "unknown" not in fates
    assert fates["trained"] + fates.get("zero_advantage", 0) == 12 * 4 * 8
    assert fates["retried"] > 0
    stale = run.staleness().rows[0]
    assert 0 < stale[4] <= 2  # type: ignore[operator]
    accounts = compute_accounts(spans)
    total = sum(int(ns or 0) for ns in category_totals(accounts).column("total"))
    assert total == accounts.total_ns == 3 * accounts.wall_ns
    for table in (run.long_tail(), run.tail_causes(), run.weight_sync(), run.whatif()):
        assert table.abstained is None
        assert table.rows
    way = run.sample_path().rows
    assert way[0][2] == "rollout"
    assert "actor_update" in [row[0] for row in way if row[2] == "trainer"]
    assert rlprof("report", path, "-o", tmp_path / "report.html")[0] == 0
    page = (tmp_path / "report.html").read_text()
    for heading in ("samples", "long_tail", "staleness", "weight_sync", "sample_path", "ledger"):
        assert heading in page


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--kill-rollout",), "--kill-rollout needs --async"),
        (("--async", "--ranks", "2"), "--ranks doesn't apply to --async"),
        (("--async", "--slow-rank", "1"), "--slow-rank doesn't apply to --async"),
        (("--async", "--kv-cache"), "--kv-cache doesn't apply to --async"),
        (("--async", "--model", "smollm2"), "--model doesn't apply to --async"),
        (("--async", "--steps", "0"), "steps=0 is too small"),
        (("--async", "--task", "spell"), "task='spell' is unknown"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: tuple[str, ...], text: str, rlprof: Run
) -> None:
    status, out, err = rlprof("demo", *words)
    assert (status, out) == (2, "")
    assert text in err
