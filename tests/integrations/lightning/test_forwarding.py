"""A callback of the user's that holds ours and calls every hook of Lightning on it."""

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.session import current
from tests.builders.models import Body, loader, make_trainer, of, steps_of, trace_of

PACKAGES = {"pytorch_lightning": pytorch_lightning, "lightning": lightning.pytorch}


def holder(package: Any, style: str) -> type[Any]:
    """Return a class of callbacks that hold another one; `called` gets the names of hooks."""
    names = [
        name
        for name, hook in vars(package.Callback).items()
        if callable(hook) and not name.startswith("_")
    ]

    def by_position(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            return getattr(self.inner, name)(*args, *kwargs.values())

        return hook

    def by_name(name: str) -> Any:
        parameters = list(getattr(package.Callback, name).__annotations__)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            named = dict(zip(parameters, args, strict=False)) | kwargs
            return getattr(self.inner, name)(**named)

        return hook

    def hold(self: Any, inner: Any) -> None:
        self.inner, self.called = inner, set()

    make = by_position if style == "by position" else by_name
    hooks = {name: make(name) for name in names}
    state_key = property(lambda self: self.inner.state_key)
    keys = {"__init__": hold, "state_key": state_key, "names": names, **hooks}
    return type("Holder", (package.Callback,), keys)


def module_of(package: Any, fails: bool = False) -> Any:
    class Module(Body, package.LightningModule):  # type: ignore[misc, name-defined]
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch)

        test_step = predict_step = validation_step

        def on_train_batch_end(self, *args: Any) -> None:
            if fails and self.trainer.global_step == 2:
                raise ValueError("of the user")

    return Module()


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("style", ["by position", "by name"])
def test_every_hook_can_be_forwarded(package: Any, style: str, tmp_path: Path) -> None:
    def made() -> tuple[Any, ProfilerCallback]:
        callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
        return holder(package, style)(callback), callback

    called = set()
    held, callback = made()
    options = {"package": package, "enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    trainer = make_trainer(held, **options)
    trainer.fit(module_of(package), loader(), loader())
    assert (steps_of(trace_of(callback)), trace_of(callback).status) == ([1, 2, 3, 4], "finished")
    assert len(of(trace_of(callback), "actor_update")) == 4
    assert len(of(trace_of(callback), "validation")) == 1
    called |= held.called
    trainer.save_checkpoint(tmp_path / "x.ckpt")

    held, callback = made()
    make_trainer(held, max_epochs=2, **options).fit(
        module_of(package), loader(), loader(), ckpt_path=str(tmp_path / "x.ckpt")
    )
    assert steps_of(trace_of(callback)) == [5, 6, 7, 8]
    called |= held.called

    for verb in ("validate", "test", "predict"):
        held, callback = made()
        getattr(make_trainer(held, **options), verb)(module_of(package), loader())
        assert callback.run is None
        called |= held.called

    held, callback = made()
    with pytest.raises(ValueError, match="of the user"):
        make_trainer(held, **options).fit(module_of(package, fails=True), loader(), loader())
    assert trace_of(callback).status == "interrupted by ValueError"
    called |= held.called
    assert current() is None
    held.load_state_dict({})  # Lightning does not, as there is nothing to load
    assert called == {*held.names} - {"load_state_dict"}


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_a_callback_that_is_held_and_in_the_list_too_records_once(
    package: Any, tmp_path: Path
) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "runs"))
    held = holder(package, "by position")(callback)
    for both in ((callback, held), (held, callback)):
        make_trainer(*both, package=package).fit(module_of(package), loader(), loader())
        trace = trace_of(callback)
        assert [span.step for span in trace.spans if span.kind == "step"] == [1, 2, 3, 4]
        assert (len(of(trace, "actor_update")), trace.status) == (4, "finished")
    assert len(list((tmp_path / "runs").iterdir())) == 2
