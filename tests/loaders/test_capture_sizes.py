"""How much a configuration will capture, from what earlier runs of its directory captured."""

import gzip
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.capture_sizes import Estimate, estimate
from lightning_rlprof.recording.recorders.registry import recorder_names
from tests.builders.runs import grpo_rows, header, write_rank

TRACE = "{}_actor_rank0-of-1_pid1.trace.json.gz"
SHAPES = {"profile_record_shapes": True}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def config(data: Path, **given: Any) -> ProfilerConfig:
    block = {"profile_save_path": str(data), **given.pop("integrated", {})}
    return ProfilerConfig.build({"integrated": block, **given})


def earlier(
    data: Path,
    windows: Collection[str],
    *,
    name: str = "one",
    events: int = 100,
    device: str = "cpu",
    ranks: int = 1,
    **given: Any,
) -> Path:
    """Write a run whose captures are traces of some events each."""
    run = data / name
    own = config(data, **given).masked()
    for rank in range(ranks):
        write_rank(run, header(rank, ranks, config=own, device=device, run_id=name), grpo_rows(9))
        for window in windows:
            folder = run / f"rank-{rank:05d}" / window
            folder.mkdir(parents=True)
            text = '{"traceEvents": [' + ", ".join(['{"ph": "X"}'] * events) + "]}"
            (folder / TRACE.format(window)).write_bytes(gzip.compress(text.encode()))
    return run


