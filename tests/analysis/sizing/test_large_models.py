"""Figures of docs/guides/large-models.md are those that sizing computes for the published jobs."""

import re
from typing import Any

import pytest

from lightning_rlprof.analysis.models.flops import forward
from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.analysis.sizing.job import Job, parse_devices
from lightning_rlprof.analysis.sizing.memory import GB, host_bytes
from lightning_rlprof.analysis.sizing.sizing import Sizing, size
from tests.analysis.models.published import CONFIGS, active_parameters, cache_bytes_per_token
from tests.places import ROOT

PAGE = (ROOT / "docs" / "guides" / "large-models.md").read_text()
MODEL = read_model(CONFIGS["DeepSeek-V3"])
OFFLOAD = {96: 1.0, 128: 0.5, 256: 0.0, 512: 0.0}
SPLIT = [
    [float(cell) for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.fullmatch(r"(\| [\d.]+ ){10}\|", line)
]


def sized(devices: int, **changes: Any) -> Sizing:
    job = Job(MODEL, parse_devices("1xH20-96G")[1], devices, 2048, 8192, shard="megatron")
    return size(job.changed(**changes))


@pytest.mark.parametrize("row", SPLIT, ids=lambda row: f"{row[0]:.0f} devices")
def test_the_split_of_a_published_job_is_as_listed(row: list[float]) -> None:
    devices, tp, pp, ep, copies, layers, experts, *amounts = row
    how = {"tp": int(tp), "pp": int(pp), "ep": int(ep), "offload": OFFLOAD[int(devices)]}
    found = sized(int(devices), **how)
    assert (found.job.data_parallel, 256 / ep) == (copies, experts)
    assert (layers - 1) * pp < len(MODEL.layers) <= layers * pp
    update = {part.name: part.low / GB for part in found.phases[-1].parts}
    weights, gradients = update["weights"], update["gradients"]
    own = [weights / 2, weights + gradients, update["optimizer"]]
    assert own == pytest.approx(amounts, abs=0.06)
    assert found.verdict == "fits"


def test_all_published_splits_are_listed() -> None:
    assert [row[0] for row in SPLIT] == [*OFFLOAD]
    shares = [(row[-2] + row[-1]) / 102.0 for row in SPLIT]
    assert f"{min(shares):.0%} to {max(shares):.0%}" in PAGE


def test_the_published_figures_are_within_the_estimate() -> None:
    how = {"tp": 8, "pp": 12, "ep": 8, "offload": 1.0, "rollout_tp": 32, "rollout_memory": 0.6}
    found = sized(96, **how, batch=96, group=8, mean=1960, eager=True)
    rows = {str(row[0]): row[1:3] for row in found.times().rows}
    update, host = found.phases[-1], host_bytes(found.job) / GB
    estimated = [
        ("memory of a device, GB", update.low / GB, update.high / GB),
        ("host memory of a node, GB", host, 2 * host),
        ("rollout, s", *rows["actor_generate"]),
        ("step, s", *rows["step"]),
    ]
    for name, low, high in estimated:
        line = re.search(rf"\| {name} \| (\d+) \| (\d+) to (\d+) \|", PAGE)
        assert line, name
        published, *ours = map(int, line.groups())
        assert ours == pytest.approx([low, high], abs=0.6)
        assert float(low or 0) < published < float(high or 0)
    assert "KV cache of a replica has room for 23 sequences" in found.memory().note


def test_the_facts_of_the_model() -> None:
    facts = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE))
    assert MODEL.parameters / 1e9 == pytest.approx(671, abs=0.5)
    assert f"{MODEL.expert_parameters / MODEL.parameters:.0%}" in facts["parameters"]
    assert f"{active_parameters(MODEL) / 1e9:.1f} " in facts["active per token"]
    assert f"{cache_bytes_per_token(MODEL):,} bytes" in facts["KV cache per token"]
    flops = forward(MODEL, [4096]).training / 4096 / 1e9
    assert f"{flops:.0f} " in facts["FLOPs per trained token at 4,096 tokens"]
