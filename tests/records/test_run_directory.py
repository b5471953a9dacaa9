"""The trace file: what a rank appends comes back, whatever happened in between."""

import errno
import os
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records import run_directory
from lightning_rlprof.records.records import FORMAT, Note
from lightning_rlprof.records.run_directory import (
    RankReader,
    TraceWriter,
    append_note,
    rank_directory,
    rank_files,
    read_header,
    read_trace,
)
from lightning_rlprof.testing import make_header

SPAN = ("span", "actor_update", "stage", 1, 10, 20, 7, 1, None, {"tokens": 3})


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    return TraceWriter(tmp_path / "run", make_header())


def test_every_kind_of_line_comes_back(writer):
    writer.write([("thread", 7, "MainThread"), SPAN, ("note", 5, "info", "hello")])
    writer.write([("end", 30, "finished")])
    writer.close()
    trace = read_trace(writer.path)
    assert trace.header == make_header()
    (span,) = trace.spans
    assert (span.name, span.kind, span.step) == ("actor_update", "stage", 1)
    assert (span.start_ns, span.end_ns, span.thread, span.id, span.parent) == (10, 20, 7, 1, None)
    assert span.counters == {"tokens": 3}
    assert trace.threads == {7: "MainThread"}
    assert trace.notes == [Note(5, "info", "hello")]
    assert (trace.status, trace.lost_lines) == ("finished", 0)


def test_two_jobs_never_share_a_file(tmp_path):
    TraceWriter(tmp_path, make_header())
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path, make_header())
    assert [path.name for path in rank_files(tmp_path)] == ["rank-00000.jsonl"]
    assert rank_directory(tmp_path, 12) == tmp_path / "rank-00012"


def test_what_lies_beside_the_trace_of_a_rank_is_no_rank(tmp_path):
    (tmp_path / "rank-0.json-samples.jsonl").write_text("{}\n")
    assert rank_files(tmp_path) == []


def test_closing_twice_is_harmless(writer):
    writer.close()
    writer.close()


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_cut_last_line_costs_that_line_only(writer, cut):
    writer.write([SPAN, SPAN])
    data = writer.path.read_bytes()
    writer.path.write_bytes(data[:-cut])
    trace = read_trace(writer.path)
    assert (len(trace.spans), trace.lost_lines, trace.status) == (1, 1, None)


def test_a_damaged_line_is_counted_and_its_neighbours_survive(writer):
    writer.write([SPAN, SPAN, SPAN])
    lines = writer.path.read_bytes().split(b"\n")
    lines[2] = b'["span","x",\xff'
    writer.path.write_bytes(b"\n".join(lines))
    trace = read_trace(writer.path)
    assert (len(trace.spans), trace.lost_lines) == (2, 1)


NESTED = "[" * 3_000


@pytest.mark.parametrize(
    "line", ["[]", "{}", "7", '["span",1]', '["end"]', "nul", "[[1]]", "[{}]", "[null]", NESTED]
)
def test_nonsense_lines_are_counted(writer, line):
    with writer.path.open("a") as file:
        file.write(line + "\n")
    assert read_trace(writer.path).lost_lines == 1


def test_a_newer_format_is_refused_with_the_cure(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    text = msgspec.json.encode(make_header()).replace(b'"format":1', b'"format":%d' % (FORMAT + 1))
    path.write_bytes(text + b"\n")
    with pytest.raises(
        TraceError, match=r"format 2, but this version reads up to 1; pip install -U"
    ):
        read_trace(path)


@pytest.mark.parametrize(
    "data", [b"", b"\x00\xff", b"{}\n", b"[1]\n", b'{"format":"x"}\n', b'{"a":' * 3_000]
)
def test_what_is_no_trace_is_one_clear_line(tmp_path, data):
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="is not a rank file of rlprof") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_trace, read_header])
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(TraceError, match=r"gone\.jsonl: cannot be read \(No such file"):
        read(tmp_path / "gone.jsonl")


