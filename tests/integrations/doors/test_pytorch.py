"""The door to PyTorch itself: what a step is, whose each moment is, and that nothing changes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import OPTIMIZER_STEP, ROLLOUT_AND_UPDATES
from lightning_rlprof.report.summary import summary
from lightning_rlprof.run import load
from tests.integrations.doors.test_contract import LONGER, ran, shares

HEAD = """
import time
import gymnasium
import torch
from torch import nn

class Slow(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}
    def step(self, action):
        time.sleep(0.002)
        return self.observation_space.sample(), 1.0, False, False, {}

gymnasium.register("Slow-v0", Slow, max_episode_steps=100)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
env = gymnasium.make("Slow-v0")
state, _ = env.reset(seed=0)

def update(inputs, divided_by=1):
    loss = model(inputs).square().mean() / divided_by
    time.sleep(0.002)
    loss.backward()

def stepped():
    optimizer.step()
    optimizer.zero_grad()
"""

ACCUMULATES = """
for _ in range(6):
    for _ in range(3):
        update(torch.ones(2, 4), 3)
    stepped()
    with torch.no_grad():
        model(torch.ones(2, 4))
"""

LOADS = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(4)

for batch in torch.utils.data.DataLoader(Data(), batch_size=2):
    update(batch)
    stepped()
"""

ROLLS_OUT_WITH_GRADIENTS = """
for _ in range(4):
    chosen = []
    for _ in range(4):
        chosen.append(model(torch.as_tensor(state)).log_softmax(0)[0])
        state = env.step(0)[0]
    loss = torch.stack(chosen).sum()
    loss.backward()
    time.sleep(0.004)
    stepped()
"""

ROLLS_OUT_IN_THE_LOADER = """
class Experience(torch.utils.data.IterableDataset):
    def __iter__(self):
        global state
        for _ in range(4):
            for _ in range(4):
                with torch.no_grad():
                    model(torch.as_tensor(state))
                state = env.step(0)[0]
            yield torch.ones(4)

for batch in torch.utils.data.DataLoader(Experience(), batch_size=1):
    update(batch)
    stepped()
"""

TWO_OPTIMIZERS = """
other = nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters())
for _ in range(5):
    update(torch.ones(2, 4))
    stepped()
    other(torch.ones(2, 4)).sum().backward()
    second.step()
"""

EVERY_FEW_STEPS = """
for at in range(12):
    with torch.no_grad():
        model(torch.as_tensor(state))
    state = env.step(0)[0]
    if at % 3 == 2:
        with torch.no_grad():
            model(torch.ones(2, 4))
        update(torch.ones(2, 4))
        stepped()
"""


ENVIRONMENTS_IN_PROCESSES = """
envs = gymnasium.make_vec("Slow-v0", num_envs=2, vectorization_mode="async")
states, _ = envs.reset(seed=0)
for _ in range(4):
    for _ in range(4):
        with torch.no_grad():
            model(torch.as_tensor(states))
        states = envs.step([0, 0])[0]
    update(torch.ones(2, 4))
    stepped()
envs.close()
"""

DRAWS_FROM_A_BUFFER = """
for at in range(16):
    with torch.no_grad():
        model(torch.as_tensor(state))
    state = env.step(0)[0]
    if at % 2:
        time.sleep(0.012)
        with torch.no_grad():
            model(torch.ones(2, 4))
        update(torch.ones(2, 4))
        stepped()
"""

ENDS_LATE = (
    EVERY_FEW_STEPS
    + """
time.sleep(0.2)
"""
)

COLLECTS = """
from tianshou.data.collector import BaseCollector

class Collector(BaseCollector):
    def _collect(self):
        time.sleep(0.004)  # Its environments are other processes.

collector = Collector()
for _ in range(4):
    collector.collect()
    update(torch.ones(2, 4))
    stepped()
"""

COLLECTS_IN_A_GENERATOR = """
from torchrl.collectors._base import BaseCollector

class Collector(BaseCollector):
    def iterator(self):
        for _ in range(4):
            time.sleep(0.004)
            yield torch.ones(2, 4)

for batch in Collector():
    update(batch)
    stepped()
"""


MARKS_ITS_ROLLOUT = """
from lightning_rlprof import stage
for _ in range(4):
    with stage("rollout"):
        time.sleep(0.006)
    with stage("reward"):
        time.sleep(0.002)
    for _ in range(3):
        update(torch.ones(2, 4))
        stepped()
"""

EVALUATES_IN_AN_ENVIRONMENT = """
for at in range(6):
    update(torch.ones(2, 4))
    stepped()
    if at % 3 == 2:
        for _ in range(3):
            with torch.no_grad():
                model(torch.as_tensor(state))
            state = env.step(0)[0]
"""

