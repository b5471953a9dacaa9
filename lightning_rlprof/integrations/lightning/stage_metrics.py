"""`StageMetrics`: each step's stages as metrics in the Trainer's own loggers."""

import json
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_rlprof.analysis.efficiency.peak_flops import recorded_device
from lightning_rlprof.analysis.efficiency.throughput import (
    counted_flops,
    model_from,
    recorded_model,
)
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.errors import ConfigError, RlprofError
from lightning_rlprof.integrations.lightning.profiler_callback import (
    Callback,
    ProfilerCallback,
    guarded,
)
from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.clock_sync import default_store
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.span_buffer import RATE, StageSums, StepTotals
from lightning_rlprof.records.records import Header
from lightning_rlprof.system.process import resident_bytes

log = logging.getLogger(__name__)


class StageMetrics(Callback):
    """Log what steps spent on their stages, over all ranks, at the Trainer's own x-axis.

    Put it behind `ProfilerCallback`. Rank 0 logs ``rlprof/step_s`` and, per stage:

    - ``rlprof/<stage>_s``: seconds open on the training thread, nested stages included.
    - ``rlprof/<stage>_share``: share of the step.
    - ``rlprof/<stage>_tokens_per_s``: for stages that count ``tokens``, over the spans that do.
    - ``rlprof/<stage>_mfu``: share of the device's peak, from 0 to 1, of what `throughput` says.

    Validations are left out of all of these.

    ``rlprof/peak_memory_gb`` is the step's highest allocated device memory (its peak is reset each
    step). Without an accelerator it is the resident memory of the process.

    With several ranks these are means over the ranks that have the stage, and tokens per second
    are sums. ``rlprof/step_s_max``, ``rlprof/<stage>_s_max`` and ``rlprof/peak_memory_gb_max`` are
    those of the highest rank, and ``rlprof/ranks`` is how many ranks the row contains. No rank
    waits for another: of each rank the row contains the newest values that have arrived.

    Where Lightning does not log at every batch (``log_every_n_steps``, gradient accumulation) a row
    is of all batches since the one before: means per batch, their shares and rates, the highest
    memory. Times of steps with a capture, which take longer, are left out where a row has others.

    W&B numbers the rows that it gets. There the metrics are part of the training's own next row, so
    that its numbers stay the same.

    Example::

        >>> callbacks = [ProfilerCallback(), StageMetrics()]
    """

    _seen: StepTotals | None = None
    _failed = _model_is_read = False
    _known_model: Model | None = None

    def __init__(self) -> None:
        self._row: list[tuple[StepTotals, float | None]] = []  # Steps since the last row.
        self._ranks = _Ranks()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer without a ProfilerCallback, and one in the other order."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        ours = [one for one in trainer.callbacks if isinstance(one, ProfilerCallback)]
        # Lightning puts the callback of RLPROF=1 last, where it serves as well.
        self._row, self._ranks = [], _Ranks()
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
        # With `log_dict`, the last value of a stage would be repeated in steps without that stage.
        loop = trainer.fit_loop
        x, every = loop.epoch_loop._batches_that_stepped, trainer.log_every_n_steps
        if not every:
            return
        memory_gb = _memory_gb(session.header.device, keep_peak=totals.captured)
        self._row.append((totals, memory_gb))
        if (x + 1) % every == 0 and not loop._should_accumulate():
            metrics = self._metrics(session.header)
            # A logger of the user may not check the rank.
            for logger in trainer.loggers if trainer.is_global_zero else ():
                try:
                    _log(logger, metrics, x)
                except Exception as error:  # The remaining loggers still get the metrics.
                    self.give_up(error)

    def _metrics(self, header: Header) -> dict[str, float]:
        """Return the metrics of the steps since the last row, on rank 0 over all ranks."""
        row, self._row = self._row, []
        steps, memory = [totals for totals, _ in row], [gb for _, gb in row if gb is not None]
        sums = StageSums([totals for totals in steps if not totals.captured] or steps)
        device, model = recorded_device(header), self._model(header)
        own = {**sums.metrics(), **_mfu(sums, device.tflops if device else None, model)}
        if memory:  # The maximum includes captured steps, whose times are left out.
            own["rlprof/peak_memory_gb"] = max(memory)
        try:
            return self._ranks.combined(own, header)
        except Exception as error:  # The connection to the other ranks may fail.
            self.give_up(error)
            return own

    def _model(self, header: Header) -> Model | None:
        """Return the model that the configuration names; of an unknown type, none."""
        if not self._model_is_read:
            self._model_is_read, recorded = True, recorded_model([header.config])
            try:
                self._known_model = None if recorded is None else model_from(recorded)
            except RlprofError as error:
                log.warning("no MFU from the model: %s", error)
        return self._known_model

    def give_up(self, error: Exception) -> None:
        """Drop this step's metrics, and say so the first time; the next step may fare better."""
        if not self._failed:
            log.warning("stage metrics could not be logged: %s", error, exc_info=error)
        self._failed = True


def _log(logger: Any, metrics: Mapping[str, float], x: int) -> None:
    """Log a row; W&B, which numbers its rows itself, keeps it for the training's own next one."""
    if "WandbLogger" not in {kind.__name__ for kind in type(logger).__mro__}:
        logger.log_metrics(metrics, step=x)
        return
    prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
    own = {f"{prefix}{name}": value for name, value in metrics.items()}
    logger.experiment.log({**own, "trainer/global_step": x}, commit=False)


def _mfu(sums: StageSums, peak: float | None, model: Model | None) -> dict[str, float]:
    """Return the share of the peak of each stage that counts FLOPs, or tokens of a known model.

    What is above the peak is left out: its FLOPs or tokens are wrong.
    """
    found = {}
    for stage in sums.stages if peak else ():
        flops, ns = counted_flops(stage, sums.counts, model) or (0, 0)
        if ns and peak and 0 <= flops / ns / 1_000 <= peak:
            found[f"rlprof/{stage}_mfu"] = flops / ns / 1_000 / peak
    return found


class _Ranks:
    """The newest metrics of every rank, through the store of the process group.

    It uses no collective: ranks that train apart, or one that has failed, hold up no other.
    """

    def __init__(self) -> None:
        self._known: list[str] = []

    def combined(self, own: dict[str, float], header: Header) -> dict[str, float]:
        """Send this rank's metrics; on rank 0, return those of all ranks that have sent some."""
        store: Any = default_store()
        if header.world_size == 1 or store is None:
            return own
        place = f"rlprof/metrics/{header.run_id}"
        if header.rank:
            store.set(f"{place}/{header.rank}", json.dumps(own))
            return own
        if len(self._known) < header.world_size - 1:
            keys = [f"{place}/{rank}" for rank in range(1, header.world_size)]
            self._known = [key for key in keys if key in self._known or store.check([key])]
        if store.has_extended_api():  # One message is enough for all ranks.
            sent = store.multi_get(self._known) if self._known else []
        else:
            sent = [store.get(key) for key in self._known]
        return _over_ranks([own, *map(json.loads, sent)])


def _over_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        found[name] = sum(values) if name.endswith(RATE) else fmean(values)
        if name.endswith(("_s", "_gb")) and not name.endswith(RATE):
            found[f"{name}_max"] = max(values)
    return {**found, "rlprof/ranks": len(rows)}


def _memory_gb(kind: str, *, keep_peak: bool) -> float | None:
    found = accelerator.memory_bytes(kind).get("device_peak_bytes")
    if found is None:
        found = resident_bytes()
    elif not keep_peak:  # In a capture, the peak belongs to the memory recorder.
        accelerator.reset_peak(kind)
    return None if found is None else found / 1e9
