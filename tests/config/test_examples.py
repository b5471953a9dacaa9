"""The files in examples/nvidia build, and capture what the words on top of them say."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.capture import after_step, at_stage, at_step
from tests.places import ROOT

FOLDER = ROOT / "examples" / "nvidia"
FILES = sorted(FOLDER.glob("*.yaml"))
STAGES = (
    "actor_generate",
    "compute_reward",
    "actor_compute_log_prob",
    "compute_advantage",
    "actor_update",
)
build = ProfilerConfig.build


def windows(config: ProfilerConfig, rank: int = 0, steps: int = 12) -> list[str]:
    """Return each capture of a training of 12 steps and 5 stages, by its step and stage."""
    found: list[str] = []
    is_open = False
    for step in range(1, steps + 1):
        action = at_step(config, rank, step, is_open=is_open)
        found += [f"{step}"] if action == "open" else []
        is_open = {"open": True, "close": False, "keep": is_open}[action]
        for stage in STAGES:
            if at_stage(config, rank, step, stage, is_open=is_open) == "open":
                found.append(f"{step} {stage}")
        if after_step(config, rank, step, is_open=is_open) == "close":
            is_open = False
    return found


def each_stage(*steps: int) -> list[str]:
    return [f"{step} {stage}" for step in steps for stage in STAGES]


# The file, the ranks of 8 that capture, the captures of each of them, the words that say so, tools.
CLAIMS: list[tuple[str, list[int], list[str], list[str], list[str]]] = [
    ("off", [], [], ["no capture and no report"], []),
    (
        "report-per-step",
        [0],
        ["3", "4", "10"],
        ["steps 3, 4 and 10 on rank 0", "three"],
        ["nsight"],
    ),
    (
        "report-per-stage",
        [0],
        each_stage(3, 4),
        ["steps 3 and 4, on rank 0", "five reports, so ten"],
        ["nsight"],
    ),
    ("all-ranks", list(range(8)), ["3"], ["Every rank captures step 3", "eight"], ["nsight"]),
    ("chosen-ranks", [0, 7], ["3", "5"], ["steps 3 and 5", "with 8 ranks, four"], ["nsight"]),
    ("roles", [0, 1, 2], ["3"], ["in step 3", "here 0, 1 and 2", "three ranks"], ["nsight"]),
    ("ray", list(range(8)), ["3", "4"], ["every worker captures steps 3 and 4"], ["nsight"]),
    ("torch-profiler", [0], ["3"], ["step 3 on rank 0, one capture"], ["torch_profiler"]),
    ("memory-snapshot", [0], ["3"], ["in step 3 on rank 0, as one snapshot"], ["memory"]),
]


def test_every_example_is_tested() -> None:
    assert sorted(name for name, *_ in CLAIMS) == [path.stem for path in FILES]


@pytest.mark.parametrize(("name", "ranks", "captures", "words", "tools"), CLAIMS)
def test_an_example_captures_what_it_says(
    name: str, ranks: list[int], captures: list[str], words: list[str], tools: list[str]
) -> None:
    config = build(FOLDER / f"{name}.yaml")
    found = {rank: windows(config, rank) for rank in range(8)}
    assert found == {rank: captures if rank in ranks else [] for rank in range(8)}
    assert (config.tools if config.captures else []) == tools
    comment = said(FOLDER / f"{name}.yaml")
    for part in words:
        assert part in comment
    config.check_world(8)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_says_how_it_is_run(path: Path) -> None:
    here = path.relative_to(ROOT).as_posix()
    ways = (f"rlprof nsys run --config {here} -- python train.py", f"RLPROF_CONFIG={here} python")
    assert any(way in said(path) for way in (*ways, f'build("{here}")'))


def said(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = lines[: next(number for number, line in enumerate(lines) if line[:1] != "#")]
    assert comment
    return " ".join(" ".join(line.lstrip("#").rstrip("\\") for line in comment).split())


def changed(name: str, **keys: Any) -> ProfilerConfig:
    return build(FOLDER / f"{name}.yaml", **keys)


def test_off_is_on_without_its_line() -> None:
    data = yaml.safe_load((FOLDER / "off.yaml").read_text(encoding="utf-8"))
    assert data.pop("integrated") == {"profile": False}
    assert windows(build({**data, "integrated": None})) == ["3"]


def test_only_an_example_that_captures_starts_nsys_which_else_records_the_whole_run() -> None:
    with_nsys = [path for path in FILES if "rlprof nsys run --config" in said(path)]
    assert with_nsys
    assert [path.stem for path in with_nsys if not build(path).captures] == []


def test_what_else_the_comments_say() -> None:
    assert windows(changed("report-per-step", profile_continuous_steps=True)) == ["3", "10"]
    few = changed("report-per-stage", stage=["actor_generate", "actor_update"])
    assert windows(few) == [
        f"{step} actor_{what}" for step in (3, 4) for what in ("generate", "update")
    ]
    critic = changed("roles", role="critic")
    assert [rank for rank in range(8) if critic.wants_rank(rank)] == [0, 2]
    assert not changed("roles", role="reward").captures
    schedule = changed("torch-profiler").torch_profiler.schedule
    left_out = schedule.skip_first + schedule.wait
    kept = range(left_out + schedule.warmup + 1, left_out + schedule.warmup + schedule.active + 1)
    assert list(kept) == [3, 4]


def test_ray_has_options_for_both_kinds_of_processes() -> None:
    nsight = changed("ray").nsight
    assert nsight.controller == {
        "trace": "nvtx,osrt",
        "cuda-memory-usage": None,
        "cuda-graph-trace": None,
    }
    assert nsight.worker["trace"] == "cuda,nvtx,cublas"
    assert nsight.worker["capture-range-end"] is None


def test_memory_is_watched_as_the_example_says() -> None:
    memory = changed("memory-snapshot").memory
    assert (memory.level, memory.max_entries, memory.stack_depth) == ("snapshot", 200_000, 16)