def test_the_header_alone_is_read_of_any_format(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    text = msgspec.json.encode(make_header()).replace(b'"format":1', b'"format":9')
    path.write_bytes(text + b"\nwhatever")
    assert read_header(path).format == 9


def test_numbers_of_other_libraries_are_stored_as_numbers(writer):
    counters = {"a": np.int64(4), "b": np.float32(0.5), "c": "no number", 7: 1, "d": float("nan")}
    writer.write([(*SPAN[:9], counters), (*SPAN[:9], {"only": "text"})])
    first, second = read_trace(writer.path).spans
    assert first.counters == {"a": 4, "b": 0.5, "7": 1, "d": None}
    assert second.counters is None


def test_a_name_that_is_no_unicode_is_repaired(writer):
    writer.write([("span", "bad \ud800 name", *SPAN[2:])])
    assert read_trace(writer.path).spans[0].name == "bad ? name"


def test_a_write_that_stopped_half_way_is_continued_by_the_next_one(writer, monkeypatch):
    real, calls = os.write, []

    def half_then_full(file, data):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2] if len(calls) == 1 else data)

    monkeypatch.setattr(run_directory.os, "write", half_then_full)
    with pytest.raises(OSError, match="No space left"):
        writer.write([SPAN])
    writer.write([SPAN])
    trace = read_trace(writer.path)
    assert (len(trace.spans), trace.lost_lines) == (2, 0)


def test_half_a_line_whose_rest_is_dropped_never_swallows_the_next_one(writer, monkeypatch):
    real, room = os.write, [20]

    def nearly_full(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(run_directory.os, "write", nearly_full)
    monkeypatch.setattr(run_directory, "_MOST_WAITING", 150)
    for _ in range(4):
        with pytest.raises(OSError, match="No space left"):
            writer.write([SPAN])
    room[0] = 10_000
    writer.write([SPAN])
    trace = read_trace(writer.path)
    assert trace.lost_lines == 1
    assert 1 < len(trace.spans) == 5 - writer.dropped


def test_a_remark_can_be_added_when_the_rank_has_ended(writer):
    writer.write([SPAN, ("end", 30, "finished")])
    writer.close()
    append_note(writer.path, Note(40, "warning", "late \ud800"))
    trace = read_trace(writer.path)
    assert trace.notes == [Note(40, "warning", "late ?")]
    assert (len(trace.spans), trace.status, trace.lost_lines) == (1, "finished", 0)


def test_a_remark_survives_the_half_line_of_a_crash(writer):
    writer.write([SPAN, SPAN])
    writer.path.write_bytes(writer.path.read_bytes()[:-5])
    append_note(writer.path, Note(40, "info", "it was killed"))
    trace = read_trace(writer.path)
    assert (len(trace.spans), trace.notes[0].text, trace.lost_lines) == (1, "it was killed", 1)


def test_a_remark_makes_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        append_note(tmp_path / "rank-00000.jsonl", Note(0, "info", "nobody"))
    assert list(tmp_path.iterdir()) == []


def test_a_line_of_any_length_costs_no_memory_and_only_itself(writer, monkeypatch):
    monkeypatch.setattr(run_directory, "_LONGEST_LINE", 1_000)
    writer.write([("note", 1, "info", "x" * length) for length in (10, 5_000, 20)])
    writer.write([SPAN, ("note", 1, "info", "y" * 3_000)])
    writer.close()
    trace = read_trace(writer.path)
    assert [len(note.text) for note in trace.notes] == [10, 20]
    assert (len(trace.spans), trace.lost_lines) == (1, 2)


def test_a_long_note_is_cut_and_says_by_how_much(writer):
    writer.write([("note", 1, "info", "x" * 1_000_000)])
    writer.close()
    (note,) = read_trace(writer.path).notes
    assert note.text == "x" * 4_000 + "… and 996,000 more characters"


_NAMES = st.sampled_from(["actor_update", "rollout", "Anfrage \u00e4\U0001f600", "x"])
_LINES = st.one_of(
    st.tuples(
        st.just("span"),
        _NAMES,
        st.sampled_from(["stage", "step", "region", "no kind"]),
        st.integers(-1, 3),
        *[st.one_of(st.integers(-5, 50), st.just(2**70))] * 2,
        st.integers(0, 2),
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(0, 9)),
        st.one_of(st.none(), st.dictionaries(_NAMES, st.integers(0, 5) | st.floats(0, 1))),
    ),
    st.tuples(st.just("thread"), st.integers(0, 2), _NAMES),
    st.tuples(st.just("count"), st.integers(0, 9), st.dictionaries(_NAMES, st.integers(0, 9))),
    st.tuples(st.just("note"), st.integers(0, 9), st.just("info"), _NAMES),
    st.tuples(st.just("end"), st.integers(0, 9), _NAMES),
    st.sampled_from([[], ["span"], ["later", 1], {}, 7, "text"]),
).map(msgspec.json.encode)
_RAW = st.sampled_from([b"", b"[", b"]", b'["note",1,"info"', b'"text"]', b"\xff\xc3", b" "])


