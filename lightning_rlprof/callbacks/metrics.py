"""`StageMetrics`: each step's stages as metrics in the Trainer's own loggers."""

import logging
from collections.abc import Mapping
from typing import Any

from lightning_rlprof import device
from lightning_rlprof.callbacks.base import Callback, guarded
from lightning_rlprof.callbacks.profiler import ProfilerCallback
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.model import Number
from lightning_rlprof.session import current

__all__ = ["StageMetrics"]

log = logging.getLogger(__name__)


class StageMetrics(Callback):
    """Log what each step spent on its stages, on rank 0, at the Trainer's own x-axis.

    Put it behind `ProfilerCallback`. Per step it logs ``rlprof/step_s``; per stage
    ``rlprof/<stage>_s`` (inclusive seconds), ``rlprof/<stage>_share`` (of the step) and, where the
    stage counted ``tokens``, ``rlprof/<stage>_tokens_per_s``; and ``rlprof/peak_memory_gb``: the
    step's highest allocated device memory (its peak is reset each step), or the process's resident
    memory where there is no accelerator.

    Example::

        >>> callbacks = [ProfilerCallback(), StageMetrics()]
    """

    _logged: Mapping[str, Any] | None = None
    _failed = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer without a ProfilerCallback, and one in the other order."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        ours = [one for one in trainer.callbacks if isinstance(one, ProfilerCallback)]
        # Lightning puts that of RLPROF=1 behind all others, where it serves as well.
        if stage == "fit" and not any(one in before or one.by_environment for one in ours):
            raise ConfigError(
                "StageMetrics finds no ProfilerCallback before it; "
                "use callbacks=[ProfilerCallback(…), StageMetrics(), …]"
            )

    @guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step that just ended."""
        session = current()
        # A batch that was None ended no step: the totals are those of the step before.
        if session is None or not session.step_totals or session.step_totals is self._logged:
            return
        self._logged = session.step_totals
        metrics = _metrics(session.step_totals)
        metrics |= _memory(session.header.device, keep_peak=session.captured_last_step)
        # Not log_dict: it repeats the last value of a stage in steps that did not have it.
        loop = trainer.fit_loop
        x, every = loop.epoch_loop._batches_that_stepped, trainer.log_every_n_steps
        if every and (x + 1) % every == 0 and not loop._should_accumulate():
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=x)

    def give_up(self, error: Exception) -> None:
        """Drop this step's metrics, and say so the first time; the next step may fare better."""
        if not self._failed:
            log.warning("metrics of stages could not be logged: %s", error, exc_info=error)
        self._failed = True


def _metrics(totals: Mapping[str, tuple[int, Mapping[str, Number]]]) -> dict[str, float]:
    step_ns = totals["step"][0] if "step" in totals else 0
    metrics = {"rlprof/step_s": step_ns / 1e9}
    for stage, (total_ns, counters) in totals.items():
        if stage == "step":
            continue
        metrics[f"rlprof/{stage}_s"] = total_ns / 1e9
        if step_ns:
            metrics[f"rlprof/{stage}_share"] = total_ns / step_ns
        if total_ns and "tokens" in counters:
            metrics[f"rlprof/{stage}_tokens_per_s"] = counters["tokens"] / (total_ns / 1e9)
    return metrics


def _memory(kind: str, *, keep_peak: bool) -> dict[str, float]:
    found = device.memory_bytes(kind).get("device_peak_bytes")
    if found is None:
        found = device.host_rss_bytes()
    elif not keep_peak:  # in a capture the peak belongs to the memory recorder
        device.reset_peak(kind)
    return {} if found is None else {"rlprof/peak_memory_gb": found / 1e9}
