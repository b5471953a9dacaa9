"""What holds on a GPU: ``python benchmarks/gpu_proof.py --output proof``.

Runs the tests marked ``cuda``, then short trainings whose times the program measures itself, with
CUDA events of its own. Writes ``proof.json`` and ``proof.md``: the machine, each figure, and
whether its bound holds. Without a GPU it does the same on the CPU with a small model, as a
rehearsal: no figure of a rehearsal says anything about a GPU, and the page says so.

Each part stands alone: one that fails is written down with its error, and the next one runs.
"""

import argparse
import importlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from lightning_rlprof import load, stage, start_session, step
from lightning_rlprof.records.records import Span

ROOT = Path(__file__).parents[1]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
STAGES = ("actor_generate", "actor_compute_log_prob", "actor_update")
_MAX_DEVIATION = 0.05  # of a stage's device time from the program's own events
_OVERHEAD_TURNS = 8
_MAX_SECONDS, _MAX_TEST_SECONDS = 480, 240  # A machine that is lent is lent for minutes.

Facts = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, and whether it is as it must be; None if it has no bound."""

    name: str
    value: object
    holds: bool | None = None


class Stopwatch:
    """Times of stages by the program's own means: CUDA events, on a CPU the clock."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, Any, Any]] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Mark a stage for rlprof and measure what happens inside it."""
        with stage(name):
            start = self._now()
            yield
            self._pairs.append((name, start, self._now()))

    def _now(self) -> Any:
        if not GPU:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times_ns(self) -> dict[str, list[float]]:
        """Return the times of each stage in order."""
        if GPU:
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for name, start, end in self._pairs:
            took = start.elapsed_time(end) * 1e6 if GPU else float(end - start)
            times.setdefault(name, []).append(took)
        return times


class Program:
    """GRPO-like steps of a language model with random weights: generate, score, update.

    On a GPU the model has the shape of SmolLM2-135M in bfloat16 and answers 64 prompts with 16
    tokens each; without one, or without transformers, it is a small network.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self._new_tokens = _language_model()
        self.model.to(DEVICE, torch.bfloat16 if GPU else torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=GPU)
        batch, length = (64, 64) if GPU else (4, 8)
        self._prompts = torch.randint(1, 250, (batch, length), device=DEVICE)

    def run(self, watch: Stopwatch) -> None:
        """Do the three stages of one step."""
        with watch.around(STAGES[0]):
            tokens = self._generate()
        with watch.around(STAGES[1]), torch.no_grad():
            self._log_probs(tokens)
        with watch.around(STAGES[2]):
            loss = -self._log_probs(tokens).mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _generate(self) -> torch.Tensor:
        tokens = self._prompts
        past = None
        last = tokens
        for _ in range(self._new_tokens):
            out = self.model(input_ids=last, past_key_values=past, use_cache=True)
            past = out.past_key_values
            last = out.logits[:, -1].float().softmax(-1).multinomial(1)
            tokens = torch.cat([tokens, last], 1)
        return tokens

    def _log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        result: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return result


def _language_model() -> tuple[torch.nn.Module, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = (
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
        if GPU
        else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256}
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)), 16 if GPU else 4


def machine() -> Facts:
    """Return what this was measured on."""
    facts: Facts = {
        "device": torch.cuda.get_device_name() if GPU else "none: a rehearsal on the CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    if GPU:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        facts["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return facts


def tests(output: Path) -> Iterator[Figure]:
    """Run the tests that need a GPU."""
    told = output / "tests.xml"
    paths = [
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "cuda",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
    ]
    done = subprocess.run(
        [*command, f"--junitxml={told}", *sorted(map(str, paths))],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=_MAX_TEST_SECONDS,
    )
    (output / "tests.txt").write_text(done.stdout + done.stderr)
    for case in ET.parse(told).iter("testcase"):
        problem = next(iter(case), None)
        state = "passed" if problem is None else problem.tag
        why = "" if problem is None else f": {(problem.get('message') or '').splitlines()[:1]}"
        yield Figure(f"{case.get('name')}", state + why, problem is None or not GPU)


def device_times(output: Path) -> Iterator[Figure]:
    """Compare the device time of stages with the program's own events."""
    watch, program = Stopwatch(), Program()
    program.run(Stopwatch())  # the first step compiles and allocates
    with start_session(profile_save_path=str(output), name="stages", summary=False):
        for _ in range(10):
            with step():
                program.run(watch)
    recorded = _spans(output / "stages")
    for name, expected in watch.times_ns().items():
        spans = [span for span in recorded if span.name == name]
        took = [float(_measured(span) or 0) for span in spans]
        if len(took) != len(expected) or 0.0 in took:
            yield Figure(f"{name}: device time", f"{len(took)} of {len(expected)} recorded", False)
            continue
        ratios = [took_ns / own for took_ns, own in zip(took, expected, strict=True)]
        shown = f"{median(took) / 1e6:.3f} ms, ratio {median(ratios):.4f} "
        shown += f"({min(ratios):.4f} to {max(ratios):.4f}) of 10 steps"
        yield Figure(f"{name}: device time", shown, abs(median(ratios) - 1) < _MAX_DEVIATION)
        on_host = median(span.duration_ns for span in spans)
        yield Figure(f"{name}: host time", f"{on_host / 1e6:.3f} ms")


