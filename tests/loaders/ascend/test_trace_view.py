"""Traces of torch_npu are recognized by their first events, whatever their name and form."""

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.ascend.trace_view import is_trace_view
from lightning_rlprof.loaders.load import load
from tests.builders.ascend_output import PID, TraceEvents
from tests.builders.ascend_recorded import ABSENT, DATA, OUTPUT, TEXT
from tests.builders.chrome import AFTER, ChromeTrace

NAMES = ("trace_view.json", "rank3_trace_view.json", "npu.json", "a.pt.trace.json", "export")


def events() -> list[dict[str, Any]]:
    trace = TraceEvents()
    trace.named("Ascend Hardware", trace.pid("Ascend Hardware", 0), {2: "Stream 2"})
    for number in range(4):
        at = number * 1_000_000
        trace.operator("aten::matmul", at, at + 40_000)
        trace.task("MatMulV2", at + 200_000, at + 450_000)
    return [*trace.events]


@pytest.mark.parametrize("seed", range(8))
def test_it_is_read_alike_under_every_name_and_in_every_form(tmp_path: Path, seed: int) -> None:
    found, chance = events(), random.Random(seed)
    if seed % 2:  # Some versions name processes first, some last.
        chance.shuffle(found)
    data: Any = {"traceEvents": found} if seed % 3 == 0 else found
    text = json.dumps(data, indent=chance.choice([None, 1])).encode()
    path = tmp_path / chance.choice(NAMES)
    if chance.random() < 0.5:
        path, text = path.with_name(f"{path.name}.gz"), gzip.compress(text)
    path.write_bytes(text)

    run = load(path)

    assert [header.device for header in run.headers.values()] == ["npu"]
    assert run.table("kernels").column("duration") == [250_000] * 4
    if ".json" in path.name:
        assert len(load(tmp_path).table("kernels").rows) == 4


def test_renamed_traces_of_several_ranks_are_one_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}_trace_view.json").write_text(json.dumps(events()))

    run = load(tmp_path)

    assert run.ranks == (0, 1)
    assert len(run.table("kernels").rows) == 8


def test_a_trace_of_kineto_with_the_name_is_one_of_kineto(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.launched(1, 100)
    path = trace.write(tmp_path / "trace_view.json")

    assert not is_trace_view(path)
    assert load(path).table("kernels").column("kernel") == ["gemm"]


def test_texts_as_times_alone_do_not_make_a_trace_one_of_torch_npu(tmp_path: Path) -> None:
    trace = ChromeTrace(after=AFTER)
    trace.event("ray", "task", 0, 10, PID, 1)["ts"] = "7.5"
    assert not is_trace_view(trace.write(tmp_path / "x.json"))


@pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
def test_a_recorded_trace_is_read_under_another_name_and_compressed(tmp_path: Path) -> None:
    source = TEXT[0] / OUTPUT / "trace_view.json"
    shutil.copy(source, tmp_path / "trace_view.json")
    expected = load(tmp_path / "trace_view.json").table("kernels")
    with gzip.open(tmp_path / "a.json.gz", "wb") as file:
        file.write(source.read_bytes())

    found = load(tmp_path / "a.json.gz").table("kernels")

    assert len(found.rows) == len(expected.rows) > 100
    assert found.column("duration") == expected.column("duration")
