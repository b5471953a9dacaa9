"""``RLPROF=1``: recording without a change of code, through Lightning's own entry points."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.autoload import callbacks
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from tests.builders.models import (
    PACKAGES,
    Tiny,
    loader,
    make_trainer,
    module_of,
    only_run,
    steps_of,
    trace_of,
)
from tests.integrations.lightning.test_processes import ROOT, train


def entry_points() -> str:
    """What an installation of this package writes, taken from the file that says so."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    kept, inside = [], False
    for line in lines:
        if line.startswith("["):
            inside = line.startswith("[project.entry-points.")
            if inside:
                kept.append("[" + line.split('"')[1] + "]")
        elif inside and "=" in line:
            kept.append(line.replace('"', ""))
    return "\n".join(kept)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that makes the package look installed to whoever has it on the path."""
    info = tmp_path / "site" / "lightning_rlprof-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-rlprof\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points())
    return info.parent


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "rlprof.yaml"
    path.write_text(f"integrated:\n  profile_save_path: {tmp_path / 'runs'}\n")
    return path


@pytest.mark.deep
def test_the_variable_records_a_script_that_knows_nothing(
    installed: Path, config: Path, tmp_path: Path
) -> None:
    path = f"{ROOT}{os.pathsep}{installed}"
    done = train(
        tmp_path, "plain", PYTHONPATH=path, RLPROF="1", RLPROF_CONFIG=str(config),
        RLPROF__STEPS="[2]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trace,) = only_run(tmp_path / "runs")
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "finished")
    assert trace.header.config["steps"] == [2]


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("package", PACKAGES)
def test_both_trainers_find_the_entry_point(
    package: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_trainer(package=package).callbacks == []
    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF_CONFIG", str(config))
    trainer = make_trainer(package=package)
    (callback,) = trainer.callbacks
    trainer.fit(module_of(package), loader())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("by_module", [False, True])
def test_a_callback_in_the_code_wins_over_the_variable(
    by_module: bool, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ProfilerCallback(profile_save_path=str(tmp_path / "explicit"))

    class Brings(Tiny):
        def configure_callbacks(self) -> list[Any]:
            return [mine] if by_module else []

    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF_CONFIG", str(config))
    make_trainer(*([] if by_module else [mine])).fit(Brings(), loader())
    assert not (tmp_path / "runs").exists()
    assert steps_of(trace_of(mine)) == [1, 2, 3, 4]


def test_an_empty_name_of_a_file_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF_CONFIG", "")
    (callback,) = callbacks()
    assert callback.config.integrated.stage == "all"


@pytest.mark.parametrize("value", [None, "0", "", "false", "No", " off "])
def test_these_values_are_off(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("RLPROF", value)
    assert callbacks() == []


@pytest.mark.parametrize("value", ["1", "true", "Yes", " ON "])
def test_these_values_are_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF", value)
    assert len(callbacks()) == 1


@pytest.mark.parametrize("value", ["2", "ja", "rlprof.yaml"])
def test_any_other_value_is_an_error_with_what_is_allowed(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROF", value)
    with pytest.raises(ConfigError) as caught:
        callbacks()
    assert str(caught.value) == (
        f"RLPROF={value!r} is neither on nor off: use 1, true, yes, on to record, "
        "or 0, false, no, off"
    )


OWN = "lightning_rlprof"


def in_new_process(code: str, **variables: str) -> str:
    """Run code in a process that has imported nothing, and return what it logged."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("RLPROF")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False, text=True,
        capture_output=True, env={**environment, "PYTHONPATH": str(ROOT), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("variables", [{}, {"RLPROF": "0"}])
def test_off_imports_next_to_nothing(variables: dict[str, str]) -> None:
    code = f"""
import sys
from importlib.metadata import EntryPoint
before = set(sys.modules)
value = "{OWN}.integrations.lightning.autoload:callbacks"
assert EntryPoint("rlprof", value, "lightning.pytorch.callbacks_factory").load()() == []
new = set(sys.modules) - before
own = {{name for name in new if name.partition(".")[0] == "{OWN}"}}
assert own == {{"{OWN}", "{OWN}.integrations", "{OWN}.integrations.lightning",
               "{OWN}.integrations.lightning.autoload"}}, own
assert {{name.partition(".")[0] for name in new - own}} <= sys.stdlib_module_names, new
assert not {{"logging", "json", "asyncio", "multiprocessing"}} & new, new
"""
    in_new_process(code, **variables)


BREAKS = f"""
import sys
sys.modules["{{}}"] = None  # importing it raises
from {OWN}.integrations.lightning.autoload import callbacks
assert callbacks() == []
"""


@pytest.mark.parametrize("module", ["torch", "pydantic", f"{OWN}.errors", f"{OWN}.recording"])
def test_what_is_broken_ends_no_training_that_did_not_ask_for_it(module: str) -> None:
    assert in_new_process(BREAKS.format(module)) == ""


@pytest.mark.parametrize("module", ["pydantic", f"{OWN}.recording"])
def test_what_is_broken_is_logged_where_it_was_asked_for(module: str) -> None:
    said = in_new_process(BREAKS.format(module), RLPROF="1")
    assert "RLPROF=1: nothing is recorded, training continues" in said


def test_on_without_a_file_takes_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF", "1")
    (callback,) = callbacks()
    assert isinstance(callback, ProfilerCallback)
    assert callback.by_environment
    assert callback.config.captures is False


def test_a_wrong_file_is_refused_where_the_trainer_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text("integrated:\n  stage: actor_updat\n")
    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF_CONFIG", str(tmp_path / "x.yaml"))
    with pytest.raises(ConfigError, match="did you mean 'actor_update'"):
        callbacks()


@pytest.mark.parametrize("first", ["code", "environment"])
def test_the_order_in_the_list_does_not_matter(
    first: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_SAVE_PATH", str(tmp_path / "environment"))
    both = callbacks()
    monkeypatch.delenv("RLPROF__INTEGRATED__PROFILE_SAVE_PATH")
    both.append(ProfilerCallback(profile_save_path=str(tmp_path / "code")))
    make_trainer(*(both if first == "environment" else reversed(both))).fit(Tiny(), loader())
    assert [path.name for path in tmp_path.iterdir()] == ["code"]
