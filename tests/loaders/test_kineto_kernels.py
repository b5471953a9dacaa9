"""Kernels joined to their launches, and to the stage, step and range of the launch."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rlprof.loaders.kernels import UNKNOWN
from lightning_rlprof.loaders.kineto import read_kernels, read_kineto
from tests.loaders.chrome import BASE, PID, ChromeTrace

AUTOGRAD = 99
NAMED = ("stage", "region")


def places(path: Path) -> list[tuple[Any, Any, Any]]:
    table = read_kineto(path).table("kernels")
    columns = [table.column(name) for name in ("stage", "step", "range")]
    return list(zip(*columns, strict=True))


def test_a_kernel_belongs_to_what_its_launch_lies_in(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("actor_update", 100, 500)
    trace.mark("micro_batch", 200, 300)
    trace.call(1, 250)
    trace.kernel(1, 2_000, 2_500)  # runs long after its step
    trace.launched(2, 400)
    trace.launched(3, 600)
    trace.launched(4, 1_100)

    assert places(trace.write(tmp_path / "t.json")) == [
        ("actor_update", 3, "actor_update"),
        (None, 3, None),
        (None, None, None),
        ("actor_update", 3, "micro_batch"),
    ]


def test_rows_come_by_start_with_device_stream_and_times(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(1, 5_000_000_000_000_007, 5_000_000_000_000_009, "b", device=3, stream=20)
    trace.kernel(2, 5_000_000_000_000_002, 5_000_000_000_000_008, "a", device=None)
    path = trace.write(tmp_path / "rank-5.json")

    table = read_kineto(path).table("kernels")

    assert [row[:6] for row in table.rows] == [(5, None, 7, "a", 0, 6), (5, 3, 20, "b", 5, 2)]


def test_autograd_borrows_from_the_thread_that_trains(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("actor_update", 100, 500)
    trace.mark("backward", 200, 400)
    trace.mark("nccl:all_reduce", 300, 310, tid=AUTOGRAD)
    trace.launched(1, 250, tid=AUTOGRAD)
    trace.launched(2, 305, tid=AUTOGRAD)
    path = trace.write(tmp_path / "t.json")

    assert places(path) == [
        ("actor_update", 3, "backward"),
        ("actor_update", 3, "nccl:all_reduce"),
    ]
    assert read_kineto(path).table("kernels").note.startswith("2 kernels were launched by threads")


def test_another_process_lends_nothing(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 100, 500)
    trace.call(1, 250, tid=5, pid=PID + 1)
    trace.kernel(1, 260, 270)

    assert places(trace.write(tmp_path / "t.json")) == [(None, None, None)]


def test_without_a_launch_the_device_tells(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("actor_update", 0, 1_000)
    trace.shadow("ProfilerStep#2", 0, 900)
    trace.shadow("compute_reward", 100, 900)
    trace.shadow("score", 100, 300)
    trace.kernel(1, 200, 250)
    trace.kernel(2, 400, 450, stream=8)
    path = trace.write(tmp_path / "t.json")

    assert places(path) == [("compute_reward", 2, "score"), (None, None, None)]
    assert read_kineto(path).table("kernels").note == (
        "2 kernels: their launch was not recorded, and little is known of their stage"
    )


def test_replays_of_graphs_are_counted(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number, at in ((1, 0), (2, 100)):
        trace.call(number, at, name="cudaGraphLaunch")
        for node in range(3):
            trace.kernel(number, at + 10 * node, at + 10 * node + 5)
    trace.launched(3, 200)

    note = read_kineto(trace.write(tmp_path / "t.json")).table("kernels").note

    assert note == (
        "6 kernels ran in 2 replays of graphs: whether the device idled inside of one is not known"
    )


def test_a_number_used_twice_means_the_last_call_before_the_kernel(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number, name in enumerate(("first", "second", "third")):
        trace.mark(name, 100 * number, 100 * number + 50)
        trace.call(1, 100 * number + 10)
    for at in (5, 60, 150, 250):
        trace.kernel(1, at, at + 1)

    found = [place[2] for place in places(trace.write(tmp_path / "t.json"))]

    assert found == ["first", "first", "second", "third"]


def test_a_missing_number_joins_nothing(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 100)
    trace.event("cuda_runtime", "cudaLaunchKernel", 10, 15, PID, 1, correlation=None)
    trace.event("kernel", "gemm", 20, 30, 0, 7, device=0, stream=7, correlation=None)

    assert places(trace.write(tmp_path / "t.json")) == [(None, None, None)]


def test_no_kernels_are_said_not_shown_as_none(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 10)

    table = read_kineto(trace.write(tmp_path / "t.json")).table("kernels")

    assert (len(table.rows), table.note) == (0, "no kernels in it: no device was profiled")


def test_kernels_alone_come_with_the_time_of_their_zero(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 1_000, 9_000)
    trace.launched(1, 2_000)
    trace.kernel(2, 3_000, 3_500)

    kernels, unix_ns, remarks = read_kernels(trace.write(tmp_path / "step-000004_x.json"))

    assert unix_ns == BASE + 1_000
    assert kernels.start_ns.tolist() == [1_010, 2_000]
    assert kernels.launch_ns is not None
    assert kernels.launch_ns.tolist() == [1_000, UNKNOWN]
    assert kernels.step.tolist() == [4, 4]
    assert len(remarks) == 1


def test_kernels_alone_leave_the_step_to_the_run_where_nothing_is_marked(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.launched(1, 2_000)
    path = trace.write(tmp_path / "step-000004_x.json")

    assert read_kernels(path)[0].step.tolist() == [0]
    assert places(path) == [(None, 4, None)]


def written_at_random(seed: int) -> ChromeTrace:
    noise, trace = random.Random(seed), ChromeTrace()
    moments = iter(noise.sample(range(1, 20_000), 400))  # all differ: no two begin at once
    names = ["ProfilerStep#1", "ProfilerStep#2", "actor_update", "weight_sync", "a", "b"]
    for _ in range(25):
        begin, end = sorted((next(moments), next(moments)))
        trace.mark(noise.choice(names), begin, end, tid=noise.choice([1, 1, 2]))
    for number in range(60):
        if noise.random() < 0.8:
            trace.call(number, next(moments), tid=noise.choice([1, 2, AUTOGRAD]))
        trace.kernel(number, (at := next(moments)), at + 5, stream=noise.choice([7, 8]))
    for _ in range(8):
        begin, end = sorted((next(moments), next(moments)))
        trace.shadow(noise.choice(names), begin, end, noise.choice([7, 8]))
    noise.shuffle(trace.events)
    return trace


def ns(raw: Any) -> int:
    return round(float(bytes(raw)) * 1000)


def kind(event: Any) -> str:
    if "#" in event["name"]:
        return "step"
    return "stage" if event["name"] in ("actor_update", "weight_sync") else "region"


def around(events: list[Any], lane: Any, at: int, *kinds: str) -> Any:
    """Return the last begun event of a lane around a moment."""
    found = [
        event
        for event in events
        if (event["pid"], event["tid"]) == lane
        and ns(event["ts"]) <= at < ns(event["ts"]) + ns(event["dur"])
        and kind(event) in kinds
    ]
    return max(found, key=lambda event: ns(event["ts"]), default={"name": None, "step": None})


def number_steps(events: list[Any], trains: int) -> None:
    """Give each event its step: its own number, or that of the step in which it began."""
    counting = {event["tid"] for event in events if kind(event) == "step"}
    for event in sorted(events, key=lambda event: kind(event) != "step"):
        if kind(event) == "step":
            event["step"] = int(event["name"][-1])
        else:
            lane = (event["pid"], event["tid"] if event["tid"] in counting else trains)
            event["step"] = around(events, lane, ns(event["ts"]), "step")["step"]


def brute(trace: ChromeTrace) -> list[tuple[Any, Any, Any]]:
    of: dict[str, list[Any]] = {}
    for event in trace.events:
        of.setdefault(event["cat"], []).append(event)
    marks, shadows = of["user_annotation"], of["gpu_user_annotation"]
    calls = {event["args"]["correlation"]: event for event in of["cuda_runtime"]}
    owned = [(kind(mark), mark["tid"]) for mark in marks]
    trains = max((2, 1), key=lambda tid: [owned.count((k, tid)) for k in ("step", "stage")])
    number_steps(marks, trains)
    rows = []
    for kernel in sorted(of["kernel"], key=lambda event: ns(event["ts"])):
        call = calls.get(kernel["args"]["correlation"], kernel)
        at, own = ns(call["ts"]), (call["pid"], call["tid"])
        lent = (PID, trains) if own == (PID, AUTOGRAD) else own
        if call is kernel:
            step = str(around(shadows, own, at, "step")["name"])[-1:]
            stage, name = (around(shadows, own, at, *k)["name"] for k in (["stage"], NAMED))
            rows.append((stage, int(step) if step.isdigit() else None, name))
        else:
            step = around(marks, lent, at, "step", "stage")["step"]
            name = around(marks, own, at, *NAMED)["name"] or around(marks, lent, at, *NAMED)["name"]
            rows.append((around(marks, lent, at, "stage")["name"], step, name))
    return rows


@pytest.mark.parametrize("seed", range(25))
def test_the_join_agrees_with_brute_force(seed: int, tmp_path: Path) -> None:
    trace = written_at_random(seed)

    assert places(trace.write(tmp_path / "t.json", "compact")) == brute(trace)


def test_kernels_that_cannot_be_read_do_not_say_that_there_were_none(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 10)
    trace.events.append(msgspec.Raw(b'{"ph": "X", "cat": "kernel", "name": "op"x"", "ts": 1}'))
    trace.mark("actor_update", 20, 30)
    path = tmp_path / "t.json"
    events = b",".join(
        bytes(e) if isinstance(e, msgspec.Raw) else msgspec.json.encode(e) for e in trace.events
    )
    path.write_bytes(b'{"traceEvents": [' + events + b"]}")

    note = read_kineto(path).table("kernels").note

    assert note == "no kernels in it that can be read: some events are damaged or lost"
