"""The contract of every door: steps, stages by their known names, and no harm to the program."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.cli.record import launched
from lightning_rlprof.integrations.doors.registry import DOORS
from lightning_rlprof.run import Run, load
from tests.places import ROOT

PROGRAMS = ROOT / "tests" / "doubles" / "programs"
DOUBLES = ROOT / "tests" / "doubles" / "frameworks"


class Case(NamedTuple):
    """What a program records.

    Attributes:
        steps: Complete ones.
        stages: Their names, with the share of a step that each has at least.
        role: Of the process.
    """

    steps: int
    stages: dict[str, float]
    role: str = "actor"


CASES = {
    "sheeprl": Case(4, {"actor_generate": 0.3, "actor_update": 0.3}),
    "skyrl": Case(
        4,
        {
            "wait_for_generation_buffer": 0.15,
            "compute_advantage": 0.03,
            "actor_update": 0.2,
            "weight_sync": 0.03,
        },
    ),
    "nemo_rl": Case(4, {"weight_sync": 0.03, "actor_generate": 0.3, "actor_update": 0.2}),
    "slime": Case(
        5,
        {
            "reference_compute_log_prob": 0.05,
            "actor_update": 0.2,
            "weight_sync": 0.03,
            "train_wait": 0.1,
        },
    ),
    "areal": Case(
        4,
        {
            "wait_for_samples": 0.15,
            "reference_compute_log_prob": 0.03,
            "compute_advantage": 0.02,
            "actor_update": 0.2,
            "weight_sync": 0.03,
            "clear_batches": 0,
        },
    ),
    "openrlhf": Case(
        4,
        {
            "actor_generate": 0.25,
            "make_experience": 0.05,
            "compute_advantage": 0.03,
            "actor_update": 0.15,
            "weight_sync": 0.03,
        },
        "controller",
    ),
    "prime_rl": Case(4, {"wait_for_samples": 0.2, "actor_update": 0.4}),
    "verl": Case(
        4,
        {
            "actor_generate": 0.2,
            "compute_reward": 0.02,
            "actor_compute_log_prob": 0.05,
            "reference_compute_log_prob": 0.05,
            "actor_update": 0.15,
        },
        "controller",
    ),
    "verl_worker": Case(
        4, {"reference_compute_log_prob": 0.2, "actor_update": 0.4, "idle": 0}, "worker"
    ),
    "codetiming": Case(
        10,
        {
            "actor_generate": 0.1,
            "actor_compute_log_prob": 0.05,
            "compute_advantage": 0,
            "actor_update": 0.25,
        },
    ),
    "opentelemetry": Case(4, {"actor_generate": 0.3, "actor_update": 0.25}),
    "fabric": Case(10, {"forward_no_grad": 0.1, "actor_update": 0.2}),
    "pytorch": Case(4, {"actor_generate": 0.3, "actor_update": 0.3}),
}
UNTRACED = 0.25
"""Of a busy machine; docs/integrations says how much it is on a quiet one."""

# In a program whose steps sleep for 30 ms a single stop of half a second would be all of its time.
LONGER = """
import asyncio, time

def longer(sleep):
    return lambda seconds, *more: sleep(20 * seconds, *more)

for module in (asyncio, time):
    module.sleep = longer(module.sleep)
"""


def program_of(name: str) -> str:
    """Return the program for a double of a framework, else the example for the real one."""
    program = PROGRAMS / f"{name}.py"
    example = ROOT / "examples" / name / "train.py"
    return (program if program.exists() else example).read_text()


def ran(program: str, folder: Path, *paths: Path, **variables: str) -> str:
    """Run a program with its doors open; returns what it wrote to standard error."""
    environ = {
        **os.environ,
        **launched({**os.environ, "RLPROF_JOB": f"{folder}"}),
        "RLPROF__INTEGRATED__PROFILE_SAVE_PATH": str(folder / "runs"),
        **variables,
    }
    places = [environ["PYTHONPATH"], *map(str, paths), str(DOUBLES), str(ROOT)]
    environ["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300,
        check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def shares(run: Run) -> dict[str, float]:
    """Return the share of the steps of each stage, and of the time in none.

    Python may collect garbage in any step, which is a row where it takes a millisecond.
    """
    table = run.stages()
    return {
        str(name): float(share)
        for name, share in zip(table.column("stage"), table.column("share"), strict=True)
        if name != "garbage_collection"
    }


def typical_shares(run: Run, *ranks: int) -> dict[str, float]:
    """Return the median share of each stage in a step of some ranks (none: of all), and of none.

    A stop of the machine is in one step, and may be longer than all of them together.
    """
    matrix = step_matrix(run, ranks or None)
    number, every = np.unique(run.step[matrix.steps], return_inverse=True)
    shape = (len(number), len(run.names) + 1)
    (ns,) = matrix.totals(every, shape, matrix.work_ns + matrix.waits_ns)
    medians = np.median(ns / ns.sum(axis=1, keepdims=True), axis=0)
    names = np.array([*run.names, "untraced"])
    there = ns.any(axis=0)
    return dict(zip(names[there].tolist(), medians[there].tolist(), strict=True))


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_a_door_records_steps_and_stages(name: str, tmp_path: Path) -> None:
    said = ran(LONGER + program_of(name), tmp_path)
    case, run = CASES[name], load(tmp_path / "runs")
    assert len(run.rows(kind="step")) == case.steps, said
    assert {header.role for header in run.headers.values()} == {case.role}
    found = shares(run)
    untraced = found.pop("untraced", 0.0)
    assert found.keys() == case.stages.keys()
    for stage, least in case.stages.items():
        assert found[stage] >= least, found
    assert untraced < UNTRACED
    assert "Traceback" not in said


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_a_program_whose_recording_fails_runs_as_before(name: str, tmp_path: Path) -> None:
    program = program_of(name)
    (tmp_path / "taken").write_text("a file where runs should be")
    place = str(tmp_path / "taken")
    said = ran(program, tmp_path, RLPROF__INTEGRATED__PROFILE_SAVE_PATH=place)
    lines = [line for line in said.splitlines() if line.startswith("rlprof's door to")]
    assert len(lines) == 1, said
    assert "failed, the training continues: integrated.profile_save_path" in lines[0]


SPANS_OF_RL = """
import json, time
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

