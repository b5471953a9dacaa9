"""Recording in a Python that has no torch: a virtual environment with all other packages."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof import load
from lightning_rlprof.records.run_directory import read_trace
from tests.places import ROOT

pytestmark = pytest.mark.deep

_NEED_TORCH = {"torch", "torchgen", "functorch", "torchmetrics", "lightning", "lightning_fabric"}
_NEED_TORCH |= {"pytorch_lightning", "accelerate", "transformers", "trl"}

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without torch."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python3*/site-packages")
    for folder in map(Path, filter(lambda path: path.endswith("site-packages"), sys.path)):
        for entry in folder.iterdir():
            name = entry.name.partition("-")[0].partition(".")[0]
            if name not in _NEED_TORCH and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return home / "bin" / "python"


@pytest.fixture
def python(bare: Path, tmp_path: Path) -> Python:
    """Run code in it, with tmp_path as working directory."""

    def run(code: str, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "program.py").write_text(code)
        kept = {name: value for name, value in os.environ.items() if "RLPROF" not in name}
        return subprocess.run(
            [str(bare), *words, "program.py"], cwd=tmp_path, capture_output=True, text=True,
            env={**kept, "PYTHONPATH": str(ROOT), **variables}, timeout=120, check=False,
        )  # fmt: skip

    return run


SERVER = """
import sys, time
import lightning_rlprof as rlprof
session = rlprof.start_session(role="tools", hang_timeout=0.2, stage="actor_update")
for call in range(3):
    with rlprof.step(), rlprof.stage("env_step", calls=1):
        rlprof.count(tokens=4)
        with rlprof.sample(call).phase("run"):
            pass
now = time.perf_counter_ns()
rlprof.record("weight_sync", now, now)
rlprof.mark("ready")
with rlprof.step():  # until the hang is reported
    while not list(session.run.rglob("rank-*-*.json")):
        time.sleep(0.01)
rlprof.log_memory("served")
print(rlprof.gather_timings({"a": 1.0}), "torch" in sys.modules)
"""


def test_a_server_records_all_that_needs_no_torch(python: Python, tmp_path: Path) -> None:
    done = python(SERVER)
    assert (done.returncode, done.stdout) == (0, "{'a': [1.0]} False\n"), done.stderr
    assert "Traceback" not in done.stderr
    (file,) = (tmp_path / "profiler_data").glob("2*/rank-*.jsonl")
    trace = read_trace(file)
    assert (trace.header.role, trace.header.device, trace.status) == ("tools", "cpu", "finished")
    assert {"env_step", "run", "weight_sync", "ready"} <= {each.name for each in trace.spans}
    assert "capture-unsupported" in {note.code for note in trace.notes}
    assert load(file.parent).steps().column("step") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "recorder"),
    [
        ("tools=['torch_profiler']", "torch_profiler"),
        ("tools=['nsight']", "nsight"),
        ("memory={'level': 'snapshot'}, steps=[1]", "memory"),
        ("device='cuda'", "device_time"),
    ],
)
def test_what_needs_torch_is_refused_before_a_run_begins(
    options: str, recorder: str, python: Python, tmp_path: Path
) -> None:
    done = python(f"from lightning_rlprof import start_session\nstart_session({options})")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"lightning_rlprof.errors.ConfigError: {recorder} needs PyTorch")
    assert not list(tmp_path.glob("profiler_data/2*"))


OPEN_TELEMETRY = """
from opentelemetry.sdk.trace import TracerProvider
tracer = TracerProvider().get_tracer("nemo")
for _ in range(4):
    with tracer.start_as_current_span("rl.grpo.step"):
        with tracer.start_as_current_span("rl.grpo.policy_training"):
            pass
"""


def test_spans_of_opentelemetry_are_recorded(bare: Path, python: Python, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    words = ("-m", "lightning_rlprof", "run", "--", str(bare))
    done = python(OPEN_TELEMETRY, *words, RLPROF__ROLE="judge")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "4 steps" in done.stderr  # no rank 0 has printed it
    (path,) = (tmp_path / "profiler_data").glob("2*")
    run = load(path)
    assert run.steps().column("step") == [1, 2, 3, 4]
    assert [header.role for header in run.headers.values()] == ["judge"]


JOB = """
import os, subprocess, sys
from lightning_rlprof import stage, start_session, step
if sys.argv[1:] == ["server"]:
    start_session(role="tools")
    with stage("env_step"):
        print(flush=True)
        sys.stdin.read()
    sys.exit()

def served():
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, __file__, "server"], **pipes)
    process.stdout.readline()
    return process

before = [] if "RANK" in os.environ else [served()]
os.environ.update(RANK="0", WORLD_SIZE="2")
with start_session():
    servers = [*before, served()]  # inherits the rank
    for _ in range(3):
        with step(), stage("actor_update"):
            pass
    for each in servers:
        each.communicate()
"""


def test_servers_are_roles_of_the_job_beside_the_ranks_of_the_training(
    python: Python, tmp_path: Path
) -> None:
    done = python(JOB, RLPROF_JOB="one")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "profiler_data").glob("2*")
    run = load(path)
    assert {rank: (head.role, head.world_size) for rank, head in run.headers.items()} == {
        0: ("actor", 2),
        10_000: ("tools", 2),
        10_001: ("tools", 2),
    }
    assert {row[0]: row[1] for row in run.roles().rows} == {"actor": 1, "tools": 2}
    assert [note.code for note in run.warnings] == ["ranks-missing"]  # rank 1 of the training
