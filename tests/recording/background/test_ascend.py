"""DCMI through a double in C."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_rlprof.recording.background import readings
from lightning_rlprof.recording.background.readings import Reading, ascend_part

# Signatures of dcmi_interface_api.h. Card 1 with two chips: logic ids 2 and 3.
DCMI = """
struct core { unsigned int freq, cur_freq; };
struct hbm { unsigned long long size; unsigned int freq; unsigned long long used; int temp;
             unsigned int rate; };
static int open_;
int dcmi_init(void) { open_ = 1; return STATUS; }
static int wrong(int card, int chip) { return !open_ || card != 1 || chip != 1 ? -8001 : 0; }
int dcmi_get_card_id_device_id_from_logicid(int *card, int *chip, unsigned int logic) {
  *card = logic / 2; *chip = logic % 2; return logic > 3 ? -8001 : 0; }
int dcmi_get_device_utilization_rate(int card, int chip, int type, unsigned int *rate) {
  *rate = type == 2 ? 83 : 0; return wrong(card, chip); }
int dcmi_get_device_power_info(int card, int chip, int *power) {
  *power = 3125; return wrong(card, chip); }
int dcmi_get_device_temperature(int card, int chip, int *heat) {
  *heat = 51; return HOT ? -8255 : wrong(card, chip); }
int dcmi_get_device_aicore_info(int card, int chip, struct core *core) {
  core->freq = 1850; core->cur_freq = 1650; return wrong(card, chip); }
#ifdef HBM
int dcmi_get_device_hbm_info(int card, int chip, struct hbm *hbm) {
  hbm->size = 65536; hbm->used = 3000; return wrong(card, chip); }
#endif
"""
READ = {
    "device_busy_percent": 83,
    "device_power_watts": 312.5,
    "device_temperature_celsius": 51,
    "device_clock_mhz": 1650,
    "device_max_clock_mhz": 1850,
}


def library(folder: Path, *options: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, built = folder / "dcmi.c", folder / "libdcmi.so"
    source.write_text(DCMI)
    defined = {"STATUS": "0", "HOT": "0"} | dict(each.partition("=")[::2] for each in options)
    flags = [f"-D{name}={value}" for name, value in defined.items()]
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", built, source], check=True)
    return str(built)


def with_library(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(readings, "_PLACES", ("libabsent.so", path))


def test_dcmi_is_asked_for_the_visible_device_on_a_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, library(tmp_path, "HBM=1"))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")
    part = ascend_part(1, None)
    assert part.device == 1
    for _ in range(2):
        assert part.read() == Reading(values={**READ, "device_memory_used_bytes": 3000 << 20})


def test_a_dcmi_that_lacks_a_function_or_answers_an_error_loses_that_on_a_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, library(tmp_path, "HOT=1"))
    values = ascend_part(3, None).read().values
    assert {*values} == READ.keys() - {"device_temperature_celsius"}


@pytest.mark.parametrize(
    ("options", "index", "why"),
    [
        (["STATUS=-8005"], 3, "dcmi_init returned -8005"),
        ([], 9, "dcmi_get_card_id_device_id_from_logicid returned -8001"),
        ([], 0, "DCMI answers no question"),
    ],
)
def test_a_dcmi_that_cannot_be_used_says_why_on_a_double(
    options: list[str], index: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, library(tmp_path, *options))
    with pytest.raises(OSError, match=why):
        ascend_part(index, None).read()


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, "libnotthere.so")
    with pytest.raises(OSError, match=r"libdcmi.so: OSError: .*"):
        ascend_part(0, None).read()


@pytest.mark.npu
def test_a_real_npu_tells_its_clock_and_temperature() -> None:
    values = ascend_part(0, None).read().values
    assert 0 < values["device_clock_mhz"] <= values["device_max_clock_mhz"]
    assert 0 < values["device_temperature_celsius"] < 120
