"""`rlprof run`: real trainings that know nothing of rlprof, and programs that train nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli.record import run_child
from lightning_rlprof.config.profiler_config import ProfilerConfig
from tests.builders.models import only_run, steps_of
from tests.places import ROOT

Run = Callable[..., tuple[int, str, str]]

TRAIN = """
import os
from tests.builders.models import Tiny, loader, make_trainer
ranks = int(os.environ.get("WORLD_SIZE", 1))
options = dict(strategy="ddp", use_distributed_sampler=False) if ranks > 1 else {}
make_trainer(devices=ranks, **options).fit(Tiny(), loader())
"""
SHOWS = """
import json, os, sys
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("RLPROF")}),
      file=open("seen.json", "w"))
sys.exit(3)
"""
PYTHON = ("--", sys.executable, "-c")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def seen() -> dict[str, str]:
    return json.loads(Path("seen.json").read_text())


def trained(*words: str) -> Any:
    Path("train.py").write_text(TRAIN)
    return launched("profile_save_path=runs", *words)


def launched(*words: str) -> Any:
    """Run the command in a process; the package is installed there."""
    command = [sys.executable, "-m", "lightning_rlprof", "run", *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


# ---- trainings


@pytest.mark.deep
def test_a_script_that_knows_nothing_is_recorded_and_says_where() -> None:
    done = trained("steps=[2]", "--", sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (trace,) = only_run(Path("runs"))
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "finished")
    assert trace.header.config["steps"] == [2]
    assert "Recorded " not in done.stderr  # the summary of the training has said where
    assert "Recorded" not in done.stderr


@pytest.mark.deep
def test_without_a_summary_rlprof_says_where_the_run_is() -> None:
    done = trained("summary=false", "--", sys.executable, "train.py")
    (run,) = Path("runs").iterdir()
    assert done.stderr.splitlines()[-1] == f"Recorded {run}"


@pytest.mark.deep
def test_all_ranks_that_torchrun_starts_write_one_run() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = trained("--", *torchrun, "--nproc-per-node=2", "train.py")
    assert done.returncode == 0, done.stderr
    traces = only_run(Path("runs"))
    assert [(each.header.rank, steps_of(each)) for each in traces] == [
        (rank, [1, 2, 3, 4]) for rank in (0, 1)
    ]


MOVES = """
import os, sys
os.makedirs("outputs/now", exist_ok=True)
os.chdir("outputs/now")
from lightning_rlprof import ProfilerCallback
from tests.builders.models import Tiny, loader, make_trainer
callbacks = [ProfilerCallback(profile_save_path=sys.argv[1])] if sys.argv[1:] else []
make_trainer(*callbacks).fit(Tiny(), loader())
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("words", "argument", "folder"),
    [
        ([], [], "profiler_data"),
        (["profile_save_path=runs"], [], "runs"),
        (["--config", "rl.yaml"], [], "of_file"),
        ([], ["of_code"], "of_code"),
        (["--config", "rl.yaml"], ["of_code"], "of_code"),
    ],
)
def test_a_program_that_changes_folder_is_recorded_where_the_command_was_typed(
    words: list[str], argument: list[str], folder: str
) -> None:
    Path("rl.yaml").write_text("integrated: {profile_save_path: of_file}\nsummary: false\n")
    Path("moves.py").write_text(MOVES)
    done = launched(*words, "--", sys.executable, "moves.py", *argument)
    assert done.returncode == 0, done.stderr
    (trace,) = only_run(Path(folder))
    assert trace.status == "finished"
    assert not [*Path("outputs").rglob("rank-*")]
    (run,) = Path(folder).glob("2*")
    said = done.stderr.splitlines()[-1]
    # A summary, which the program prints itself, says where the run is, too.
    assert said in (f"Recorded {run}", f"See it:    rlprof report {run.absolute()} --open")


# ---- programs that train nothing


@pytest.mark.parametrize(
    ("code", "status", "failed", "advice"),
    [
        (
            *("", 0, ""),
            "See which frameworks are recorded: rlprof doctor. A loop of your own needs with "
            "step(): around each turn.",
        ),
        (
            *("exit(7)", 7, ", and the program ended with status 7"),
            "Look at its own messages first.",
        ),
    ],
)
def test_a_program_that_trains_nothing_says_so_in_a_line_and_keeps_its_status(
    rlprof: Run, code: str, status: int, failed: str, advice: str
) -> None:
    assert rlprof("run", *PYTHON, code) == (
        status,
        "",
        f"warning: no training reached its first step{failed}, so profiler_data has no new run. "
        f"{advice}\n",
    )


def test_a_program_that_was_killed_has_the_status_of_a_shell(rlprof: Run) -> None:
    assert rlprof("run", *PYTHON, "import os; os.kill(os.getpid(), 9)")[0] == 137


def test_macos_passes_on_signals_that_no_terminal_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "sigtimedwait")
    code = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
