"""Peaks of devices by name, and formulas for the FLOPs of a token."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.analysis.efficiency.peak_flops import (
    DEVICES,
    Type,
    device_labeled,
    device_of,
    recorded_device,
    token_flops,
    unconfirmed_note,
)
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording import start
from lightning_rlprof.recording.accelerator import chip_facts
from tests.builders.runs import header, write_rank
from tests.places import ROOT


def peak_of(name: str, kind: Type = "bf16") -> float | None:
    device = device_of(name)
    return None if device is None else device.of(kind)


def gb_s_of(name: str) -> float | None:
    device = device_of(name)
    return None if device is None else device.gb_s


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
    assert gb_s_of(name) == gb_s


def test_no_name_is_that_of_two_devices() -> None:
    plain = [re.sub(r"\([^)]*\)\??", "", device.name) for device in DEVICES]
    assert len(set(plain)) == len(plain)
    for device in DEVICES:
        matching = [d for d in DEVICES if re.fullmatch(d.name, sample(device.name), re.IGNORECASE)]
        assert matching == [device]
        assert device.tflops > 0
        assert device.gb_s is None or 200 < device.gb_s < 10_000


def sample(pattern: str) -> str:
    """Return a name that matches: the first way at each fork."""
    first = pattern.partition("|NVIDIA ")[0]
    while (inner := re.search(r"\(([^()|]*)[^()]*\)\??", first)) is not None:
        first = first[: inner.start()] + inner[1] + first[inner.end() :]
    return first


def test_the_formula_is_that_of_the_paper() -> None:
    assert token_flops(1e9, "training") == 3 * token_flops(1e9, "forward") == 6e9


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
    named = [header(device=name) for name in ("NVIDIA H200", "Ascend910B3", "NVIDIA B200", "cpu")]
    assert unconfirmed_note(named, "tflops") == "Unconfirmed: Ascend910B3 ~294.9 TFLOP/s."
    assert "NVIDIA B200 ~8000 GB/s" in unconfirmed_note(named, "gb_s")
    assert unconfirmed_note(named[:1], "tflops", "gb_s") == ""
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


def test_the_page_has_the_table_of_devices_each_with_its_source() -> None:
    page = (ROOT / "docs" / "efficiency.md").read_text()
    for device in DEVICES:
        figures = ("fp32", "tf32", "tflops", "fp8", "int8", "fp4", "memory_gb", "gb_s")
        cells = " | ".join(map(device.shown, figures))
        row = re.escape(f"| {device.label} | {cells} | ")
        assert re.search(rf"^{row}\w.* \|$", page, re.MULTILINE), device.label


def ini(cores: str = "24", clock: str = "1800") -> str:
    return f"""[version]
SoC_version=Ascend910B2
[SoCInfo]
ai_core_cnt=24
cube_core_cnt={cores}
memory_size=68719476736
[AICoreSpec]
cube_freq={clock}
cube_m_size=16
"""


@pytest.mark.parametrize("folder", ["data", "x86_64-linux/data", "latest/compiler/data"])
def test_cores_and_clock_are_read_from_a_written_platform_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    path = tmp_path / folder / "platform_config" / "Ascend910B2.ini"
    path.parent.mkdir(parents=True)
    path.write_text(ini())
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert chip_facts("Ascend910B2") == {"cube_cores": 24, "cube_mhz": 1800}
    assert chip_facts("Ascend910B3") == {}
    assert chip_facts(None) == chip_facts("../Ascend910B2") == {}
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert chip_facts("Ascend910B2") == {}


@pytest.mark.parametrize(
    "text",
    [
        *("", "no sections", ini(cores="0"), ini(cores="x"), ini(clock="1800000000")),
        *(ini(clock=""), ini(clock="-1"), ini().replace("[SoCInfo]", "[Other]"), "\x00\x00"),
    ],
)
def test_a_written_platform_config_without_plausible_numbers_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "data" / "platform_config" / "Ascend910B2.ini"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert chip_facts("Ascend910B2") == {}


def test_a_run_on_a_double_of_an_ascend_stores_its_chip_in_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / "platform_config" / "Ascend910B2.ini"
    path.parent.mkdir(parents=True)
    path.write_text(ini(clock="1850"))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(start, "device_name", lambda kind: "Ascend910B2")
    made = start.make_header(ProfilerConfig(), "run", 0, 1, "npu")
    assert made.chip == {"cube_cores": 24, "cube_mhz": 1850}
    assert start.make_header(ProfilerConfig(), "run", 0, 1, "cpu").chip == {}
    write_rank(tmp_path / "run", made, [])
    assert load(tmp_path / "run").headers[0].chip == made.chip


def test_what_a_run_recorded_of_its_chip_goes_before_the_table() -> None:
    head = header(
        device="npu", device_name="Ascend910B2", chip={"cube_cores": 24, "cube_mhz": 1850}
    )
    device, table = recorded_device(head), device_of("Ascend910B2")
    assert device is not None
    assert table is not None
    assert device.tflops == pytest.approx(24 * 8192 * 1.85e9 / 1e12)
    assert device.others["int8"] == pytest.approx(2 * device.tflops, rel=1e-3)
    assert (device.gb_s, device.memory_gb) == (table.gb_s, table.memory_gb)
    assert unconfirmed_note([head], "tflops") == ""
    assert unconfirmed_note([head], "gb_s") == "Unconfirmed: Ascend910B2 ~1600 GB/s."
    assert recorded_device(replace(head, chip={})) == table


def test_a_chip_that_no_table_has_gets_a_peak_from_what_the_run_recorded() -> None:
    head = header(device="npu", device_name="Ascend999", chip={"cube_cores": 10, "cube_mhz": 1000})
    device = recorded_device(head)
    assert device is not None
    assert (device.tflops, device.others, device.gb_s) == (81.92, {"int8": 163.84}, None)
    assert recorded_device(replace(head, chip={})) is None
