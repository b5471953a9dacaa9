"""Lightning trainings under the real torch_npu on the CANN double: every call that reaches CANN.

That is not Ascend: the double records calls and computes nothing.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.double import Run, left_open, shown
from tests.builders.npu_run import notes

pytestmark = pytest.mark.deep

CANARY = ["+ rlprof rlprof.canary", "- rlprof rlprof.canary"]
# torch_npu's own: a range per step, and one in every fetch of a DataLoader.
STEP = """
    + rlprof step
        + rlprof data_fetch
            + default dataloader
            - default dataloader
        - rlprof data_fetch
        + rlprof batch_transfer
        - rlprof batch_transfer
        + rlprof training_step
            + rlprof actor_generate
                + rlprof score
                - rlprof score
                ! rlprof sampled
            - rlprof actor_generate
            + rlprof actor_update
            - rlprof actor_update
        - rlprof training_step
        + rlprof actor_update
            + rlprof backward
            - rlprof backward
            + rlprof optimizer_step
            - rlprof optimizer_step
        - rlprof actor_update
    - rlprof step
"""
GENERATE = """
    + rlprof training_step
    + rlprof actor_generate
    + rlprof score
    - rlprof score
    ! rlprof sampled
    - rlprof actor_generate
    - rlprof training_step
"""
UPDATE = """
    + rlprof training_step
    + rlprof actor_update
    - rlprof actor_update
    - rlprof training_step
    + rlprof actor_update
    + rlprof backward
    - rlprof backward
    + rlprof optimizer_step
    - rlprof optimizer_step
    - rlprof actor_update
