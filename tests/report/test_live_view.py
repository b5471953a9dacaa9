"""What is shown of a run that is being written."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import Diagnosis, diagnose
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.loaders.live_run import LATELY, LiveRun
from lightning_rlprof.records.hang_reports import HangReport
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.report.live_view import LiveScreen, LiveView, live_view
from lightning_rlprof.report.summary import summary
from lightning_rlprof.run import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.testing import make_header
from tests.builders.scripted import Script, play

MS = 1_000_000


class Job:
    """Ranks that write steps of 100 ms, and a view of them."""

    def __init__(
        self, run: Path, ranks: int, roles: tuple[str, ...] = ("actor",), **header: object
    ) -> None:
        headers = [
            replace(make_header(rank), world_size=ranks, role=roles[rank % len(roles)], **header)
            for rank in range(ranks)
        ]
        self.writers = [TraceWriter(run, header) for header in headers]
        self.time = SimpleNamespace(now=50.0)
        self.live = LiveRun(run, lambda: self.time.now, lambda: 0.0)

    def step(self, step: int, slow: dict[int, int] | None = None, ranks=None, counters=None):
        for rank, writer in enumerate(self.writers):
            if ranks is None or rank in ranks:
                more = (slow or {}).get(rank, 0) * MS
                at = step * 1_000 * MS
                mid, end = at + 60 * MS + more, at + 100 * MS + more
                writer.write(
                    [
                        ("span", "actor_generate", "stage", step, at, mid, 7, 2, 1, counters),
                        ("span", "actor_update", "stage", step, mid, end - 10 * MS, 7, 3, 1, None),
                        ("span", "step", "step", step, at, end, 7, 1, None, None),
                    ]
                )

    @property
    def view(self) -> LiveView:
        self.live.refresh()
        return live_view(self.live)


def rows(table):
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path, 4)


def test_before_the_first_step_nothing_is_claimed(job):
    view = job.view
    assert view.title == "4 ranks · no step has ended yet"
    assert (view.facts, view.slowest, view.busy, view.has_ended) == ((), "", "", False)
    assert view.stages.abstained == "no stage has ended in a complete step"
    assert [each["median"] for each in rows(view.ranks)] == [None] * 4


def test_the_rank_that_takes_longest_is_named_with_its_stage(job):
    for step in range(1, 25):
        job.step(step, slow={2: 30})
    view = job.view
    assert view.title == "4 ranks · step 24 · median 108 ms · actor_generate 63%"
    assert view.slowest == "slowest rank 2: 1.30x the median rank's work"
    generate, update, untraced = rows(view.stages)
    assert (generate["stage"], generate["slowest rank"]) == ("actor_generate", 2)
    assert generate["slowest / peers"] == pytest.approx(1.5)
    assert generate["share"] == pytest.approx(270 / 430)
    assert (update["mean"], update["slowest / peers"]) == (30 * MS, 1.0)
    assert (untraced["stage"], untraced["mean"]) == ("untraced", 10 * MS)
    assert sum(each["share"] for each in rows(view.stages)) == pytest.approx(1)
    assert [each["slowdown"] for each in rows(view.ranks)] == [1.0, 1.0, 1.3, 1.0]


def places(view: LiveView) -> list[tuple[str, int | None]]:
    """Return what the diagnosis found first, and on which rank."""
    assert view.found is not None
    return [
        (
            each.id,
            next((fact.value for fact in each.facts if fact.text == f"rank {fact.value}"), None),
        )
        for each in view.found.first
    ]


def test_a_rank_that_is_15_percent_slow_is_a_problem_where_the_others_wait_for_it(tmp_path):
    """The page said "within 5%" beside it: ranks that wait for one another have equal steps."""
    view = live_view(written(tmp_path, play(Script(ranks=4, steps=40, slow={2: 0.15}), 3).spans))
    assert places(view)[0] == ("straggler", 2)
    assert view.slowest.startswith("slowest rank 2: 1.1")
    assert view.facts[1].startswith("Fix first: A rank slows the others down (rank 2")
    steps = [each["median"] for each in rows(view.ranks)]
    assert max(steps) / min(steps) < 1.01
    assert "within" not in " ".join([view.line, *view.facts])


def written(run: Path, spans: Spans) -> LiveRun:
    """Write a run that is in memory, and follow it."""
    writers = {
        rank: TraceWriter(run, replace(header, host="node"))
        for rank, header in spans.headers.items()
    }
    for each in sorted(spans, key=lambda span: span.end_ns):
        times = (each.step, each.start_ns, each.end_ns, 7, each.id, each.parent)
        counters = dict(each.counters) if each.counters else None
        writers[each.rank].write([("span", each.name, each.kind, *times, counters)])
    live = LiveRun(run)
    live.refresh()
    return live


H100 = {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3"}
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128_256}
LAYERS = {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
MODEL = {"model_type": "llama", **SIZES, **LAYERS}


@pytest.mark.parametrize(
    ("counters", "header"),
    [
        ([{"tokens": 400, "samples": 4}] * 2, H100 | {"config": {"model": MODEL}}),
        ([{"tokens": 400}, {"tokens": 300}], H100 | {"config": {"model": MODEL}}),
        ([{"tokens": 400, "samples": 4}, None], H100 | {"config": {"model": MODEL}}),
        ([{"tokens": 9, "flops": 6e12}, {"tokens": 7, "flops": 3 * 10**12}], H100),
        ([{"flops": 6e12}, None], H100),
        ([{"tokens": 400, "flops": 6e12}] * 2, {"device": "cpu"}),
        ([{"tokens": 400, "flops": 6e18}] * 2, H100),
        ([{"tokens": 400}] * 2, H100 | {"config": {"model": {"model_type": "?"}}}),
        ([{"tokens": 0}] * 2, H100),
    ],
)
def test_tokens_per_second_and_mfu_are_those_of_throughput(counters, header, tmp_path):
    job = Job(tmp_path, 2, **header)
    for step in range(1, 4):
        for rank in (0, 1):
            job.step(step, {1: 20}, {rank}, counters[rank])
    live = rows(job.view.stages)[0]
    expected = next(iter(rows(throughput(load(tmp_path)))))
    assert live["stage"] == expected["stage"] == "actor_generate"
    assert live["MFU"] == pytest.approx(expected["MFU"])
    assert live["tokens/s in stage"] == pytest.approx(expected["tokens/s in stage"])
    assert rows(job.view.stages)[1]["tokens/s in stage"] is None


def test_spans_that_count_at_the_same_time_share_it(tmp_path):
    job = Job(tmp_path, 1)
    at = 1_000 * MS
    spans = [(0, 60, {"tokens": 30}), (40, 80, {"tokens": 50}), (80, 90, None)]
    for number, (start, end, counters) in enumerate(spans):
        times = at + start * MS, at + end * MS
        span = ("span", "actor_generate", "stage", 1, *times, 7 + number, number, None, counters)
        job.writers[0].write([span])
    job.writers[0].write([("span", "step", "step", 1, at, at + 100 * MS, 7, 9, None, None)])
    assert rows(job.view.stages)[0]["tokens/s in stage"] == pytest.approx(1_000)


@pytest.mark.parametrize("amount", [True, "9", None, [1]])
def test_a_count_that_cannot_be_one_is_left_out(amount, tmp_path):
    job = Job(tmp_path, 1, **H100, config={"model": MODEL})
    job.step(1, counters={"tokens": amount, "samples": amount, "flops": amount})
    first = rows(job.view.stages)[0]
    assert (first["tokens/s in stage"], first["MFU"]) == (None, None)


def write_stages(job: Job, times_ms: list[dict[str, int]]) -> None:
    """Write ten steps of each rank, of stages one after another."""
    for writer, stages in zip(job.writers, times_ms, strict=True):
        for step in range(1, 11):
            start = at = step * 1_000 * MS
            for number, (name, ms) in enumerate(stages.items(), 2):
                line = ("span", name, "stage", step, at, at + ms * MS, 7, number, 1, None)
                writer.write([line])
                at += ms * MS
            writer.write([("span", "step", "step", step, start, at, 7, 1, None, None)])


def test_a_rank_that_waits_for_a_slow_one_is_not_named(job):
    """Rank 2 generates fastest, and waits for the others in the all-reduce of its update."""
    usual = {"actor_generate": 70, "actor_update": 30}
    write_stages(job, [usual, usual, {"actor_generate": 40, "actor_update": 60}, usual])
    view = job.view
    assert view.slowest == ""
    assert "straggler" not in dict(places(view))
    assert rows(view.stages)[1]["slowest rank"] == 2, "the figures are shown as they are"


def test_that_ranks_wait_in_a_barrier_is_a_problem(job):
    usual = {"actor_generate": 40, "barrier": 35, "actor_update": 25}
    late = {"actor_generate": 70, "barrier": 5, "actor_update": 25}
    write_stages(job, [usual, usual, late, usual])
    view = job.view
    assert view.slowest == "slowest rank 2: 1.43x the median rank's work"
    assert places(view)[0][0] == "collective-wait"


def test_ranks_that_are_alike_are_not_compared(job):
    job.step(1, slow={1: 2})
    assert job.view.slowest == ""


def test_devices_are_as_busy_as_they_were_when_last_asked(job):
    for rank, busy in enumerate((90, 30, 60)):
        job.writers[rank].write([("metrics", 0, 1, 0, {}, {"device_busy_percent": busy})])
    view = job.view
    assert view.busy == "devices busy 60% (rank 1: 30%, rank 0: 90%)"
    assert [each["device busy"] for each in rows(view.ranks)] == [0.9, 0.3, 0.6, None]


def test_problems_are_looked_for_beside_the_view(job, monkeypatch):
    """The first view waits for them; later ones show what was found last, and go on."""
    asked: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow(spans: Spans) -> Diagnosis:
        asked.append(int(spans.step.max()))
        if len(asked) > 1:
            begun.set()
            may_end.wait(60)
        return diagnose(spans)

    monkeypatch.setattr("lightning_rlprof.report.live_view.diagnose", slow)
    screen = LiveScreen(job.live, lambda: job.time.now)
    for step in range(1, 12):
        job.step(step)
    first = places(screen.view())
    assert first == [("rollout", None)]
    job.step(12)
    job.time.now += 9_000  # A diagnosis takes a tenth of the time at most.
    view = screen.view()
    assert begun.wait(60)
    assert "step 12" in view.title
    assert places(view) == first
    job.step(13)
    assert "step 13" in screen.view().title
    assert asked == [11, 12], "one at a time"
    may_end.set()


def test_a_run_that_has_ended_is_shown_whole(tmp_path):
    """While it goes on, the figures are those of the last steps."""
    job = Job(tmp_path, 2)
    for step in range(1, LATELY + 31):
        job.step(step, slow=dict.fromkeys((0, 1), 10 if step <= 30 else 0))
    screen = LiveScreen(job.live)
    view = screen.view()
    assert view.found.mean_ns == 100 * MS
    assert view.facts[0].startswith(f"last {LATELY} steps on 2 ranks, median 100 ms")
    for writer in job.writers:
        writer.write([("end", 999, "finished")])
    view = screen.view()
    assert view.found.to_dict() == summary(load(tmp_path)).to_dict()
    assert view.found.steps == LATELY + 30
    assert view.found.mean_ns == pytest.approx((30 * 110 + LATELY * 100) / 230 * MS, abs=1)


def test_of_one_rank_nothing_is_compared(tmp_path):
    job = Job(tmp_path, 1)
    job.step(1)
    view = job.view
    assert view.slowest == ""
    assert view.line == "1 rank · step 1 · actor_generate 60%"
    assert rows(view.stages)[0]["slowest rank"] is None


def test_ranks_are_compared_with_those_of_their_role(tmp_path):
    job = Job(tmp_path, 6, ("trainer", "rollout"))
    slow = dict.fromkeys((1, 3, 5), 900)
    job.step(1, slow=slow)
    view = job.view
    assert view.slowest == ""
    assert [each["role"] for each in rows(view.ranks)] == ["trainer", "rollout"] * 3


def test_of_many_ranks_the_slowest_are_shown(tmp_path):
    job = Job(tmp_path, 40)
    job.step(1, slow={21: 50, 39: 20}, counters={"host_rss_bytes": 7})
    found = rows(job.view.ranks)
    assert [each["rank"] for each in found] == [*map(str, (*range(14), 21, 39))]
    assert (found[14]["slowdown"], found[14]["resident"]) == (1.5, 7)
    assert job.view.ranks.note == "The 16 slowest of 40 ranks"


def test_memory_counts_children_and_prefers_what_the_driver_reports(job):
    counters = {"host_rss_bytes": 10, "children_rss_bytes": 5, "device_reserved_bytes": 3}
    job.step(1, counters=counters)
    job.writers[1].write([("metrics", 0, 1, 0, {}, {"device_memory_used_bytes": 4})])
    first, second, *_ = rows(job.view.ranks)
    assert (first["resident"], first["device"]) == (15, 3)
    assert second["device"] == 4


def test_background_metrics_are_alarms_only_if_they_are_unusual(job):
    for rank, swapped in enumerate((0, 2**20, 3 * 2**20)):
        values = {"device_power_watts": 300, "device_power_throttled": 0}
        rates = {"swap_in_bytes_per_s": swapped, "cpu_pressure_percent": 79.9, "page_faults": 3}
        job.writers[rank].write([("metrics", 0, 1, 0, rates, values)])
    ((level, ranks, text),) = job.view.alarms.rows
    assert (level, ranks, text.split()[0]) == ("warning", "1-2", "swap_in_bytes_per_s")


@pytest.mark.parametrize("device", [None, 1])
def test_preemptions_of_an_engine_are_an_alarm(job, device):
    for rank, rate in enumerate((0.0, 2.0)):
        job.writers[rank].write([("metrics", 0, 1, device, {"engine_preemptions_per_s": rate}, {})])
    ((level, ranks, text),) = job.view.alarms.rows
    assert (level, ranks, text.split()[0]) == ("warning", "1", "engine_preemptions_per_s")


def test_the_line_names_the_largest_row_untraced_included(tmp_path):
    job = Job(tmp_path, 1)
    at = 1_000 * MS
    stage = ("span", "actor_update", "stage", 1, at, at + 30 * MS, 7, 2, 1, None)
    job.writers[0].write([stage, ("span", "step", "step", 1, at, at + 100 * MS, 7, 1, None, None)])
    assert job.view.line.endswith("untraced 70%")


def test_a_rank_that_writes_nothing_for_longer_than_some_steps_is_an_alarm(job):
    for step in range(1, 9):
        job.step(step, slow=dict.fromkeys(range(4), 2_900))  # of 3 s
    assert job.view.alarms.rows == []
    job.time.now += 14.9
    job.step(9, ranks={0, 1, 3}, slow=dict.fromkeys(range(4), 2_900))
    assert job.view.alarms.rows == []
    job.time.now += 0.2
    assert job.view.alarms.rows == [
        ("error", "2", "nothing written for more than 5 steps, since step 8")
    ]
    assert rows(job.view.ranks)[2]["written"] == "15 s ago"


def test_short_steps_get_ten_seconds_and_a_first_step_any_time(job):
    job.step(1, ranks={0})
    job.view  # noqa: B018 - a refresh
    job.time.now += 9.9
    assert job.view.alarms.rows == []
    job.time.now += 10_000
    assert [row[1] for row in job.view.alarms.rows] == ["0"]


def test_warnings_and_errors_are_grouped_by_what_they_say(job):
    for rank in (0, 1, 3):
        job.writers[rank].write([("note", 1, "warning", "disk is full")])
    job.writers[2].write([("note", 1, "info", "hello"), ("note", 1, "error", "recorder lost")])
    assert job.view.alarms.rows == [
        ("error", "2", "recorder lost"),
        ("warning", "0-1, 3", "disk is full"),
    ]
    assert job.view.line.endswith("· 2 alarms: recorder lost")


def test_more_alarms_than_fit_are_counted(job):
    for number in range(16):
        job.writers[0].write([("note", 1, "warning", f"note {number:02}")])
    alarms = job.view.alarms
    assert (len(alarms.rows), alarms.note) == (12, "and 4 more")
    assert alarms.rows[0][2] == "note 15"  # the newest first


def test_how_ranks_ended_is_shown_and_an_interruption_is_an_alarm(job):
    job.step(1)
    for rank, status in enumerate(("finished", "finished", "ValueError: x")):
        job.writers[rank].write([("end", 9, status)])
    view = job.view
    assert view.title == "4 ranks, 3 ended · step 1 · actor_generate 60%"
    assert view.alarms.rows == [("error", "2", "ended: ValueError: x")]
    assert [each["written"] for each in rows(view.ranks)][1:] == [
        "finished",
        "ValueError: x",
        "0 s ago",
    ]
    job.writers[3].write([("end", 9, "finished")])
    assert job.view.has_ended


def test_a_report_of_a_hang_is_an_alarm_until_the_rank_recovers(job):
    job.step(1)
    job.live.refresh()
    job.live.hangs[1] = HangReport(1, 1, "hang", 5, 61.0, 60.0, 2, True, "backward")
    alarms = live_view(job.live).alarms.rows
    text = "hang report: no progress for 1 min 01 s in step 2, last span backward"
    assert alarms == [("error", "1", text)]
    job.live.hangs[1] = HangReport(1, 2, "recovered", 5, 80.0, 60.0, 2, True, "backward")
    assert live_view(job.live).alarms.rows == []


def test_a_rank_that_runs_while_another_one_hangs_is_no_alarm(job):
    job.step(1)
    job.live.refresh()
    job.live.hangs[1] = HangReport(1, 1, "asked", 5, 0.4, 60.0, 2, True, "backward")
    assert live_view(job.live).alarms.rows == []


def test_ranks_without_a_file_are_counted(tmp_path):
    (tmp_path / "all").mkdir()
    job = Job(tmp_path / "all", 4)
    job.writers[3].path.unlink()
    assert job.view.title.startswith("3 of 4 ranks")
