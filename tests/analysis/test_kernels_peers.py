"""Kernels, operators and queues of real traces, compared with HTA's if a Python has it.

Opt-in: ``RLPROF_PEERS`` names a Python that has the package ``traceinsight``, in an environment of
its own. ``docs/accuracy.md`` explains the differences from HTA.
"""

import json
import os
import subprocess
from functools import cache
from typing import Any

import pytest

from lightning_rlprof.analysis.device.launches import launches
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.analysis.operators import UNATTRIBUTED, operators
from lightning_rlprof.loaders.load import load
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "kineto"
PEERS = os.environ.get("RLPROF_PEERS", "")
NAMES = ("alexnet", "h100_qwen1.5-0.5b", "mi300_bert-small", "nccl", "ns_resolution_rank-0")
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
events = hta.t.get_trace(0)
symbols = hta.t.symbol_table.get_sym_table()
events["text"] = [symbols[code] for code in events["name"]]
kind = [symbols[code] if code >= 0 else "" for code in events["cat"]]
events["kind"] = kind
ran = events[events["kind"] == "kernel"].groupby("text")["dur"].agg(["count", "sum"])
calls = events[events["kind"] == "cpu_op"]["text"].value_counts()
queue = hta.get_queue_length_time_series()[0]
print(json.dumps({
    "kernels": {name: [int(row["count"]), int(row["sum"])] for name, row in ran.iterrows()},
    "operators": {name: int(count) for name, count in calls.items()},
    "queue": {int(s): int(rows["queue_length"].max()) for s, rows in queue.groupby("stream")},
}))
"""


@cache
def hta(name: str) -> Any:
    command = [PEERS, "-W", "ignore", "-c", SCRIPT, str(DATA / f"{name}.json.gz")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


@every_trace
def test_kernels_are_as_many_and_as_long_as_htas_but_for_its_microseconds(name: str) -> None:
    table = kernels(load(DATA / f"{name}.json.gz"))
    columns = (table.column(each) for each in ("kernel", "kind", "count", "total"))
    found = {row[0]: row[2:] for row in zip(*columns, strict=True) if row[1] != "copy"}
    theirs = hta(name)["kernels"]
    assert {each: count for each, (count, _) in found.items()} == {
        each: count for each, (count, _) in theirs.items()
    }
    for each, (count, total) in found.items():
        # Start and end are cut to microseconds separately.
        assert abs(total - 1_000 * theirs[each][1]) <= 2_000 * count


@every_trace
def test_operators_are_called_as_often_as_in_hta(name: str) -> None:
    table = operators(load(DATA / f"{name}.json.gz"))
    found = dict(zip(table.column("operator"), table.column("calls"), strict=True))
    del found[UNATTRIBUTED]
    assert found == hta(name)["operators"]


@every_trace
def test_queues_are_as_long_as_in_hta_but_for_what_begins_in_the_same_microsecond(
    name: str,
) -> None:
    table = launches(load(DATA / f"{name}.json.gz"))
    found = dict(zip(table.column("stream"), table.column("queue max"), strict=True))
    theirs = hta(name)["queue"]
    assert set(found) == set(map(int, theirs))
    for stream, most in found.items():
        assert abs(most - theirs[str(stream)]) <= 1
