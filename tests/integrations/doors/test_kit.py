"""What fails in a hook is said once, by the hook's own name, and the training continues."""

import functools
import logging

import pytest

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.integrations.doors.transformers import _Hooks


def _fails(*given: object) -> None:
    raise ValueError(f"not {given}")


def names(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The hooks that the log names."""
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [text.partition(": ")[2].partition(" failed")[0] for text in said]


def test_a_hook_with_arguments_of_its_own_is_named_like_its_function(caplog):
    hook = Kit("a framework").quiet(functools.partial(_fails, "its own"))
    assert hook(1) is None
    assert hook(2) is None
    assert names(caplog) == ["_fails"]


def test_each_event_of_transformers_that_fails_is_said_by_its_name(caplog):
    callback = _Hooks()
    callback.session = 1  # type: ignore[assignment]
    for event in ("on_step_begin", "on_step_end", "on_train_end", "on_step_begin"):
        assert getattr(callback, event)(None, None, None, model=None) is None
    events = ["on_step_begin", "on_step_end", "on_train_end"]
    assert names(caplog) == [f"_Hooks.{event}" for event in events]
