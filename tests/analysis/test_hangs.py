"""Which rank a job waits for: each kind of hang, from what ranks have reported."""

from dataclasses import replace

import pytest

from lightning_rlprof.analysis.hangs import find_hang, short_stack
from lightning_rlprof.records.hang_reports import (
    ChildProcess,
    Collective,
    Frame,
    HangReport,
    Heartbeat,
    OpenSpan,
    RankEvidence,
    ThreadStack,
)
from lightning_rlprof.testing import make_header

NOW = 1_000_000_000_000
TORCH = "/venv/lib/python3.11/site-packages/torch"
IN_ALL_REDUCE = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "_exception_logger.<locals>.wrapper", ""),
    Frame("/code/grpo/train.py", 61, "update", "dist.all_reduce(grad)"),
)
IN_REWARD = (Frame("/code/grpo/rewards.py", 12, "score", "while not done:"),)
IN_RAY = (
    Frame("/venv/lib/python3.11/site-packages/ray/_private/worker.py", 3009, "get", ""),
    Frame("/code/grpo/train.py", 70, "fit", "ray.get(results)"),
)
IN_RAYS_LOOP = (
    Frame("/venv/lib/python3.11/site-packages/ray/_private/worker.py", 1024, "main_loop", ""),
    Frame("/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py", 320, "", ""),
)
IN_LOADER = (
    Frame("/usr/lib/python3.11/selectors.py", 415, "select", ""),
    Frame("/usr/lib/python3.11/multiprocessing/connection.py", 948, "wait", ""),
    Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get", ""),
    Frame(f"{TORCH}/utils/data/dataloader.py", 1275, "_try_get_data", ""),
    Frame("/code/grpo/train.py", 40, "fit", "for batch in loader:"),
)


def at(seq: int, *, name: str = "gloo:all_reduce", group: str = "0", done: bool = False):
    """Return the entries of a rank whose last collective is this one."""
    before = Collective(group, seq - 1, "gloo:all_reduce", is_done=True)
    return (before, Collective(group, seq, name, is_done=done))


def report(rank: int, stack=(), collectives=(), *, inside=("actor_update",), **more) -> HangReport:
    spans = tuple(OpenSpan(name, "stage", 3, 10**11, is_training=True) for name in inside)
    threads = (ThreadStack("MainThread", stack, is_training=True, cpu_share=0.0),)
    given = {"number": 1, "cause": "hang", "quiet_s": 300.0, "unix_ns": NOW - 10**10, **more}
    return HangReport(
        rank=rank,
        limit_s=300,
        step=3,
        in_step=True,
        spans=spans,
        threads=given.pop("threads", threads),
        collectives=collectives,
        **given,
    )


def of(*reports: HangReport | None, **more) -> list[RankEvidence]:
    beat = Heartbeat(NOW - 10**9, 3, 300)
    return [
        RankEvidence(
            rank,
            make_header(rank, len(reports)),
            beat=beat,
            reports=() if each is None else (each,),
            **more,
        )
        for rank, each in enumerate(reports)
    ]


def causes(hang) -> list[int]:
    return [each.rank for each in hang.causes]


def test_the_rank_that_has_not_come_to_a_collective_is_named_with_its_line():
    hang = find_hang(
        of(
            report(0, IN_ALL_REDUCE, at(6)),
            report(1, IN_REWARD, at(5, done=True), inside=("compute_reward",)),
        ),
        NOW,
    )

    assert hang.headline == (
        "Rank 1 has not come to gloo:all_reduce #6 of group 0, is in compute_reward, at "
        "grpo/rewards.py:12 score (while not done:). Rank 0 waits in gloo:all_reduce #6 of group 0."
    )
    table = hang.table()
    assert table.column("rank") == [1, 0]
    assert table.column("state") == ["hangs", "waits"]
    assert table.column("in") == ["compute_reward", "actor_update"]


def test_ranks_that_wait_for_one_that_waits_in_another_group_wait_for_the_last_of_the_chain():
    """Rank 0 waits for 1 in group a, and 1 for 2 in group b, which is in the reward."""
    hang = find_hang(
        of(
            report(0, IN_ALL_REDUCE, at(4, group="a"), groups={"a": ((0, 1, 1),)}),
            report(
                1,
                IN_ALL_REDUCE,
                (*at(3, group="a", done=True), *at(9, group="b")),
                groups={"a": ((0, 1, 1),), "b": ((1, 2, 1),)},
            ),
            report(2, IN_REWARD, at(8, group="b", done=True), groups={"b": ((1, 2, 1),)}),
        ),
        NOW,
    )
    assert causes(hang) == [2]


def test_ranks_that_wait_for_each_other_in_two_groups_are_all_named():
    groups = {"a": ((0, 1, 1),), "b": ((0, 1, 1),)}
    hang = find_hang(
        of(
            report(0, IN_ALL_REDUCE, at(4, group="a"), groups=groups),
            report(1, IN_ALL_REDUCE, at(9, group="b"), groups=groups),
        ),
        NOW,
    )
    assert causes(hang) == [0, 1]