def four_streams(output: Path) -> Iterator[Figure]:
    """Work on four streams that the stage's own stream waits for belongs to the stage."""
    if not GPU:
        return
    streams = [torch.cuda.Stream() for _ in range(4)]
    cycles = 20_000_000
    own: list[tuple[Any, Any]] = []
    with start_session(profile_save_path=str(output), name="streams", summary=False):
        for _ in range(5):
            with step(), stage("actor_update"):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for each in streams:
                    each.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(each):
                        torch.cuda._sleep(cycles)
                for each in streams:
                    torch.cuda.current_stream().wait_stream(each)
                end.record()
                own.append((start, end))
    torch.cuda.synchronize()
    expected = [start.elapsed_time(end) * 1e6 for start, end in own]
    spans = [span for span in _spans(output / "streams") if span.name == "actor_update"]
    took = [_measured(span) or 0 for span in spans]
    ratio = median(a / b for a, b in zip(took, expected, strict=True))
    yield Figure(
        "actor_update on four streams", f"ratio {ratio:.4f}", abs(ratio - 1) < _MAX_DEVIATION
    )


def capture(output: Path) -> Iterator[Figure]:
    """Capture one actor_update with torch.profiler, and read its kernels."""
    options = {"tools": ["torch_profiler"], "steps": [3]}
    watch, program = Stopwatch(), Program()
    with start_session(
        options | {"integrated": {"stage": "actor_update"}},
        profile_save_path=str(output),
        name="capture",
        summary=False,
    ):
        for _ in range(4):
            with step():
                program.run(watch)
    run = load(output / "capture")
    for name in ("kernels", "operators", "launches", "breakdown", "idle", "device_critical_path"):
        try:
            table = getattr(run, name)()
        except Exception as error:  # the other tables are wanted all the same
            yield Figure(f"{name} of a capture", f"{type(error).__name__}: {error}", False)
            continue
        yield Figure(
            f"{name} of a capture", f"{len(table.rows)} rows", len(table.rows) > 0 or not GPU
        )


def nsight(output: Path) -> Iterator[Figure]:
    """Let Nsight Systems, if it is there, see the stages as NVTX ranges, and its kernels."""
    if shutil.which("nsys") is None:
        yield Figure("Nsight Systems", "not installed: NVTX ranges were not seen by a listener")
        return
    program = str(ROOT / "examples" / "loop" / "train.py")
    words = ["nsys", "run", "--", sys.executable, program]
    command = [sys.executable, "-m", "lightning_rlprof", *words]
    done = subprocess.run(command, check=False, cwd=output, capture_output=True, text=True)
    (output / "nsight.txt").write_text(done.stdout + done.stderr)
    yield Figure("rlprof nsys run", f"exit {done.returncode}", done.returncode == 0)
    reports = sorted(output.rglob("*.nsys-rep"))
    yield Figure("reports of Nsight Systems", len(reports), bool(reports))
    for report in reports[:1]:
        run = load(report)
        seen = sorted({run.names[code] for code in run.name.tolist()} & {*STAGES})
        yield Figure("stages that it saw as NVTX ranges", seen, bool(seen))
        if GPU:
            rows = len(run.kernels().rows)
            yield Figure("kernels that it saw", f"{rows} rows", rows > 0)


