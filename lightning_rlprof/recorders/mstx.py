"""Mirror spans as MSTX ranges, which the profilers of Ascend NPUs record."""

import inspect

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.model import Header, Kind
from lightning_rlprof.recorders.base import Recorder

__all__ = ["MstxRecorder", "build"]

_DOMAIN = "rlprof"


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank."""
    return MstxRecorder()


class MstxRecorder(Recorder):
    """Start one MSTX range per span in the domain ``rlprof`` and end it by its number.

    A range reaches the data only while torch_npu.profiler or msprof runs with ``mstx`` on.

    Raises:
        RecorderError: torch_npu cannot be imported, or is older than its MSTX domains.
    """

    def __init__(self) -> None:
        try:
            from torch_npu.npu import mstx
        except Exception as error:  # torch_npu without CANN raises more than ImportError
            raise RecorderError(
                f"MSTX ranges need torch_npu on a machine with CANN ({error}); "
                'pip install "lightning-rlprof[npu]"'
            ) from error
        # Versions do not order this: 2.1.0.post13 has domains, 2.5.1 has none.
        if "domain" not in inspect.signature(mstx.range_start).parameters:
            raise RecorderError(
                "this torch_npu is older than its MSTX domains; pip install 'torch_npu>=2.6'"
            )
        self._mstx = mstx

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (MstxRecorder, ())

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Start a range and return its number."""
        return self._mstx.range_start(name, domain=_DOMAIN)

    def exit(self, token: object) -> None:
        """End the range in the domain that it was started in."""
        self._mstx.range_end(token, domain=_DOMAIN)
