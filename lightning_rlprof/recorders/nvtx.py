"""Mirror spans as NVTX ranges, which Nsight Systems shows and records."""

import asyncio
from pathlib import Path
from typing import Any

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.model import Header, Kind
from lightning_rlprof.recorders.base import Recorder

__all__ = ["NvtxRecorder", "build"]

_DOMAIN = "rlprof"


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank."""
    return NvtxRecorder()


class NvtxRecorder(Recorder):
    """Push one NVTX range per span into the domain ``rlprof``; without a tool attached it is idle.

    Ranges are pushed and popped, which lets Nsight project them onto the kernels launched inside.
    Inside an asyncio loop spans interleave, so there each range is started and ended by its own id.

    Raises:
        RecorderError: The package ``nvtx`` is not installed.
    """

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise RecorderError(
                "NVTX ranges need the package nvtx, which is not installed; pip install nvtx"
            ) from error
        self._get_domain = nvtx.get_domain
        self._domain: Any = None
        self._attributes: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (NvtxRecorder, ())

    def open(self, out: Path) -> None:
        """Find the domain; NVTX decides at the first call of a process whether a tool listens."""
        self._domain = self._get_domain(_DOMAIN)

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Push a range, or start one inside an asyncio loop."""
        attributes = self._attributes.get(name)
        if attributes is None:
            attributes = self._domain.get_event_attributes(message=name)
            self._attributes[name] = attributes
        if asyncio._get_running_loop() is not None:
            return (self._domain.start_range(attributes),)
        self._domain.push_range(attributes)
        return None

    def exit(self, token: object) -> None:
        """Pop or end the range."""
        if isinstance(token, tuple):
            self._domain.end_range(token[0])
        else:
            self._domain.pop_range()
