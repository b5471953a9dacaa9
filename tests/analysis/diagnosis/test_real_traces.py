"""On real traces links resolve, numbers are those of the commands, lost events add no claim."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.analysis.device.timeline import idle
from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.places import SHARED_DATA

DATA = SHARED_DATA
TRACES = [
    "kineto/nccl.json.gz",
    "kineto/vllm_prefill_decode_graph.json.gz",
    "kineto/h100_qwen1.5-0.5b.json.gz",
    "kineto/ns_resolution_rank-0.json.gz",
    "nsys/t4_power_iteration.sqlite",
]


def loaded(name: str) -> Spans:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"NO TRACES: {path} is not here")
    return load(path)


def claims(table: Table) -> set[str]:
    return {str(each) for each in table.column("id")}


@pytest.mark.parametrize("name", TRACES)
def test_every_link_returns_events_and_every_number_is_that_of_its_command(name: str) -> None:
    spans = loaded(name)
    table = findings(spans)
    for own_id, cost, query in zip(*map(table.column, ("id", "cost", "query")), strict=True):
        assert len(Run.of(spans).sql(str(query)).rows) > 0, own_id
        if own_id in ("short-gaps", "long-gaps"):
            own = idle(spans)
            kinds = zip(own.column("kind"), own.column("total"), strict=True)
            late = sum(int(total or 0) for kind, total in kinds if kind == "host-bound idle")
            assert int(str(cost)) == pytest.approx(late, rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kineto/nccl.json.gz", {"long-gaps"}),
        ("kineto/h100_qwen1.5-0.5b.json.gz", set()),
        ("kineto/ns_resolution_rank-0.json.gz", set()),
    ],
)
def test_what_is_claimed_of_known_traces(name: str, expected: set[str]) -> None:
    assert claims(findings(loaded(name))) == expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRACES)
def test_losing_a_fifth_of_the_kernels_adds_no_claim(name: str, seed: int) -> None:
    spans = loaded(name)
    whole = spans.table("kernels")
    keep = np.random.default_rng(seed).random(len(whole.rows)) >= 0.2
    rows = [row for row, stays in zip(whole.rows, keep, strict=True) if stays]
    lost = replace(whole, rows=rows)
    less = replace(spans, tables={**spans.tables, "kernels": lambda: lost})
    assert claims(findings(less)) <= claims(findings(spans))
