"""The kernels of two real ranks beside HTA's TraceDiff, where a Python has it.

Opt-in: ``RLPROF_PEERS`` names a Python that has the package ``traceinsight``. HTA compares one
iteration unless it is told which; here it is told both.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lightning_rlprof.analysis.comparison.trace_diff import TOTAL, trace_diff
from lightning_rlprof.loaders.load import load
from tests.places import SHARED_DATA

RANKS = SHARED_DATA / "kineto" / "two_ranks"
PEERS = os.environ.get("RLPROF_PEERS", "")
pytestmark = [
    pytest.mark.skipif(
        not PEERS, reason="RLPROF_PEERS names no Python that has HTA (traceinsight)"
    ),
    pytest.mark.skipif(not RANKS.is_dir(), reason="no real traces in ../shared/data/kineto"),
]
SCRIPT = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.common.trace import Trace
from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff
sides = []
for label, path in zip("AB", sys.argv[1:]):
    trace = Trace({0: path}, trace_dir="/")
    trace.parse_traces()
    trace.decode_symbol_ids()
    sides.append(LabeledTrace(label, t=trace))
both = {"control_iteration": [551, 552], "test_iteration": [551, 552]}
found = TraceDiff.compare_traces(*sides, **both, device_type=DeviceType.GPU).fillna(0)
columns = ["A_counts", "B_counts", "A_total_duration", "B_total_duration"]
print(json.dumps({name: [int(row[each]) for each in columns] for name, row in found.iterrows()}))
"""


def test_kernels_are_as_many_and_as_long_as_htas() -> None:
    files = [str(RANKS / f"rank-{rank}.json.gz") for rank in (0, 1)]
    command = [PEERS, "-W", "ignore", "-c", SCRIPT, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    theirs = json.loads(done.stdout.splitlines()[-1])
    kernels = {name: row for name, row in theirs.items() if not name.startswith("Mem")}
    table = trace_diff(*(load(Path(file)) for file in files), by="kernels")
    columns = (table.column(each) for each in ("kernel", "A count", "B count", "A", "B"))
    ours = {
        name: [round(2 * n), round(2 * m), a * 2 // 1_000, b * 2 // 1_000]
        for name, n, m, a, b in zip(*columns, strict=True)  # over two steps, in microseconds
        if not str(name).startswith("Mem") and name != TOTAL
    }
    assert ours == kernels
