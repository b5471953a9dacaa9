"""The icicle: sums are exact, layers of one kind are one box, and its size is bounded."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.device.work import device_work
from lightning_rlprof.loaders.join_ranks import Piece, join_tables
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html import icicle as page_icicle
from lightning_rlprof.report.html.icicle import Stacks, icicle
from lightning_rlprof.store import open_run as opening
from lightning_rlprof.tables.spans import ByRank, Spans, apart
from lightning_rlprof.tables.table import Table
from tests.builders.calls import Call, Copy, Kernel, run
from tests.builders.runs import header
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"


def boxes_of(spans: Spans) -> list[list[object]]:
    work = device_work(spans)
    names = [*work.named[1], "unknown"]
    stacks = Stacks(spans, work)
    return icicle(work, stacks, names, [0] * len(names))


def layers(count: int, rank: int = 0, copies: Sequence[Copy] = ()) -> Spans:
    """Return a model of layers with two projections each, and a kernel that nothing launched."""
    calls, kernels = [Call("nn.Module: Net_0", 0, 1_000_000, "module")], [Kernel("lost", 0, 5)]
    for layer in range(count):
        now = 5_000 * layer
        calls += [Call(f"nn.Module: Block_{layer}", now, now + 4_900, "module")]
        for part in range(2):
            at = now + 2_000 * part
            name = f"nn.Module: Linear_{2 * layer + part}"
            calls += [Call(name, at, at + 1_900, "module"), Call("aten::mm", at, at + 1_900)]
            kernels += [Kernel("gemm", at + 50, at + 60, at + 10)]
    calls += [Call("aten::add", 2_000_000, 2_000_900)]
    kernels.append(Kernel("add", 2_000_500, 2_000_600, 2_000_100))
    marks = ([each._replace(rank=rank) for each in own] for own in (calls, kernels, copies))
    return run(*marks)


def joined_layers() -> Spans:
    """Return a run of three ranks whose models differ in their number of layers."""
    copy = Copy("HtoD", 2_000_700, 2_000_790, 2_000_200, 8)
    every = [layers(*each, [copy]) for each in ((12, 0), (5, 3), (8, 7))]

    def read(name: str, rank: int | None = None) -> Table:
        parts = zip((0, 3, 7), every, strict=True)
        return join_tables(
            name,
            [Piece((at,), 0, of.tables[name]) for at, of in parts if rank in (None, at)],
        )

    return replace(
        every[0],
        headers={rank: header(rank, 8) for rank in (0, 3, 7)},
        tables={name: ByRank(partial(read, name)) for name in every[0].tables},
    )


@pytest.mark.parametrize("of_traces", [False, True])
def test_ranks_one_after_the_other_have_the_stacks_of_all_at_once(
    of_traces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_traces and not KINETO.exists():
        pytest.skip("NO SHARED DATA: the real traces are not there")
    spans = joined_layers()
    if of_traces:
        monkeypatch.setattr(opening, "LARGE", 0)
        for file in (KINETO / "two_ranks").glob("*.json.gz"):
            shutil.copyfile(file, tmp_path / file.name)
        spans = opening.open_run(tmp_path)
    at_once = replace(spans, tables={name: read.__call__ for name, read in spans.tables.items()})
    assert len(apart(spans, "calls")) == len(spans.ranks) > 1
    assert apart(at_once, "calls") == (None,)
    work = device_work(spans)
    alone, whole = Stacks(spans, work), Stacks(at_once, work)

    def names(stacks: Stacks) -> list[tuple[object, object, int]]:
        return [
            (
                [step for step, _ in stacks.modules[module]],
                [step for step, _ in stacks.operators[operator]],
                ns,
            )
            for module, operator, ns in zip(
                stacks.module.tolist(), stacks.operator.tolist(), stacks.ns.tolist(), strict=True
            )
        ]

    assert names(alone) == names(whole)
    assert {*alone.module_names} == {*whole.module_names}
    texts = [*work.named[1], "unknown"]
    rows = [icicle(work, each, texts, [0] * len(texts)) for each in (alone, whole)]
    assert sorted(map(str, rows[0])) == sorted(map(str, rows[1]))


def test_stages_come_before_modules_and_steps_of_a_profiler_are_left_out() -> None:
    kernels = [Kernel("k", 0, 10, -1, stage="actor_update"), Kernel("k", 10, 13, 5)]
    assert [row[1:4] for row in boxes_of(run([], kernels))] == [
        ["a", "all kernels and copies", 13],
        ["s", "actor_update", 10],
        ["k", "k", 10],
        ["k", "k", 3],
    ]


def test_without_device_work_it_is_the_host_time_of_operators() -> None:
    calls = [
        Call("nn.Module: Net_0", 0, 1_000_000, "module"),
        Call("aten::linear", 0, 900_000),
        Call("aten::mm", 100_000, 700_000),
    ]
    assert [row[:5] for row in boxes_of(run(calls))] == [
        [-1, "a", "all operators", 900_000, 2],
        [0, "m", "Net", 900_000, 2],
        [1, "o", "aten::linear", 900_000, 2],
        [2, "o", "aten::mm", 600_000, 1],
    ]


def test_a_run_without_calls_and_work_has_no_box() -> None:
    assert boxes_of(run()) == []


def test_the_largest_boxes_stay_with_those_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [Call(f"op{at}", at * 10_000, at * 10_000 + 9_000) for at in range(50)]
    kernels = [
        Kernel(f"k{at}", at * 10_000, at * 10_000 + 100 + at, at * 10_000) for at in range(50)
    ]
    monkeypatch.setattr(page_icicle, "_MAX_BOXES", 21)
    rows = boxes_of(run(calls, kernels))
    assert len(rows) <= 21
    assert all(row[0] < at for at, row in enumerate(rows)), "an outer box comes first"
    assert rows[0][3] == sum(100 + at for at in range(50)), "what is left out counts"


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
@pytest.mark.parametrize("name", ["h100_qwen1.5-0.5b.json.gz", "two_ranks"])
def test_boxes_of_real_traces_add_up(name: str) -> None:
    spans = load(KINETO / name)
    rows = boxes_of(spans)
    assert rows[0][3] == device_work(spans).duration.sum()
    inside = np.zeros(len(rows), np.int64)
    for parent, _, _, ns, *_ in rows[1:]:
        inside[parent] += ns
    assert all(part <= row[3] for part, row in zip(inside.tolist(), rows, strict=True))
    assert inside[0] >= 0.99 * rows[0][3]