def test_a_rank_of_another_group_is_not_waited_for():
    groups = {"a": ((0, 1, 1),)}
    hang = find_hang(
        of(
            report(0, IN_ALL_REDUCE, at(4, group="a"), groups=groups),
            report(1, IN_REWARD, at(3, group="a", done=True), groups=groups),
            report(2, IN_REWARD, ()),
        ),
        NOW,
    )
    assert causes(hang) == [1]


def test_ranks_in_different_collectives_at_the_same_number_are_found():
    hang = find_hang(
        of(
            report(0, IN_ALL_REDUCE, at(6)),
            report(1, IN_ALL_REDUCE, at(6)),
            report(2, IN_ALL_REDUCE, at(6, name="gloo:broadcast")),
        ),
        NOW,
    )
    assert causes(hang) == [2]
    assert "gloo:broadcast #6" in hang.headline


def test_a_collective_that_all_have_come_to_is_a_matter_of_the_network():
    hang = find_hang(of(*(report(rank, IN_ALL_REDUCE, at(6)) for rank in range(4))), NOW)
    assert causes(hang) == []
    assert hang.headline.startswith("Ranks 0-3 wait in gloo:all_reduce #6 of group 0, and none is")


def test_without_a_flight_recorder_the_stacks_decide():
    hang = find_hang(of(report(0, IN_ALL_REDUCE), report(1, IN_REWARD)), NOW)
    assert causes(hang) == [1]
    assert "Rank 0 waits in torch.distributed all_reduce" in hang.headline


def test_a_dump_that_torch_wrote_serves_for_what_the_report_lacks():
    evidence = of(report(0, ()), report(1, ()))
    evidence = [replace(evidence[0], dump=at(6)), replace(evidence[1], dump=at(5, done=True))]
    assert causes(find_hang(evidence, NOW)) == [1]


@pytest.mark.parametrize(
    ("process", "end", "state", "word"),
    [
        ("gone", None, "killed", "was killed or crashed"),
        ("T", None, "stopped", "is stopped"),
        ("", "interrupted by ValueError", "failed", "has ended: interrupted by ValueError"),
    ],
)
def test_a_rank_without_a_report_is_the_cause(process, end, state, word):
    evidence = of(report(0, IN_ALL_REDUCE, at(6)), None)
    evidence[1] = replace(evidence[1], process=process, end=end)
    hang = find_hang(evidence, NOW)
    assert [(each.rank, each.state) for each in hang.causes] == [(1, state)]
    assert f"Rank 1 {word}" in hang.headline
    assert "Rank 0 waits in gloo:all_reduce #6" in hang.headline


def with_roles(evidence: list[RankEvidence], *roles: str) -> list[RankEvidence]:
    return [
        replace(each, header=replace(each.header, role=role))
        for each, role in zip(evidence, roles, strict=True)
    ]


def test_a_driver_that_waits_in_ray_waits_for_the_actor_that_is_in_its_own_code():
    found = of(report(0, IN_RAY), report(1, IN_REWARD, inside=("compute_reward",)), None)
    hang = find_hang(with_roles(found, "controller", "rollout", "rollout"), NOW)
    assert [(each.rank, each.state) for each in hang.causes] == [(1, "hangs")]
    assert hang.headline == (
        "Rank 1 (rollout) is in compute_reward, at grpo/rewards.py:12 score (while not done:). "
        "Rank 0 waits in Ray."
    )
    assert hang.table().column("role") == ["rollout", "controller", "rollout"]
    assert hang.hints == ()


def test_an_actor_between_two_calls_is_idle_and_no_cause():
    idle = report(1, IN_RAYS_LOOP, inside=(), cause="asked")
    found = of(report(0, IN_RAY), idle, report(2, IN_REWARD))
    hang = find_hang(with_roles(found, "controller", "critic", "rollout"), NOW)
    assert causes(hang) == [2]
    assert [each.state for each in hang.ranks] == ["waits", "idle", "hangs"]
    assert hang.ranks[1].waits_in == ""


def test_ranks_that_all_wait_in_ray_wait_for_an_actor_that_is_not_in_the_run():
    hang = find_hang(of(report(0, IN_RAY), report(1, IN_RAY)), NOW)
    assert causes(hang) == []
    assert hang.headline == ("Ranks 0-1 wait in Ray, and no rank of this run makes them wait.")
    assert hang.hints == ("Look at the actors that are not in this run: ray list actors",)


def test_of_ranks_in_a_collective_one_of_their_role_that_waits_in_ray_is_the_cause():
    found = of(report(0, IN_RAY), report(1, IN_ALL_REDUCE), report(2, IN_RAY))
    hang = find_hang(with_roles(found, "controller", "actor", "actor"), NOW)
    assert causes(hang) == [2]


