"""What breaks in training: the user's own error passes through, and the run stays readable."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current
from tests.builders.models import Tiny, cut_steps, loader, make_trainer, of, steps_of, trace_of


class BoomError(Exception):
    pass


class Breaks(pytorch_lightning.Callback):
    """Another callback, whose named hook raises the given object the n-th time."""

    def __init__(self, hook: str, error: BaseException, nth: int = 1) -> None:
        self.left, self.error = nth, error
        setattr(self, hook, self._break)

    def _break(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if not self.left:
            raise self.error


def fit_and_fail(callback: ProfilerCallback, error: BaseException, *others: Any, **options: Any):
    module = options.pop("module", None) or Tiny()
    data = options.pop("data", None) or loader()
    with pytest.raises(type(error)) as caught:
        make_trainer(*others, **options).fit(module, data)
    assert caught.value is error
    assert current() is None
    return trace_of(callback)


@pytest.fixture
def callback(tmp_path: Path) -> ProfilerCallback:
    return ProfilerCallback(profile_save_path=str(tmp_path / "runs"))


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # Lightning ignores it after a KeyboardInterrupt


def breaking(error: BaseException, at: int = 2) -> Tiny:
    module = Tiny()

    def act(batch_idx: int) -> None:
        if batch_idx == at:
            raise error

    module.on_batch = act
    return module


def test_an_exception_in_training_step(callback: ProfilerCallback) -> None:
    error = BoomError("user's")
    trace = fit_and_fail(callback, error, callback, module=breaking(error))
    assert trace.status == "interrupted by BoomError"
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2], [3])
    assert [span.step for span in of(trace, "actor_update")] == [1, 2, 3]  # closed, not lost
    assert load(callback.run).statuses == {0: "interrupted by BoomError"}


def test_what_explains_a_crash_is_in_the_run(callback: ProfilerCallback) -> None:
    """The exception, the spans around it, the memory of the process, and versions."""
    error = BoomError("user's")
    trace = fit_and_fail(callback, error, callback, module=breaking(error))
    last = [span for span in trace.spans if span.step == 3]
    assert {"training_step", "actor_update", "step"} <= {span.name for span in last}
    memory = [span.counters.get("host_rss_bytes", 0) for span in last if span.counters]
    assert max(memory) > 2**20, "of the step that was cut, too"
    assert trace.status == "interrupted by BoomError"
    assert {"python", "torch", "lightning-rlprof"} <= trace.header.versions.keys()


def test_an_exception_in_validation(callback: ProfilerCallback) -> None:
    class Validates(Tiny):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            raise error

    error = BoomError()
    with pytest.raises(BoomError):
        make_trainer(callback, num_sanity_val_steps=0).fit(Validates(), loader(), loader())
    trace = trace_of(callback)
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2, 3, 4], [])
    assert trace.status == "interrupted by BoomError"


HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
         "on_before_zero_grad", "on_before_backward", "on_after_backward",
         "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
         "on_train_end", "on_fit_end")  # fmt: skip


@pytest.mark.parametrize("before_ours", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_another_callback(
    hook: str, before_ours: bool, callback: ProfilerCallback
) -> None:
    error = BoomError()
    other = Breaks(hook, error)
    order = (other, callback) if before_ours else (callback, other)
    trace = fit_and_fail(callback, error, *order)
    assert trace.status == "interrupted by BoomError"
    assert len(cut_steps(trace)) <= 1


@pytest.mark.parametrize("before_ours", [True, False])
def test_a_callback_that_fails_at_batch_start_leaves_finished_steps(
    before_ours: bool, callback: ProfilerCallback
) -> None:
    error = BoomError()
    other = Breaks("on_train_batch_start", error, nth=3)
    order = (other, callback) if before_ours else (callback, other)
    trace = fit_and_fail(callback, error, *order)
    assert steps_of(trace) == [1, 2]
    assert cut_steps(trace) == []  # the third batch was never run


def test_an_exception_in_a_setup_before_ours_leaves_no_run(callback: ProfilerCallback) -> None:
    error = BoomError()
    with pytest.raises(BoomError) as caught:
        make_trainer(Breaks("setup", error), callback).fit(Tiny(), loader())
    assert caught.value is error
    assert callback.run is None
    make_trainer(callback).fit(Tiny(), loader())  # and does not disturb the next
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


def test_an_exception_in_a_setup_after_ours_ends_the_run(callback: ProfilerCallback) -> None:
    error = BoomError()
    trace = fit_and_fail(callback, error, callback, Breaks("setup", error))
    assert (trace.status, trace.spans) == ("interrupted by BoomError", [])


@pytest.mark.parametrize("before_ours", [True, False])
def test_an_exception_in_another_teardown(before_ours: bool, callback: ProfilerCallback) -> None:
    error = BoomError()
    other = Breaks("teardown", error)
    trace = fit_and_fail(
        callback, error, *((other, callback) if before_ours else (callback, other))
    )
    assert trace.status == ("interrupted by BoomError" if before_ours else "finished")
    assert steps_of(trace) == [1, 2, 3, 4]


@pytest.mark.usefixtures("_signals")
def test_a_keyboard_interrupt_keeps_the_run_and_lightnings_exit(callback: ProfilerCallback) -> None:
    with pytest.raises(SystemExit) as caught:
        make_trainer(callback).fit(breaking(KeyboardInterrupt()), loader())
    assert caught.value.code == 1
    trace = trace_of(callback)
    assert trace.status == "interrupted by KeyboardInterrupt"
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2], [3])


def test_a_system_exit_passes_through(callback: ProfilerCallback) -> None:
    error = SystemExit(3)
    trace = fit_and_fail(callback, error, callback, module=breaking(error))
    assert trace.status == "interrupted by SystemExit"
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2], [3])


class Faulty(Dataset[torch.Tensor]):
    """Raises at its fifth item, in whatever process asks for it; marks what it does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with stage("actor_generate"):
            if index == 4:
                raise BoomError("in the data")
            return torch.ones(4)


def test_an_exception_in_a_forked_data_worker(
    callback: ProfilerCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long torch waits for a worker that has failed before it ends it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    data = DataLoader(Faulty(), batch_size=1, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(BoomError, match="in the data"):
        make_trainer(callback).fit(Tiny(), data)
    gc.collect()
    trace = trace_of(callback)
    assert trace.status == "interrupted by BoomError"
    assert (steps_of(trace), cut_steps(trace), trace.lost_lines) == ([1, 2, 3, 4], [], 0)
    assert of(trace, "actor_generate") == []  # the worker records nothing into our file


class Asks(Dataset[torch.Tensor]):
    """Ones from a process that records nothing, zeros from one that does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(current() is None))


def test_a_forked_data_worker_leaves_the_recording_to_its_parent(
    callback: ProfilerCallback,
) -> None:
    class Sees(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            assert batch.eq(1).all()
            return super().training_step(batch, batch_idx)

    data = DataLoader(Asks(), num_workers=1, multiprocessing_context="fork")
    make_trainer(callback).fit(Sees(), data)
    assert len(steps_of(trace_of(callback))) == 8


def test_an_exception_in_the_data_of_this_process(callback: ProfilerCallback) -> None:
    with pytest.raises(BoomError, match="in the data"):
        make_trainer(callback).fit(Tiny(), DataLoader(Faulty(), batch_size=1))
    trace = trace_of(callback)
    assert [span.step for span in of(trace, "actor_generate")] == [1, 2, 3, 4, 5]
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "interrupted by BoomError")