def size_of(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*.gz"))


def of(wanted: ProfilerConfig) -> Estimate | None:
    return estimate(wanted, lambda device: recorder_names(wanted, device))


def found(wanted: ProfilerConfig) -> Estimate:
    answer = of(wanted)
    assert answer is not None
    return answer


def test_a_step_is_the_mean_of_the_captured_steps_and_ranks(data: Path) -> None:
    run = earlier(data, ["step-000002", "step-000003"], ranks=2, steps=[2, 3])
    answer = found(config(data, steps=[5]))
    assert set(answer.size) == {size_of(run) / 4}
    assert (answer.events, answer.world_size) == ((100, 100), 2)
    assert answer.evidence == "4 captures of one"


def test_one_capture_of_joined_steps_is_divided_by_its_steps(data: Path) -> None:
    window = {"profile_step_start": 2, "profile_step_end": 6}
    earlier(data, ["step-000002"], integrated=window)  # steps 2 to 5
    assert found(config(data, integrated=window)).events == (25, 25)


def test_a_capture_ends_with_the_training(data: Path) -> None:
    window = {"profile_step_start": 8, "profile_step_end": 100}
    earlier(data, ["step-000008"], integrated=window)  # the run has 9 steps
    assert found(config(data, integrated=window)).events == (50, 50)


def test_a_stage_that_opens_twice_in_a_step_counts_twice(data: Path) -> None:
    stage = {"stage": "actor_update"}
    windows = ["step-000003-actor_update", "step-000003-actor_update-2"]
    earlier(data, windows, integrated=stage, steps=[3])
    assert found(config(data, integrated=stage, steps=[7])).events == (200, 200)


def test_stages_without_a_capture_are_named(data: Path) -> None:
    earlier(data, ["step-000003-my_stage"], custom_stages=["my-stage"], discrete=True, steps=[3])
    wanted = {"stage": ["my-stage", "actor_update"]}
    answer = found(config(data, integrated=wanted, custom_stages=["my-stage"], steps=[4]))
    assert (answer.events, answer.missing) == ((100, 100), ("actor_update",))


def test_stages_say_nothing_of_whole_steps_and_the_reverse(data: Path) -> None:
    earlier(data, ["step-000003"], steps=[3])
    assert of(config(data, integrated={"stage": "actor_update"}, steps=[3])) is None
    assert of(config(data, discrete=True, steps=[3])) is None
    assert of(config(data, steps=[3])) is not None


def test_all_stages_need_a_run_that_captured_all_stages(data: Path) -> None:
    earlier(data, ["step-000003-actor_update"], integrated={"stage": "actor_update"}, steps=[3])
    assert of(config(data, discrete=True, steps=[3])) is None
    names = ["step-000003-actor_update", "step-000003-actor_generate"]
    earlier(data, names, name="two", discrete=True, steps=[3])
    assert found(config(data, discrete=True, steps=[3])).events == (200, 200)


def test_another_option_of_known_effect_gives_a_range_both_ways(data: Path) -> None:
    run = earlier(data, ["step-000003"], steps=[3])
    low, high = found(config(data, integrated=SHAPES, steps=[3])).size
    assert size_of(run) < low < high < 2 * size_of(run)
    other = data.with_name("other")
    with_shapes = earlier(other, ["step-000003"], integrated=SHAPES, steps=[3])
    answer = found(config(other, steps=[3]))
    assert size_of(with_shapes) / 2 < answer.size[0] < answer.size[1] < size_of(with_shapes)
    assert answer.evidence == "1 capture of one, without shapes estimated"


def test_equal_options_win_over_a_newer_run(data: Path) -> None:
    earlier(data, ["step-000003"], name="a", events=100, integrated=SHAPES, steps=[3])
    earlier(data, ["step-000003"], name="b", events=200, steps=[3])
    answer = found(config(data, integrated=SHAPES, steps=[3]))
    assert (answer.events, answer.evidence) == ((100, 100), "1 capture of a")


@pytest.mark.parametrize(
    "other",
    [
        {"integrated": {"profile_with_cpu": False}},
        {"torch_profiler": {"schedule": {"active": 1}}},
        {"tools": ["memory"]},
    ],
)
def test_another_option_of_unknown_effect_gives_no_estimate(
    data: Path, other: dict[str, Any]
) -> None:
    earlier(data, ["step-000003"], steps=[3])
    assert of(config(data, steps=[3], **other)) is None


def test_a_directory_without_a_readable_run_gives_no_estimate(data: Path) -> None:
    wanted = config(data, steps=[3])
    assert of(wanted) is None
    (data / "bad").mkdir(parents=True)
    (data / "bad" / "rank-00000.jsonl").write_text("no header\n")
    (data / "other").mkdir()
    write_rank(data / "new", header(config={"key_of_tomorrow": 1}), grpo_rows(3))
    assert of(wanted) is None


def test_a_damaged_trace_has_a_size_and_no_number_of_events(data: Path) -> None:
    run = earlier(data, ["step-000003"], steps=[3])
    (trace,) = run.rglob("*.gz")
    trace.write_bytes(trace.read_bytes()[:-20])
    answer = found(config(data, steps=[3]))
    assert (answer.size[0], answer.events) == (trace.stat().st_size, None)


# ---- Ascend


def ascend(data: Path, **block: Any) -> Path:
    """Write a run on an NPU: 1,000 bytes of raw data, and 500 parsed as text, three events."""
    given = {"stage": "actor_update", "profile_level": "level1", **block}
    run = earlier(data, [], device="npu", integrated=given, steps=[3])
    folder = run / "rank-00000" / "step-000003-actor_update" / "h_1_20261121153342445_ascend_pt"
    (folder / "PROF_1").mkdir(parents=True)
    (folder / "PROF_1" / "raw").write_bytes(bytes(1000))
    output = folder / "ASCEND_PROFILER_OUTPUT"
    output.mkdir()
    (output / "trace_view.json").write_text('["ph": , "ph": , "ph": ]'.ljust(400))
    (output / "kernel_details.csv").write_bytes(bytes(100))
    return run


def test_an_ascend_capture_counts_raw_and_parsed_data(data: Path) -> None:
    ascend(data)
    wanted = {"stage": "actor_update", "profile_level": "level1"}
    answer = found(config(data, integrated=wanted, steps=[4]))
    assert [*answer.size, answer.raw, *(answer.events or ())] == [1500, 1500, 1000, 3, 3]
    assert (answer.tools, answer.unpacked) == (("npu_profiler",), None)


def test_a_database_takes_30_percent_of_the_text(data: Path) -> None:
    ascend(data)
    wanted = {"stage": "actor_update", "profile_level": "level1", "profile_export_type": "db"}
    answer = found(config(data, integrated=wanted, steps=[4]))
    assert set(answer.size) == {1150}
    assert answer.evidence == "1 capture of one, as db estimated"


@pytest.mark.parametrize(
    "other",
    [
        {"profile_level": "level2"},
        {"profile_with_memory": True},
        {"mstx": True},
        {"profile_with_cpu": False},
    ],
)
def test_another_level_or_option_on_ascend_needs_a_capture(
    data: Path, other: dict[str, Any]
) -> None:
    ascend(data)
    wanted = {"stage": "actor_update", "profile_level": "level1", **other}
    answer = of(config(data, integrated=wanted, steps=[4]))
    assert answer is None or "npu_profiler" not in answer.tools


# ---- Nsight Systems


def test_reports_of_nsys_are_measured(data: Path) -> None:
    nsight: dict[str, Any] = {
        "tools": ["nsight"],
        "steps": [2],
        "integrated": {"stage": "actor_update"},
    }
    run = earlier(data, [], device="cuda", **nsight)
    home = run / "rank-00000"
    home.mkdir()
    (home / "actor_step1_rank0_step2-actor_update.nsys-rep").write_bytes(bytes(700))
    answer = found(config(data, **nsight))
    assert (answer.size, answer.events, answer.tools) == ((700, 700), None, ("nsight",))


def test_the_estimate_holds_for_real_traces(data: Path) -> None:
    torch = pytest.importorskip("torch")
    from lightning_rlprof import stage, start_session, step

    layer = torch.nn.Linear(8, 8)
    sizes: dict[str, int] = {}
    options: dict[str, dict[str, Any]] = {"plain": {}, "shapes": SHAPES}
    for name, given in options.items():
        block = {"profile_save_path": str(data / name), "stage": "actor_update", **given}
        with (
            start_session({"integrated": block}, steps=[1], summary=False),
            step(),
            stage("actor_update"),
        ):
            for _ in range(200):
                layer(torch.randn(4, 8)).sum().backward()
        sizes[name] = size_of(data / name)
    wanted = config(data / "plain", integrated={"stage": "actor_update", **SHAPES}, steps=[1])
    low, high = found(wanted).size
    assert low * 0.8 < sizes["shapes"] < high * 1.25
