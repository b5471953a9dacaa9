"""The dozen lines that a training prints when it ends."""

from dataclasses import replace
from pathlib import Path

from lightning_rlprof.analysis.diagnosis.data_quality import Check, Quality
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose, findings
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import render_report
from lightning_rlprof.report.summary import (
    finding_cost,
    first_lines,
    quality_lines,
    run_line,
    summary,
    summary_lines,
)
from lightning_rlprof.report.terminal import cell_text
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table, rows_of
from tests.builders.runs import Row, grpo_rows, grpo_run, header, loaded, write_rank
from tests.builders.sampled import S, sampled_run
from tests.builders.scripted import Script, play


def lines_of(spans: Spans) -> list[str]:
    return summary_lines(summary(spans))


def test_a_slow_rank_is_named_with_its_price_and_what_to_try(tmp_path: Path) -> None:
    lines = lines_of(play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans)
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("rlprof: 40 steps on 4 ranks, median ")
    assert lines[0].endswith(" tokens/s")
    assert any(line.startswith("  waiting in actor_update") for line in lines)
    assert any(line.startswith("Fix first: A rank slows the others down (rank 2") for line in lines)
    assert lines[-1].startswith("See it:    rlprof report ")


def test_a_price_is_one_text_on_every_screen() -> None:
    spans = play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans
    found = diagnose(spans).problems[0]
    offer = found.remedies[0]
    assert found.price is not None
    assert offer.saves is not None
    lost, saves = (f"{price.kind} {price.share:.1%}" for price in (found.price, offer.saves))
    assert any(f"({lost} of the job)" in line for line in lines_of(spans))
    assert finding_cost(found, "GPU").startswith(f"{lost} of the job")
    assert offer.gain.startswith(f"{saves} of the job")
    (first,) = (row["share"] for row in rows_of(findings(spans)) if row["id"] == found.id)
    assert cell_text(first, Column("share", "share")) == lost.removeprefix("lost ")
    page = render_report(spans, {})
    assert f'<p class="big">{lost.removeprefix("lost ")}</p>' in page
    assert f"{lost} of the job" in page
    assert f"{saves} of the job" in page


def test_bars_are_drawn_to_the_largest_part_and_small_parts_are_one(tmp_path: Path) -> None:
    rows = [Row("step", "step", n, 1000 * n, 1000 * n + 1000) for n in range(6)]
    for n in range(6):
        start = 1000 * n
        for name, length in (("a", 480), ("b", 240), ("c", 120), ("d", 60), ("e", 30), ("f", 20)):
            rows.append(Row(name, "stage", n, start, start + length))
            start += length
    bars = lines_of(loaded(rows))[1:6]
    shown = [line.split()[0] for line in bars]
    assert shown == ["a", "b", "c", "d", "3"]  # the rest: e, f and untraced
    assert [line.count("█") for line in bars] == [24, 12, 6, 3, 5]
    assert [line.split("%")[0].split()[-1] for line in bars] == ["48", "24", "12", "6.0", "10"]


def test_with_few_steps_or_no_mark_it_says_what_is_needed(tmp_path: Path) -> None:
    few = lines_of(grpo_run(tmp_path / "few", steps=2))
    assert few[0] == "rlprof: 2 steps on 1 rank; 3 are needed to show where time goes"
    assert len(few) == 3
    bare = [row for row in grpo_rows(6) if row.kind == "step"]
    lines = lines_of(loaded(bare))
    assert lines[1] == '  No stage was marked. Mark one: with stage("actor_generate"): ...'


def test_captures_that_were_not_read_are_not_called_free_of_problems() -> None:
    rows = [Row("step", "step", n, 1000 * n, 1000 * n + 1000) for n in range(30)]
    rows += [row._replace(name="actor_update", kind="stage") for row in rows]
    spans = loaded(rows)
    captured = replace(spans, tables={"kernels": lambda: Table("kernels", ())})
    found = summary(spans)
    assert (found.first, found.captures_unread) == ((), False)
    assert found.undecided > 0
    several = replace(found, undecided=14)
    assert first_lines(several) == [
        "No problem found in what was recorded; 14 checks need more data."
    ]
    assert summary(captured).captures_unread
    assert first_lines(summary(captured)) == [
        "No problem found in what was recorded outside captures. "
        f"For captures: rlprof findings {spans.path}"
    ]
    assert not summary(captured, captures=True).captures_unread


