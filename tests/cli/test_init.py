"""`rlprof init`: what it reads out of training code, what it asks, and the file that it writes."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlprof.config.profiler_config import ProfilerConfig

Run = Callable[..., tuple[int, str, str]]

TRAIN = """
from pytorch_lightning import Trainer
from parts.grpo import GRPO
Trainer().fit(GRPO())
raise SystemExit("this code was run")
"""
GRPO = """
import pytorch_lightning as pl
from .policy import Policy, Reward

class Base(pl.LightningModule):
    def compute_advantages(self, rewards): return rewards

class GRPO(Base):
    def __init__(self, engine, critic: "Critic", reward_fn=None):
        super().__init__()
        self.policy, self.engine, self.reward_fn = None, engine, reward_fn
        self.policy: Policy = Policy()
        self.reward = Reward()
        self.critic = critic

    def training_step(self, batch, batch_idx):
        samples = self.policy.generate(batch)
        rewards = self.reward(samples) + self.reward_fn(samples)
        self.engine.load_weights(self.policy)
        self.tokenizer.decode(samples)
        self.trainer.generate()

    @property
    def score(self): return 0

    def _reward(self): ...

class Critic:
    def compute_values(self): ...
"""
POLICY = """
import torch

class Policy(torch.nn.Module):
    def generate(self, prompts): return self.llm.generate_sequences(prompts)
    async def old_log_probs(self): ...

class Reward(torch.nn.Module):
    def forward(self, samples): ...
