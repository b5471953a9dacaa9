"""Record a tiny run with what this machine has, and check what is in it; no number is shown."""

import gzip
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from lightning_rlprof.cli.doctor import Check
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.ascend.offline_analysis import (
    Options,
    ascend_directories,
    device_data,
    parse_captures,
)
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.system.subprocess_python import InterpreterError, ask
from lightning_rlprof.tables.spans import Spans

_NAME = "selftest"
_STEPS, _STAGES = (1, 2), ("actor_generate", "actor_update")
_TRAIN = "from lightning_rlprof.cli.selftest import train; answer.update(train(sys.argv[1]))"
_TRAIN_S, _ANALYSIS_S = 600.0, 600.0


def run_selftest() -> list[Check]:
    """Train two steps in another process and check what is in them; nothing of it stays.

    Needs a minute where the analysis of an Ascend capture is part of it.
    """
    if find_spec("torch") is None:
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
    from lightning_rlprof.recording.accelerator import device_kind
    from lightning_rlprof.recording.start import start_session

    for name in [name for name in os.environ if name.startswith("RLPROF")]:
        del os.environ[name]  # the configuration of a training is not that of this one
    device = device_kind()
    refused = _refusal(device)
    block = {"profile": True, "profile_save_path": save_path, "mstx": device in ("cuda", "npu")}
    config = ProfilerConfig.build({"integrated": block, "steps": [_STEPS[-1]]})
    printed = StringIO()  # where torch_npu tells its errors
    with redirect_stdout(printed), start_session(config, name=_NAME, device=device) as session:
        for step in _STEPS:
            session.begin_step(step)
            for name in _STAGES:
                with stage(name):
                    _work("cpu" if refused else device)
            session.end_step()
    errors = [line for line in printed.getvalue().splitlines() if "[ERROR]" in line]
    return {"device": device, "refused": refused, "errors": " / ".join(errors[:3])}


def _refusal(device: str) -> str:
    try:
        _work(device)
    except RuntimeError as error:
        return (str(error).strip().splitlines() or ["RuntimeError"])[0]
    return ""


def _work(device: str) -> None:
    import torch

    weights = torch.ones(64, 64, device=device, requires_grad=True)
    (weights @ weights).sum().backward()
    float(weights.grad.sum())  # type: ignore[union-attr]  # waits for the device


def _checks(run: Path, device: str, refused: str, errors: str) -> Iterator[Check]:
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
    # What the recorders warned of, such as MSTX ranges that no tool collects.
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


def _wrong_spans(spans: Spans) -> str:
    """Compare with what was trained: the same spans, none besides, stages inside of their step."""
    wanted = Counter((step, name) for step in _STEPS for name in ("step", *_STAGES))
    mine = [span for span in spans if span.kind in ("step", "stage")]
    if Counter((span.step, span.name) for span in mine) != wanted:
        return "differ from the recorded ones"
    steps = {span.step: span for span in mine if span.kind == "step"}
    for span in mine:
        if not steps[span.step].start_ns <= span.start_ns <= span.end_ns <= steps[span.step].end_ns:
            return "a stage extends beyond its step"
    return "; ".join(problem.text for problem in spans.warnings)


def _wrong_trace(spans: Spans, device: str) -> str:
    """Look for the operators in the trace, and on a GPU for kernels in the right stages."""
    traces = sorted(spans.path.glob("rank-00000/*/*.trace.json.gz"))
    if not traces:
        return "torch.profiler wrote no trace"
    if device != "cuda":
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
