import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.stages import regions, stages
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.native import NO_STAGES
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.spans import NO_PARENT, RunWarning, Thread
from tests.builders.runs import MAIN, Row, grpo_rows, grpo_run, header, loaded, write_rank


def _problems(path: Path) -> list[tuple[int | None, str]]:
    return [(problem.rank, problem.text) for problem in load(path).warnings]


def test_rows_are_sorted_by_rank_start_and_id_and_keep_what_was_written(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, steps=4, ranks=3)

    keys = [(span.rank, span.start_ns, span.id) for span in spans]
    assert keys == sorted(keys)
    written = {
        (rank, at, *row[:3], row.end_ns - row.start_ns, row.parent, str(row.counters))
        for rank in range(3)
        for at, row in enumerate(grpo_rows(4, rank), start=1)
    }
    assert written == {
        (s.rank, s.id, s.name, s.kind, s.step, s.duration_ns, s.parent, str(s.counters))
        for s in spans
    }
    assert spans.warnings == ()
    assert spans.statuses == dict.fromkeys(range(3), "finished")


def test_ranks_of_one_host_keep_their_common_clock_to_the_nanosecond(tmp_path: Path) -> None:
    for rank, skew in enumerate((0, 777, 123_456)):
        head = header(rank, 3, unix_ns=header().unix_ns + skew)
        write_rank(tmp_path, head, [Row("step", "step", 1, 1000 + rank, 2000)])

    spans = load(tmp_path)

    assert spans.start_ns.tolist() == [0, 1, 2]
    assert spans.unix_ns == header().unix_ns + 777 + 1000


def test_notes_and_their_times_share_the_axis(tmp_path: Path) -> None:
    write_rank(
        tmp_path,
        header(),
        [Row("step", "step", 1, 500, 900)],
        notes=[(800, "warning", "late"), (600, "info", "early")],
    )
    assert load(tmp_path).notes == (
        (0, 100, "info", "early", "", {}),
        (0, 300, "warning", "late", "", {}),
    )


def test_a_note_keeps_its_code_and_facts(tmp_path: Path) -> None:
    facts = {"capture": "step-000003", "step": 3, "share": 0.5}
    write_rank(tmp_path, header(), [], notes=[(8, "info", "text", "capture-taken", facts)])
    (note,) = load(tmp_path).notes
    assert (note.code, note.facts) == (Code.CAPTURE_TAKEN, facts)


def test_a_note_of_a_later_version_loses_the_facts_that_are_not_flat(tmp_path: Path) -> None:
    facts = {"capture": "step-000003", "parts": [1, 2]}
    write_rank(tmp_path, header(), [], notes=[(8, "info", "text", "another-code", facts)])
    (note,) = load(tmp_path).notes
    assert (note.code, note.facts) == ("another-code", {"capture": "step-000003"})


@pytest.mark.parametrize("clock", [2**63, -(2**63) - 1, 2**200])
def test_a_note_of_no_possible_time_keeps_its_text(tmp_path: Path, clock: int) -> None:
    write_rank(tmp_path, header(), [], notes=[(clock, "error", "lost")])
    assert [note.text for note in load(tmp_path).notes] == ["lost"]


def test_threads_have_names_or_their_number(tmp_path: Path) -> None:
    rows = [Row("a", "stage", 1, 0, 1), Row("b", "stage", 1, 0, 1, thread=2**64)]
    write_rank(tmp_path, header(), rows)

    spans = load(tmp_path)

    assert spans.threads == (Thread(0, MAIN, "Main"), Thread(0, 2**64, f"thread {2**64}"))
    assert [span.thread for span in spans] == [MAIN, 2**64]


def test_missing_ranks_are_named_as_ranges(tmp_path: Path) -> None:
    for rank in (1, 4, 5):
        write_rank(tmp_path, header(rank, 2**20), [])
    assert _problems(tmp_path) == [
        (None, f"of {2**20} ranks, these have no trace: 0, 2-3, 6-{2**20 - 1}")
    ]


def test_one_ranks_file_alone_misses_nobody(tmp_path: Path) -> None:
    file = write_rank(tmp_path, header(1, 8), [])
    assert load(file).warnings == ()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "its file is truncated: the rank was killed or is still running"),
        ("KeyboardInterrupt", "it ended early: KeyboardInterrupt"),
        ("{1} {} {x", "it ended early: {1} {} {x"),
    ],
)
def test_an_unfinished_rank_is_a_problem(tmp_path: Path, status: str | None, said: str) -> None:
    write_rank(tmp_path, header(), [], status=status)
    assert _problems(tmp_path) == [(0, said)]


