"""Critical paths of real traces, compared with HTA's if a Python has it.

Opt-in: ``RLPROF_PEERS`` names a Python that has the package ``traceinsight``. HTA takes one step
and counts whole microseconds, so that shares are compared, not times.
"""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from lightning_rlprof.analysis.device.device_critical_path import device_critical_path
from lightning_rlprof.loaders.load import load
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"
PEERS = os.environ.get("RLPROF_PEERS", "")
pytestmark = [
    pytest.mark.skipif(
        not PEERS, reason="RLPROF_PEERS names no Python that has HTA (traceinsight)"
    ),
    pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto"),
]
SCRIPT = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
step = int(sys.argv[2])
graph, _ = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=step)
found = graph.get_critical_path_breakdown()
print(json.dumps(found.groupby("bound_by")["duration"].sum().to_dict()))
"""


@pytest.mark.parametrize(
    ("name", "step", "host"),
    [
        ("ns_resolution_rank-0.json.gz", 1, 0.0),
        ("nccl.json.gz", 1, 1.0),
        ("cuda_event_sync.json.gz", 0, 0.98),
    ],
)
def test_the_host_has_the_share_that_hta_gives_it(name: str, step: int, host: float) -> None:
    file = str(KINETO / name)
    command = [PEERS, "-W", "ignore", "-c", SCRIPT, file, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs.get("cpu_bound", 0) / sum(theirs.values()) == pytest.approx(host, abs=0.015)
    ours: Counter[object] = Counter()
    for part, _, _, share, *_ in device_critical_path(load(Path(file))).rows:
        ours[part] += share
    assert ours["host"] == pytest.approx(host, abs=0.015)