@given(
    lines=st.lists(_LINES | _RAW, max_size=12),
    header_at=st.integers(0, 2),
    ends=st.booleans(),
    data=st.data(),
)
def test_a_file_in_any_cuts_is_the_same_as_the_whole_file(lines, header_at, ends, data):
    """Also if it is cut within a character; what is in it may be damaged in any way."""
    head = msgspec.json.encode(make_header()) + b"   "
    all_lines = [*lines[:header_at], head, *lines[header_at:], head]
    content = b"\n".join(all_lines) + b"\n" * ends
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=20).map(sorted))
    whole, parts = RankReader(Path("rank-00000.jsonl")), RankReader(Path("rank-00000.jsonl"))
    edges = [0, *cuts, len(content)]
    found = []
    for reader, pieces in (
        (whole, [content]),
        (parts, [content[low:high] for low, high in pairwise(edges)]),
    ):
        try:
            for piece in pieces:
                reader.feed(piece)
            found.append(reader.whole())
        except TraceError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_halves_of_a_torn_line_are_two_lost_lines_wherever_the_file_is_cut(writer):
    with writer.path.open("ab") as file:
        file.write(b'["note",1,"info"\n"text"]\n["note",1,"info","whole"]\n')
    trace = read_trace(writer.path)
    assert ([note.text for note in trace.notes], trace.lost_lines) == (["whole"], 2)


def test_a_line_that_is_too_long_is_lost_however_it_comes(monkeypatch, tmp_path):
    monkeypatch.setattr(run_directory, "_LONGEST_LINE", 400)
    head = msgspec.json.encode(make_header())
    content = head + b"\n" + b"[" * 1_000 + b"\n" + msgspec.json.encode(SPAN) + b"\n"
    for size in (1, 7, 399, 400, 401, 5_000):
        reader = RankReader(tmp_path / "rank-00000.jsonl")
        for at in range(0, len(content), size):
            reader.feed(content[at : at + size])
        trace = reader.whole()
        assert (len(trace.spans), trace.lost_lines) == (1, 1)


def test_a_reader_goes_on_where_it_stopped_and_says_whether_there_is_more(writer, monkeypatch):
    monkeypatch.setattr(run_directory, "_AT_ONCE", 300)
    writer.write([SPAN] * 20)
    reader = RankReader(writer.path)
    reads = 1
    while reader.read():
        reads += 1
    assert (len(reader.spans), reads > 4) == (20, True)
    assert reader.read() is False
    writer.write([SPAN])
    reader.read()
    assert len(reader.spans) == 21


def test_a_reader_that_skips_keeps_the_header_and_the_end(writer):
    writer.write([(*SPAN[:3], step, *SPAN[4:]) for step in range(5_000)])
    reader = RankReader(writer.path)
    while reader.read(1 << 12):
        pass
    steps = [line.step for line in reader.spans]
    assert reader.trace.header == make_header()
    assert (reader.has_skipped, steps[0], steps[-1]) == (True, 0, 4_999)
    assert len(steps) < 2_000
    assert reader.trace.lost_lines == 0


def test_a_file_that_was_written_in_place_is_read_again(writer):
    writer.write([SPAN])
    reader = RankReader(writer.path)
    reader.read()
    writer.write_reserved([("end", 9, "disk full")])
    os.utime(writer.path, ns=(1, 1))
    reader.read()
    assert (reader.status, len(reader.spans)) == ("disk full", 1)
