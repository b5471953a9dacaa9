"""Stages of programs that mark them for torch's profiler, by `torch.profiler.record_function`."""

from typing import Any

from torch.autograd.profiler import record_function

from lightning_rlprof.recording.annotations import Marker, stage
from lightning_rlprof.recording.open_spans import innermost
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.records.stage_aliases import standard_stage


class _OwnName(str):
    """The name of a row that shows a span of rlprof's own."""

    __slots__ = ()


def own_row(name: str) -> record_function:
    """Return a row in torch's traces that is not recorded as a stage."""
    return record_function(_OwnName(name))


_MOST = 1_000  # names that are remembered; some programs put a number into each


class RecordFunctions:
    """Record those whose names mean a known stage, until `remove`; others are left alone.

    One inside a span of the same name is not another stage.
    """

    def __init__(self) -> None:
        self._torchs = vars(record_function)["__enter__"], vars(record_function)["__exit__"]
        enter, leave = self._torchs
        known: dict[str, Marker | None] = {}

        def begin(self: Any) -> Any:
            name = self.name
            if isinstance(name, _OwnName):
                return enter(self)
            marker = known.get(name)
            if marker is None and name not in known and len(known) < _MOST:
                found = standard_stage(name)
                marker = known[name] = stage(found) if found in STAGES else None
            around = innermost() if marker is not None else None
            if marker is None or (around is not None and around[2].name in (name, marker.name)):
                return enter(self)
            self.rlprof_marker = marker
            marker.__enter__()
            return enter(self)

        def end(self: Any, *error: Any) -> Any:
            found = leave(self, *error)
            if (marker := vars(self).pop("rlprof_marker", None)) is not None:
                marker.__exit__(None, None, None)
            return found

        self._mine = begin, end
        record_function.__enter__, record_function.__exit__ = begin, end  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore torch's methods, unless other code replaced them since."""
        if (record_function.__enter__, record_function.__exit__) == self._mine:
            enter, leave = self._torchs
            record_function.__enter__, record_function.__exit__ = enter, leave  # type: ignore[method-assign]
