"""The real package nvtx, heard by a real NVTX tool of our own; no GPU and no Nsight takes part."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.doubles.nvtx import listener
from tests.doubles.nvtx.listener import Call, left_open, shown

pytestmark = pytest.mark.deep

# A session whose first step is captured with the recorder, around the lines that a test adds.
SESSION = """
import asyncio
from pathlib import Path
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import annotate, mark, stage
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import FakeClock, make_header

config = ProfilerConfig(integrated={"profile": True})
with Session(config, Path("run"), make_header(), [NvtxRecorder(5)], FakeClock()) as session:
    session.begin_step(1)
"""


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listener.build(tmp_path_factory.mktemp("nvtx"))


def session_with(body: str) -> str:
    return SESSION + "\n".join(f"    {line}" for line in body.strip().splitlines())


def ranges(calls: list[Call]) -> list[str]:
    """Return ranges and marks but those that open a capture."""
    return shown(call for call in calls if not call.message.startswith("rlprof."))


def test_spans_nest_as_pushes_and_pops_in_the_domain_rlprof(tool: Path, tmp_path: Path) -> None:
    body = """
with stage("actor_update", tokens=3):
    with annotate("optimizer é"):
        mark("weights published")
with stage("weight_sync"):
    pass
session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert ranges(calls) == [
        "push step step 1",
        "push stage actor_update 1",
        "push region optimizer é 1",
        "mark mark weights published 1",
        "pop",
        "pop",
        "push stage weight_sync 1",
        "pop",
        "pop",
    ]
    assert {call.domain for call in calls} == {"rlprof"}
    assert {call.thread for call in calls} == {calls[0].thread}


def test_ranges_are_there_outside_of_captures_and_the_step_is_their_payload(
    tool: Path, tmp_path: Path
) -> None:
    body = """
for step in (1, 2, 3):
    session.begin_step(step)
    with stage("actor_update"):
        mark("half")
    session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    inner = ["push stage actor_update {}", "mark mark half {}", "pop"]
    one, two, three = ([word.format(step) for word in inner] for step in (1, 2, 3))
    assert ranges(calls) == ["push step step 1", *one, "pop", *two, *three]


def test_a_capture_begins_with_marks_of_rank_and_wall_clock(tool: Path, tmp_path: Path) -> None:
    before = time.time_ns()
    body = """
session.end_step()
session.begin_step(2)
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    rank, clock = (
        call for call in calls if call.message.startswith("rlprof.") and call.verb == "mark"
    )
    assert (rank.message, rank.payload, rank.category) == ("rlprof.rank", 5, "")
    assert (clock.message, clock.category) == ("rlprof.clock", "")
    assert clock.payload is not None
    assert before < clock.payload < time.time_ns()
    assert calls.index(rank) < calls.index(clock) < [call.verb for call in calls].index("push")


def test_each_capture_has_its_own_marks(tool: Path, tmp_path: Path) -> None:
    script = """
from pathlib import Path
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
recorder = NvtxRecorder(1)
for step in (1, 2):
    recorder.open(Path(f"step-{step}"))
    recorder.close()
"""
    marks = [call for call in listener.heard(script, tmp_path, tool) if call.verb == "mark"]
    assert [(call.message, call.payload) for call in marks][::2] == [("rlprof.rank", 1)] * 2
    first, second = (call.payload or 0 for call in marks[1::2])
    assert first < second


def test_names_are_registered_once_and_never_hold_a_number(tool: Path, tmp_path: Path) -> None:
    body = """
for step in range(1, 40):
    session.begin_step(step)
    with stage("actor_update"), annotate("optimizer"):
        mark("half")
    session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    names = Counter(call.message for call in calls if call.verb in ("register", "category"))
    messages = ["step", "actor_update", "optimizer", "half", "rlprof.rank", "rlprof.clock"]
    assert names == Counter([*messages, "stage", "region", "step", "mark"])
    assert sum(call.verb == "create" for call in calls) == 1


def test_colours_are_of_the_stage_and_grey_for_what_is_none(tool: Path, tmp_path: Path) -> None:
    body = """
with stage("actor_update"), stage("my_filter"), annotate("actor_update"):
    pass
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    colors = {(call.category, call.message): hex(call.color) for call in calls if call.color}
    assert colors == {
        ("", "rlprof.rank"): "0xff000000",
        ("", "rlprof.clock"): "0xff000000",
        ("step", "step"): "0xff808080",
        ("stage", "actor_update"): "0xffd55e00",
        ("stage", "my_filter"): "0xff88ccee",
        ("region", "actor_update"): "0xffa0a0a0",
    }


