"""NVTX ranges of small exports, made by the project, as spans."""

from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans, Thread
from tests.builders.nsys_export import DOMAIN, EPOCH, MARK, PID, STARTED, NsysExport, global_tid


@pytest.fixture
def export(tmp_path: Path) -> NsysExport:
    return NsysExport(tmp_path / "report.sqlite")


def rows(spans: Spans) -> list[tuple[object, ...]]:
    return [(s.name, s.kind, s.step, s.start_ns, s.end_ns, s.parent) for s in spans]


def test_ranges_of_our_domain_carry_kind_and_step(export: NsysExport) -> None:
    export.own("step", "step", 100, 900, step=3)
    export.own("actor_update", "stage", 110, 500, step=3)
    export.own("my stage", "stage", 510, 600, step=3)
    export.own("micro_batch", "region", 120, 300, step=3)
    export.own("saved", "mark", 700, step=3)

    spans = load(export.write())

    assert rows(spans) == [
        ("step", "step", 3, 0, 800, None),
        ("actor_update", "stage", 3, 10, 400, 0),
        ("micro_batch", "region", 3, 20, 200, 1),
        ("my stage", "stage", 3, 410, 500, 0),
        ("saved", "mark", 3, 600, 600, 0),
    ]
    assert spans.unix_ns == EPOCH + 100


def test_foreign_ranges_are_regions_in_the_step_around_them(export: NsysExport) -> None:
    export.own("actor_update", "stage", 100, 500, step=7)
    export.nvtx(59, "aten::mm", 200, 300, text="aten::mm", textId=None, int64Value=99)
    export.nvtx(59, "later", 600, 700)

    spans = load(export.write())

    assert rows(spans)[1:] == [
        ("aten::mm", "region", 7, 100, 200, 0),
        ("later", "region", 0, 500, 600, None),
    ]


def test_operators_of_torch_are_named_without_the_numbers_of_their_call(tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "x_rank0.sqlite")
    export.own("actor_update, seq = 1", "region", 0, 900, step=7)
    for at, call in enumerate(
        (
            "",
            ", seq = 5",
            ", op_id = 6",
            ", seq = 5, op_id = 6, sizes = [[2, 3], [], [3]], input_op_ids = [(4,0), (5,-1)]",
        )
    ):
        export.nvtx(59, f"aten::mm{call}", 10 * at, 10 * at + 5)
    for name in (", seq = 1", "chunk, id = 4", "score, seq = 1 of 2"):
        export.nvtx(59, name, 100, 200)

    names = load(export.write()).names

    assert sorted(names) == sorted(
        ["aten::mm", "actor_update, seq = 1", ", seq = 1", "chunk, id = 4", "score, seq = 1 of 2"]
    )


def test_a_domain_is_numbered_by_its_process(export: NsysExport) -> None:
    export.own("actor_update", "stage", 0, 9, step=1)
    export.declare(200, DOMAIN, "other", domainId=1)
    export.nvtx(59, "actor_update", 0, 9, globalTid=global_tid(200), domainId=1, int64Value=1)

    spans = load(export.write())

    assert [(s.rank, s.kind, s.step) for s in spans] == [(0, "stage", 1), (1, "region", 0)]


def test_capture_ranges_and_marks_for_the_reader_are_no_spans(export: NsysExport) -> None:
    export.said("rlprof.rank", 5, start=10)
    export.said("rlprof.clock", EPOCH + 11, start=11)
    export.own("rlprof.capture", "region", 5, 99)
    export.own("actor_update", "stage", 20, 30, step=1)
    export.nvtx(59, "rlprof.capture", 21, 22)

    spans = load(export.write())

    assert rows(spans) == [
        ("actor_update", "stage", 1, 0, 10, None),
        ("rlprof.capture", "region", 1, 1, 2, 0),
    ]
    assert spans.ranks == (5,)
    assert spans.warnings == ()


def test_without_categories_the_name_tells_the_kind(export: NsysExport) -> None:
    for at, name in enumerate(("step", "actor_update", "whatever")):
        export.own(name, "region", 10 * at, 10 * at + 5, step=1, category=None)

    assert [s.kind for s in load(export.write())] == ["step", "stage", "region"]


