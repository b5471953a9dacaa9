import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

from lightning_rlprof.cli.demo.options import DemoOptions, Fault, Recipe
from tests.builders.runs import grpo_rows, header, write_rank

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a demo in place that trains nothing, and return what it was asked for."""
    seen: dict[str, Any] = {}

    def run_demo(options: DemoOptions, progress: Callable[[int, int, float], None]) -> Any:
        default = vars(DemoOptions())
        seen.update({key: value for key, value in vars(options).items() if value != default[key]})
        progress(1, 2, 0.25)
        progress(2, 2, 0.75)
        run = options.save_path / "run"
        if "lost" not in str(run):
            write_rank(run, header(), grpo_rows(4))
        return SimpleNamespace(
            exact_before=0.21,
            exact_after=0.86,
            rewards=(0.25, 0.75),
            seconds=58.4,
            parameters=239_872,
            run=run if run.is_dir() else None,
        )

    module = ModuleType("lightning_rlprof.cli.demo.run")
    vars(module).update(run_demo=run_demo)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_the_demo_shows_what_was_learned_where_time_went_and_what_to_type(
    rlprof: Run, asked: dict[str, Any], hints: None, tmp_path: Path
) -> None:
    status, out, err = rlprof("demo", "-o", tmp_path)

    assert status == 0
    assert asked == {"save_path": tmp_path}
    assert "Trained 239,872 parameters for 2 steps in 58 s.\n" in out
    assert "Held-out exact match, before and after GRPO: 0.21 → 0.86\n" in out
    assert "actor_generate" in out
    assert out.endswith(
        f"Wrote {tmp_path}/run/report.html\n"
        "The rollout has no KV cache. Add one with --kv-cache, then compare the two runs.\n"
    )
    assert err.endswith(
        f"next: rlprof findings {tmp_path}/run\n"
        f"next: rlprof demo --kv-cache -o {tmp_path}\n"
        f"next: rlprof compare {tmp_path}/run {tmp_path}\n"
    )


def test_what_to_type_next_repeats_the_options(
    rlprof: Run, asked: dict[str, Any], hints: None, tmp_path: Path
) -> None:
    err = rlprof("demo", "-o", tmp_path, "--ranks", 2, "--steps", 9)[2]
    assert f"next: rlprof demo --kv-cache --steps 9 --ranks 2 -o {tmp_path}\n" in err


def test_options_reach_the_demo_and_a_cached_one_offers_no_cache(
    rlprof: Run,
    asked: dict[str, Any],
    hints: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("demo", "--steps", 7, "--ranks", 2, "--kv-cache")

    status, out, err = rlprof(*words)

    assert status == 0
    assert asked == {
        "steps": 7,
        "ranks": 2,
        "kv_cache": True,
    }
    assert out.endswith("Wrote profiler_data/run/report.html\n")
    assert err.endswith("next: rlprof findings profiler_data/run\n")
    assert "--kv-cache" not in err


def test_a_demo_that_left_no_run_is_an_error(
    rlprof: Run, asked: dict[str, Any], tmp_path: Path
) -> None:
    status, _, err = rlprof("demo", "-o", tmp_path / "lost")
    assert (status, "left no run" in err) == (2, True)


def test_a_slow_rank_is_made_and_the_command_that_finds_it_is_next(
    rlprof: Run, asked: dict[str, Any], hints: None, tmp_path: Path
) -> None:
    err = rlprof("demo", "-o", tmp_path, "--ranks", 2, "--slow-rank", 1)[2]

    assert (asked["slow_rank"], asked["ranks"]) == (1, 2)
    assert err.endswith(f"next: rlprof stragglers {tmp_path}/run\n")


@pytest.mark.parametrize(
    "words",
    [
        ("--steps", 0),
        ("--ranks", 65),
        ("--inject", "hnag"),
    ],
)
def test_a_number_or_fault_that_is_not_allowed_is_refused(
    rlprof: Run, asked: dict[str, Any], words: tuple[object, ...]
) -> None:
    status, _, err = rlprof("demo", *words)
    assert (status, asked) == (2, {})
    assert f"invalid value for '{words[0]}'" in err


def test_help_names_the_default_of_the_recipe(rlprof: Run) -> None:
    text = " ".join(rlprof("demo", "--help")[1].split())
    assert f"(default: {Recipe().steps})" in text


def test_without_a_package_the_error_says_how_to_install_it(
    rlprof: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    status, _, err = rlprof("demo", "-o", tmp_path)
    assert status == 2
    assert "the demo needs reasoning_gym, which is not installed" in err
    assert 'pip install "lightning-rlprof[demo]"' in err


def test_a_hang_trains_two_ranks_unless_more_are_asked_for(
    rlprof: Run, asked: dict[str, Any], tmp_path: Path
) -> None:
    status, out, _ = rlprof("demo", "--inject", "hang", "-o", tmp_path)
    assert (status, asked["ranks"]) == (0, 2)
    assert "Injected: in step 5, the last rank never leaves its reward." in out
    assert "no rank has reported a hang" in out, "of the run that was written"
    rlprof("demo", "--inject", "hang", "--ranks", 3, "-o", tmp_path / "more")
    assert asked["ranks"] == 3


@pytest.mark.parametrize("fault", [each for each in get_args(Fault) if each != "hang"])
def test_it_says_what_was_injected_and_what_is_found(
    rlprof: Run, asked: dict[str, Any], tmp_path: Path, fault: str
) -> None:
    status, out, _ = rlprof("demo", "--inject", fault, "-o", tmp_path)
    assert (status, asked.get("ranks", 1)) == (0, 2 if fault == "slow-step" else 1)
    assert "Injected: " in out
    assert f"{tmp_path}/run: findings" in out