def test_lost_lines_are_counted(tmp_path: Path) -> None:
    file = write_rank(tmp_path, header(), grpo_rows(1))
    with file.open("a") as lines:
        lines.write('["span", "no\n["later kind", 1]\n["span", "half')

    assert _problems(tmp_path) == [(0, "3 of its lines can't be read")]
    assert len(load(tmp_path)) == 7


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row("a", "stage", 1, 9, 8), "1 spans are left out: they end before they start"),
        (Row("a", "stage", 1, 2**63, 2**64), "1 spans are left out: their numbers are out of"),
        (Row("a", "stage", 1, 0, 2**60), "1 spans are left out: their numbers are out of"),
        (Row("a", "stage", 2**70, 0, 1), "1 spans are left out: their numbers are out of"),
        (Row("a", "stage", -1, 0, 1), "1 spans are left out: their numbers are out of"),
        (Row("a", "stage", 1, 0, 1, id=-4), "1 spans are left out: their numbers are out of"),
        (Row("a", "stage", 1, 0, 1, parent=-4), "1 spans are left out: their numbers are out of"),
    ],
)
def test_spans_that_cannot_be_true_are_left_out_and_counted(row: Row, said: str) -> None:
    spans = loaded([Row("b", "stage", 1, 3, 4), row])

    assert [span.name for span in spans] == ["b"]
    (problem,) = spans.warnings
    assert problem.text.startswith(said)


def test_twins_and_orphans_are_counted_and_kept() -> None:
    rows = [
        Row("a", "stage", 1, 0, 1, id=7),
        Row("b", "stage", 1, 0, 1, id=7),
        Row("c", "stage", 1, 0, 1, id=8, parent=99),
    ]
    spans = loaded(rows)

    assert len(spans) == 3
    assert spans.warnings == (
        RunWarning(0, "1 spans share an id with another span", "ids-shared"),
        RunWarning(0, "1 spans lost their parent, which never ended", "parents-lost"),
    )


def test_two_files_of_one_rank_and_a_file_of_another_run_are_said(tmp_path: Path) -> None:
    first = write_rank(tmp_path, header(0, 2), [Row("a", "stage", 1, 0, 1)])
    (tmp_path / "rank-0.jsonl").write_bytes(first.read_bytes())
    write_rank(tmp_path, header(1, 2, run_id="other"), [])

    assert _problems(tmp_path) == [
        (0, "rank-00000.jsonl is left out: its rank is 0, as in rank-0.jsonl"),
        (1, "rank-00001.jsonl belongs to run other, rank-0.jsonl to another one"),
    ]


@pytest.mark.parametrize("world", [2**64, 2**20 + 1, 0, -3])
def test_a_world_that_cannot_be_true_is_not_taken(tmp_path: Path, world: int) -> None:
    write_rank(tmp_path, header(0, world), [])
    text = f"ignored the world size {world} of its header (allowed: 1 to 1048576)"
    assert _problems(tmp_path) == [(0, text)]
    assert load(tmp_path).headers[0].world_size == 1