def test_a_range_is_popped_when_its_span_raises(tool: Path, tmp_path: Path) -> None:
    body = """
try:
    with stage("actor_generate"), annotate("reward"):
        raise KeyError("reward")
except KeyError:
    pass
with stage("actor_update"):
    pass
session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert [word.split()[0] for word in ranges(calls)] == [
        *["push", "push", "push", "pop", "pop", "push", "pop", "pop"]
    ]


def test_a_range_spans_the_end_of_the_capture_that_it_began_in(tool: Path, tmp_path: Path) -> None:
    body = """
with stage("actor_generate"):
    session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert [word.split()[0] for word in ranges(calls)] == ["push", "push", "pop", "pop"]
    assert left_open(calls) == []


def test_the_range_of_a_step_that_was_expected_and_skipped_is_popped(
    tool: Path, tmp_path: Path
) -> None:
    script = session_with("session.end_step()\nsession.begin_step(3)\nsession.end_step()")
    three = '"profile": True, "profile_step_end": 4'
    calls = listener.heard(script.replace('"profile": True', three), tmp_path, tool)
    steps = [f"push step step {step}" for step in (1, 2, 3)]
    assert [word for word in ranges(calls) if word != "pop"] == steps
    assert left_open(calls) == []


def test_interleaved_asyncio_tasks_start_and_end_ranges_by_number(
    tool: Path, tmp_path: Path
) -> None:
    body = """
async def first(began, ended):
    with stage("actor_generate"):
        await began.wait()
    ended.set()

async def second(began, ended):
    with stage("compute_reward"):
        began.set()
        await ended.wait()

async def both():
    events = asyncio.Event(), asyncio.Event()
    await asyncio.gather(first(*events), second(*events))

with stage("rollouts"):
    asyncio.run(both())
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    inside = [call for call in calls if call.verb in ("start", "end")]
    assert [(call.verb, call.number, call.message) for call in inside] == [
        *[("start", 1, "actor_generate"), ("start", 2, "compute_reward")],
        *[("end", 1, ""), ("end", 2, "")],
    ]
    about = [(call.category, call.payload, call.color) for call in inside[:2]]
    assert about == [("stage", 1, 0xFF56B4E9), ("stage", 1, 0xFFF0E442)]


def test_a_coroutine_that_fails_or_is_cancelled_ends_its_range(tool: Path, tmp_path: Path) -> None:
    body = """
@stage("compute_reward")
async def reward(fails):
    if fails:
        raise ValueError("no reward")
    await asyncio.sleep(3600)

async def both():
    waiting = asyncio.create_task(reward(False))
    await asyncio.gather(reward(True), return_exceptions=True)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

asyncio.run(both())
session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    verbs = Counter(call.verb for call in calls)
    assert (verbs["start"], verbs["end"]) == (2, 2)
    assert left_open(calls) == []


def test_a_range_begun_before_a_loop_is_popped_after_it(tool: Path, tmp_path: Path) -> None:
    script = """
import asyncio
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder

async def inside(recorder):
    recorder.exit(recorder.enter("inner", "stage", 1))

recorder = NvtxRecorder()
token = recorder.enter("outer", "stage", 1)
asyncio.run(inside(recorder))
recorder.exit(token)
"""
    calls = listener.heard(script, tmp_path, tool)
    assert shown(calls) == ["push stage outer 1", "start stage inner 1", "end", "pop"]


def test_the_contract_under_a_tool_leaves_no_range_open(tool: Path, tmp_path: Path) -> None:
    script = """
from pathlib import Path
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
from lightning_rlprof.testing import check_recorder
check_recorder(NvtxRecorder(), Path("out"))
"""
    calls = listener.heard(script, tmp_path, tool)
    verbs = Counter(call.verb for call in calls)
    assert verbs["push"] == verbs["pop"] == 6
    assert verbs["mark"] == 2 + 3 * 2
    assert left_open(calls) == []


def test_a_pickled_recorder_works_where_it_arrives(tool: Path, tmp_path: Path) -> None:
    script = """
import copy, pickle
from pathlib import Path
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder

recorder = NvtxRecorder(3)
recorder.exit(recorder.enter("actor_update", "stage", 1))
for other in (pickle.loads(pickle.dumps(recorder)), copy.deepcopy(recorder)):
    other.open(Path("window"))
    other.exit(other.enter("actor_update", "stage", 2))
"""
    words = shown(listener.heard(script, tmp_path, tool))
    assert words.count("mark  rlprof.rank 3") == 2
    assert words.count("push stage actor_update 2") == 2
