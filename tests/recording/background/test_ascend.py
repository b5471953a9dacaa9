"""DCMI through a double in C, and npu-smi through a double that prints what the tool prints."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_rlprof.recording.background import ascend
from lightning_rlprof.recording.background.readings import NpuSmi, Reading, ascend_part

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
MAP = """\
\tNPU ID        Chip ID        Chip Logic ID        Chip Name
\t0        0        0        Ascend 910B3
\t0        1        -        Mcu
\t1        0        1        Ascend 910B3
\t1        1        -        Mcu
"""
COMMON = """\
\tNPU ID                         : 1
\tChip ID                        : 0
\tMemory Usage Rate(%)           : 5
\tAicore Usage Rate(%)           : 83
\tAicore Freq(MHZ)               : 1850
\tAicore curFreq(MHZ)            : 1650
\tTemperature(C)                 : 51
\tNPU Real-time Power(W)         : 312.5
\tAicpu Usage Rate(%)            : NA
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
    monkeypatch.setattr(ascend, "_PLACES", ("libabsent.so", path))
    monkeypatch.setenv("PATH", "")


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
        (["STATUS=-8005"], 3, "dcmi_init returned -8005; npu-smi is not on PATH"),
        ([], 9, "dcmi_get_card_id_device_id_from_logicid returned -8001; npu-smi is not on PATH"),
        ([], 0, "DCMI answers no question"),
    ],
)
def test_a_dcmi_that_cannot_be_used_says_why_on_a_double(
    options: list[str], index: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, library(tmp_path, *options))
    with pytest.raises(OSError, match=why):
        ascend_part(index, None).read()


def test_without_the_library_and_the_tool_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, "libnotthere.so")
    with pytest.raises(OSError, match=r"libdcmi.so: OSError: .*; npu-smi is not on PATH"):
        ascend_part(0, None).read()


def npu_smi(folder: Path, common: str = COMMON, status: int = 0) -> Path:
    (folder / "map").write_text(MAP)
    (folder / "common").write_text(common)
    program = folder / "npu-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {folder}/calls\n'
        f'if [ "$*" = "info -m" ]; then /bin/cat {folder}/map; exit {status}; fi\n'
        f'if [ "$*" = "info -t common -i 1 -c 0" ]; then /bin/cat {folder}/common; exit 0; fi\n'
        "exit 3\n"
    )
    program.chmod(0o755)
    return program


def test_npu_smi_is_run_once_a_minute_if_there_is_no_library_on_a_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_smi(tmp_path)
    monkeypatch.setattr(ascend, "_PLACES", ("libabsent.so",))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ascend_part(1, None).read() == Reading(values=READ)
    now = [0.0]
    tool = NpuSmi(str(tmp_path / "npu-smi"), 1, lambda: now[0])
    calls = len((tmp_path / "calls").read_text().splitlines())
    for now[0], values in ((0.0, READ), (59.9, {}), (60.0, READ)):
        assert tool.read() == Reading(values=values)
    assert len((tmp_path / "calls").read_text().splitlines()) == calls + 2


@pytest.mark.parametrize(
    ("common", "status", "logic_id", "why"),
    [
        (COMMON, 4, 1, "npu-smi info -m: CalledProcessError"),
        (COMMON, 0, 5, "npu-smi does not list device 5"),
        ("\tAicore Usage Rate(%) : NA\n", 0, 1, "npu-smi prints none of the metrics"),
    ],
)
def test_a_tool_that_tells_nothing_says_why_on_a_double(
    common: str, status: int, logic_id: int, why: str, tmp_path: Path
) -> None:
    program = npu_smi(tmp_path, common, status)
    with pytest.raises(OSError, match=why):
        NpuSmi(str(program), logic_id).read()


def test_a_tool_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "npu-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(ascend, "_TIMEOUT_S", 0.01)
    with pytest.raises(OSError, match="TimeoutExpired"):
        NpuSmi(str(program), 0)


@pytest.mark.npu
def test_a_real_npu_tells_its_clock_and_temperature() -> None:
    values = ascend_part(0, None).read().values
    assert 0 < values["device_clock_mhz"] <= values["device_max_clock_mhz"]
    assert 0 < values["device_temperature_celsius"] < 120
