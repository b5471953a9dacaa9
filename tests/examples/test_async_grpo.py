"""`examples/ray/async_grpo.py`: actors ahead of a trainer, one killed, and books that balance."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.analysis.ledger.ledger import category_totals, compute_accounts
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import load as load_run
from lightning_rlprof.tables.table import Table
from tests.places import ROOT

Run = Callable[..., tuple[int, str, str]]


def counts(table: Table) -> dict[object, int]:
    return {row[0]: int(row[1] or 0) for row in table.rows}


@pytest.mark.deep
def test_a_killed_rollout_actor_leaves_books_that_balance_on_one_axis(
    rlprof: Run, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    words = ["--kill-rollout", "--steps", "12", "-o", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray" / "async_grpo.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
    for table in (run.long_tail(), run.tail_causes(), run.weight_sync()):
        assert table.abstained is None
        assert table.rows
    # How much the work of the ranks explains depends on what else the machine did.
    predicted = run.whatif()
    assert predicted.rows or "explains" in str(predicted.abstained)
    way = run.sample_path().rows
    assert way[0][2] == "rollout"
    assert "actor_update" in [row[0] for row in way if row[2] == "trainer"]
    assert rlprof("report", path, "-o", tmp_path / "report.html")[0] == 0
    page = (tmp_path / "report.html").read_text()
    for heading in ("samples", "long_tail", "staleness", "weight_sync", "sample_path", "ledger"):
        assert heading in page
