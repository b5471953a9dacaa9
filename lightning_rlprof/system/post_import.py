"""Call a function with a module once that is imported, or at once if it has been."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

Hook = Callable[[ModuleType], object]


def when_imported(name: str, hook: Hook) -> None:
    """Call a hook with a module after it has been imported; what the hook raises is logged.

    Args:
        name: Full name of the module.
        hook: Called in the thread that imports it, before the importing code continues.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        _call(hook, module)
        return
    _finder.hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Find modules that have hooks by asking all other finders, and wrap their loaders."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._asked: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hooks or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.discard(name)
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if spec is None or execute is None:
            return None

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for hook in self.hooks.pop(name, []):
                _call(hook, module)

        try:
            loader.exec_module = execute_and_call
        except AttributeError:  # A loader with slots, or one written in C, refuses this.
            log.warning("%s is imported by %r, so it is not watched", name, loader)
        return spec


_finder = _Finder()


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # The importing code must continue.
        log.warning("%s could not be prepared: %s", module.__name__, error, exc_info=error)


def process_group() -> Any:
    """Return the module ``torch.distributed`` if this process is in a group, else None.

    Example::

        >>> process_group()
    """
    module: Any = sys.modules.get("torch.distributed")
    return module if module and module.is_available() and module.is_initialized() else None