"""
NAME = re.compile(r"\w[\w.-]*_\d+_\d{17}_ascend_pt")


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def window(number: int, text: str) -> list[str]:
    step = f"default ProfilerStep#{number}"
    return ["start", f"+ {step}", *CANARY, *lines(text), f"- {step}", "stop"]


def test_stage_all_is_one_window_over_the_steps_with_every_span_in_our_domain(train: Run) -> None:
    calls = train("trainings").part("together")
    first, last = "default ProfilerStep#2", "default ProfilerStep#3"
    assert shown(calls) == [
        *["start", f"+ {first}", *CANARY, *lines(STEP), f"- {first}"],
        *[f"+ {last}", *lines(STEP), f"- {last}", "stop"],
    ]
    assert {call["tid"] for call in calls if call["call"].startswith("mstx")} == {calls[0]["pid"]}


def test_stages_are_a_window_each_in_which_open_ranges_begin_anew_and_end_before_the_stop(
    train: Run,
) -> None:
    calls = train("trainings").part("stages")
    expected = [window(step, text) for step in (2, 3) for text in (GENERATE, UPDATE)]
    assert shown(calls) == [line for lines in expected for line in lines]


@pytest.mark.parametrize("name", ["together", "stages", "broken", "short"])
def test_no_range_is_open_when_the_profiler_stops(name: str, train: Run) -> None:
    calls = train("trainings").part(name)
    assert left_open(calls) == []
    counts = {call: shown(calls).count(call) for call in ("start", "stop")}
    assert counts["start"] == counts["stop"] > 0


def test_an_exception_of_the_user_passes_and_ends_its_ranges(train: Run) -> None:
    process = train("trainings")
    assert process.raised("broken") == "RuntimeError: told to break"
    said = shown(process.part("broken"))
    broken = said.index("+ rlprof weight_sync")
    assert said[broken:] == [
        *["+ rlprof weight_sync", "+ rlprof broken", "- rlprof broken", "- rlprof weight_sync"],
        *["- rlprof training_step", "- rlprof step", "- default ProfilerStep#3", "stop"],
    ]
    assert process.trace("broken").status == "interrupted by RuntimeError"


def test_a_training_that_ends_before_its_window_still_has_its_steps(train: Run) -> None:
    said = shown(train("trainings").part("short"))
    steps = [line.removeprefix("+ default ") for line in said if line.startswith("+ default Prof")]
    assert steps == [f"ProfilerStep#{number}" for number in (2, 3, 4, 5)]


def test_a_token_window_holds_its_iterations_and_the_generation_around_them(train: Run) -> None:
    process = train("trainings")
    iterations = ["+ rlprof forward", "- rlprof forward"] * 2
    text = "\n".join(["+ rlprof actor_generate", *iterations, "- rlprof actor_generate"])
    assert shown(process.part("tokens")) == window(1, text)
    assert list(process.captures("tokens")) == ["step-000001-actor_generate"]


def test_windows_are_directories_by_step_and_stage_with_names_of_torch_npu(train: Run) -> None:
    process = train("trainings")
    assert list(process.captures("together")) == ["step-000002"]
    stages = ("actor_generate", "actor_update")
    assert list(process.captures("stages")) == [
        f"step-00000{step}-{stage}" for step in (2, 3) for stage in stages
    ]
    for capture in process.captures("stages").values():
        assert NAME.fullmatch(capture.name)
        assert list(capture.glob("PROF_*"))
        assert (
            json.loads((capture / "profiler_metadata.json").read_text()).items()
            >= {
                "role": "actor",
                "rlprof_run": process.run("stages").name,
                "rlprof_rank": "0",
                "rlprof_window": capture.parent.name,
            }.items()
        )


def test_the_runs_say_what_they_captured_and_nothing_went_wrong(train: Run) -> None:
    process = train("trainings")
    for name, windows in (("together", 1), ("stages", 4)):
        trace = process.trace(name)
        assert trace.status == "finished"
        assert notes(trace) == notes(trace, "error") == []
        said = [text for text in notes(trace, "info") if text.startswith("captured")]
        assert len(said) == windows
        assert all(text.endswith("NpuProfilerRecorder, MstxRecorder") for text in said)
        assert trace.header.device == "npu"


def test_lightnings_own_torch_profiler_is_refused_before_training(train: Run) -> None:
    process = train("trainings")
    assert process.raised("beside").startswith("ConfigError: the Trainer's PyTorchProfiler and")
    assert process.part("beside") == []


def test_inside_an_active_torch_profiler_the_recorder_is_dropped_and_nothing_crashes(
    train: Run,
) -> None:
    process = train("trainings")
    assert process.status == 0
    (error,) = notes(process.trace("inside"), "error")
    assert "another profiler is active on this thread, and torch_npu.profiler inside of it" in error
    (warning,) = notes(process.trace("inside"))
    assert warning.startswith(
        "MSTX does not record the stages: torch_npu.profiler is not running in this capture"
    )
    assert shown(process.part("inside")) == []


@pytest.fixture(scope="module")
def two_ranks(train: Run) -> Any:
    return train("ranks")


def test_each_rank_has_its_window_on_its_own_process(two_ranks: Any) -> None:
    assert two_ranks.status == 0, two_ranks.output
    processes = {call["pid"] for call in two_ranks.calls if call["call"] == "aclprofStart"}
    assert len(processes) == 2
    for process in processes:
        calls = [call for call in two_ranks.calls if call["pid"] == process]
        assert left_open(calls) == []
        # In each step the loss of the user's mark, then backward and optimizer.
        assert shown(calls).count("+ rlprof actor_update") == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_files_of_a_rank_carry_its_number(rank: int, two_ranks: Any) -> None:
    (capture,) = two_ranks.captures("ranks", rank).values()
    info: Path = capture / f"profiler_info_{rank}.json"
    assert json.loads(info.read_text())["rank_id"] == rank
    metadata = json.loads((capture / "profiler_metadata.json").read_text())
    assert metadata["rlprof_rank"] == str(rank)
    assert notes(two_ranks.trace("ranks", rank)) == []


def test_the_variable_rank_names_the_file_without_torch_distributed(train: Run) -> None:
    captures = train("one", RANK="6").captures("one").values()
    assert len(captures) == 2
    assert all((capture / "profiler_info_6.json").is_file() for capture in captures)
