"""Peaks of devices by name, and formulas for the FLOPs of a token."""

import re

import pytest

from lightning_rlprof.analysis.efficiency.peak_flops import (
    DEVICES,
    bandwidth_of,
    kind_of,
    peak_of,
    token_flops,
)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_names_that_torch_reports_have_a_peak(name: str, peak: float) -> None:
    assert peak_of(name) == peak
    assert peak_of(name.upper()) == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",  # SXM, PCIe or NVL
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of one
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI250X/MI250",
        "Ascend910B3",
        "Ascend910_9392",
        "cpu",
        "",
    ],
)
def test_a_name_of_several_devices_has_no_peak(name: str) -> None:
    assert peak_of(name) is None


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        *(("NVIDIA A100-SXM4-80GB", 2039), ("A100-PCIE-40GB", 1555)),
        *(("NVIDIA H100 80GB HBM3", 3350), ("NVIDIA H200", 4800), ("NVIDIA GH200 480GB", None)),
        *(("AMD Instinct MI300X", 5300), ("NVIDIA H100", None), ("Ascend910B3", None)),
    ],
)
def test_the_bandwidth_is_that_of_exactly_one_device(name: str, gb_s: float | None) -> None:
    assert bandwidth_of(name) == gb_s


def test_no_name_is_that_of_two_devices_and_each_has_a_source() -> None:
    plain = [re.sub(r"\([^)]*\)\??", "", device.name) for device in DEVICES]
    assert len(set(plain)) == len(plain)
    for device in DEVICES:
        matching = [d for d in DEVICES if re.fullmatch(d.name, sample(device.name), re.IGNORECASE)]
        assert matching == [device]
        assert device.tflops > 0
        assert device.gb_s is None or 300 < device.gb_s < 10_000
        assert device.source


def sample(pattern: str) -> str:
    """Return a name that matches: the first way at each fork."""
    first = pattern.partition("|NVIDIA ")[0]
    while (inner := re.search(r"\(([^()|]*)[^()]*\)\??", first)) is not None:
        first = first[: inner.start()] + inner[1] + first[inner.end() :]
    return first


def test_the_formula_is_that_of_the_paper() -> None:
    assert token_flops(1e9, "training") == 3 * token_flops(1e9, "forward") == 6e9


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("training", "actor_update critic_update update_actor update_policy policy_training train"),
        ("forward", "actor_generate rollout gen generate_sequences old_log_prob ref_log_prob"),
        ("forward", "reference_compute_log_prob actor_compute_log_prob critic_compute_values"),
        (None, "compute_reward compute_advantage weight_sync optimizer_step backward retrain_x"),
    ],
)
def test_the_kind_of_a_stage_follows_from_its_name(kind: str, stages: str) -> None:
    assert {kind_of(stage) for stage in stages.split()} == {kind}
