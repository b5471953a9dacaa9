"""The real package nvtx, heard by a real NVTX tool of our own; no GPU and no Nsight takes part."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recorders.nvtx import NvtxRecorder
from tests.doubles.nvtx import listener
from tests.doubles.nvtx.listener import Call

# A session whose first step is captured with the recorder, around the lines that a test adds.
SESSION = """
import asyncio
from pathlib import Path
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.marking import annotate, stage
from lightning_rlprof.recorders.nvtx import NvtxRecorder
from lightning_rlprof.session import Session
from lightning_rlprof.testing import FakeClock, make_header

config = ProfilerConfig(integrated={"profile": True})
with Session(config, Path("run"), make_header(), [NvtxRecorder()], FakeClock()) as session:
    session.begin_step(1)
"""


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listener.build(tmp_path_factory.mktemp("nvtx"))


def session_with(body: str) -> str:
    return SESSION + "\n".join(f"    {line}" for line in body.strip().splitlines())


def ranges(calls: list[Call]) -> list[tuple[str, str]]:
    return [(call.verb, call.message) for call in calls if call.verb in ("push", "pop")]


def test_spans_nest_as_pushes_and_pops_in_the_domain_rlprof(tool: Path, tmp_path: Path) -> None:
    body = """
with stage("actor_update", tokens=3):
    with annotate("optimizer é"):
        pass
with stage("weight_sync"):
    pass
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert ranges(calls) == [
        ("push", "actor_update"),
        ("push", "optimizer é"),
        ("pop", ""),
        ("pop", ""),
        ("push", "weight_sync"),
        ("pop", ""),
    ]
    assert {call.domain for call in calls} == {"rlprof"}
    assert {call.thread for call in calls} == {calls[0].thread}


def test_the_domain_is_made_once_and_nothing_is_heard_before(tool: Path, tmp_path: Path) -> None:
    body = """
with stage("actor_update"): pass
session.end_step()
session.begin_step(2)
with stage("actor_update"): pass
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert [call.verb for call in calls] == ["create", "push", "pop"]


def test_a_range_is_popped_when_its_span_raises(tool: Path, tmp_path: Path) -> None:
    body = """
try:
    with stage("actor_generate"), stage("compute_reward"):
        raise KeyError("reward")
except KeyError:
    pass
with stage("actor_update"):
    pass
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert [verb for verb, _ in ranges(calls)] == ["push", "push", "pop", "pop", "push", "pop"]


def test_a_span_that_never_ends_is_popped_with_the_window(tool: Path, tmp_path: Path) -> None:
    body = """
stage("actor_generate").__enter__()
session.end_step()
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    assert ranges(calls) == [("push", "actor_generate"), ("pop", "")]


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
    assert ranges(calls) == [("push", "rollouts"), ("pop", "")]
    assert [(call.verb, call.number, call.message) for call in calls[2:-1]] == [
        ("start", 1, "actor_generate"),
        ("start", 2, "compute_reward"),
        ("end", 1, ""),
        ("end", 2, ""),
    ]


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
"""
    calls = listener.heard(session_with(body), tmp_path, tool)
    verbs = Counter(call.verb for call in calls)
    assert (verbs["start"], verbs["end"], verbs["push"]) == (2, 2, 0)
    started = {call.number for call in calls if call.verb == "start"}
    assert {call.number for call in calls if call.verb == "end"} == started


def test_a_range_begun_before_a_loop_is_popped_after_it(tool: Path, tmp_path: Path) -> None:
    script = """
import asyncio
from pathlib import Path
from lightning_rlprof.recorders.nvtx import NvtxRecorder

async def inside(recorder):
    recorder.exit(recorder.enter("inner", "stage", 1))

recorder = NvtxRecorder()
recorder.open(Path("window"))
token = recorder.enter("outer", "stage", 1)
asyncio.run(inside(recorder))
recorder.exit(token)
"""
    calls = listener.heard(script, tmp_path, tool)
    assert [call.verb for call in calls] == ["create", "push", "start", "end", "pop"]


def test_the_contract_under_a_tool_leaves_no_range_open(tool: Path, tmp_path: Path) -> None:
    script = """
from pathlib import Path
from lightning_rlprof.recorders.nvtx import NvtxRecorder
from lightning_rlprof.testing import check_recorder
check_recorder(NvtxRecorder(), Path("out"))
"""
    calls = listener.heard(script, tmp_path, tool)
    verbs = Counter(call.verb for call in calls)
    assert verbs["push"] == verbs["pop"] == 4
    assert {call.message for call in calls if call.verb == "push"} == {"actor_update", "é" * 50}


def test_without_a_tool_nothing_raises_and_nothing_is_written(tmp_path: Path) -> None:
    done = listener.run(session_with('with stage("actor_update"): pass'), tmp_path, None)
    assert (done.returncode, done.stderr) == (0, "")
    assert "failed" not in (tmp_path / "run" / "rank-00000.jsonl").read_text()
    assert not (tmp_path / "calls").exists()


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(RecorderError, match=r"package nvtx, which is not installed; pip install"):
        NvtxRecorder()


def test_a_pickled_recorder_works_where_it_arrives(tool: Path, tmp_path: Path) -> None:
    script = """
import pickle
from pathlib import Path
from lightning_rlprof.recorders.nvtx import NvtxRecorder
from lightning_rlprof.testing import check_recorder

recorder = NvtxRecorder()
recorder.open(Path("window"))
check_recorder(pickle.loads(pickle.dumps(recorder)), Path("out"))
"""
    calls = listener.heard(script, tmp_path, tool)
    assert sum(call.verb == "push" for call in calls) == 4