def test_ranges_that_never_ended_or_cannot_be_true_are_counted(export: NsysExport) -> None:
    export.own("open", "stage", 10, None, step=1)
    export.own("open", "stage", 11, "later", step=1)
    export.own("backwards", "stage", 30, 20, step=1)
    export.own("far", "stage", 1, 2**61, step=1)
    export.own("far back", "stage", -(2**63), 1, step=1)
    export.own("nowhere", "stage", 1, 2, step=1, globalTid=None)
    export.own("kept", "stage", 40, 50, step=-4)
    export.add("NVTX_EVENTS", start=1, eventType="x", globalTid=global_tid())

    spans = load(export.write())

    assert rows(spans) == [("kept", "stage", 0, 0, 10, None)]
    assert [problem.text for problem in spans.warnings if "guessed" not in problem.text] == [
        "1 NVTX events are left out: they have no type",
        "2 NVTX ranges are left out: they never ended",
        "4 NVTX ranges are left out: their times are invalid",
    ]


def test_what_began_before_the_capture_has_a_negative_start_in_the_file(
    export: NsysExport,
) -> None:
    export.own("actor_update", "stage", -300, 100, step=1)
    export.own("reward", "region", 0, 50, step=1)

    spans = load(export.write())

    assert spans.start_ns.tolist() == [0, 300]
    assert spans.unix_ns == EPOCH - 300


def test_parents_nest_on_their_thread_only(export: NsysExport) -> None:
    export.own("outer", "region", 0, 100, step=1)
    export.own("overlaps", "region", 50, 150, step=1, event=STARTED)
    export.own("inside both", "region", 60, 90, step=1)
    export.own("inside the later", "region", 110, 120, step=1)
    export.own("at the end", "region", 140, 150, step=1)
    export.own("elsewhere", "region", 20, 30, step=1, tid=101)
    export.own("inner twin", "region", 200, 205, step=1)
    export.own("outer twin", "region", 200, 210, step=1)
    export.nvtx(MARK, "instant", 70)
    export.nvtx(MARK, "instant", 70)

    spans = load(export.write())

    names = {s.id: s.name for s in spans}
    assert [(s.name, names.get(-1 if s.parent is None else s.parent)) for s in spans] == [
        ("outer", None),
        ("elsewhere", None),
        ("overlaps", None),
        ("inside both", "overlaps"),
        ("instant", "inside both"),
        ("instant", "inside both"),
        ("inside the later", "overlaps"),
        ("at the end", "overlaps"),
        ("outer twin", None),
        ("inner twin", "outer twin"),
    ]


def test_threads_and_processes_have_their_names(export: NsysExport) -> None:
    export.own("a", "stage", 0, 9, step=1)
    export.own("b", "stage", 0, 9, step=1, tid=3_000_140)
    export.add("ThreadNames", nameId=export.string("python"), globalTid=global_tid())
    export.add("PROCESSES", globalPid=global_tid() - PID, pid=PID, name="python3 train.py")

    spans = load(export.write())

    assert spans.threads == (Thread(0, PID, "python"), Thread(0, 3_000_140, "thread 3000140"))
    assert "process 100 (python3 train.py) is rank 0" in [note.text for note in spans.notes]


def test_ids_count_in_each_rank_and_rows_are_sorted(export: NsysExport) -> None:
    for pid, rank in ((300, 0), (200, 1)):
        export.said("rlprof.rank", rank, pid=pid)
        for start in (40, 20, 30):
            export.own(f"{rank}", "stage", start, start + 5, step=1, pid=pid)

    spans = load(export.write())

    assert [(s.rank, s.start_ns, s.id) for s in spans] == [
        (rank, start, at) for rank in (0, 1) for at, start in enumerate((0, 10, 20))
    ]
    assert [(rank, head.pid) for rank, head in spans.headers.items()] == [(0, 300), (1, 200)]


def test_names_are_distinct_though_the_file_has_them_twice(export: NsysExport) -> None:
    export.own("a", "stage", 0, 9, step=1)
    export.own("a", "stage", 10, 19, step=1, text="a", textId=None)

    spans = load(export.write())

    assert spans.names == ("a",)
    assert len(spans.rows(name="a")) == 2


def test_a_name_that_is_nowhere_leaves_the_span(export: NsysExport) -> None:
    export.nvtx(59, "x", 0, 9, textId=12345)

    assert [s.name for s in load(export.write())] == ["unnamed"]


def test_the_header_says_where_it_was_recorded(export: NsysExport) -> None:
    export.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node-a")
    export.own("a", "stage", 50, 60, step=1)
    export.own("a", "stage", 50, 60, step=1, pid=101)
    export.kernel("gemm", 51, 52, 1)

    spans = load(export.write())

    head = spans.headers[0]
    assert (head.run_id, head.host, head.pid, head.world_size) == ("report", "node-a", PID, 2)
    assert (head.unix_ns, head.clock_ns) == (EPOCH, 0)
    assert head.versions == {"nsys": "2025.1.1"}
    assert [each.device for each in spans.headers.values()] == ["cuda", "cpu"]
    assert spans.statuses == {0: "finished", 1: "finished"}