"""
EXPECTED = {
    "compute_advantages": "compute_advantage",
    "engine.load_weights": "weight_sync",
    "reward.forward": "compute_reward",
    "policy.generate": "actor_generate",
    "policy.old_log_probs": "actor_compute_log_prob",
    "critic.compute_values": "critic_compute_values",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    for name, text in {"train": TRAIN, "parts/grpo": GRPO, "parts/policy": POLICY}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def written(name: str = "rlprof.yaml") -> Any:
    return yaml.safe_load(Path(name).read_text())


def one_class(body: str, head: str = "") -> None:
    text = (
        f"{head}\nclass M(L.LightningModule):\n    def training_step(self, b, i):\n        {body}\n"
    )
    Path("one.py").write_text(text)


# ---- what the code says


@pytest.mark.parametrize("source", [[], ["train.py"], ["train"], ["parts.grpo"]])
def test_methods_parts_and_calls_that_mean_a_stage_become_rules(
    rlprof: Run, hints: None, source: list[str]
) -> None:
    status, out, err = rlprof("init", *source)
    assert (status, err) == (0, "next: rlprof config check rlprof.yaml\n")
    assert out == "Wrote rlprof.yaml\nGRPO in parts/grpo.py: 6 wrap rules\n"
    assert written() == {"wrap": EXPECTED, "integrated": {"profile_save_path": "profiler_data"}}
    text = Path("rlprof.yaml").read_text()
    assert "  policy.generate: actor_generate  # policy.py:5\n" in text
    assert "  reward.forward: compute_reward  # called in grpo.py:18\n" in text
    assert "  # reward_fn: compute_reward  # called in grpo.py:18\n" in text  # may be a module
    assert rlprof("config", "check", "rlprof.yaml")[0] == 0


def test_a_method_called_within_another_stage_alone_gets_no_rule(rlprof: Run) -> None:
    one_class("self.rollout()\n    def rollout(self): self.generate()\n    def generate(self): ...")
    rlprof("init", "one.py")
    assert written()["wrap"] == {"rollout": "actor_generate"}


def test_stages_that_the_code_marks_are_named_and_get_no_rule(rlprof: Run) -> None:
    body = 'self.a.compute_rewards()\n        with stage("actor_generate"): self.a.generate()'
    one_class(body, "from lightning_rlprof import stage")
    rlprof("init", "one.py")
    assert written()["wrap"] == {"a.compute_rewards": "compute_reward"}
    assert "# Marked in the code, so without a rule: actor_generate.\n" in (
        Path("rlprof.yaml").read_text()
    )


def test_without_a_telling_name_the_file_has_an_example(rlprof: Run) -> None:
    one_class("self.other(b)")
    status, out, _ = rlprof("init", "one.py")
    assert (status, "note: no method's name means a stage" in out) == (0, True)
    assert "wrap" not in written()
    assert "# wrap:\n#   policy.generate: actor_generate\n" in Path("rlprof.yaml").read_text()


def test_parts_that_hold_one_another_and_imports_in_a_circle_end(rlprof: Run) -> None:
    Path("one.py").write_text(
        "from two import *\nclass A(LightningModule):\n"
        "    def __init__(self, b: B): self.b = b; self.a: A = self\n    def generate(self): ...\n"
    )
    Path("two.py").write_text(
        "import one\nclass B(B):\n    def __init__(self): self.a = A()\n    def reward(self): ...\n"
    )
    rlprof("init", "one.py")
    assert {"generate", "b.reward"} <= {*written()["wrap"]}


# ---- questions and options


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, hints: None) -> Callable[..., None]:
    def give(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))

    return give


def test_a_terminal_is_asked_three_questions(rlprof: Run, answers: Callable[..., None]) -> None:
    Path("parts/grpo.py").write_text(f"{GRPO}\nclass PPO(pl.LightningModule): ...\n")
    answers("GRPO", "actor_generate", "[2, 4]")
    _, _, err = rlprof("init")
    assert err.count("?") == 3
    config = ProfilerConfig.build("rlprof.yaml")
    assert (config.integrated.stage, config.steps) == ("actor_generate", [2, 4])


@pytest.mark.parametrize("words", [["--yes"], ["--class", "GRPO", "--stage", "none"]])
def test_options_answer_the_questions(
    rlprof: Run, answers: Callable[..., None], words: list[str]
) -> None:
    answers()
    status, _, err = rlprof("init", *words)
    assert (status, "?" in err) == (0, False)
    assert not ProfilerConfig.build("rlprof.yaml").captures


def test_options_choose_what_is_captured(rlprof: Run) -> None:
    assert rlprof("init", "--stage", "actor_update", "--steps", "all", "-o", "x.yaml")[0] == 0
    config = ProfilerConfig.build("x.yaml")
    assert (config.integrated.stage, config.steps) == ("actor_update", "all")


def test_a_class_can_be_named(rlprof: Run) -> None:
    Path("parts/grpo.py").write_text(f"{GRPO}\nclass PPO(pl.LightningModule):\n  def score(s): ...")
    rlprof("init", "--class", "PPO")
    assert written()["wrap"] == {"score": "compute_reward"}


# ---- refusals


def test_an_existing_file_is_kept_without_force(rlprof: Run) -> None:
    Path("rlprof.yaml").write_text("mine")
    status, _, err = rlprof("init")
    assert (status, "rlprof.yaml exists already" in err) == (2, True)
    assert Path("rlprof.yaml").read_text() == "mine"
    assert rlprof("init", "--force")[0] == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def (", "one.py, line 1, is not valid Python: "),
        ("x = '\0'", "one.py"),
        ("print('no module')", "one.py and the files beside it that it imports define no Light"),
    ],
)
def test_code_that_cannot_be_read_is_a_line(rlprof: Run, text: str, error: str) -> None:
    Path("one.py").write_text(text)
    status, out, err = rlprof("init", "one.py")
    assert (status, out) == (2, "")
    assert err.splitlines()[0].startswith(f"rlprof: error: {error}")
    assert err.count("\n") == 1 + ("no Light" in error)
    assert not Path("rlprof.yaml").exists()


def test_an_imported_file_that_is_not_python_is_left_out(rlprof: Run) -> None:
    Path("parts/policy.py").write_text("def (")
    assert rlprof("init")[0] == 0
    assert "critic.compute_values" in written()["wrap"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere.py"], "nowhere.py is neither a Python file nor a module"),
        (["."], ". is neither a Python file nor a module"),
        ([".."], ".. is neither a Python file nor a module"),
        (["--class", "GRP"], "unknown LightningModule 'GRP'\n  hint: did you mean 'GRPO'?"),
        (["--stage", "actor_updat"], "did you mean 'actor_update'"),
        (["--steps", "[1"], "steps=[1 is not valid YAML"),
    ],
)
def test_mistakes_name_what_is_allowed(rlprof: Run, words: list[str], error: str) -> None:
    status, _, err = rlprof("init", *words)
    assert (status, error in err) == (2, True), err
    assert not Path("rlprof.yaml").exists()


def test_several_scripts_have_to_be_named(rlprof: Run) -> None:
    Path("eval.py").write_text("Trainer().test()")
    _, _, err = rlprof("init")
    assert "2 scripts here train with Lightning: eval.py, train.py\n  hint: Name the script" in err


# ---- Ascend: light, one stage, few ranks

ORDER = ["rlprof-1-light.yaml", "rlprof-2-stage.yaml", "rlprof-3-few-ranks.yaml"]


def test_ascend_goes_from_light_to_one_stage_to_few_ranks(rlprof: Run) -> None:
    status, out, _ = rlprof("init", "--ascend", "--stage", "actor_generate", "--steps", "[4]")
    assert status == 0
    commands = [line.strip() for line in out.splitlines() if line.startswith("  ")]
    assert commands == [f"rlprof run --config {name} -- python train.py" for name in ORDER]
    light, stage, ranks = map(ProfilerConfig.build, ORDER)
    assert light.lightweight
    assert [config.integrated.stage for config in (light, stage, ranks)] == [
        "all",
        "actor_generate",
        "actor_generate",
    ]
    assert [config.wanted_ranks for config in (light, stage, ranks)] == ["all", "all", [0]]
    assert {config.wants_step(4) for config in (light, stage, ranks)} == {True}
    assert [each.integrated.profile_with_memory for each in (stage, ranks)] == [False, True]


@pytest.mark.parametrize("name", ORDER)
def test_each_file_for_ascend_passes_the_check_and_has_the_rules(rlprof: Run, name: str) -> None:
    rlprof("init", "--ascend")
    assert written(name)["wrap"] == EXPECTED
    status, out, err = rlprof("config", "check", name)
    assert (status, err) == (0, "")
    assert "tools on npu" in out
    assert "npu_profiler, mstx" in out
    assert "note on npu" not in out  # a key without effect there


def test_files_for_ascend_are_named_after_the_output(rlprof: Run) -> None:
    Path("files").mkdir()
    assert rlprof("init", "--ascend", "-o", "files/npu.yaml")[0] == 0
    names = sorted(path.name for path in Path("files").iterdir())
    assert names == ["npu-1-light.yaml", "npu-2-stage.yaml", "npu-3-few-ranks.yaml"]


def test_one_existing_file_for_ascend_keeps_all_from_being_written(rlprof: Run) -> None:
    Path(ORDER[2]).write_text("mine")
    status, _, err = rlprof("init", "--ascend")
    assert (status, f"{ORDER[2]} exists already" in err) == (2, True)
    assert not Path(ORDER[0]).exists()
    assert Path(ORDER[2]).read_text() == "mine"


@pytest.mark.parametrize("stage", ["all", "none"])
def test_ascend_refuses_what_is_not_one_stage(rlprof: Run, stage: str) -> None:
    status, _, err = rlprof("init", "--ascend", "--stage", stage)
    assert status == 2
    assert f"captures one stage after the light capture, not '{stage}'\n  hint: Give one: " in err
    assert not Path(ORDER[0]).exists()


def test_a_loop_without_lightning_gets_the_files_for_ascend_without_rules(rlprof: Run) -> None:
    Path("loop.py").write_text("from lightning_rlprof import start_session\n")
    assert rlprof("init", "loop.py")[0] == 2
    status, out, _ = rlprof("init", "loop.py", "--ascend")
    assert (status, "note: no method's name means a stage" in out) == (0, True)
    assert [("wrap" in written(name), rlprof("config", "check", name)[0]) for name in ORDER] == [
        (False, 0)
    ] * 3
