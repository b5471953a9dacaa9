"""One Callback class that both Trainers accept, and how a hook fails without failing training."""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch  # noqa: F401 - the first to be missing, before Lightning, which needs it

__all__ = ["Callback", "guarded"]

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


_OLDEST = (2, 4)


def _installed_bases() -> tuple[type, ...]:
    # lightning.pytorch.Callback and pytorch_lightning.Callback are two classes, and LightningCLI
    # accepts only its own: deriving from every installed one serves all Trainers.
    bases: list[type] = []
    found: dict[str, tuple[int, ...]] = {}
    for package in ("pytorch_lightning", "lightning.pytorch"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            continue
        try:
            module = importlib.import_module(package)
            bases.append(module.Callback)
            found[package] = tuple(map(int, module.__version__.split(".")[:2]))
        except Exception as error:
            log.debug("%s cannot be imported: %s", package, error)
    if max(found.values(), default=(0,)) < _OLDEST:
        has = [f"{name} {'.'.join(map(str, version))}" for name, version in found.items()]
        raise ImportError(
            f"recording needs Lightning 2.4 or newer, found {' and '.join(has) or 'none'}. "
            'Run: pip install "lightning-rlprof[lightning]"'
        )
    return tuple(bases)


if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    Callback = type("Callback", _installed_bases(), {"__doc__": "Base for both Trainers."})


def guarded(hook: F) -> F:
    """Turn a hook's own failure into one logged error and the end of the recording.

    The callback's ``give_up(error)`` is called; training continues.
    """

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return call  # type: ignore[return-value]
