"""What the torch that is installed here writes, as it is read back."""

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from lightning_rlprof.loaders.kineto.reader import is_chrome_trace, read_kineto

torch: Any = pytest.importorskip("torch")
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

# torch 2.6 writes names as they are, so that these quotes break its own event.
OLD = Version(torch.__version__) < Version("2.7")
REGION = "lambda()#1" if OLD else 'quoted "name"\\ {lambda()#1}, {"ph": 雪}'
TOLERANCE_NS = 50_000_000  # the profiler compares two clocks on a busy machine


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_of_this_torch_is_read_to_the_nanosecond(suffix: str, tmp_path: Path) -> None:
    before = time.time_ns()
    rows = [record_function(name) for name in ("ProfilerStep#3", "actor_update", REGION)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler, rows[0], rows[1], rows[2]:
        torch.ones(8, 8) @ torch.ones(8, 8)
    after = time.time_ns()
    path = tmp_path / f"trace{suffix}"
    profiler.export_chrome_trace(str(path))

    assert is_chrome_trace(path)
    spans = read_kineto(path)

    step, stage, region = list(spans)
    assert (step.kind, step.step, step.parent) == ("step", 3, None)
    assert (stage.name, stage.kind, stage.step, stage.parent) == ("actor_update", "stage", 3, 1)
    assert (region.kind, region.step, region.parent) == ("region", 3, 2)
    assert spans.warnings == ()
    assert before - TOLERANCE_NS < spans.unix_ns < after + TOLERANCE_NS
    if suffix == ".json":
        found = json.loads(path.read_text(), parse_float=Decimal)
        marks = [one for one in found["traceEvents"] if one.get("cat") == "user_annotation"]
        starts = {int(one["ts"] * 1000) + found["baseTimeNanoseconds"] for one in marks}
        assert {span.start_ns + spans.unix_ns for span in spans} == starts
        assert {span.name for span in spans} == {one["name"] for one in marks}
