"""`StageMetrics`: each step's stages as metrics in the Trainer's own loggers."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_rlprof.analysis.efficiency.peak_flops import recorded_device
from lightning_rlprof.analysis.efficiency.throughput import (
    counted_flops,
    decode_bytes,
    generates,
    model_from,
    recorded_model,
)
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.errors import ConfigError, RlprofError
from lightning_rlprof.integrations.lightning.callback_base import Callback, guarded
from lightning_rlprof.integrations.lightning.profiler_actions import Cover
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.background.host_usage import host_rss_bytes
from lightning_rlprof.recording.clock_sync import default_store
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.span_buffer import StepTotals
from lightning_rlprof.recording.stage_sums import RATE, StageSums
from lightning_rlprof.records.records import Header

log = logging.getLogger(__name__)


class StageMetrics(Callback):
    """Log what steps spent on their stages, over all ranks, at the Trainer's own x-axis.

    Put it behind `ProfilerCallback`. Rank 0 logs ``rlprof/step_s`` and, per stage:

    - ``rlprof/<stage>_s``: seconds open on the training thread, nested stages included.
    - ``rlprof/<stage>_share``: share of the step.
    - ``rlprof/<stage>_tokens_per_s``: for stages that count ``tokens``, over the spans that do.
    - ``rlprof/<stage>_mfu``: share of the device's peak, from 0 to 1, of what `throughput` says.
    - ``rlprof/<stage>_bandwidth``: share of the device's memory bandwidth that decoding reads at
      least, of stages that generate and count ``tokens`` and ``samples``, with a ``model`` in the
      configuration.

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
    that its numbers stay the same; a training that logs nothing to W&B has no such row.

    Args:
        parameters: Of the model, one number or by stage: MFU from tokens, where no ``flops`` are
            counted. A ``model`` in the configuration goes before it.
        peak_tflops: Of one device, in 10^12 FLOP/s; None takes the vendor's number, if it is known.

    Raises:
        ConfigError: A number is not above 0 and below 1e18.

    Example::

        >>> callbacks = [ProfilerCallback(), StageMetrics(parameters=7e9)]
    """

    _seen: StepTotals | None = None
    _failed = _model_is_read = False
    _known_model: Model | None = None

    def __init__(
        self,
        *,
        parameters: float | Mapping[str, float] | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        by_stage = parameters if isinstance(parameters, Mapping) else {"": parameters}
        for name, values in {"parameters": by_stage, "peak_tflops": {"": peak_tflops}}.items():
            for value in values.values():
                if value is not None and not 0 < value < 1e18:
                    raise ConfigError(f"{name}={value} must be above 0 and below 1e18")
        self._parameters, self._peak_tflops = by_stage, peak_tflops
        self._row, self._ranks = _Row(), _Ranks()
        self._beside: list[_Beside] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer without a ProfilerCallback, and one in the other order."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        ours = [one for one in trainer.callbacks if isinstance(one, ProfilerCallback)]
        # Lightning puts that of RLPROF=1 behind all others, where it serves as well.
        self._row, self._ranks = _Row(), _Ranks()
        if stage == "fit" and not any(one in before or one.by_environment for one in ours):
            raise ConfigError(
                "StageMetrics needs a ProfilerCallback before it: "
                "callbacks=[ProfilerCallback(…), StageMetrics(), …]"
            )
        self._leave()
        if stage == "fit" and trainer.is_global_zero:
            numbering = filter(_numbers_rows, trainer.loggers)
            self._beside = [_Beside(logger, self.give_up) for logger in numbering]

    @guarded
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave what no row of the Trainer took to the row that the training writes next."""
        for each in self._beside:
            each.send()

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
        memory_gb = _memory_gb(session.header.device, keep_peak=totals.captured)
        self._row.add(totals, memory_gb)
        for each in self._beside:
            each.add(totals, memory_gb)
        # Not log_dict: it repeats the last value of a stage in steps that did not have it.
        loop = trainer.fit_loop
        x, every = loop.epoch_loop._batches_that_stepped, trainer.log_every_n_steps
        if every and (x + 1) % every == 0 and not loop._should_accumulate():
            row, self._row = self._row, _Row()
            metrics = self._metrics(row, session.header)
            # A logger of the user's own may know nothing of ranks.
            for logger in trainer.loggers if trainer.is_global_zero else ():
                try:
                    if not _numbers_rows(logger):
                        logger.log_metrics(metrics, step=x)
                except Exception as error:  # the others get theirs
                    self.give_up(error)
            for each in self._beside:
                waiting = each.waiting()
                is_same = waiting.shown.steps == row.shown.steps
                each.keep(metrics if is_same else self._metrics(waiting, session.header), x)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the loggers as they were."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the loggers as they were; the exception passes through."""
        self._leave()

    def _leave(self) -> None:
        left, self._beside = self._beside, []
        for each in left:
            each.remove()

    def _metrics(self, row: "_Row", header: Header) -> dict[str, float]:
        """Return the metrics of some steps, on rank 0 over all ranks."""
        sums, device, model = row.shown, recorded_device(header), self._model(header)
        peak = self._peak_tflops or (device.tflops if device else None)
        gb_s = device.gb_s if device else None
        rates = _mfu(sums, self._parameters, peak, model) | _bandwidth(sums, gb_s, model)
        own = {**sums.metrics(), **rates}
        try:
            return self._ranks.combined(own, header)
        except Exception as error:  # the connection to the other ranks
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


