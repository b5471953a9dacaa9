"""A strict fake of ``torch_npu.npu.mstx``; the real one needs CANN and an Ascend NPU.

It takes the arguments of torch_npu's own signatures and nothing else, hands out range numbers as
MSTX does, and refuses what the real one loses in silence: a range ended in another domain than it
was started in, ended twice, or never started.
"""

import sys
from types import ModuleType
from typing import Any

import pytest


class Mstx:
    """Records its calls; like torch_npu's, a class of static methods."""

    calls: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.calls = calls = []
        running: dict[int, str] = {}

        def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
            if not isinstance(message, str) or "," in domain:
                raise TypeError(f"MSTX refuses {message!r} in {domain!r}")
            number = len(calls) + 1
            running[number] = domain
            calls.append(("start", number, message, stream, domain))
            return number

        def range_end(range_id: int, domain: str = "default") -> None:
            if running.pop(range_id, None) != domain:
                raise ValueError(f"range {range_id} does not run in {domain!r}")
            calls.append(("end", range_id, domain))

        self.range_start = range_start
        self.range_end = range_end
        self.running = running


def install(monkeypatch: pytest.MonkeyPatch) -> Mstx:
    """Let ``from torch_npu.npu import mstx`` find a new fake for the rest of the test."""
    package, npu = ModuleType("torch_npu"), ModuleType("torch_npu.npu")
    mstx = Mstx()
    package.npu = npu  # type: ignore[attr-defined]
    npu.mstx = mstx  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setitem(sys.modules, "torch_npu.npu", npu)
    return mstx