def nvml(output: Path) -> Iterator[Figure]:
    """See the device's counters among the background metrics."""
    with start_session(profile_save_path=str(output), name="metrics", summary=False):
        end = time.monotonic() + (6 if GPU else 1)
        number = 0
        with step():
            while time.monotonic() < end:
                torch.randn(2048, 2048, device=DEVICE) @ torch.randn(2048, 2048, device=DEVICE)
                number += 1
                if GPU:
                    torch.cuda.synchronize()
    found = load(output / "metrics").sql(
        "SELECT name, count(*) AS samples FROM background_metrics"
        " WHERE starts_with(name, 'device_') GROUP BY name ORDER BY name"
    )
    names = {str(name): samples for name, samples in found.rows}
    yield Figure("background metrics of the device", names, bool(names) or not GPU)


def memory(output: Path) -> Iterator[Figure]:
    """Compare the peak of a stage with torch's own, and run out of memory on purpose."""
    size = 2**28 if GPU else 2**20
    options: Facts = {"memory": {"level": "counters"}, "steps": [2]}
    with start_session(options, profile_save_path=str(output), name="memory", summary=False):
        for _ in range(3):
            with step(), stage("actor_update"):
                block = torch.empty(size, dtype=torch.uint8, device=DEVICE)
                del block
    peaks = [
        span.counters["device_peak_bytes"]
        for span in _spans(output / "memory")
        if span.counters and "device_peak_bytes" in span.counters
    ]
    if GPU:
        held = bool(peaks) and max(peaks) >= size
        yield Figure(
            "peak of a stage that allocates 256 MiB",
            [f"{each / 2**20:.1f} MiB" for each in peaks],
            held,
        )
        raised = ""
        options = {"memory": {"level": "snapshot"}, "steps": [2]}
        try:
            with start_session(options, profile_save_path=str(output), name="oom", summary=False):
                for _ in range(3):
                    with step(), stage("actor_update"):
                        torch.empty(2**42, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError as error:
            raised = type(error).__name__
        status = load(output / "oom").statuses[0]
        yield Figure(
            "out of memory on purpose", f"raised {raised}; {status}", "OutOfMemory" in raised
        )


def graphs(output: Path) -> Iterator[Figure]:
    """Replay a CUDA graph in a stage, with a capture around it."""
    if not GPU:
        return
    layer = torch.nn.Linear(1024, 1024, device=DEVICE)
    batch = torch.randn(1024, 1024, device=DEVICE)
    expected = layer(batch).relu().sum().item()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(batch).relu()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    options = {"tools": ["torch_profiler"], "steps": [2]}
    with start_session(options, profile_save_path=str(output), name="graphs", summary=False):
        # A mark while a graph is being captured.
        with torch.cuda.graph(graph), stage("actor_generate"):
            result = layer(batch).relu()
        for _ in range(3):
            with step(), stage("actor_update"):
                for _ in range(20):
                    graph.replay()
        torch.cuda.synchronize()
    same = abs(result.sum().item() - expected) <= 1e-3 * abs(expected)
    yield Figure("result of a graph with a mark inside", "as without", same)
    kernels = load(output / "graphs").kernels()
    yield Figure(
        "kernels of replayed graphs in a capture",
        f"{len(kernels.rows)} rows",
        len(kernels.rows) > 0,
    )


def overhead(output: Path) -> Iterator[Figure]:
    """Take turns of steps with and without recording, and without against without."""
    program = Program()
    kinds = ("without", "with", "without again")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(_OVERHEAD_TURNS):
        shift = turn % len(kinds)
        for kind in (*kinds[shift:], *kinds[:shift]):
            if kind == "with":
                with start_session(
                    profile_save_path=str(output), name=f"turn-{turn}", summary=False
                ):
                    times[kind].append(_step_seconds(program, step))
            else:
                times[kind].append(_step_seconds(program, _no_step))
    middle = {kind: median(each) for kind, each in times.items()}
    pairs = zip(times["with"], times["without"], strict=True)
    cost = median(a - b for a, b in pairs)
    again = median(a - b for a, b in zip(times["without again"], times["without"], strict=True))
    yield Figure("a step without recording", f"{middle['without'] * 1e3:.2f} ms")
    share = cost / middle["without"]
    yield Figure(
        "recording costs a step", f"{cost * 1e6:+.0f} µs ({share:+.2%})", share < 0.01 or not GPU
    )
    control = again / middle["without"]
    yield Figure(
        "A/A control", f"{again * 1e6:+.0f} µs ({control:+.2%})", abs(control) < 0.01 or not GPU
    )


def _step_seconds(program: Program, around: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with around():
            program.run(Stopwatch())
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return fmean(times[1:])


@contextmanager
def _no_step() -> Iterator[None]:
    yield


def answers(output: Path) -> Iterator[Figure]:
    """Ask the command line about the runs of this proof."""
    for words in (
        ["summary", "stages"], ["findings", "stages"], ["findings", "capture"],
        ["report", "capture", "--output", str(output / "report.html")],
        ["doctor"],
    ):  # fmt: skip
        command = [sys.executable, "-m", "lightning_rlprof", *words]
        done = subprocess.run(command, check=False, cwd=output, capture_output=True, text=True)
        name = "-".join(words[:2])
        (output / f"{name}.txt").write_text(done.stdout + done.stderr)
        yield Figure(
            f"rlprof {' '.join(words[:2])}", f"exit {done.returncode}", done.returncode == 0
        )


def _measured(span: Span) -> float | None:
    return (span.counters or {}).get("device_ns") if GPU else span.duration_ns


def _spans(run: Path) -> list[Span]:
    return list(load(run))


PARTS: Mapping[str, Callable[[Path], Iterator[Figure]]] = {
    "Tests that need a GPU": tests,
    "Device time of stages": device_times,
    "Four streams": four_streams,
    "A capture with torch.profiler": capture,
    "Nsight Systems": nsight,
    "Counters of the device": nvml,
    "Memory": memory,
    "CUDA graphs": graphs,
    "Overhead": overhead,
    "Answers": answers,
}


def page(facts: Facts, parts: Mapping[str, list[Figure]], seconds: float) -> str:
    """Return the figures as Markdown."""
    out = io.StringIO()
    with redirect_stdout(out):
        print("# rlprof on this machine\n")
        for name, value in facts.items():
            print(f"- {name}: {value}")
        print(f"- took {seconds:.0f} s")
        for title, figures in parts.items():
            print(f"\n## {title}\n\n| figure | value | holds |\n|---|---|---|")
            for each in figures:
                holds = {True: "yes", False: "**no**", None: ""}[each.holds]
                print(f"| {each.name} | {each.value} | {holds} |")
    return out.getvalue()


def main() -> int:
    """Run all parts; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--only", nargs="*", default=[], help="parts by their function's name")
    given = parser.parse_args()
    output = given.output.resolve()
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty: give a new folder by --output")
    (output / "runs").mkdir(parents=True)
    began = time.monotonic()
    parts: dict[str, list[Figure]] = {}
    for title, part in PARTS.items():
        if given.only and part.__name__ not in given.only:
            continue
        figures: list[Figure] = []
        try:
            figures.extend(part(output if part is tests else output / "runs"))
        except Exception as error:  # one part must not take the others away
            traceback.print_exc()
            figures.append(Figure(part.__name__, f"{type(error).__name__}: {error}", False))
        parts[title] = figures
        for each in figures:
            print(f"{title}: {each.name}: {each.value} {each.holds}", flush=True)
    facts = machine()
    seconds = time.monotonic() - began
    whole = Figure("all parts", f"{seconds:.0f} s", seconds < _MAX_SECONDS or not GPU)
    parts["Time"] = [whole]
    (output / "proof.md").write_text(page(facts, parts, seconds))
    stored = {title: [vars(each) for each in figures] for title, figures in parts.items()}
    (output / "proof.json").write_text(
        json.dumps({"machine": facts, "parts": stored}, indent=1, default=str)
    )
    return int(any(each.holds is False for figures in parts.values() for each in figures))


if __name__ == "__main__":
    sys.exit(main())