TRAINS_IN_A_THREAD = """
import threading
def learn():
    for _ in range(6):
        update(torch.ones(2, 4))
        stepped()
thread = threading.Thread(target=learn)
thread.start()
while thread.is_alive():
    state = env.step(0)[0]
"""

TAKES_GRADIENTS = """
for _ in range(5):
    parts = list(model.parameters())
    loss = model(torch.ones(2, 4)).square().mean()
    for part, gradient in zip(parts, torch.autograd.grad(loss, parts)):
        part.grad = gradient
    time.sleep(0.002)
    stepped()
"""

SAMPLES_BY_HAND = """
for _ in range(5):
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, 4))
            time.sleep(0.002)
    update(torch.ones(2, 4))
    stepped()
"""

ONLY_STEPS = """
from lightning_rlprof import stage, step
weights = torch.zeros(4)
for _ in range(5):
    with step():
        with stage("sync_weights"):
            time.sleep(0.002)
        weights *= 0.9
"""


class Case(NamedTuple):
    """A loop, its steps, and the least share of each stage."""

    program: str
    steps: int
    stages: dict[str, float]
    unit: str = ROLLOUT_AND_UPDATES
    most_untraced: float = 1.0


CASES = {
    "gradients are accumulated": Case(
        ACCUMULATES, 6, {"actor_update": 0.8, "forward_no_grad": 0}, OPTIMIZER_STEP
    ),
    "a loader": Case(LOADS, 4, {"data_fetch": 0.3, "actor_update": 0.2}, OPTIMIZER_STEP),
    "actions are drawn with gradients": Case(
        ROLLS_OUT_WITH_GRADIENTS, 4, {"actor_generate": 0.5, "actor_update": 0.2}
    ),
    "the loader rolls out": Case(
        ROLLS_OUT_IN_THE_LOADER, 4, {"actor_generate": 0.5, "actor_update": 0.1}
    ),
    "environments are processes": Case(
        ENVIRONMENTS_IN_PROCESSES, 4, {"actor_generate": 0.5, "actor_update": 0.1}
    ),
    "two optimizers": Case(TWO_OPTIMIZERS, 5, {"actor_update": 0.8}, OPTIMIZER_STEP),
    "a batch is drawn from a buffer": Case(
        DRAWS_FROM_A_BUFFER, 8, {"actor_generate": 0.1, "actor_update": 0.55}
    ),
    "the program goes on after its last step": Case(
        ENDS_LATE, 4, {"actor_generate": 0.1, "actor_update": 0.05}, most_untraced=0.5
    ),
    "a collector's environments are processes": Case(
        COLLECTS, 4, {"actor_generate": 0.4, "actor_update": 0.1}
    ),
    "a collector is a generator": Case(
        COLLECTS_IN_A_GENERATOR, 4, {"actor_generate": 0.4, "actor_update": 0.1}
    ),
    "an update every few steps": Case(
        EVERY_FEW_STEPS, 4, {"actor_generate": 0.5, "actor_update": 0.15}
    ),
    "its rollout is marked": Case(
        MARKS_ITS_ROLLOUT, 4, {"rollout": 0.2, "reward": 0.05, "actor_update": 0.1}
    ),
    "it evaluates in an environment": Case(
        EVALUATES_IN_AN_ENVIRONMENT,
        6,
        {"actor_update": 0.2, "actor_generate": 0.1, "forward_no_grad": 0},
        OPTIMIZER_STEP,
    ),
    "it trains in a thread": Case(TRAINS_IN_A_THREAD, 5, {"actor_update": 0.2}, OPTIMIZER_STEP),
    "it takes gradients": Case(TAKES_GRADIENTS, 5, {"actor_update": 0.5}, OPTIMIZER_STEP),
    "it samples by hand": Case(
        SAMPLES_BY_HAND, 5, {"forward_no_grad": 0.4, "actor_update": 0.1}, OPTIMIZER_STEP
    ),
    "its steps are marked": Case(ONLY_STEPS, 5, {"sync_weights": 0.5}, ""),
}
SAYS = "\nprint(sum(each.double().sum().item() for each in model.parameters()).hex())"