def test_roles_may_have_a_world_each(tmp_path: Path) -> None:
    for rank, (world, role) in enumerate(
        ((4, "actor"), (2, "critic"), (2, "critic"), (4, "actor"))
    ):
        write_rank(tmp_path, header(rank, world, role=role), [])
    assert _problems(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 2**20}, "rank 1048576 in its header is out of range \\(0 to 1048575\\)"),
        ({"rank": -1}, "rank -1 in its header is out of range"),
        ({"unix_ns": 2**62}, "the clock values in its header are out of range"),
        ({"clock_ns": 2**80}, "the clock values in its header are out of range"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "rank-00000.jsonl"
    plain = {key: getattr(header(), key) for key in header().__dataclass_fields__}
    file.write_text(json.dumps({**plain, **changes}) + "\n")
    with pytest.raises(TraceError, match=reason):
        load(tmp_path)


def test_the_extremes_that_are_allowed_do_not_overflow(tmp_path: Path) -> None:
    far, early = 2**62 - 1, -(2**60) + 1
    write_rank(tmp_path, header(0, 2, host="a", unix_ns=far), [Row("a", "stage", 1, 0, 2**60 - 1)])
    rows = [Row("a", "stage", 1, early, early)]
    write_rank(tmp_path, header(1, 2, host="b", unix_ns=early), rows)

    spans = load(tmp_path)

    assert spans.end_ns.tolist() == [far - 2 * early + 2**60 - 1, 0]


def test_counters_of_all_ranks_are_joined_without_losing_a_bit() -> None:
    spans = loaded(
        [Row("a", "stage", 1, 5, 6, counters={"n": 2**62 + 1}), Row("b", "stage", 1, 0, 1)],
        [Row("a", "stage", 1, 0, 1, counters={"n": 0.5, "m": 3})],
        [Row("a", "stage", 1, 9, 9, counters={"m": 2**63 - 1})],
    )

    assert spans.counters["n"].rows.tolist() == [1, 2]
    assert spans.counters["n"].values.tolist() == [2**62 + 1, 0.5]
    assert spans.counters["m"].rows.tolist() == [2, 3]
    assert spans.counters["m"].values.dtype == np.int64
    assert spans.counters["m"].values.tolist() == [3, 2**63 - 1]


def test_a_counter_that_was_no_number_is_absent_not_zero() -> None:
    spans = loaded([Row("a", "stage", 1, 0, 1, counters={"n": float("nan"), "m": 1})])
    assert spans.counters_of(0) == {"m": 1}


PHASES = [
    Row("step", "step", 1, 0, 100),
    Row("data_fetch", "region", 1, 0, 20),
    Row("training_step", "region", 1, 20, 60),
    Row("my region", "region", 1, 25, 30),
    Row("backward", "region", 1, 60, 80),
    Row("optimizer_step", "region", 1, 80, 90),
    Row("Other.on_train_batch_end", "region", 1, 90, 95),
]


def test_without_marks_the_phases_of_lightnings_loop_are_the_stages() -> None:
    spans = loaded(PHASES)
    table = stages(spans)
    shown = dict(zip(table.column("stage"), table.column("total"), strict=True))
    assert shown == {
        **{"training_step": 40, "data_fetch": 20, "backward": 20, "optimizer_step": 10},
        **{"Other.on_train_batch_end": 5, "untraced": 5},
    }
    assert regions(spans).column("name") == ["my region"]
    assert [note.text for note in spans.notes] == [NO_STAGES]


def test_one_mark_replaces_the_phases_on_every_rank() -> None:
    spans = loaded(PHASES, [*PHASES, Row("actor_update", "stage", 1, 25, 30)])
    assert {span.name for span in spans if span.kind == "stage"} == {"actor_update"}
    assert NO_STAGES not in [note.text for note in spans.notes]


def test_what_contains_a_validation_is_not_contained_by_it() -> None:
    spans = loaded(
        [
            Row("step", "step", 1, 0, 100),
            Row("outer", "stage", 1, 10, 90),
            Row("validation", "region", 1, 10, 90, parent=2),
            Row("inner", "region", 1, 20, 30),
        ]
    )
    parents = dict(zip((spans.names[name] for name in spans.name), spans.parent, strict=True))
    assert parents == {"step": NO_PARENT, "outer": NO_PARENT, "validation": 2, "inner": 3}


def test_a_rollout_in_a_validation_is_validation() -> None:
    spans = loaded(
        [
            Row("sanity_check", "region", 0, 0, 50),
            Row("actor_generate", "stage", 0, 10, 40, counters={"tokens": 7}),
            Row("step", "step", 1, 100, 300),
            Row("actor_generate", "stage", 1, 100, 160, counters={"tokens": 9}),
            Row("validation", "region", 1, 200, 290),
            Row("actor_generate", "stage", 1, 210, 280, counters={"tokens": 50}),
        ]
    )
    table = stages(spans)
    shown = dict(zip(table.column("stage"), table.column("total"), strict=True))
    assert shown == {"validation": 90, "actor_generate": 60, "untraced": 50}
    generated = spans.amounts("tokens", np.int64)
    counted = spans.kind[generated.rows] == KINDS.index("stage")
    assert generated.values[counted].tolist() == [9]
    shares = dict(zip(*map(ledger(spans).column, ("category", "total")), strict=True))
    assert (shares["rollout"], shares["checkpoint/eval"]) == (60, 140)


def test_background_metrics_are_a_table_on_the_axis_of_the_run(tmp_path: Path) -> None:
    for rank, skew in enumerate((0, 1_000)):
        head = header(rank, 2, unix_ns=header().unix_ns + skew, host=f"node-{rank}")
        path = write_rank(tmp_path, head, [Row("step", "step", 1, 500, 9_000)], status=None)
        lines = [
            ["metrics", 600, 600, None, {}, {"host_cpu_count": 8}],
            ["metrics", 600, 1_600, None, {"host_cpu_percent": 25.5}, {}],
            ["metrics", 600, 1_600, 3, {"device_power_watts": 300}, {"device_clock_mhz": None}],
            ["metrics", 2**61, 2**61, None, {}, {"host_cpu_count": 9}],
            ["metrics", 9, 5, None, {"host_cpu_percent": 1}, {}],  # ends before it starts
            ["end", 9_000, "finished"],
        ]
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    spans = load(tmp_path)
    table = spans.table("background_metrics")
    assert [column.name for column in table.columns] == [
        "rank", "device", "metric", "time", "duration", "value",
    ]  # fmt: skip
    own = [
        (None, "host_cpu_count", 100, 0, 8.0),
        (None, "host_cpu_percent", 100, 1_000, 25.5),
        (3, "device_power_watts", 100, 1_000, 300.0),
    ]
    off = [(device, name, at + 1_000, length, value) for device, name, at, length, value in own]
    assert [*table.rows] == [(rank, *row) for rank, rows in enumerate((own, off)) for row in rows]


def test_a_run_without_background_metrics_has_no_such_table(tmp_path: Path) -> None:
    assert "background_metrics" not in grpo_run(tmp_path, steps=2, ranks=1).tables
