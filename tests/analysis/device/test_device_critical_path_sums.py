"""Sums of the critical path are exact, whatever was recorded."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.device_critical_path import device_critical_path
from lightning_rlprof.loaders.load import load
from tests.analysis.device.test_device_critical_path import KINETO, STEP, job
from tests.builders.calls import Call, Kernel
from tests.builders.runs import Row
from tests.effort import examples


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_sums_are_exact_whatever_was_recorded(data: st.DataObject) -> None:
    times = st.integers(0, 1_000)
    kernels = []
    for number in range(data.draw(st.integers(1, 12))):
        start, length = data.draw(times), data.draw(st.integers(0, 90))
        launch = data.draw(st.none() | times)
        more = {"stream": data.draw(st.integers(0, 2)), "graph": data.draw(st.none() | st.just(1))}
        kernels.append(Kernel(str(number), start, start + length, launch, 9, **more))
    calls = []
    for name in data.draw(st.lists(st.sampled_from(["cudaStreamSynchronize", "aten::mm"]))):
        start = data.draw(times)
        calls.append(Call(name, start, start + data.draw(times), "runtime"))
    calls.append(Call("aten::mm", 0, 10))
    spans = job(STEP, calls, kernels)
    table = device_critical_path(spans)
    if any(each.end > each.start and _begun(each) < 1_000 for each in kernels):
        ends = [each.end for each in kernels if each.end > each.start and _begun(each) < 1_000]
        assert sum(table.column("total")) == max(1_000, *ends)
        assert all(part is None or 0 < part <= 1 for part in table.column("on path"))
    else:
        assert table.abstained


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_no_time_counts_twice_whatever_the_steps(data: st.DataObject) -> None:
    times = st.integers(0, 400)
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 400), min_size=1, max_size=4)))]
    rows = [Row("step", "step", at, *pair) for at, pair in enumerate(pairwise(starts))]
    kernels = []
    for number in range(data.draw(st.integers(1, 8))):
        start, launch = data.draw(times), data.draw(times)
        length, stream = data.draw(st.integers(1, 500)), data.draw(st.integers(0, 2))
        start = max(start, launch)
        kernels.append(Kernel(str(number), start, start + length, launch, 3, stream=stream))
    table = device_critical_path(job(rows, [Call("aten::mm", 0, 10)], kernels))
    assert sum(table.column("total")) <= max(starts[-1], *(each.end for each in kernels))
    assert all(part is None or 0 < part <= 1 for part in table.column("on path"))


def _begun(kernel: Kernel) -> int:
    return kernel.start if kernel.launch is None else kernel.launch


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_a_real_trace_is_divided_exactly() -> None:
    spans = load(KINETO / "h100_qwen1.5-0.5b.json.gz")
    table = device_critical_path(spans)
    (step,) = spans.rows(kind="step").tolist()
    kernels = spans.table("kernels")
    ends = [a + b for a, b in zip(kernels.column("start"), kernels.column("duration"), strict=True)]
    last = max(int(spans.end_ns[step]), *ends)
    assert sum(table.column("total")) == last - int(spans.start_ns[step])
    assert "kernel 88.1%" in table.note