def plain(program: str) -> str:
    """Run a program without rlprof; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RLPROF": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_steps_and_phases_of_a_loop(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ran(LONGER + HEAD + case.program, tmp_path)
    run = load(tmp_path / "runs")
    found = shares(run)
    assert found.pop("untraced", 0.0) < case.most_untraced
    assert len(run.ranks) == 1
    assert len(run.rows(kind="step")) == case.steps
    assert summary(run).step_unit == case.unit
    assert found.keys() == case.stages.keys()
    for stage, least in case.stages.items():
        assert found[stage] >= least, found


@pytest.mark.deep
def test_results_are_the_same_bits(tmp_path: Path) -> None:
    program = HEAD + EVERY_FEW_STEPS
    said = ran(
        program + SAYS.replace(".hex())", ".hex(), file=__import__('sys').stderr)"), tmp_path
    )
    assert plain(program + SAYS).strip() in said


@pytest.mark.deep
def test_what_has_not_trained_leaves_no_run(tmp_path: Path) -> None:
    said = ran(HEAD + "for _ in range(5):\n    env.step(0)\n", tmp_path)
    assert "Traceback" not in said
    assert not list((tmp_path / "runs").glob("2*"))


@pytest.mark.deep
def test_a_session_of_the_program_takes_its_place(tmp_path: Path) -> None:
    own = """
from lightning_rlprof import stage, start_session, step
with start_session(name="own"):
    for _ in range(3):
        with step(), stage("actor_update"):
            update(torch.ones(2, 4))
            stepped()
"""
    ran(HEAD + "update(torch.ones(2, 4)); stepped()\n" + own, tmp_path)
    runs = {path.name: path for path in (tmp_path / "runs").glob("[2o]*")}
    assert len(load(runs.pop("own")).rows(kind="step")) == 3
    (before,) = runs.values()
    assert len(load(before).rows(kind="step")) == 1


COMPILED = """
import sys
import torch
import torch._dynamo as dynamo
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(8, 1))
    def forward(self, inputs):
        return self.rest(self.first(inputs))

model = Model()
model.rest.register_forward_hook(lambda *given: None)
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    compiled(torch.ones(4, 8)).sum().backward()
    optimizer.step()
found = dynamo.explain(model)(torch.ones(4, 8))
stats = dynamo.utils.counters["stats"]["unique_graphs"]
print("graphs", stats, found.graph_count, found.graph_break_count, file=sys.stderr)
"""


@pytest.mark.deep
def test_compiled_code_has_the_same_graphs(tmp_path: Path) -> None:
    said = ran(COMPILED, tmp_path)
    assert plain(COMPILED.replace("file=sys.stderr", "")).strip() in said
    assert len(load(tmp_path / "runs").rows(kind="step")) == 5


COMPILED_WITHIN = """
import sys
def backend(graph, inputs):
    print("compiled", file=sys.stderr)
    return graph.forward
class Own(nn.Module):
    def forward(self, inputs):
        return inputs.relu()
model[1] = Own()
model[1].compile(backend=backend)
for _ in range(3):
    update(torch.ones(2, 4))
    stepped()
"""


@pytest.mark.deep
def test_a_module_that_is_compiled_within_another_runs_what_was_compiled(tmp_path: Path) -> None:
    assert ran(HEAD + COMPILED_WITHIN, tmp_path).count("compiled\n") == 1
    assert len(load(tmp_path / "runs").rows(kind="step")) == 3


BESIDE_FABRIC = """
import gc, sys
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
model, optimizer = fabric.setup(model, optimizer)
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
for _ in range(40):
    env.step(0)
print("full collections:", collections.count(2), file=sys.stderr)
fabric.backward(model(torch.ones(2, 4)).sum())
stepped()
"""


@pytest.mark.deep
def test_a_step_of_an_environment_asks_nothing_of_another_doors_session(tmp_path: Path) -> None:
    said = ran(HEAD + BESIDE_FABRIC, tmp_path)
    (line,) = [each for each in said.splitlines() if each.startswith("full collections:")]
    assert int(line.split()[-1]) < 4
    assert len(load(tmp_path / "runs").rows(kind="step")) == 1


SERVES = """
import time
from lightning_rlprof import stage
for _ in range(3):
    with stage("search"):
        time.sleep(0.002)
"""


@pytest.mark.deep
def test_marks_alone_are_recorded_and_the_end_says_what_shows_steps(tmp_path: Path) -> None:
    said = ran(SERVES, tmp_path)
    run = load(tmp_path / "runs")
    assert [run.names[code] for code in run.name[run.rows(kind="stage")]] == ["search"] * 3
    assert "rlprof: no step, but search, in " in said
    assert "with step(): around each turn" in said


SERVES_IN_THREADS = """
import threading, time
from lightning_rlprof import stage

def request():
    with stage("search"):
        time.sleep(0.002)

for _ in range(3):
    threads = [threading.Thread(target=request) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.deep
def test_a_server_that_marks_in_the_threads_of_its_requests_is_recorded(tmp_path: Path) -> None:
    assert "rlprof: no step, but search, in " in ran(SERVES_IN_THREADS, tmp_path)
    run = load(tmp_path / "runs")
    assert [run.names[code] for code in run.name[run.rows(kind="stage")]] == ["search"] * 6


INSIDE_OF_ITS_UPDATE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **small)
model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
tokens = torch.arange(16)

