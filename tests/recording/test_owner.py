"""Which threads a session records: the owner's, and no others."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_rlprof.recording.annotations import count, mark, record, stage
from lightning_rlprof.recording.open_spans import Owner, rejoin, set_apart
from lightning_rlprof.recording.samples import sample
from lightning_rlprof.recording.session import AlreadyRecordingError, current
from lightning_rlprof.recording.span_buffer import RankTakenError
from lightning_rlprof.recording.torch_hooks import OptimizerSteps
from lightning_rlprof.records.run_directory import RankTrace
from tests.builders.recording import read


def in_thread(what: Callable[[], object], name: str | None = None) -> None:
    """Run something in a thread of its own, to its end; raise what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            what()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def everything(name: str) -> None:
    """Record something of each kind."""
    with stage(name, tokens=1):
        count(tokens=5)
    mark(f"mark of {name}")
    record(f"record of {name}", 1, 2)
    with sample(f"prompt of {name}") as one, one.phase(f"phase of {name}"):
        pass
    one.record(f"recorded phase of {name}", 1, 2)
    one.end("trained")
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], 0.1).step()


def recorded(session: Any) -> tuple[set[str], list[str], int]:
    """Return the names of spans, prompts, and how many optimizers stepped, after its end."""
    session.close()
    trace = read(session)
    names = [span.name for span in trace.spans]
    prompts = [each.prompt for each in trace.samples]
    return stages(trace), prompts, names.count("optimizer_step")


def stages(trace: RankTrace) -> set[str]:
    """Return the names of the stages that `everything` opens itself."""
    return {span.name for span in trace.spans if span.kind == "stage" and " of " not in span.name}


def test_the_main_thread_owns_all_threads(start) -> None:
    session = start()
    session.at_close(OptimizerSteps(session).remove)
    everything("own")
    in_thread(lambda: in_thread(lambda: everything("grandchild")))
    names, prompts, steps = recorded(session)
    assert names == {"own", "grandchild"}
    assert (prompts, steps) == (["prompt of own", "prompt of grandchild"], 2)


def test_a_thread_owns_what_it_starts_and_neither_its_siblings_nor_its_parent(start) -> None:
    began, others_done = threading.Event(), threading.Event()
    found: list[Any] = []

    async def tasks() -> None:
        await asyncio.gather(asyncio.to_thread(everything, "pool"), task())

    async def task() -> None:
        everything("task")

    def owner() -> None:
        session = start()
        session.at_close(OptimizerSteps(session).remove)
        began.set()
        others_done.wait()
        everything("own")
        in_thread(lambda: everything("child"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(in_thread, lambda: everything("grandchild")).result()
        asyncio.run(tasks())
        found.append(recorded(session))

    before = threading.Thread(target=lambda: (began.wait(), everything("older sibling")))
    thread = threading.Thread(target=owner)
    before.start()
    thread.start()
    began.wait()
    assert current() is None
    everything("parent")
    in_thread(lambda: everything("younger sibling"))
    before.join()
    others_done.set()
    thread.join()
    [(names, prompts, steps)] = found
    own = ["own", "child", "grandchild", "pool", "task"]
    assert names == {*own}
    assert sorted(prompts) == sorted(f"prompt of {name}" for name in own)
    assert steps == len(own)


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_sibling_never_ends_the_span_that_the_owner_has_open(mirrored: bool, start) -> None:
    session = start(**({"steps": [1], "stage": "critic_update"} if mirrored else {}))
    session.begin_step(1)

    def sibling() -> None:
        set_apart()
        with stage("actor_update"):
            pass

    with stage("actor_update"):
        in_thread(sibling)
        with stage("compute_reward"):
            pass
    session.end_step()
    session.close()
    assert [span.name for span in read(session).spans][:2] == ["compute_reward", "actor_update"]


def test_a_training_in_another_thread_is_declined_and_its_thread_set_apart(start, caplog) -> None:
    session = start()

    def another() -> None:
        for _ in range(2):
            assert session.decline("a fit")
            everything("another")
            in_thread(lambda: everything("its child"))
        rejoin()
        everything("afterwards")

    in_thread(another, "worker-1")
    session.close()
    trace = read(session)
    assert stages(trace) == {"afterwards"}
    said = "a fit in another thread, worker-1, is not recorded: a process records one"
    assert [note.text for note in trace.notes] == [said]
    assert sum(said in text for text in caplog.messages) == 2


def test_what_begins_inside_of_the_owners_thread_is_a_part_of_its_run(start) -> None:
    session = start()
    assert not session.decline("a fit")
    everything("inside")
    session.close()
    assert "inside" in {span.name for span in read(session).spans}


def test_a_run_ends_with_the_thread_that_owns_it(start) -> None:
    found: list[Any] = []

    def dies() -> None:
        found.append(start())
        found[0].begin_step(1)

    in_thread(dies)
    with pytest.raises(RankTakenError):
        start()  # the same folder and rank, but no session any more
    assert read(found[0]).status == "interrupted by the end of its thread"


def test_of_two_threads_that_begin_at_once_one_is_refused(start, tmp_path) -> None:
    first, last, found = threading.Barrier(8), threading.Barrier(9), []

    def begin(rank: int) -> None:
        first.wait()
        try:
            found.append(start(rank=rank))
        except AlreadyRecordingError as error:
            found.append(error.session)
        last.wait()

    threads = [threading.Thread(target=begin, args=[rank]) for rank in range(8)]
    for thread in threads:
        thread.start()
    last.wait()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1
    assert len([*tmp_path.glob("rank-*.jsonl")]) == 1
    found[0].close()


def test_timers_that_start_timers_keep_no_chain() -> None:
    Owner().begin()
    last: list[threading.Thread] = []
    done = threading.Event()

    def again(left: int) -> None:
        for before in last[-1:]:
            before.join()
        last.append(threading.current_thread())
        if left:
            threading.Timer(0, again, [left - 1]).start()
        else:
            done.set()

    threading.Timer(0, again, [50]).start()
    done.wait()
    length, thread = 0, last[-1]
    while (thread := vars(thread).get("rlprof_parent")) is not None:
        length += 1
    assert length < 10


def test_a_thread_that_takes_the_number_of_one_that_was_apart_is_recorded(start) -> None:
    session = start()
    numbers = set()

    def apart() -> None:
        set_apart()
        numbers.add(threading.get_ident())
        with stage("apart"):
            pass

    def own() -> None:
        with stage("own"):
            pass

    for _ in range(20):
        in_thread(apart)
        in_thread(own)
    session.close()
    names = [span.name for span in read(session).spans]
    assert names == ["own"] * 20
