"""Whether the stages of a run are as fast as its model, devices and lengths allow.

The seconds that a run measured are compared with those that are attainable. Above the range a stage
is slow, and hypotheses say what may explain it; below the range a fact is wrong.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from lightning_rlprof.analysis.communication.weight_sync import paths
from lightning_rlprof.analysis.efficiency.peak_flops import Peak, recorded_device
from lightning_rlprof.analysis.efficiency.throughput import model_from, recorded_model
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.analysis.samples.sample_book import sample_book
from lightning_rlprof.analysis.sizing.attainable import Pass, Refit, Rollout, Work
from lightning_rlprof.analysis.stages import StepTimes, step_times
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.records import stated_world_size
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

Verdict = Literal["normal", "slow", "fast", "too short", "unknown"]
"""``fast``: below the range, so that a fact is wrong; ``unknown``: a fact is missing."""

_COLUMNS = (
    Column("stage", "text"),
    *columns_of("number", "measured s", "low s", "high s", unit="s"),
    *columns_of("text", "verdict", "cause or limit"),
    *columns_of("ratio", "slow by", "to"),
)
_NOTE = (
    "measured s: per step, of the slowest rank. low s, high s: attainable if everything is "
    "as good, or as bad, as healthy jobs show it. fast: a fact that the run tells is wrong."
)
_OF_STAGES = {"micro_tokens", "padded_tokens", "offload", "streamed", "updates"}
_SHORTEST = 2.0  # Seconds: what is fixed makes the range of a shorter stage useless.
_PASSES = {
    "actor_compute_log_prob": False,
    "reference_compute_log_prob": False,
    "critic_compute_values": False,
    "actor_update": True,
    "critic_update": True,
}
_STAGES = ("actor_generate", *_PASSES, "weight_sync")
_CAUSES = {
    "eager": "engines decode without graphs",
    "small_batch": "few sequences run at a time",
    "padding": "sequences are padded",
    "recompute": "activations are computed again",
    "micro_batches": "micro-batches are small, so that launches take the time",
    "offload": "the optimizer's state moves between host and device in each update",
    "host_adam": "the optimizer runs on the host",
    "streamed": "weights come from the host in each micro-batch",
    "expert_loop": "experts run one after the other, not as one grouped matmul",
    "disk": "weights go over a disk",
    "export": "tensors are exported one by one",
}
_NEEDS = {
    "model": "model: config.json in the configuration, or --model",
    "devices": "the devices: --devices 8xH100-80G, or by their figures",
    "tokens": "count(tokens=..., samples=...) in the stage, or lengths",
    "eager": "count(eager=...): whether engines decode without graphs",
    "mean": "count(prompt_tokens=...): tokens of a mean prompt",
    "longest": "count(lengths=...): the longest response",
    "share": "count(kv_tokens=...): the room of the engines' KV cache",
    "tp": "count(rollout_tp=...): tensor parallelism of the engines",
    "streamed": "count(streamed=...): whether weights come from the host in each micro-batch",
    "path": "spans named p2p, broadcast, ipc or disk in the sync: how weights reach the engines",
}


@dataclass(frozen=True)
class Speed:
    """A stage, and how fast it may be.

    Attributes:
        stage: As the run names it.
        verdict: What it is.
        seconds: Of a step, on the slowest rank.
        low: Seconds if everything is as good as healthy jobs show it; None if unknown.
        high: Seconds if everything is as bad.
        limit: What the low end consists of, mostly.
        causes: Hypotheses that explain the measured seconds, the most specific first.
        missing: The fact that is needed, or that would narrow the range most; empty if none.
    """

    stage: str
    verdict: Verdict
    seconds: float
    low: float | None = None
    high: float | None = None
    limit: str = ""
    causes: tuple[str, ...] = ()
    missing: str = ""

    @property
    def factors(self) -> tuple[float | None, float | None]:
        """How many times as long as at worst, and as at best, a slow stage takes."""
        if self.verdict != "slow" or self.low is None or self.high is None:
            return None, None
        return self.seconds / self.high, self.seconds / self.low

    @property
    def bounds(self) -> str:
        """The attainable seconds in words; empty if they are unknown."""
        return "" if self.low is None else f"{self.low:.3g} to {self.high:.3g} s"

    @property
    def why(self) -> str:
        """The cause of a slow stage, or what is missing."""
        if self.verdict == "slow":
            return self.cause
        return f"needs {self.needs}" if self.verdict == "unknown" else self.limit

    @property
    def cause(self) -> str:
        """The first cause in words."""
        return _CAUSES[self.causes[0]] if self.causes else "none that is known explains it"

    @property
    def needs(self) -> str:
        """The missing fact in words, and how to tell it."""
        return _NEEDS.get(self.missing, f"count({self.missing}=...)") if self.missing else ""

    @property
    def line(self) -> str:
        """The verdict in a few words."""
        least, most = self.factors
        by = "" if least is None else f" by {least:.1f} to {most:.1f} x"
        return f"{self.stage} {self.verdict}{by}"

    @property
    def text(self) -> str:
        """The verdict in words, with what it was judged by."""
        if self.verdict == "unknown":
            return f"{self.line}: needs {self.needs}"
        if self.low is None:
            return f"{self.line} to judge"
        narrower = f"; to narrow it: {self.needs}" if self.missing else ""
        return f"{self.line} ({self.seconds:.3g} s; {self.bounds} are attainable{narrower})"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        return asdict(self)


def judge_speed(stage: str, seconds: float, work: Work) -> Speed:
    """Return whether the measured seconds of a stage are attainable, and what explains them."""
    if seconds < _SHORTEST:
        return Speed(stage, "too short", seconds)
    low, high = work.range()
    missing = work.narrowest() or ("", 1.0)
    verdict: Verdict = "slow" if seconds > high else "fast" if seconds < low else "normal"
    causes = work.causes(seconds) if verdict == "slow" else ()
    return Speed(stage, verdict, seconds, low, high, work.limit, causes, missing[0])


def speeds(spans: Spans, given: Mapping[str, Any] | None = None) -> tuple[Speed, ...]:
    """Return how fast each stage of a run is, of those whose attainable time can be computed.

    Args:
        spans: The run.
        given: Facts that go before those that the run counts, by the same names; ``model``,
            ``device`` and ``devices``, too.
    """
    if given is None and {head.device for head in spans.headers.values()} <= {"cpu"}:
        return ()
    times = step_times(spans)
    if not times.included.any():
        return ()
    job, found = _Job(times, given or {}), []
    for code, name in enumerate(spans.names):
        seconds = job.seconds(code)
        if standard_stage(name) not in _STAGES or not seconds:
            continue
        work = job.work(code) if seconds >= _SHORTEST else None
        if work is not None:
            found.append(judge_speed(name, seconds, work))
        elif seconds < _SHORTEST:
            found.append(Speed(name, "too short", seconds))
        else:
            found.append(Speed(name, "unknown", seconds, missing=job.lacks or "tokens"))
    return tuple(found)


def speed_table(found: Sequence[Speed]) -> Table:
    """Return the verdicts as the table of step times, with what was measured."""
    rows: list[tuple[Cell, ...]] = [
        (each.stage, each.seconds, each.low, each.high, each.verdict, each.why, *each.factors)
        for each in found
    ]
    if not rows:
        return Table("step_time", _COLUMNS, abstained="No included step has a known stage.")
    return Table("step_time", _COLUMNS, rows, _NOTE)


class _Job:
    """What a run tells of its model, devices and stages."""

    def __init__(self, times: StepTimes, given: Mapping[str, Any]) -> None:
        self.spans, self.times, self.given = times.spans, times, given
        self.steps = times.numbers[times.included]
        configs = [head.config for head in self.spans.headers.values()]
        heads = [head for head in self.spans.headers.values() if recorded_device(head)]
        self.device: Peak | None = given.get("device") or (
            recorded_device(heads[0]) if heads else None
        )
        counted = self.spans.amounts("devices", np.int64).values.max(initial=0)
        world = stated_world_size(heads)
        self.devices = int(given.get("devices") or counted or world)
        self.model: Model | None = given.get("model")
        if self.model is None and (recorded := recorded_model(configs)) is not None:
            with suppress(RlprofError):  # `throughput` says what is wrong with it.
                self.model = model_from(recorded)

    @property
    def lacks(self) -> str:
        """What must be known for any stage, and is not."""
        device = self.device
        if self.model is None:
            return "model"
        has_peaks = device is not None and device.tflops and device.gb_s
        return "" if has_peaks and self.devices else "devices"

    def seconds(self, code: int) -> float:
        """Return the seconds of a stage per step: the work of the slowest rank."""
        work = self.times.work
        return float((work.work_ns[:, code] / work.steps).max(initial=0.0)) / 1e9

    def work(self, code: int) -> Work | None:
        """Return the work of a stage; None if the run does not tell it."""
        stage = self._stage(code)
        if self.model is None or self.device is None or self.lacks:
            return None
        apart, pair = int(self._fact(code, "rollout_devices") or 0), partial(self._pair, code)
        if stage == "weight_sync":
            usual = ["p2p", "nccl"] if apart else ["ipc"]
            known: Any = paths(self.spans, code) or usual
            return Refit(
                *(self.model, self.device, apart or self.devices),
                path=(known[0], known[-1]),
                bytes=self._fact(code, "refit_bytes") or 0.0,
                tensors=int(self._fact(code, "refit_tensors") or 0),
                senders=int(self._fact(code, "refit_senders") or 0),
            )
        samples, tokens = (self._per_step(code, name) for name in ("samples", "tokens"))
        counted = bool(samples and tokens)
        if not counted:
            samples, tokens = self._responses()
        if not samples or not tokens:
            return None
        mean, prompt = tokens / samples, pair("prompt_tokens", (0.0, tokens / samples))
        longest = self._fact(code, "longest") or self._longest() or 0.0
        if stage == "actor_generate":
            return Rollout(
                *(self.model, self.device, apart or self.devices, round(samples), prompt[1]),
                mean=pair("mean", (mean, mean)),
                longest=(longest, longest) if longest else (mean, 4 * mean),
                group=int(self._fact(code, "group") or 1),
                tp=pair("rollout_tp", (least := _least_tp(self.model, self.device), least)),
                ep=int(self._fact(code, "rollout_ep") or 0),
                eager=pair("eager", Rollout.eager),
                max_num_seqs=pair("max_num_seqs", Rollout.max_num_seqs),
                kv_tokens=pair("kv_tokens", Rollout.kv_tokens),
            )
        padded, squares = (self._per_step(code, name) for name in ("padded_tokens", "tokens_sq"))
        lengths: dict[str, Any] = {"square": squares * samples / tokens**2} if squares else {}
        sharded = pair("sharded", Pass.sharded)
        # FSDP may keep the weights of a reference on the host: verl always does.
        from_host = (False, stage == "reference_compute_log_prob" and sharded[1])
        tp, pp, cp, ep = (int(self._fact(code, name) or 1) for name in ("tp", "pp", "cp", "ep"))
        return Pass(
            self.model.critic() if stage.startswith("critic") else self.model,
            *(self.device, self.devices - apart, samples),
            mean=(mean, mean) if counted else (mean + prompt[0], mean + prompt[1]),
            backward=_PASSES[stage],
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            updates=int(self._fact(code, "updates") or max(self._calls(code), 1)),
            lora=bool(self._fact(code, "lora")),
            micro_tokens=pair("micro_tokens", Pass.micro_tokens),
            padding=(max(padded / tokens, 1.0),) * 2 if padded else Pass.padding,
            recompute=pair("recompute", Pass.recompute),
            sharded=sharded,
            offload=pair("offload", Pass.offload),
            host_adam=pair("host_adam", Pass.host_adam),
            streamed=pair("streamed", from_host),
            longest=longest + prompt[1],
            **lengths,
        )

    def _stage(self, code: int) -> str:
        return standard_stage(self.spans.names[code])

    def _fact(self, code: int, name: str) -> float | None:
        """Return a fact that was given, else counted in the stage, else in any if it is a job's."""
        if name in self.given:
            return float(self.given[name])
        rows, values = self.spans.amounts(name)
        own = values[self.spans.name[rows] == code]
        is_of_job = name not in _OF_STAGES or self._stage(code) == "actor_update"
        values = values if is_of_job and not len(own) else own
        return float(values.max()) if len(values) else None

    def _pair(self, code: int, name: str, unknown: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return a fact at best and at worst."""
        found = self._fact(code, name)
        return unknown if found is None else (found, found)

    def _per_step(self, code: int, counter: str) -> float:
        """Return the sum of a counter of a stage over the ranks, per step."""
        rows, values = self.spans.amounts(counter)
        own = (self.spans.name[rows] == code) & np.isin(self.spans.step[rows], self.steps)
        return float(values[own].sum()) / len(self.steps)

    def _calls(self, code: int) -> int:
        """Return how often a rank calls a stage in a step, at most."""
        matrix = self.times.matrix
        return int(matrix.calls[matrix.name == code].max(initial=0))

    def _responses(self) -> tuple[float, float]:
        """Return the responses of a step and their tokens, as samples or lengths tell them."""
        book = sample_book(self.spans)
        known = (book.tokens >= 0) & (book.fate_row >= 0) & ~book.fates("evaluation")
        own = np.isin(self.spans.step[book.fate_row[known]], self.steps)
        return (
            int(own.sum()) / len(self.steps),
            float(book.tokens[known][own].sum()) / len(self.steps),
        )

    def _longest(self) -> float:
        """Return the tokens of the longest response, in the mean of steps; 0 if unknown."""
        rows, tokens = self.spans.amounts("tokens_max")
        if not len(rows):
            rows, tokens = self.spans.amounts("response_limit")
        own = np.isin(self.spans.step[rows], self.steps)
        steps, place = np.unique(self.spans.step[rows[own]], return_inverse=True)
        tops = np.zeros(len(steps))
        np.maximum.at(tops, place, tokens[own])
        return float(tops.mean()) if len(tops) else 0.0


def _least_tp(model: Model, device: Peak) -> int:
    """Return the least tensor parallelism that leaves a quarter of the device for the KV cache."""
    free = 0.6 * device.usable
    sizes = (1 << power for power in range(7))
    return next((tp for tp in sizes if 2 * model.parameters / tp <= free), 64)