class Preferences(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        with torch.no_grad():
            wanted = other(input_ids=inputs["input_ids"]).logits
            if self.state.global_step:
                model(input_ids=inputs["input_ids"])
        found = model(**inputs)
        return found.loss + (found.logits - wanted).square().mean()

args = TrainingArguments(
    "out", max_steps=5, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    use_cpu=True, disable_tqdm=True,
)
rows = [{"input_ids": tokens, "labels": tokens} for _ in range(10)]
Preferences(model, args, train_dataset=rows).train()
"""


@pytest.mark.deep
def test_what_scores_without_gradients_in_an_update_is_apart(tmp_path: Path) -> None:
    """Its reference is another model than the one that it trains; old log-probs are of that one."""
    ran(INSIDE_OF_ITS_UPDATE, tmp_path)
    run = load(tmp_path / "runs")
    at = run.rows(kind="stage")
    steps = {
        name: run.step[at][run.name[at] == run.names.index(name)].tolist()
        for name in ("reference_compute_log_prob", "actor_compute_log_prob", "actor_update")
    }
    assert steps["reference_compute_log_prob"] == [1, 2, 3, 4, 5]
    assert steps["actor_compute_log_prob"] == [2, 3, 4, 5]
    assert {*steps["actor_update"]} == {1, 2, 3, 4, 5}


ROLLS_OUT_IN_LIGHTNINGS_LOADER = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

class Source(IterableDataset):
    def __init__(self, make):
        self.make = make
    def __iter__(self):
        return iter(self.make())

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    def samples(self):
        for _ in range(8):
            for _ in range(20):
                with torch.no_grad():
                    self.net(torch.ones(4, 4))
                time.sleep(0.0001)
            yield torch.ones(4)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
    def train_dataloader(self):
        return DataLoader(Source(self.samples), batch_size=1)

Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Module())
"""


@pytest.mark.deep
def test_a_rollout_in_lightnings_loader_is_a_rollout(tmp_path: Path) -> None:
    ran(LONGER + ROLLS_OUT_IN_LIGHTNINGS_LOADER, tmp_path)
    run = load(tmp_path / "runs")
    found = shares(run)
    assert found["actor_generate"] > 0.5 > found["data_fetch"]
    assert len(run.rows(kind="step")) == 8


WAITS = """
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02 * dist.get_rank())
    for each in model.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.deep
def test_collectives_of_a_loop_are_regions_in_which_ranks_wait(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    launcher = """
import runpy, sys
sys.argv = ["torchrun", "--nproc-per-node", "2", "waits.py"]
runpy.run_module("torch.distributed.run", run_name="__main__")
"""
    ran(launcher, tmp_path)
    run = load(tmp_path / "runs")
    assert run.ranks == (0, 1)
    reduced = run.name == run.names.index("all_reduce")
    length = run.end_ns - run.start_ns
    waited = [length[reduced & (run.rank == rank)] for rank in run.ranks]
    assert [len(each) for each in waited] == [8, 8]
    assert np.median(waited[0][::2]) > np.median(waited[1][::2])


MARKS_IN_CHILDREN = """
import multiprocessing, os, subprocess, sys, time
from lightning_rlprof import stage, start_session, step

def work():
    with stage("in_child"):
        time.sleep(0.001)

if __name__ == "__main__":
    how = sys.argv[1]
    if how != "fork before":
        session = start_session(name="parent", summary=False)
        with step():
            pass
    else:
        import torch
    if how == "spawn":
        child = multiprocessing.get_context("spawn").Process(target=work)
        child.start()
        child.join()
    elif how == "command":
        code = "from lightning_rlprof import stage; stage('in_child').__enter__()"
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        if not os.fork():
            work()
            os._exit(0)
        os.wait()
"""


@pytest.mark.deep
@pytest.mark.parametrize("how", ["spawn", "command", "fork", "fork before"])
def test_marks_of_child_processes_begin_no_run_and_are_told(how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MARKS_IN_CHILDREN)
    words = f"[sys.executable, 'program.py', {how!r}]"
    ran(f"import subprocess, sys; subprocess.run({words}, check=True)", tmp_path)
    runs = list((tmp_path / "runs").glob("[2p]*"))
    if how == "fork before":
        assert runs == []
        return
    (path,) = runs
    run = load(path)
    assert run.ranks == (0,)
    assert [note.code for note in run.notes if note.level == "warning"] == [Code.CHILD_PROCESS]
