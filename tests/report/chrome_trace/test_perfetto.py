"""An exported trace as Perfetto's own trace processor reads it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.steps.step_matrix import find_waits
from lightning_rlprof.report.chrome_trace.writer import write_trace
from tests.builders.scripted import Script, play

STEPS, RANKS = 40, 4


def binary() -> str | None:
    """Return the trace processor that TRACE_PROCESSOR names, one on the PATH, or a kept one."""
    names = (os.environ.get("TRACE_PROCESSOR", ""), "trace_processor_shell", "trace_processor")
    kept = Path.home().glob(".local/share/perfetto/prebuilts/trace_processor_shell*")
    return next(
        (found for name in (*names, *map(str, kept)) if (found := shutil.which(name))), None
    )


@pytest.mark.deep
def test_perfetto_reads_every_step_counter_and_arrow(tmp_path: Path) -> None:
    processor: Any = pytest.importorskip(
        "perfetto.trace_processor", reason="NO PERFETTO: pip install perfetto"
    )
    found = binary()
    if found is None:
        pytest.skip(
            "NO TRACE PROCESSOR: perfetto downloads it at first use; set TRACE_PROCESSOR to one"
        )
    spans = play(Script(ranks=RANKS, steps=STEPS, slow={2: 0.4}), 3).spans
    write_trace(spans, tmp_path / "t.json")
    config = processor.TraceProcessorConfig(bin_path=found)
    with processor.TraceProcessor(trace=str(tmp_path / "t.json"), config=config) as trace:

        def rows(query: str) -> list[Any]:
            return list(trace.query(query))

        steps = rows(
            "select utid, count(*) as n from slice join thread_track on track_id = thread_track.id "
            "join thread using (utid) where thread.name = 'steps' group by utid"
        )
        assert [row.n for row in steps] == [STEPS] * RANKS
        counters = rows(
            "select upid, count(*) as n from counter join process_counter_track as t "
            "on track_id = t.id where t.name = 'tokens/s' group by upid"
        )
        assert [row.n for row in counters] == [STEPS + 1] * RANKS
        assert rows("select count(*) as n from flow")[0].n == len(find_waits(spans).row)
        broken = "select name from stats where severity in ('error', 'data_loss') and value > 0"
        assert [row.name for row in rows(broken)] == []
