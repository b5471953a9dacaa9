"""Peaks of devices by name, and formulas for the FLOPs of a token."""

import re

import pytest

from lightning_rlprof.analysis.efficiency.peak_flops import (
    DEVICES,
    Type,
    bandwidth_of,
    device_labeled,
    kind_of,
    peak_of,
    token_flops,
    unconfirmed_note,
)
from lightning_rlprof.errors import RlprofError
from tests.places import ROOT


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
        ("AMD Instinct MI300X VF", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("NVIDIA L40S", 362.05),
        ("Ascend910B1", 353.9),
        ("Ascend910B2C", 353.9),
        ("Ascend910B3", 294.9),
        ("Ascend910B4", 245.8),
        ("Ascend910_9392", 376.0),
        ("Ascend950PR_9579", 378.5),
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
        "Ascend910B",  # a first-generation 910
        "Ascend910_9372",
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
        *(("AMD Instinct MI300X", 5300), ("NVIDIA H100", None), ("Ascend910B", None)),
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


@pytest.mark.parametrize(
    ("name", "kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979),
        ("NVIDIA B200", "fp4", 9000),
        ("NVIDIA GeForce RTX 4090", "fp8", 330.3),
        ("AMD Instinct MI300X", "int8", 2614.9),
        ("Ascend910B3", "int8", 590),
        ("NVIDIA H100", "fp8", None),
    ],
)
def test_peaks_by_type(name: str, kind: Type, peak: float | None) -> None:
    assert peak_of(name, kind) == peak


def test_ascend_peaks_follow_from_cores_and_clocks() -> None:
    for label, cores, ghz in (
        ("910B2", 24, 1.8),
        ("910B3", 20, 1.8),
        ("910B4-32G", 20, 1.5),
        ("950PR", 28, 1.65),
        ("950DT", 32, 1.65),
    ):
        own = 2 * 16**3 * cores * ghz / 1_000
        assert device_labeled(label).tflops == pytest.approx(own, rel=1e-3)


def test_unconfirmed_figures_are_shown_as_such() -> None:
    named = ["NVIDIA H200", "Ascend910B3", "NVIDIA B200", "cpu"]
    assert unconfirmed_note(named, "tflops") == "Unconfirmed: Ascend910B3 ~294.9 TFLOP/s."
    assert "NVIDIA B200 ~8000 GB/s" in unconfirmed_note(named, "gb_s")
    assert unconfirmed_note(["NVIDIA H200"], "tflops", "gb_s") == ""
    assert all(device.unconfirmed for device in DEVICES if device.name.startswith("Ascend"))


def test_a_label_names_one_device() -> None:
    labels = [device.label.lower() for device in DEVICES]
    assert len({*labels}) == len(labels)
    assert device_labeled("910b4-1").memory_gb == 64
    with pytest.raises(RlprofError, match="'A100' may be several devices") as error:
        device_labeled("A100")
    assert error.value.hint == "Known: A100-40G, A100-80G"
    with pytest.raises(RlprofError, match="unknown device 'H1000'"):
        device_labeled("H1000")


def test_the_page_has_the_table_of_devices() -> None:
    page = (ROOT / "docs" / "efficiency.md").read_text()
    for device in DEVICES:
        figures = ("fp32", "tf32", "tflops", "fp8", "int8", "fp4", "memory_gb", "gb_s")
        cells = " | ".join(map(device.shown, figures))
        assert f"| {device.label} | {cells} | {device.source} |" in page