class _Row:
    """Steps that a row is of: those without a capture, and those with one."""

    def __init__(self) -> None:
        self._sums, self._captured = StageSums(), StageSums()

    def add(self, totals: StepTotals, memory_gb: float | None) -> None:
        """Add a step."""
        (self._captured if totals.captured else self._sums).add(totals)
        for sums in (self._sums, self._captured):  # the highest, also where times are left out
            sums.reach(memory_gb)

    @property
    def shown(self) -> StageSums:
        """Those whose times count."""
        return self._sums if self._sums.steps else self._captured


def _numbers_rows(logger: Any) -> bool:
    """Tell whether a logger numbers its rows itself, so that one more would move the others."""
    return "WandbLogger" in {kind.__name__ for kind in type(logger).__mro__}


class _Beside:
    """Metrics that wait for the training's next row in a logger that numbers its rows.

    W&B keeps what is logged with ``commit=False`` for the next row. It is logged just before one
    that the Trainer logs, or before the next batch, in which the code may log one itself. Metrics
    that got no row until the next are due are part of those.

    Args:
        logger: A WandbLogger.
        give_up: Told what failed; the Trainer, which logs through here, does not hear of it.
    """

    def __init__(self, logger: Any, give_up: Callable[[Exception], None]) -> None:
        self._logger, self._give_up = logger, give_up
        self._row, self._newer = _Row(), _Row()  # since the last row, and since metrics were sent
        self._kept: dict[str, Any] | None = None
        self._sent_at: int | None = None  # the number of the next row then
        self._joined = False
        self._log = logger.log_metrics
        self._cover = Cover(logger, "log_metrics", self._send_and_log)

    def add(self, totals: StepTotals, memory_gb: float | None) -> None:
        """Add a step."""
        self._row.add(totals, memory_gb)
        self._newer.add(totals, memory_gb)

    def waiting(self) -> _Row:
        """Return the steps that are in no row yet."""
        if self._has_joined():
            self._row, self._sent_at = self._newer, None
        return self._row

    def keep(self, metrics: dict[str, float], x: int) -> None:
        """Keep the metrics of those steps for the next row."""
        prefix = (
            f"{found}{self._logger.LOGGER_JOIN_CHAR}" if (found := self._logger._prefix) else ""
        )
        own = {f"{prefix}{name}": value for name, value in metrics.items()}
        self._kept = {**own, "trainer/global_step": x}

    def send(self) -> None:
        """Let the next row contain what is kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            experiment = self._logger.experiment
            experiment.log(kept, commit=False)
            self._sent_at, self._newer = experiment.step, _Row()

    def remove(self) -> None:
        """Give the logger its method back; say if no row came."""
        self._cover.remove()
        if self._sent_at is not None and not self._joined and not self._has_joined():
            log.warning("stage metrics are not in W&B: the training has logged no row there")

    def _has_joined(self) -> bool:
        if self._sent_at is not None and self._logger.experiment.step > self._sent_at:
            self._joined = True
            return True
        return False

    def _send_and_log(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.send()
        except Exception as error:
            self._give_up(error)
        return self._log(*args, **kwargs)


def _mfu(
    sums: StageSums,
    parameters: Mapping[str, float | None],
    peak: float | None,
    model: Model | None,
) -> dict[str, float]:
    """Return the share of the peak of each stage that counts FLOPs, or tokens of a known size.

    What is above the peak is left out: its FLOPs or tokens are wrong.
    """
    found = {}
    for stage in sums.stages if peak else ():
        size = parameters.get(stage, parameters.get(""))
        flops, ns = counted_flops(stage, sums.counts, model, size) or (0, 0)
        if ns and peak and 0 <= flops / ns / 1_000 <= peak:
            found[f"rlprof/{stage}_mfu"] = flops / ns / 1_000 / peak
    return found


def _bandwidth(sums: StageSums, gb_s: float | None, model: Model | None) -> dict[str, float]:
    """Return the share of the memory's bandwidth that decoding reads at least, of each stage.

    What is above the bandwidth is left out, as in `_mfu`.
    """
    found = {}
    for stage in filter(generates, sums.stages if model and gb_s else ()):
        tokens, ns = sums.counts.get((stage, "tokens"), (0, 0))
        samples, _ = sums.counts.get((stage, "samples"), (0, 0))
        calls = sums.spans.get((stage, "samples"), 0)
        if model and gb_s and ns and samples and tokens:
            share = decode_bytes(model, tokens, samples, calls) / ns / gb_s
            if share <= 1:
                found[f"rlprof/{stage}_bandwidth"] = share
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
        if store.has_extended_api():  # one message for all of them
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
        found = host_rss_bytes()
    elif not keep_peak:  # in a capture the peak belongs to the memory recorder
        accelerator.reset_peak(kind)
    return None if found is None else found / 1e9
