"""The verb ``doctor``: check what this machine can record, what is missing, and how to get it."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from importlib import util
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.open_run import SAVE_PATH
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.integrations.doors.registry import DOORS
from lightning_rlprof.system.subprocess_python import InterpreterError, ask

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans

_STYLES = {"ok": "green", "missing": "dim", "warn": "yellow", "broken": "red"}
_WIDTH = max(map(len, _STYLES))
_PROC = Path("/proc/driver/nvidia")
_STATUS = Path("/proc/self/status")
# Either lets a process read the counters of a GPU (CAP_PERFMON from driver 565 on).
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
# With this, torch can be imported even if torch_npu is installed and broken.
_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_SET_ENV = (
    Path("/usr/local/Ascend/cann/set_env.sh"),
    Path("/usr/local/Ascend/ascend-toolkit/set_env.sh"),
)
_LITTLE_BYTES = 10 << 30
_GET_TORCH = "see https://pytorch.org/get-started"
_ANSWERS_S = 180.0
_ASK_TORCH = """
import torch
from lightning_rlprof.recording.accelerator import device_count, device_kind, device_name
answer.update(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
answer.update(kind=device_kind(), name=device_name(), count=device_count())
"""

_ASK_TORCH_NPU = """
import torch, torch_npu
answer.update(version=torch_npu.__version__, count=torch.npu.device_count())
"""

_NAME = "selftest"
_STEPS, _STAGES = (1, 2), ("actor_generate", "actor_update")
_TRAIN = "from lightning_rlprof.cli.doctor import train; answer.update(train(sys.argv[1]))"
_TRAIN_S, _ANALYSIS_S = 600.0, 600.0


def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Record a tiny run and check its contents")
    ] = False,
) -> None:
    """Check what this machine can record, and how to get the rest.

    Example: rlprof doctor --selftest
    """
    if selftest:
        _selftest()
        return
    with console.bar("Checking"):
        found = diagnose()
    checks, records = [*found.checks.values()], recordable(found)
    if console.is_json():
        data: dict[str, Any] = {"device": found.device, "records": records}
        data |= {"checks": _data(checks), "frameworks": [each._asdict() for each in doors()]}
        console.put_json(data)
    else:
        _print_checks(checks)
        _print_doors(doors())
        console.say(f"This machine can record: {', '.join(records)}", "bold")
    console.next_command("rlprof", "doctor", "--selftest")


def _selftest() -> None:
    with console.bar("Recording"):
        checks = run_selftest()
    if console.is_json():
        console.put_json({"selftest": _data(checks)})
    else:
        _print_checks(checks)
    if failed := [check.name for check in checks if check.state != "ok"]:
        raise console.CheckFailedError(f"self-test failed: {', '.join(failed)}")
    console.status("Self-test passed. Temporary files were removed.", "bold")


def _print_doors(found: "list[Framework]") -> None:
    """Print the frameworks that ``rlprof run`` records, first those that are installed."""
    console.say("Frameworks that rlprof run records:", "bold")
    width = max(len(each.name) for each in found)
    for each in found:
        if each.installed:
            console.say(f"  {each.name:{width}}  {each.installed}, tested with {each.tested}")
    if absent := [each.name for each in found if not each.installed]:
        console.say(f"  not installed here: {', '.join(absent)}", "dim")


def _data(checks: "list[Check]") -> list[dict[str, str]]:
    return [check._asdict() for check in checks]


def _print_checks(checks: "list[Check]") -> None:
    """Print a line per check, and below it how to fix it."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        text = f"{check.state:{_WIDTH}}  {check.name:{width}}  {check.message}"
        console.say(text, _STYLES[check.state])
        if check.fix:
            console.say(f"{'':{_WIDTH + width + 4}}{check.fix}", "dim")


State = Literal["ok", "missing", "warn", "broken"]
"""Result of a check; ``warn`` if it may work, or could not be checked."""


class Check(NamedTuple):
    """One check.

    Attributes:
        name: What was checked.
        state: ``ok``, ``missing``, ``warn`` or ``broken`` (installed, but does not work).
        message: What was found.
        fix: How to install or repair it; empty if there is nothing to do.
    """

    name: str
    state: State
    message: str
    fix: str = ""


class Diagnosis(NamedTuple):
    """All checks of a machine, by name, in reading order.

    ``device`` is the accelerator that torch finds, ``cpu`` without one, None without torch.
    """

    device: str | None
    checks: dict[str, Check]


def diagnose() -> Diagnosis:
    """Check everything that a recording may use; as slow as importing torch and torch_npu."""
    torch, answer = check_torch()
    nvtx = check_nvtx()
    checks = [torch, check_lightning(), check_gpu(answer), nvtx, check_nsys(nvtx), check_cupti()]
    checks += [check_torch_npu(), check_cann(), check_msprof(), check_disk(SAVE_PATH)]
    return Diagnosis(answer.get("kind"), {check.name: check for check in checks})


def recordable(found: Diagnosis) -> list[str]:
    """Return what a run on this machine can record, by recorder name; spans always."""
    names = ["spans"]
    if found.device is None:
        return names
    names += ["memory"] if found.device == "npu" else ["memory", "torch_profiler"]
    names += ["device_time"] if found.device in ("cuda", "npu", "xpu") else []
    if found.checks["nvtx"].state == found.checks["nsys"].state == "ok":
        names += ["nvtx", "nsight"]
    return names + (["mstx", "npu_profiler"] if found.device == "npu" else [])


class Framework(NamedTuple):
    """A framework that is recorded without a change of code.

    Attributes:
        name: As users call it.
        package: The distribution.
        installed: Its version here, None without it.
        tested: With what it was tested.
    """

    name: str
    package: str
    installed: str | None
    tested: str


def doors() -> list[Framework]:
    """Return the frameworks that ``rlprof run`` records, and which of them are installed."""
    found = []
    for door in DOORS:
        version = installed(door.package) or (installed(door.also) if door.also else None)
        found.append(Framework(door.name, door.package, version, door.tested))
    return found


def installed(package: str) -> str | None:
    """Return the version of a package, None if it is not installed; imports nothing."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the front of a version, to compare.

    Example::

        >>> numbers("2.13.0+cpu") > numbers("2.6")
        True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _find(pattern: str, path: Path) -> str | None:
    """Return what the group of a pattern matches in a small file, None if it cannot be read."""
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def check_torch() -> tuple[Check, Mapping[str, Any]]:
    """Ask torch for itself and its devices, in another interpreter."""
    if util.find_spec("torch") is None:
        return Check("torch", "missing", "not installed", f"pip install torch; {_GET_TORCH}"), {}
    try:
        answer = ask(_ASK_TORCH, timeout_s=_ANSWERS_S)
    except InterpreterError as error:
        cure = f"reinstall it: {_GET_TORCH}"
        if util.find_spec("torch_npu"):
            cure = (
                "source set_env.sh of CANN, or pip uninstall torch_npu, or export "
                f"TORCH_DEVICE_BACKEND_AUTOLOAD=0; else {cure}"
            )
        return Check("torch", "broken", f"import failed: {error}", cure), {}
    built = f"for CUDA {answer['cuda']}" if answer["cuda"] else "without CUDA"
    built = f"for ROCm {answer['hip']}" if answer["hip"] else built
    return Check("torch", "ok", f"{answer['version']}, built {built}"), answer


def check_lightning() -> Check:
    """Look at the version of Lightning without importing it; two of them were malware."""
    for name in ("pytorch-lightning", "lightning"):
        version = installed(name)
        if version is None:
            continue
        if version in ("2.6.2", "2.6.3"):  # See GHSA-w37p-236h-pfx3.
            says = f"{name} {version} is malware that steals credentials"
            cure = f"pip install --upgrade {name}, and renew every secret that this machine holds"
            return Check("Lightning", "broken", says, cure)
        if numbers(version) < (2, 4):
            cure = "pip install 'pytorch-lightning>=2.4'"
            return Check("Lightning", "broken", f"{name} {version} is too old", cure)
        return Check("Lightning", "ok", f"{name} {version}")
    says = "not installed: only start_session records"
    return Check("Lightning", "missing", says, "pip install pytorch-lightning")


def check_gpu(answer: Mapping[str, Any]) -> Check:
    """Compare what torch finds, as `check_torch` returns it, with the driver of the kernel."""
    driver = _find(r"Module\D*?(?:x86_64|aarch64)?\s+([\d.]+)", _PROC / "version")
    if driver is None and (_PROC / "version").is_file():
        driver = "of unknown version"
    if answer.get("kind") == "cuda":
        runs = f"driver {driver}" if driver else "unknown driver"
        return Check("GPU", "ok", f"{answer['count']} x {answer['name']}, {runs}")
    if driver is None:
        cure = "With a GPU: install its driver; in a container, use docker run --gpus all"
        return Check("GPU", "missing", "no NVIDIA driver", cure)
    if answer and not answer.get("cuda"):
        says = f"driver {driver}, but this torch is built without CUDA"
        return Check("GPU", "broken", says, "install a CUDA build: https://pytorch.org/get-started")
    cure = "See nvidia-smi. CUDA_VISIBLE_DEVICES may hide it"
    return Check("GPU", "broken", f"driver {driver}, but torch finds no device", cure)


def check_nvtx() -> Check:
    """Look for the package nvtx without importing it."""
    version = installed("nvtx")
    if version is None:
        return Check("nvtx", "missing", "not installed: no stages in Nsight", "pip install nvtx")
    return Check("nvtx", "ok", version)


def check_nsys(nvtx: Check) -> Check:
    """Judge by what was seen: 2022.4 and 2023.4 hear nothing of nvtx 0.2.12, 2025.3 does."""
    program = shutil.which("nsys")
    if program is None:
        cure = "install Nsight Systems: https://developer.nvidia.com/nsight-systems"
        return Check("nsys", "missing", "not on PATH: no Nsight Systems reports", cure)
    from lightning_rlprof.recording.nsys import installed_version

    version = installed_version(program)
    if version is None:
        return Check("nsys", "warn", f"cannot read the version of {program}")
    says = "{}.{} at {}".format(*version, program)
    if nvtx.state != "ok" or numbers(nvtx.message) < (0, 2, 12) or version >= (2025, 3):
        return Check("nsys", "ok", says)
    cure = "install nsys 2025.3 or newer"
    if version <= (2023, 4):
        says += f" does not receive ranges of nvtx {nvtx.message}"
        return Check("nsys", "broken", says, cure)
    return Check("nsys", "warn", f"{says}, untested with nvtx {nvtx.message}", cure)


def check_cupti() -> Check:
    """Say who may read performance counters, which nsys's GPU metrics and some drivers need."""
    if not _PROC.is_dir():
        return Check("CUPTI", "missing", "no NVIDIA driver, no performance counters")
    closed = _find(r"RmProfilingAdminOnly: (\d)", _PROC / "params")
    if closed is None:
        return Check("CUPTI", "warn", "cannot read who may use performance counters")
    if closed == "0":
        return Check("CUPTI", "ok", "every user may read performance counters")
    says = "only administrators may read performance counters"
    rights = int(_find(r"CapEff:\s*([0-9a-f]+)", _STATUS) or "0", 16)
    if rights >> _CAP_SYS_ADMIN & 1 or rights >> _CAP_PERFMON & 1:
        return Check("CUPTI", "ok", f"{says}, and you are one")
    cure = (
        "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reboot; in "
        "a container --cap-add=SYS_ADMIN (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )
    return Check("CUPTI", "broken", f"{says}, which GPU metrics of nsys need", cure)


def check_torch_npu() -> Check:
    """Import torch_npu in another interpreter and count the devices that it finds."""
    if util.find_spec("torch_npu") is None:
        cure = 'on a machine with Ascend NPUs: pip install "lightning-rlprof[npu]"'
        return Check("torch_npu", "missing", "not installed", cure)
    try:
        answer = ask(_ASK_TORCH_NPU, timeout_s=_ANSWERS_S, environment=_NO_AUTOLOAD)
    except InterpreterError as error:
        cure = "source set_env.sh of CANN; torch_npu and torch need the same version"
        return Check("torch_npu", "broken", f"import failed: {error}", cure)
    if not answer["count"]:
        cure = "See npu-smi info. ASCEND_RT_VISIBLE_DEVICES may hide it"
        return Check("torch_npu", "broken", f"{answer['version']} finds no NPU", cure)
    return Check("torch_npu", "ok", f"{answer['version']}, {answer['count']} NPUs")


def check_cann() -> Check:
    """Look for CANN where its set_env.sh says, and for its version there."""
    names = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    name = next((name for name in names if os.environ.get(name)), "")
    home = os.environ.get(name)
    if not home:
        cures = [f"source {path}" for path in _SET_ENV if path.is_file()]
        cures += ["install CANN: https://www.hiascend.com/software/cann"]
        return Check("CANN", "missing", "ASCEND_HOME_PATH is not set", cures[0])
    if not Path(home).is_dir():
        says = f"{name}={home} is not a directory"
        return Check("CANN", "broken", says, "source set_env.sh of the installed CANN")
    for pattern in ("*/ascend_toolkit_install.info", "version.info", "*/version.info"):
        for path in sorted(Path(home).glob(pattern)):
            if version := _find(r"(?im)^version\s*=\s*\[?([\w.]+)", path):
                return Check("CANN", "ok", f"{version} at {home}")
    return Check("CANN", "warn", f"cannot read the version of CANN in {home}")


def check_msprof() -> Check:
    """Look for the exporter that the analysis of Ascend data calls."""
    program = shutil.which("msprof")
    if program is None:
        cure = "it comes with CANN: source its set_env.sh"
        return Check("msprof", "missing", "not on PATH: cannot parse Ascend data here", cure)
    return Check("msprof", "ok", program)


def check_disk(save_path: Path) -> Check:
    """Look at the space where runs go, in the nearest directory that exists by now."""
    folder = save_path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        says, cure = f"{folder} cannot be written", "choose another integrated.profile_save_path"
        return Check("disk", "broken", says, cure)
    free = shutil.disk_usage(folder).free
    says = f"{free / 2**30:,.0f} GiB free for {save_path}"
    if free < _LITTLE_BYTES:
        cure = "captures can take gigabytes per rank, and parsing 20 times the raw data"
        return Check("disk", "broken", f"only {says}", cure)
    return Check("disk", "ok", says)


def run_selftest() -> list[Check]:
    """Train two steps in another process and check what is in them; nothing of it stays.

    Needs a minute where the analysis of an Ascend capture is part of it.
    """
    import tempfile

    if util.find_spec("torch") is None:
        cure = 'pip install "lightning-rlprof[lightning]"'
        return [Check("training", "missing", "torch is not installed", cure)]
    folder = Path(tempfile.mkdtemp(prefix="rlprof-selftest-"))
    try:
        answer = ask(_TRAIN, str(folder), timeout_s=_TRAIN_S)
        return [*_checks(folder / _NAME, **answer)]
    except InterpreterError as error:
        return [Check("training", "broken", f"failed: {error}")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train(save_path: str) -> dict[str, str]:
    """Record two steps of two stages, the second one captured, in a process of its own.

    Returns:
        ``device``, its kind; ``refused``, why it runs no operators, so that the CPU does instead;
        ``errors``, what was printed.
    """
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.accelerator import device_kind
    from lightning_rlprof.recording.annotations import stage
    from lightning_rlprof.recording.start import start_session

    for name in [name for name in os.environ if name.startswith("RLPROF")]:
        del os.environ[name]  # A training's configuration must not change this check.
    device = device_kind()
    refused = _work(device)
    block = {"profile": True, "profile_save_path": save_path, "mstx": device in ("cuda", "npu")}
    config = ProfilerConfig.build({"integrated": block, "steps": [_STEPS[-1]]})
    printed = StringIO()  # On errors, torch_npu only prints.
    with redirect_stdout(printed), start_session(config, name=_NAME, device=device) as session:
        for step in _STEPS:
            session.begin_step(step)
            for name in _STAGES:
                with stage(name):
                    _work("cpu" if refused else device)
            session.end_step()
    errors = [line for line in printed.getvalue().splitlines() if "[ERROR]" in line]
    return {"device": device, "refused": refused, "errors": " / ".join(errors[:3])}


def _work(device: str) -> str:
    """Run a forward and a backward pass; returns why the device refuses them."""
    import torch

    try:
        weights = torch.ones(64, 64, device=device, requires_grad=True)
        (weights @ weights).sum().backward()
        float(weights.grad.sum())  # type: ignore[union-attr]  # It waits for the device.
    except RuntimeError as error:
        return (str(error).strip().splitlines() or ["RuntimeError"])[0]
    return ""


def _checks(run: Path, device: str, refused: str, errors: str) -> Iterator[Check]:
    from lightning_rlprof.loaders.load import load

    if refused:
        cure = "try one by hand: torch.ones(2, device=...) + 1"
        yield Check("operators", "broken", f"{device} cannot run them: {refused}", cure)
    else:
        yield Check("operators", "ok", f"forward and backward ran on {device}")
    try:
        spans = load(run)
    except RlprofError as error:
        yield Check("run", "broken", str(error))
        return
    fine = "2 steps with 2 stages each, all inside their step"
    yield _judge("spans", _wrong_spans(spans), fine)
    # Recorders warn, for instance, of MSTX ranges that no tool collects.
    texts = [note.text for note in spans.notes if note.level in ("warning", "error")]
    texts += [f"printed: {errors}"] if errors else []
    yield _judge("recorders", "; ".join(texts), "no warnings")
    if device in ("cuda", "npu", "xpu"):
        wrong = "" if "device_ns" in spans.counters else "not recorded"
        yield _judge("device time", wrong, "recorded for stages")
    if device == "npu":
        yield from _npu(run)
    else:
        fine = "contains kernels of every stage" if device == "cuda" else "contains the operators"
        yield _judge("trace", _wrong_trace(spans, device), fine)


def _judge(name: str, wrong: str, fine: str) -> Check:
    """Return a check that is broken if something is wrong."""
    return Check(name, "broken" if wrong else "ok", wrong or fine)


def _wrong_spans(spans: "Spans") -> str:
    """Compare with what was trained: the same spans, none besides, stages inside of their step."""
    mine = [span for span in spans if span.kind in ("step", "stage")]
    steps = {span.step: span for span in mine if span.kind == "step"}
    found = Counter(
        (span.step, span.name)
        for span in mine
        for step in [steps.get(span.step)]
        if step and step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns
    )
    if found != Counter((step, name) for step in _STEPS for name in ("step", *_STAGES)):
        return "differ from the recorded ones"
    return "; ".join(problem.text for problem in spans.warnings)


def _wrong_trace(spans: "Spans", device: str) -> str:
    """Look for the operators in the trace, and on a GPU for kernels in the right stages."""
    traces = sorted(spans.path.glob("rank-00000/*/*.trace.json.gz"))
    if not traces:
        return "torch.profiler wrote no trace"
    if device != "cuda":
        import gzip

        there = b"aten::mm" in gzip.decompress(traces[0].read_bytes())
        return "" if there else "the operators are missing"
    try:
        table = spans.table("kernels")
    except RlprofError as error:
        return str(error)
    stages = set(table.column("stage")) if table.rows else set()
    return "" if set(_STAGES) <= stages else "some stages have no kernels"


def _npu(run: Path) -> Iterator[Check]:
    """Look for data of the device, analyse it, and look for the stages in the outcome."""
    from lightning_rlprof.loaders.ascend.offline_analysis import (
        Options,
        ascend_directories,
        device_data,
        parse_captures,
    )

    try:
        (directory,) = ascend_directories([run])
    except (RlprofError, ValueError):
        yield Check("capture", "broken", "torch_npu.profiler did not write exactly one directory")
        return
    wrong = "" if device_data(directory) else "no data of the device (no PROF_)"
    yield _judge("capture", wrong, "CANN recorded the device (PROF_)")
    try:
        (outcome,) = parse_captures([directory], Options(timeout_s=_ANALYSIS_S))
    except RlprofError as error:
        yield Check("analysis", "broken", str(error))
        return
    done = outcome.state != "failed"
    says = outcome.message or "all expected files are there"
    yield Check("analysis", "ok" if done else "broken", says)
    trace = directory / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    text = trace.read_bytes() if trace.is_file() else b""
    missing = [name for name in _STAGES if f'"{name}"'.encode() not in text]
    wrong = f"{', '.join(missing)} not in the trace" if missing else ""
    yield _judge("MSTX", wrong, "every stage is in the trace")
