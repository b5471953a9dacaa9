"""Breakdown and overlap of real traces, compared with HTA's if a Python has it.

Opt-in: ``RLPROF_PEERS`` names a Python that has the package ``traceinsight``, in an environment of
its own. ``docs/accuracy.md`` explains the differences from HTA's defaults.
"""

import json
import os
import subprocess
from functools import cache
from typing import Any

import pytest

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.analysis.device.timeline import device_timeline
from lightning_rlprof.loaders.load import load
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "kineto"
PEERS = os.environ.get("RLPROF_PEERS", "")
NAMES = [
    *("h100_qwen1.5-0.5b", "mi300_bert-small", "nccl", "ns_resolution_rank-0"),
    *("two_ranks/rank-0", "two_ranks/rank-1", "cuda_event_sync"),
]
pytestmark = [
    pytest.mark.skipif(
        not PEERS, reason="RLPROF_PEERS names no Python that has HTA (traceinsight)"
    ),
    pytest.mark.skipif(not DATA.is_dir(), reason="no real traces in ../shared/data/kineto"),
]
every_trace = pytest.mark.parametrize("name", NAMES)
SCRIPT = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
hta = TraceAnalysis({0: sys.argv[1]}, trace_dir="/", include_last_profiler_step=True)
row = hta.get_temporal_breakdown(visualize=False).iloc[0]
found = {name: float(row[name + "_time(us)"]) for name in ("idle", "compute", "non_compute")}
overlap = hta.get_comm_comp_overlap(visualize=False)
print(json.dumps(found | {"overlap": float(overlap["comp_comm_overlap_pctg"][0])}))
"""


@cache
def hta(name: str) -> Any:
    """Return HTA's microseconds and per cent, without its rounding and with the last step."""
    command = [PEERS, "-W", "ignore", "-c", SCRIPT, str(DATA / f"{name}.json.gz")]
    exact = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, env=exact
    )
    return json.loads(done.stdout.splitlines()[-1])


@every_trace
def test_compute_other_work_and_idle_are_htas(name: str) -> None:
    spans = load(DATA / f"{name}.json.gz")
    table = breakdown(spans)
    names = [column.name for column in table.columns]
    ours = dict(zip(names, table.rows[-1], strict=True))
    (lane,) = device_timeline(spans).lanes
    outside = lane.work.start_ns.min() - lane.start_ns + lane.end_ns - lane.work.end_ns.max()
    waits = 5 if name == "cuda_event_sync" else 0  # of the host for a stream: work, says HTA

    theirs = hta(name)
    # Its times since 1970 are doubles, a quarter of a microsecond apart.
    near = {"rel": 1e-6, "abs": 0.25}
    assert ours["compute"] / 1e3 == pytest.approx(theirs["compute"], **near)
    others = ours["exposed communication"] + ours["exposed memcpy"]
    assert others / 1e3 + waits == pytest.approx(theirs["non_compute"], **near)
    inside = ours["idle"] + ours["unknown"] - outside
    assert inside / 1e3 - waits == pytest.approx(theirs["idle"], **near)


@every_trace
def test_overlap_is_htas(name: str) -> None:
    table, theirs = breakdown(load(DATA / f"{name}.json.gz")), hta(name)["overlap"]
    names = ("overlapped communication", "exposed communication")
    hidden, exposed = (int(table.column(each)[-1] or 0) for each in names)

    if not hidden + exposed:
        assert theirs != theirs  # it says nan
    else:
        assert round(100 * hidden / (hidden + exposed), 2) == theirs
