"""`StageMetrics`: each step's stages as metrics in the Trainer's own loggers."""

import logging
from typing import Any

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.callback_base import Callback, guarded
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.host_memory import host_rss_bytes
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.span_buffer import StepTotals
from lightning_rlprof.records.records import Number

log = logging.getLogger(__name__)


class StageMetrics(Callback):
    """Log what each step spent on its stages, on rank 0, at the Trainer's own x-axis.

    Put it behind `ProfilerCallback`. Per step it logs ``rlprof/step_s`` and, per stage:

    - ``rlprof/<stage>_s``: seconds open on the training thread, nested stages included.
    - ``rlprof/<stage>_share``: share of the step.
    - ``rlprof/<stage>_tokens_per_s``: for stages that count ``tokens``, over the spans that do.

    Validations are left out of all of these.

    ``rlprof/peak_memory_gb`` is the step's highest allocated device memory (its peak is reset each
    step). Without an accelerator it is the resident memory of the process.

    Where Lightning does not log at every batch (``log_every_n_steps``, gradient accumulation) a row
    is of all batches since the one before: means per batch, their shares and rates, the highest
    memory. Times of steps with a capture, which take longer, are left out where a row has others.

    Example::

        >>> callbacks = [ProfilerCallback(), StageMetrics()]
    """

    _seen: StepTotals | None = None
    _failed = False

    def __init__(self) -> None:
        self._sums, self._captured = _Sums(), _Sums()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer without a ProfilerCallback, and one in the other order."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        ours = [one for one in trainer.callbacks if isinstance(one, ProfilerCallback)]
        # Lightning puts that of RLPROF=1 behind all others, where it serves as well.
        self._sums, self._captured = _Sums(), _Sums()
        if stage == "fit" and not any(one in before or one.by_environment for one in ours):
            raise ConfigError(
                "StageMetrics needs a ProfilerCallback before it: "
                "callbacks=[ProfilerCallback(…), StageMetrics(), …]"
            )

    @guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step that just ended."""
        session = current()
        # A batch that was None ended no step: the totals are those of the step before.
        if session is None or not session.step_totals.ns or session.step_totals is self._seen:
            return
        self._seen = totals = session.step_totals
        (self._captured if totals.captured else self._sums).add(totals)
        memory_gb = _memory_gb(session.header.device, keep_peak=totals.captured)
        for sums in (self._sums, self._captured):  # the highest, also where times are left out
            sums.reach(memory_gb)
        # Not log_dict: it repeats the last value of a stage in steps that did not have it.
        loop = trainer.fit_loop
        x, every = loop.epoch_loop._batches_that_stepped, trainer.log_every_n_steps
        if every and (x + 1) % every == 0 and not loop._should_accumulate():
            metrics = (self._sums if self._sums.steps else self._captured).metrics()
            self._sums, self._captured = _Sums(), _Sums()
            # A logger of the user's own may know nothing of ranks.
            for logger in trainer.loggers if trainer.is_global_zero else ():
                try:
                    logger.log_metrics(metrics, step=x)
                except Exception as error:  # the others get theirs
                    self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Drop this step's metrics, and say so the first time; the next step may fare better."""
        if not self._failed:
            log.warning("stage metrics could not be logged: %s", error, exc_info=error)
        self._failed = True


class _Sums:
    """What some steps spent, together."""

    def __init__(self) -> None:
        self.steps = self._ns = 0
        self._memory_gb: float | None = None
        # Of each stage: nanoseconds, tokens, and the nanoseconds of the spans that counted them.
        self._stages: dict[str, tuple[int, Number, int]] = {}

    def reach(self, memory_gb: float | None) -> None:
        if memory_gb is not None:
            self._memory_gb = max(memory_gb, self._memory_gb or 0.0)

    def add(self, step: StepTotals) -> None:
        self.steps += 1
        self._ns += step.ns
        for name, spent in step.stages.items():
            ns, tokens, counted_ns = self._stages.get(name, (0, 0, 0))
            tokens += spent.counters.get("tokens", 0)
            counted_ns += spent.counted_ns.get("tokens", 0)
            self._stages[name] = ns + spent.ns, tokens, counted_ns

    def metrics(self) -> dict[str, float]:
        found = {}
        for stage, (ns, tokens, counted_ns) in self._stages.items():
            found[f"rlprof/{stage}_s"] = ns / self.steps / 1e9
            found[f"rlprof/{stage}_share"] = ns / self._ns
            if counted_ns:
                found[f"rlprof/{stage}_tokens_per_s"] = tokens / (counted_ns / 1e9)
        # After them, as a stage may be called "step".
        found["rlprof/step_s"] = self._ns / self.steps / 1e9
        if self._memory_gb is not None:
            found["rlprof/peak_memory_gb"] = self._memory_gb
        return found


def _memory_gb(kind: str, *, keep_peak: bool) -> float | None:
    found = accelerator.memory_bytes(kind).get("device_peak_bytes")
    if found is None:
        found = host_rss_bytes()
    elif not keep_peak:  # in a capture the peak belongs to the memory recorder
        accelerator.reset_peak(kind)
    return None if found is None else found / 1e9
