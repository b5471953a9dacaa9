"""Contracts of run files of format 1: what is read from stored ones, and what is written."""

import gc
import itertools
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_rlprof import annotate, count, mark, record, sample, stage
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording import annotations, open_spans
from lightning_rlprof.recording.background.sampler import CpuWait, HostMemory
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import FakeClock, FakeRecorder, make_header
from tests.golden.golden import Contract, answer, rows_of

_SPAN = [
    "name",
    "kind",
    "rank",
    "step",
    "start_ns",
    "end_ns",
    "duration_ns",
    "thread",
    "thread_name",
    "id",
    "parent",
]
_COUNTED = ("spans", "ranks", "total_ns", "steps", "marks", "notes", "warnings")
_COUNTS = """\
select count(*) as spans, count(distinct rank) as ranks, sum(end_ns - start_ns) as total_ns,
count(*) filter (kind = 'step') as steps, count(*) filter (kind = 'mark') as marks,
(select count(*) from notes) as notes, (select count(*) from warnings) as warnings"""


def _format_1(run: str, change: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Return numbers of a stored run: of its spans, of each counter, and of the ledger."""
    if change is not None:
        change(run)
    columns = rows_of("sql", run, "--describe")
    counters = [row[1] for row in columns if row[0] == "spans" and row[1] not in _SPAN]
    sums = [f'count("{name}"), sum("{name}")' for name in counters]
    query = f"{_COUNTS}, {', '.join(sums)} from spans" if sums else f"{_COUNTS} from spans"
    (row,) = rows_of("sql", run, query)
    counts = dict(zip(_COUNTED, row[: len(_COUNTED)], strict=True))
    values = row[len(_COUNTED) :]
    pairs = zip(values[::2], values[1::2], strict=True)
    facts = answer(f"show {run} rank_status")
    ledger = answer(f"show {run} ledger")
    return {
        "counts": counts,
        "counters: count and sum": dict(zip(counters, pairs, strict=True)),
        "ledger": {row[0]: row[3] for row in ledger["tables"][0]["rows"]},
        "rank_status": facts["tables"][0]["rows"],
        "warnings": facts["warnings"],
        "notes": facts["notes"],
    }


def _cut(run: str) -> None:
    """Cut the first rank's file in the middle of a line, as a full disk does."""
    path = Path(run, "rank-00000.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n", len(data) // 2) - 20])


def _crash(run: str) -> None:
    """Take the last step and the end from a rank that was killed; the other one says why."""
    first, second = (Path(run, f"rank-0000{rank}.jsonl") for rank in (0, 1))
    header, *lines = first.read_text().splitlines()
    early = [line for line in lines if not _is_late(json.loads(line))]
    first.write_text("\n".join([header, *early]) + "\n")
    second.write_text(second.read_text().replace('"finished"]', '"exception: ValueError"]'))


def _is_late(line: list[Any]) -> bool:
    return line[0] == "end" or (line[0] == "span" and line[3] == 24)


def _written() -> str:
    """Return the file of a session on a fake clock; the number of its thread becomes 1."""
    clock, none, numbers = FakeClock(), lambda self: {}, itertools.count(1)
    gc.disable()  # a collection is a span of its own
    try:
        with (
            patch.object(HostMemory, "counters", none),
            patch.object(CpuWait, "counters", none),
            # The process numbers its spans, also those of tests that ran before.
            patch.object(annotations, "numbers", numbers),
            patch.object(open_spans, "numbers", numbers),
        ):
            session = Session(
                ProfilerConfig.build(None), Path("written"), make_header(), [FakeRecorder()], clock
            )
            for step in (1, 2):
                session.begin_step(step)
                _train(session, clock, step)
                session.end_step()
            session.close()
    finally:
        gc.enable()
    text = Path("written", "rank-00000.jsonl").read_text(encoding="utf-8")
    return text.replace(str(threading.get_ident()), "1")


def _train(session: Session, clock: FakeClock, step: int) -> None:
    clock.advance(1_000)
    with patch("os.urandom", lambda size: bytes([step] * size)):
        one = sample("prompt 3", group="group 1")
    with stage("actor_generate", requests=8):
        clock.advance(5_000)
        with annotate("prefill"):
            clock.advance(2_000)
        count(tokens=512 * step, entropy=0.5)
        one.first_token()
    with one.phase("compute_reward", reward=1):
        clock.advance(10)
    one.end("trained", tokens=12)
    record("weight_sync", clock() - 5, clock(), version=step)
    mark("checkpoint saved")
    session.note("warning", f"something of step {step} is lost")


CONTRACTS: dict[str, Contract] = {
    **{f"format-1/{run}.json": partial(_format_1, run) for run in ("demo", "slow", "async")},
    "format-1/truncated.json": partial(_format_1, "demo", _cut),
    "format-1/crashed.json": partial(_format_1, "demo", _crash),
    "format-1/written.jsonl": _written,
}
