"""Record a tiny run with what this machine has, and check what is in it; no number is shown."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_rlprof.cli.doctor.check import Check
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
from lightning_rlprof.records.records import Span
from lightning_rlprof.system.subprocess_python import InterpreterError, ask
from lightning_rlprof.tables.spans import Spans

_NAME = "selftest"
_STEPS, _STAGES = (1, 2), ("actor_generate", "actor_update")
_CAPTURED, _FEW = 2, 3
_MARKED = ("cuda", "npu")
_TIMED = ("cuda", "npu", "xpu")
_TRAIN = "from lightning_rlprof.cli.doctor.selftest import train; answer.update(train(sys.argv[1]))"
_TRAIN_S, _ANALYSIS_S = 600.0, 600.0


def run_selftest() -> list[Check]:
    """Train two steps in another process, load them, and return a finding per thing looked at.

    Needs a minute where the analysis of an Ascend capture is part of it. Nothing of it stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlprof-selftest-"))
    try:
        answer = ask(_TRAIN, str(folder), timeout_s=_TRAIN_S)
        return [_operators(answer), *_checks(folder / _NAME, answer["device"], answer["errors"])]
    except InterpreterError as error:
        return [Check("training", "broken", f"failed: {error}")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train(save_path: str) -> dict[str, str]:
    """Record two steps of two stages, the second one captured; the training without Lightning.

    Where the device refuses operators, the CPU runs them, and the answer says so: everything else
    can still be looked at. Meant for a process of its own.

    Returns:
        ``device``, its kind; ``refused``, why it runs no operators; ``errors``, what was printed.
    """
    from lightning_rlprof.recording.accelerator import device_kind
    from lightning_rlprof.recording.start import start_session

    for name in [name for name in os.environ if name.startswith("RLPROF")]:
        del os.environ[name]  # the configuration of a training is not that of this one
    device = device_kind()
    refused = _refusal(device)
    block = {"profile": True, "profile_save_path": save_path, "mstx": device in _MARKED}
    config = ProfilerConfig.build({"integrated": block, "steps": [_CAPTURED]})
    printed = StringIO()  # where torch_npu tells its errors
    with redirect_stdout(printed), start_session(config, name=_NAME, device=device) as session:
        for step in _STEPS:
            session.begin_step(step)
            for name in _STAGES:
                with stage(name):
                    _work("cpu" if refused else device)
            session.end_step()
    errors = [line for line in printed.getvalue().splitlines() if "[ERROR]" in line]
    return {"device": device, "refused": refused, "errors": " / ".join(errors[:_FEW])}


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


def _operators(answer: dict[str, Any]) -> Check:
    if answer["refused"]:
        says = f"{answer['device']} cannot run them: {answer['refused']}"
        return Check("operators", "broken", says, "try one by hand: torch.ones(2, device=...) + 1")
    return Check("operators", "ok", f"forward and backward ran on {answer['device']}")


def _checks(run: Path, device: str, errors: str) -> Iterator[Check]:
    try:
        spans = load(run)
    except RlprofError as error:
        yield Check("run", "broken", str(error))
        return
    yield _spans(spans)
    yield _remarks(spans, errors)
    if device in _TIMED:
        there = "device_ns" in spans.counters
        says = "recorded for stages" if there else "not recorded"
        yield Check("device time", "ok" if there else "broken", says)
    yield from _npu(run) if device == "npu" else [_trace(spans, device)]


def _spans(spans: Spans) -> Check:
    """Compare with what was trained: the same spans, none besides, stages inside of their step."""
    wanted = Counter((step, name) for step in _STEPS for name in ("step", *_STAGES))
    mine = [span for span in spans if span.kind in ("step", "stage")]
    if Counter((span.step, span.name) for span in mine) != wanted:
        return Check("spans", "broken", "differ from the recorded ones")
    steps = {span.step: span for span in mine if span.kind == "step"}
    if not all(_inside(span, steps[span.step]) for span in mine):
        return Check("spans", "broken", "a stage extends beyond its step")
    if spans.warnings:
        return Check("spans", "broken", "; ".join(problem.text for problem in spans.warnings))
    return Check("spans", "ok", "2 steps with 2 stages each, all inside their step")


def _inside(span: Span, step: Span) -> bool:
    return step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns


def _remarks(spans: Spans, errors: str) -> Check:
    """Pass on what the recorders warned of, such as MSTX ranges that no tool collects."""
    texts = [note.text for note in spans.notes if note.level in ("warning", "error")]
    texts += [f"printed: {errors}"] if errors else []
    if texts:
        return Check("recorders", "broken", "; ".join(texts))
    return Check("recorders", "ok", "no warnings")


def _trace(spans: Spans, device: str) -> Check:
    """Look for the operators in the trace, and on a GPU for kernels in the right stages."""
    name = "trace"
    traces = sorted(spans.path.glob("rank-00000/*/*.trace.json.gz"))
    if not traces:
        return Check(name, "broken", "torch.profiler wrote no trace")
    if device != "cuda":
        import gzip

        there = b"aten::mm" in gzip.decompress(traces[0].read_bytes())
        says = "contains the operators" if there else "the operators are missing"
        return Check(name, "ok" if there else "broken", says)
    try:
        table = spans.table("kernels")
        stages = set(table.column("stage")) if table.rows else set()
    except RlprofError as error:
        return Check(name, "broken", str(error))
    if not set(_STAGES) <= stages:
        return Check(name, "broken", "some stages have no kernels")
    return Check(name, "ok", "contains kernels of every stage")


def _npu(run: Path) -> Iterator[Check]:
    """Look for data of the device, analyse it, and look for the stages in the outcome."""
    try:
        (directory,) = ascend_directories([run])
    except (RlprofError, ValueError):
        yield Check("capture", "broken", "torch_npu.profiler did not write exactly one directory")
        return
    there = bool(device_data(directory))
    says = "CANN recorded the device (PROF_)" if there else "no data of the device (no PROF_)"
    yield Check("capture", "ok" if there else "broken", says)
    try:
        (outcome,) = parse_captures([directory], Options(timeout_s=_ANALYSIS_S))
    except RlprofError as error:
        yield Check("analysis", "broken", str(error))
        return
    done = outcome.state != "failed"
    yield Check(
        "analysis", "ok" if done else "broken", outcome.message or "all expected files are there"
    )
    trace = directory / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    text = trace.read_bytes() if trace.is_file() else b""
    missing = [name for name in _STAGES if f'"{name}"'.encode() not in text]
    says = f"{', '.join(missing)} not in the trace" if missing else "every stage is in the trace"
    yield Check("MSTX", "broken" if missing else "ok", says)