def test_a_rank_of_another_host_whose_signs_of_life_ended_first_is_the_cause():
    evidence = of(report(0, IN_ALL_REDUCE, at(6)), None)
    evidence[1] = replace(evidence[1], beat=Heartbeat(NOW - 10**9 - 100 * 10**9, 3, 0))
    (cause,) = find_hang(evidence, NOW + 10**15).causes
    assert (cause.rank, cause.state) == (1, "silent")
    assert "no sign of life for 100 s" in cause.reason


def test_c_code_that_keeps_pythons_lock_is_told_from_a_rank_that_runs():
    (only,) = of(None)
    blocked = replace(only, process="R", beat=Heartbeat(NOW - 60 * 10**9, 3, 0))
    assert find_hang([blocked], NOW).causes[0].state == "silent"
    assert find_hang([replace(only, process="R")], NOW).causes == ()


def test_a_loop_that_computes_is_told_from_one_that_waits():
    thread = ThreadStack("MainThread", IN_REWARD, is_training=True, cpu_share=0.97)
    hang = find_hang(of(report(0, threads=(thread,), inside=("compute_reward",))), NOW)
    assert hang.headline == (
        "Rank 0 is in compute_reward, at grpo/rewards.py:12 score (while not done:), its thread "
        "uses 97% of a CPU."
    )


def test_a_short_stack_has_the_libraries_that_the_training_has_called_and_no_others():
    around = Frame("/venv/lib/python3.11/site-packages/lightning/trainer.py", 9, "fit")
    shown = short_stack([*IN_ALL_REDUCE, around, *IN_REWARD])
    assert shown == [*IN_ALL_REDUCE, *IN_REWARD]


def test_a_worker_of_a_data_loader_that_is_stopped_is_named():
    child = ChildProcess(77, "pt_data_worker", "T")
    hang = find_hang(of(report(0, IN_LOADER, children=(child,), inside=("data_fetch",))), NOW)
    assert "waits for a DataLoader worker, child process 77 is stopped" in hang.headline
    assert "grpo/train.py:40 fit" in hang.headline


def test_ranks_that_make_progress_are_no_cause():
    running = report(1, IN_REWARD, cause="asked", quiet_s=0.2)
    hang = find_hang(of(report(0, IN_LOADER), running), NOW)
    assert causes(hang) == [0]
    assert [each.state for each in hang.ranks] == ["hangs", "runs"]


def test_a_hang_that_is_over_is_told_as_such():
    over = report(0, IN_REWARD), report(0, number=2, cause="recovered", quiet_s=412.0)
    (evidence,) = of(over[0])
    hang = find_hang([replace(evidence, reports=over)], NOW)
    assert hang.headline.startswith("Progress came back after 412 s. Until then: Rank 0 is in")


def test_reports_of_an_earlier_hang_do_not_count():
    old = report(1, IN_REWARD, unix_ns=NOW - 3600 * 10**9)
    hang = find_hang(of(report(0, IN_ALL_REDUCE), old), NOW)
    assert [each.state for each in hang.ranks] == ["waits", "runs"]


def test_a_rank_that_left_out_a_collective_and_ended_is_named():
    """The connection of the others breaks, so that they fail, and none reports a hang."""
    left, *others = of(None, None, None)
    ended = [
        replace(left, end="finished", last_ns=NOW - 10**9),
        *(replace(each, end="failed: RuntimeError", last_ns=NOW) for each in others),
    ]
    hang = find_hang(ended, NOW)
    assert [each.rank for each in hang.causes] == [0, 1, 2]
    assert "Rank 0 had ended before" in hang.headline
    later = [replace(ended[0], last_ns=NOW + 10**9), *ended[1:]]
    assert [each.rank for each in find_hang(later, NOW).causes] == [1, 2]


@pytest.mark.parametrize(
    ("evidence", "headline"),
    [
        (of(None, end="finished"), "The run has finished, and no rank has reported a hang."),
        (of(None), "Hangs are not watched in this run: hang_timeout is null."),
        (of(None, process="gone"), "No rank has reported a hang, but rank 0 was killed or"),
    ],
    ids=["finished", "off", "killed"],
)
def test_without_reports_it_says_what_is_known(evidence, headline):
    assert find_hang(evidence, NOW).headline.startswith(headline)


def test_a_run_without_a_hang_says_after_how_long_one_is_reported():
    (evidence,) = of(None)
    header = replace(evidence.header, config={"hang_timeout": 300})
    hang = find_hang([replace(evidence, header=header)], NOW)
    assert "after 300 s without progress" in hang.headline
    assert causes(hang) == []


def test_a_thousand_ranks_are_told_in_a_few_words():
    hung = [report(rank, IN_ALL_REDUCE, at(6)) for rank in range(1023)]
    late = report(1023, IN_REWARD, at(5, done=True))
    hang = find_hang(of(*hung, late), NOW)
    assert causes(hang) == [1023]
    assert "Ranks 0-1022 wait in" in hang.headline
    assert len(hang.headline) < 400