os.kill(os.getppid(), signal.SIGINT)
os.kill(os.getppid(), signal.SIGTERM)
signal.sigwait({signal.SIGTERM})
sys.exit(7 if signal.SIGINT not in signal.sigpending() else 8)
"""
    before = signal.getsignal(signal.SIGTERM)
    assert run_child([sys.executable, "-c", code], os.environ) == 7
    assert signal.getsignal(signal.SIGTERM) is before


# ---- what the program is given


def test_the_variables_say_what_the_words_say(rlprof: Run) -> None:
    Path("rl.yaml").write_text("steps: [1]\n")
    words = ("--config", "rl.yaml", "--stage", "actor_update", "--applied", "swap-ranks")
    words += ("auto_stages=false",)
    assert rlprof("run", *words, *PYTHON, SHOWS)[0] == 3
    found = seen()
    assert len(found.pop("RLPROF_JOB")) == 16
    assert not Path(found.pop("RLPROF_SIGNS")).exists()  # the program has ended
    assert found == {
        "RLPROF": "1",
        "RLPROF_FOLDER": str(Path.cwd()),
        "RLPROF_CONFIG": str(Path("rl.yaml").resolve()),
        "RLPROF__INTEGRATED": '{"stage": "actor_update"}',
        "RLPROF__AUTO_STAGES": "false",
        "RLPROF__APPLIED": '["swap-ranks"]',
    }


def test_words_win_over_variables_and_leave_the_others(
    rlprof: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROF__INTEGRATED__STAGE", "actor_generate")
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_STEP_END", "9")
    monkeypatch.setenv("RLPROF__STEPS", "[2]")
    stages = ("--stage", "actor_update", "--stage", "compute_reward")
    rlprof("run", *stages, "roles.Actor.ranks=[0]", *PYTHON, SHOWS)
    with monkeypatch.context() as changed:
        for name in [name for name in os.environ if name.startswith("RLPROF")]:
            changed.delenv(name)
        for name, value in seen().items():
            changed.setenv(name, value)
        config = ProfilerConfig.build()
    assert config.integrated.stage == ["actor_update", "compute_reward"]
    assert (config.integrated.profile_step_end, config.steps) == (9, [2])
    assert [*config.roles] == ["Actor"]


def test_the_file_of_the_variable_is_checked(rlprof: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF_CONFIG", "missing.yaml")
    status, _, err = rlprof("run", *PYTHON, SHOWS)
    assert (status, err.count("\n")) == (2, 1)
    assert "configuration 'missing.yaml' cannot be read" in err
    assert not Path("seen.json").exists()


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["stage=actor_updat"], "did you mean 'actor_update'", ""),
        (["--stage", "a", "stage=b"], "--stage and stage= both choose", "Give one of them"),
        (["steps=[1", *PYTHON, SHOWS], "steps=[1 is not valid YAML", ""),
        (["nosuch=1"], "nosuch is not an option", ""),
        (["--applied", "swap-rank"], "unknown problem 'swap-rank'", "did you mean 'swap-ranks'?"),
        (["--", "-m", "train"], "'-m' is an option, not a program", "python -m train"),
        (["steps=[1]", "--config", "x"], "'--config' is an option", "before KEY=VALUE"),
        (["steps=[1]", "--"], "no program to run", "rlprof run -- python train.py"),
        (["--", "./no.py"], "cannot run ./no.py: No such file", "python ./no.py"),
    ],
)
def test_mistakes_end_in_a_line_before_the_program_starts(
    rlprof: Run, words: list[str], error: str, hint: str
) -> None:
    command = [] if "--" in words or "--config" in words else [*PYTHON, SHOWS]
    status, out, err = rlprof("run", *words, *command)
    assert (status, out, err.count("\n")) == (2, "", 2 if hint else 1), err
    assert error in err
    assert hint in err
    assert not Path("seen.json").exists()


def test_options_of_the_program_are_its_own(rlprof: Run) -> None:
    code = "import sys; sys.exit(sys.argv[1:] != ['--config', 'x', '--', 'a=b'])"
    assert rlprof("run", *PYTHON, code, "--config", "x", "--", "a=b")[0] == 0


def test_a_python_that_ignores_variables_is_told_apart(rlprof: Run) -> None:
    _, _, err = rlprof("run", "python", "-Im", "this")
    text = "warning: 'python -Im' ignores PYTHONPATH, so only Lightning is recorded"
    assert err.splitlines()[0] == text


NO_STEP = """
import time
import torch

weights = torch.zeros(4, requires_grad=True)

def descend():
    (weights - 1).square().sum().backward()
    with torch.no_grad():
        weights.sub_(0.1 * weights.grad)
    time.sleep(0.1)

for _ in range(20):
    descend()
"""


@pytest.mark.deep
def test_a_training_without_a_step_is_told_what_was_seen_and_what_to_paste(rlprof: Run) -> None:
    Path("by_hand.py").write_text(NO_STEP)
    code, _, err = rlprof("run", "--", sys.executable, "by_hand.py")
    assert code == 0
    first, *paste, where = err.splitlines()
    assert first.startswith("warning: no step was found in by_hand.py, which made 20 backward")
    assert "".join(paste) == "  from lightning_rlprof import step  with step():"
    assert where.startswith("Its main thread was in descend (by_hand.py) ")