def test_how_it_ended_and_what_is_missing_are_said(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", header(0, 2), grpo_rows(6), status="interrupted by ValueError")
    lines = summary_lines(summary(load(tmp_path / "run")), ended="interrupted by ValueError")
    assert lines[0].endswith("tokens/s, interrupted by ValueError")
    found = summary(load(tmp_path / "run"))
    assert [doubt.name for doubt in found.quality.doubts] == ["ranks", "files", "dropped events"]
    at = next(at for at, line in enumerate(lines) if line.startswith("Recording: 3 doubts, in "))
    assert lines[at + 1] == "  ranks           1 of 2 present; missing: 1 (and 2 more)"
    assert len(lines) <= 12


def test_steps_that_are_left_out_are_said_beside_the_mean() -> None:
    """Once a median and a mean left out two warm-up steps without a word."""
    rows = [Row("step", "step", n, n * 100, n * 100 + 50) for n in range(1, 30)]
    rows.append(Row("step", "step", 0, 0, 100))
    found = summary(loaded(rows))
    assert (found.steps, found.included, found.left_out) == (30, 29, {"warm-up": 1})
    assert "mean 50 ns (without 1 warm-up step)" in run_line(found)


def test_remarks_of_the_run_are_no_dropped_events(tmp_path: Path) -> None:
    """A capture that never came was once a doubt named "dropped events"."""
    notes = [(5, "warning", "steps never reached: 90; last complete step: 6")]
    write_rank(tmp_path / "run", header(), grpo_rows(6), notes=notes)
    (doubt,) = summary(load(tmp_path / "run")).quality.doubts
    assert doubt == Check("remarks of the run", "warn", notes[0][2])


def test_complete_data_is_one_line_and_each_doubt_a_line_with_its_name_apart() -> None:
    fine = summary(loaded(grpo_rows(6)))
    assert fine.quality.doubts == ()
    assert quality_lines(fine) == ["Recording: complete"]
    doubts = (
        Check("ranks", "warn", "1 of 2 present; missing: 1"),
        Check("files", "warn", "rank 0: ended early"),
    )
    assert quality_lines(replace(fine, quality=Quality(doubts))) == [
        "Recording: 2 doubts",
        "  ranks  1 of 2 present; missing: 1",
        "  files  rank 0: ended early",
    ]


def test_names_of_files_steer_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a \x1b[31m run"
    write_rank(path, header(), grpo_rows(4))
    lines = lines_of(load(path))
    assert not any("\x1b" in line for line in lines)
    assert "'" in lines[-1], "the path is quoted for a shell"


def test_a_command_to_try_is_whole_however_long_the_path(tmp_path: Path) -> None:
    run, second = tmp_path / ("long" * 20), 10**9
    counters = [{"host_rss_bytes": step << 24} for step in range(31)]
    rows = [
        Row("step", "step", step, step * second, (step + 1) * second, counters=counters[step])
        for step in range(1, 31)
    ]
    write_rank(run, header(), rows)
    lines = lines_of(load(run))
    at = lines.index("Fix first: Memory grows every step (host, rank 0, rest of step)")
    assert lines[at + 1] == f"  Find the stage with rlprof show {run} memory_phases"


def test_background_metrics_are_no_captures_and_their_findings_are_named() -> None:
    rows = [Row("actor_update", "stage", at + 1, at * S, (at + 1) * S) for at in range(100)]
    quiet = sampled_run([(0, None, {"cpu_throttled_percent": [0.0] * 100})], rows)
    assert summary(quiet).first == ()
    busy = sampled_run([(0, None, {"cpu_throttled_percent": [60.0] * 100})], rows)
    assert [each.id for each in summary(busy).first] == ["cpu-quota"]
