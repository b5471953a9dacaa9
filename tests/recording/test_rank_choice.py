"""Which ranks an anomaly is captured on: the slowest, a healthy one, one of each role."""

from dataclasses import replace
from itertools import count

import pytest

from lightning_rlprof.recording.anomalies import (
    Choice,
    RankSteps,
    choose,
    pick,
    read_steps,
)
from lightning_rlprof.records.run_directory import TraceWriter, rank_file
from lightning_rlprof.testing import make_header

MS = 1_000_000


def write(run, rank, steps=range(1, 11), late=0, role="actor", counters=None, host_ns=0):
    """Write steps of 100 ms, in which generation takes 60 ms, and the update ends with all ranks.

    ``late`` lengthens generation, so that the others wait for this rank in the update.
    """
    header = replace(make_header(), rank=rank, world_size=8, role=role)
    lines, number = [], count(1)
    for step in steps:
        start = host_ns + step * 100 * MS
        middle, end, last = start + 60 * MS + late, start + 99 * MS, start + 100 * MS
        lines += [
            ["span", "actor_generate", "stage", step, start, middle, 7, next(number), None, None],
            ["span", "actor_update", "stage", step, middle, end, 7, next(number), None, None],
            ["span", "other", "stage", step, start, end + rank, 8, next(number), None, None],
            ["span", "step", "step", step, start, last, 7, next(number), None, counters],
        ]
    writer = TraceWriter(run, header)
    writer.write(lines)
    writer.close()
    return header


def choice(run, header, *, step=10, alone=False, **options):
    return choose(header, run, step, alone=alone, **options)


def test_of_four_ranks_all_are_captured(tmp_path):
    headers = [write(tmp_path, rank) for rank in range(4)]
    assert choice(tmp_path, replace(headers[0], world_size=4)) == Choice(None)


def test_the_rank_that_arrives_last_and_a_healthy_one(tmp_path):
    headers = [
        # Clocks of hosts differ by hours; each step is compared from its own start.
        write(tmp_path, rank, late=30 * MS * (rank == 5), host_ns=rank * 3600 * 10**9)
        for rank in range(8)
    ]
    assert choice(tmp_path, headers[0]) == Choice([0, 5], "rank 5 arrives last, by 30% of the step")


def test_a_rank_that_is_early_is_not_the_slowest(tmp_path):
    headers = [write(tmp_path, rank, late=-30 * MS * (rank == 5)) for rank in range(8)]
    assert choice(tmp_path, headers[0]) == Choice([0, 1], "no rank is known to arrive late")


def test_one_rank_of_each_role(tmp_path):
    headers = [
        write(tmp_path, rank, role=role, late=30 * MS * (rank == 2))
        for rank, role in enumerate(["actor"] * 4 + ["critic"] * 3 + ["reward"])
    ]
    assert choice(tmp_path, headers[0]).ranks == [0, 2, 4, 7]


def test_of_a_single_slow_step_only_that_step_counts(tmp_path):
    headers = []
    for rank in range(8):
        header = write(tmp_path, rank, range(1, 10))
        rank_file(tmp_path, rank).rename(tmp_path / "before")
        write(tmp_path, rank, [10], late=20 * MS * (rank == 6))
        last = rank_file(tmp_path, rank).read_bytes().splitlines(keepends=True)[1:]
        text = (tmp_path / "before").read_bytes() + b"".join(last)
        rank_file(tmp_path, rank).write_bytes(text)
        headers.append(header)
    assert choice(tmp_path, headers[0], alone=True).ranks == [0, 6]
    assert choice(tmp_path, headers[0]).why == "no rank is known to arrive late"


def test_captured_and_interrupted_steps_and_those_of_other_threads_do_not_count(tmp_path):
    write(tmp_path, 0, counters={"capture": 1})
    write(tmp_path, 1, counters={"interrupted": 1})
    write(tmp_path, 2, [4])
    assert read_steps(rank_file(tmp_path, 0)).ends == {}
    assert read_steps(rank_file(tmp_path, 1)).ends == {}
    assert read_steps(rank_file(tmp_path, 2)).ends == {
        4: {("actor_generate", 0): 60 * MS, ("actor_update", 0): 99 * MS}
    }


def test_reading_many_files_stops_after_its_time(tmp_path):
    headers = [write(tmp_path, rank, late=30 * MS * (rank == 7)) for rank in range(8)]
    ticks = count(0, 60 * MS)
    found = choice(tmp_path, headers[2], clock=lambda: next(ticks))
    assert found == Choice([0, 2], "no rank is known to arrive late, of 3 ranks that were read")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\n",
        b'{"format": 1}\n',
        b'["span", "step", "step", 1]\n',
        b'["span", [], "stage", 10, 0, "x", {}]\n["span"]\n["span", 1, "step", 10, 5, 9, 1]\n',
        b"[" * 100_000 + b"\n",
        b'["span", "s", "step", 10, 0, %d, 7, 1, null, null]\n' % 10**400,
        b'["span", "step", "step", 10, 0, 9, [1], 2, null, {"capture": [1]}]\n',
        b'["span", "s", "stage", 10, 0, 5, 1, 2, null, null]\n'
        b'["span", "step", "step", 10, 0, 9, 1, 2, null, "no counters"]\n',
    ],
    ids=lambda content: content[:24].decode("latin-1"),
)
def test_a_damaged_file_costs_its_rank_alone(content, tmp_path):
    headers = [write(tmp_path, rank, late=30 * MS * (rank == 5)) for rank in range(8)]
    own = rank_file(tmp_path, 7).read_bytes().splitlines(keepends=True)[0]
    for text in (content, own + content):
        rank_file(tmp_path, 7).write_bytes(text)
        assert choice(tmp_path, headers[0]).ranks == [0, 5]


def test_a_rank_whose_stages_differ_is_compared_by_those_that_all_have():
    def rank(number, **ends):
        stages = {(name, 0): end for name, end in ends.items()}
        return RankSteps(number, "actor", {1: 100}, {1: stages})

    ranks = [rank(0, a=50, b=90), rank(1, a=50), rank(2, a=70, b=90, c=99), rank(3, a=50, b=90)]
    assert pick(ranks, {1}, own=0).ranks == [0, 2]
    assert pick([rank(0), rank(1, z=5), rank(2, a=9)], {1}, own=1).ranks == [0, 1]
    assert pick([], {1}, own=4) == Choice([4], "no rank is known to arrive late")
