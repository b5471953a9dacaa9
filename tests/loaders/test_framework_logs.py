"""Logs of all frameworks: recognized, damaged, and hostile."""

import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.samples.long_tail import long_tail
from lightning_rlprof.analysis.samples.sample_tables import samples
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.framework_logs import objects
from lightning_rlprof.run import Run, load
from tests.loaders.framework_records import plain, sample, session
from tests.loaders.otlp_records import batch, nemo_step

GIANT = 10 << 20


def verl(at: int) -> dict[str, Any]:
    return {"step": at, "data": {"timing_s/gen": 0.5, "timing_s/step": 1.0, "perf/mfu": 0.1}}


def one_session(at: int) -> dict[str, Any]:
    return session(at // 2, at, at, {"generate": [(at, at + 2)], "reward": [(at + 2, at + 3)]})


def one_sample(at: int) -> dict[str, Any]:
    return sample(at, plain(at, at + 2, 9), length=9) | {"rollout_id": 0}


def one_batch(at: int) -> dict[str, Any]:
    return batch(nemo_step(at)[1:])


WRITERS = {
    "verl": verl,
    "areal": one_session,
    "slime": one_sample,
    "otlp": one_batch,
}
Writer = Callable[[int], dict[str, Any]]
each_log = pytest.mark.parametrize("record", WRITERS.values(), ids=WRITERS)


def lines(record: Writer, count: int = 8) -> list[str]:
    return [json.dumps(record(at)) for at in range(count)]


def parts(path: Path) -> int:
    return counted(load(path))


def counted(run: Run) -> int:
    """Return the number of regions, or of stages where there are none."""
    return len(run.rows(kind="region")) or len(run.rows(kind="stage"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a rank file of rlprof"),
        ('{"step": 1, "data": {"loss": 1.0}}\n', "has no timings of a step"),
        (
            '{"task_id": 1, "session_id": 2, "submit_ts": null}\n',
            "has no session with a task and a start",
        ),
        ('{"trace": {"events": 5}}\n', "its samples have no trace"),
        ('{"a": 1}\n', "is not a rank file of rlprof"),
        ("[1]\n", "is not a rank file of rlprof"),
    ],
)
def test_a_file_without_data_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=reason) as error:
        load(path)
    assert "\n" not in str(error.value)


@each_log
@pytest.mark.parametrize(
    "damage",
    ['{"half": ', "\x00\x01", '"text"', "[" * 5000, "{}" * 3, "9" * 5000, "x" * (17 << 20)],
    ids=["half", "bytes", "text", "deep", "twice", "digits", "giant"],
)
@pytest.mark.parametrize("place", [0, 4, 8])
def test_a_damaged_line_alone_is_lost(
    record: Writer, damage: str, place: int, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    whole = lines(record)
    path.write_text("\n".join(whole))  # the last line has no end
    count = parts(path)
    path.write_text("\n".join([*whole[:place], damage, *whole[place:]]))
    run = load(path)
    assert counted(run) == count
    assert [each.text for each in run.warnings] == ["1 of its lines can't be read"]


@each_log
def test_a_file_that_is_cut_loses_its_last_line(record: Writer, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    text = "\n".join(lines(record))
    path.write_text("\n".join(lines(record, 7)))
    count = parts(path)
    path.write_text(text[: len(text) - 5])
    run = load(path)
    assert counted(run) == count
    assert [each.text for each in run.warnings] == ["1 of its lines can't be read"]


@each_log
def test_a_line_of_ten_megabytes_is_read(record: Writer, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    own = [record(at) for at in range(8)]
    path.write_text("\n".join(map(json.dumps, own)))
    count = parts(path)
    own[0]["note"] = "x" * GIANT
    path.write_text("\n".join(map(json.dumps, own)))
    run = load(path)
    assert counted(run) == count
    assert not run.warnings


HOSTILE: tuple[object, ...] = (
    *(None, True, "", "text", "\ud800", "x" * 100_000, [], [1], {}, {"a": 1}, [[[]]], -1, 0, 1.5),
    *(float("nan"), float("inf"), -1e308, 1e308, 10**30, -(10**30), 2**53, 2**63, 10**4000),
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to each value inside of one."""
    parts: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        parts = [*value.items()]
    elif isinstance(value, list):
        parts = [*enumerate(value)]
    inner = [way for key, part in parts for way in places(part, (*path, key))]
    return [path, *inner] if path else inner


def changed(value: Any, path: tuple[Any, ...], new: object, *, gone: bool) -> Any:
    own = copy.deepcopy(value)
    at = own
    for key in path[:-1]:
        at = at[key]
    if gone:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return own


@pytest.mark.deep
@each_log
def test_a_wrong_value_costs_no_more_than_its_line(record: Writer, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = [record(at) for at in range(8)]
    path.write_text("\n".join(map(json.dumps, whole)))
    wanted = parts(path)
    picked = random.Random(0)
    cases = [(way, new) for way in places(whole[3]) for new in HOSTILE]
    cases = picked.sample(cases, min(len(cases), 250))
    cases += [(way, ...) for way in places(whole[3])]
    for way, new in cases:
        wrong = changed(whole[3], way, new, gone=new is ...)
        path.write_text("\n".join(map(json.dumps, [*whole[:3], wrong, *whole[4:]])))
        run = load(path)
        assert wanted - 2 <= counted(run), (way, new)  # two phases to a sample
        for table in (samples(run), long_tail(run), run.stages(), run.summary()):
            assert table is not None
        numbers = [span.end_ns for span in run if span.step < 100]
        assert max(numbers) < 2**60, (way, new)


@each_log
def test_a_broken_file_beside_others_is_a_warning_or_one_line(
    record: Writer, tmp_path: Path
) -> None:
    (tmp_path / "a-r0.jsonl").write_text("\n".join(lines(record)))
    (tmp_path / "b-r1.jsonl").write_text("")
    assert parts(tmp_path) == parts(tmp_path / "a-r0.jsonl")


def test_a_compressed_file_that_is_cut_off_is_one_loss(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps({"rollout_id": 0, "samples": [*range(9_999)]}).encode())
    (tmp_path / "a.json.gz").write_bytes(data[: len(data) // 2])
    assert [*objects(tmp_path / "a.json.gz")] == [None]
