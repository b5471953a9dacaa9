"""The ledger of four real processes over gloo, beside what each of them measured of itself."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.ledger.ledger import (
    category_breakdown,
    category_totals,
    compute_accounts,
)
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from tests.builders.roles import DIES, SCRIPT, STEPS
from tests.places import ROOT

SECONDS = 120
Between = tuple[int, int]
"""Nanoseconds inside of a marker and around it: what is recorded lies between them."""
Measured = list[list[dict[str, Between]]]


def play(folder: Path, how: str) -> tuple[Spans, Measured, list[int]]:
    """Run the four; return the run, what they measured by rank and step, and how they ended."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.builders.roles", str(folder), str(rank), how],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(len(SCRIPT))
    ]
    try:
        statuses = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [(folder / f"measured-{rank}.jsonl").read_text() for rank in range(len(SCRIPT))]
    measured = [[json.loads(line) for line in own.splitlines()] for own in lines]
    return load(folder / "runs"), measured, statuses


def by_rank(spans: Spans) -> list[dict[str, Any]]:
    table = category_breakdown(compute_accounts(spans, per_rank=True), per_step=False)
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def expected(measured: Measured, rank: int) -> dict[str, Between]:
    """Return what a rank measured, its collectives divided by what all of them measured."""
    least, most = Counter[str](), Counter[str]()
    for step, own in enumerate(measured[rank]):
        together = [steps[step]["all_reduce"] for steps in measured if step < len(steps)]
        shortest = min(inside for inside, _ in together), min(around for _, around in together)
        inside, around = own["all_reduce"]
        parts = {**own, "exposed communication": shortest}
        parts["collective wait"] = (max(inside - shortest[1], 0), around - shortest[0])
        del parts["all_reduce"]
        for label, between in parts.items():
            least[label] += between[0]
            most[label] += between[1]
    return {label: (least[label], ns) for label, ns in most.items() if ns}


def close(ns: int, between: Between) -> bool:
    slack = max(2_000_000, 0.02 * between[1])
    return between[0] - slack <= ns <= between[1] + slack


def wrong(line: dict[str, Any], wanted: dict[str, Between]) -> dict[str, tuple[int, Between]]:
    """Return the labels that a rank's line has otherwise than was measured."""
    labels = {*line, *wanted} - {"rank", "wall", "untraced", "outside steps"}
    found = {each: (int(line.get(each) or 0), wanted.get(each, (0, 0))) for each in labels}
    return {each: pair for each, pair in found.items() if not close(*pair)}


def check_sum(spans: Spans) -> None:
    accounts = compute_accounts(spans)
    whole = sum(int(ns or 0) for ns in category_totals(accounts).column("total"))
    assert whole == len(SCRIPT) * accounts.wall_ns
    assert {line["wall"] for line in by_rank(spans)} == {accounts.wall_ns}


@pytest.mark.deep
def test_four_scripted_roles_come_out_as_they_measured_themselves(tmp_path: Path) -> None:
    spans, measured, statuses = play(tmp_path, "whole")

    assert statuses == [0] * 4
    check_sum(spans)
    for rank, (line, script) in enumerate(zip(by_rank(spans), SCRIPT.values(), strict=True)):
        assert wrong(line, expected(measured, rank)) == {}
        for part in script:  # a sleep may be late, never early
            assert line[part.label] >= STEPS * part.ms * 1_000_000


@pytest.mark.deep
def test_a_role_that_is_killed_is_outside_steps_from_its_last_step_on(tmp_path: Path) -> None:
    spans, measured, statuses = play(tmp_path, "dies")

    assert [status != 0 for status in statuses] == [rank == DIES for rank in range(4)]
    check_sum(spans)
    assert len(measured[DIES]) == 1
    lines = by_rank(spans)
    for rank, line in enumerate(lines):
        assert wrong(line, expected(measured, rank)) == {}
    dead = lines[DIES]
    traced = sum(around for _, around in expected(measured, DIES).values())
    unknown = dead["untraced"] + dead["outside steps"]
    assert unknown >= dead["wall"] - traced - 2_000_000
    assert dead["outside steps"] > dead["untraced"]
    assert f"Rank {DIES}: file is truncated " in category_totals(compute_accounts(spans)).note