process = {"service.name": "nemo-rl", "rl.role": "trainer", "nv.dl.rank": 1, "nv.dl.world_size": 2}
provider, kept = TracerProvider(resource=Resource.create(process)), InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(kept))
span = provider.get_tracer("nemo.lens").start_as_current_span
idle = {"rl.bucket": "idle"}
with span("rl.grpo.job"):
    for at in range(20):
        with span("rl.grpo.step", attributes={"rl.iteration": 500 + at}):
            with span("rl.idle.buffer_starvation", attributes=idle):
                time.sleep(0.015)
            with span("rl.grpo.generation"), span("rl.vllm.generate"), span("GET"):
                time.sleep(0.006)
            with span("rl.grpo.policy_and_reference_logprobs"):
                time.sleep(0.002)
            with span("rl.grpo.policy_training"), span("optimizer.step"):
                time.sleep(0.004)
            with span("rl.sync") as sync:
                sync.set_attribute("rl.bucket", "idle")
            with span("rl.grpo.validation", attributes=idle):
                time.sleep(0.001)
found = MessageToDict(encode_spans(kept.get_finished_spans()), use_integers_for_enums=True)
print(json.dumps(found), file=open("traces.jsonl", "w"))
"""


@pytest.mark.deep
def test_spans_of_nemo_rl_are_the_same_run_live_and_from_a_file(tmp_path: Path) -> None:
    said = ran(SPANS_OF_RL, tmp_path)
    live, file = load(tmp_path / "runs"), load(tmp_path / "traces.jsonl")
    for run in (live, file):
        assert run.step[run.rows(kind="step")].tolist() == [*range(500, 520)], said
        (header,) = run.headers.values()
        assert (header.rank, header.world_size, header.role) == (1, 2, "trainer")
        assert "data-wait" in run.findings().column("id")
    found, wanted = shares(live), shares(file)
    waits = {"buffer_starvation", "wait_for_data#validation"}
    assert wanted.keys() - {"untraced"} == waits | {
        "actor_generate",
        "actor_update",
        "policy_and_reference_logprobs",
        "weight_sync",
    }
    assert found == pytest.approx(wanted, abs=0.03)
    assert wanted["buffer_starvation"] > 0.4


# What an unknown version may look like: the modules are there, and nothing of what doors look for.
EMPTY = """
import importlib, importlib.machinery, importlib.util, sys, types

class Empty:
    def find_spec(self, name, path=None, target=None):
        if name in wanted or any(each.startswith(f"{name}.") for each in wanted):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.Trainer = module.Fabric = type("Trainer", (), {})
        module.TrainerCallback, module.DEFAULT_CALLBACKS = type("Callback", (), {}), []

from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.integrations.doors.registry import DOORS

wanted = {module for door in DOORS for module in door.modules if door.package != "torch"}
sys.meta_path.insert(1, Empty())
for module in sorted(wanted):
    importlib.import_module(module)
print("imported", len(wanted), file=sys.stderr)
"""


@pytest.mark.deep
def test_an_unknown_version_is_a_line_each_and_no_error(tmp_path: Path) -> None:
    said = ran(EMPTY, tmp_path)
    assert said.splitlines()[-1].startswith("imported ")
    assert "Traceback" not in said
    assert "SkyRL: skyrl.train.utils.utils has no Timer, so it is not recorded" in said
    assert "transformers: Trainer has no training_step, so it is not recorded" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.deep
def test_doors_can_be_chosen_and_need_rlprof(tmp_path: Path) -> None:
    program = program_of("codetiming")
    ran(program, tmp_path, RLPROF_DOORS="trl, verl")
    ran(program, tmp_path, RLPROF="0")
    assert not (tmp_path / "runs").exists()


@pytest.mark.deep
def test_the_sitecustomize_that_is_hidden_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden_ran = True")
    said = ran("import sys; print(sys.hidden_ran, file=sys.stderr)", tmp_path, tmp_path)
    assert said == "True\n"


def test_every_door_has_a_case() -> None:
    tested = {name.partition("_worker")[0] for name in CASES} | {"transformers", "trl", "ray"}
    assert {door.name.lower().replace("-", "_") for door in DOORS} == tested
