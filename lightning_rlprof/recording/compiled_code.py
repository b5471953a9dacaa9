"""Leave out marks in code that torch.compile traces, and remember which, so that the run says so.

A mark inside a graph would break it, which ``fullgraph=True`` refuses.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from lightning_rlprof.records.notes import Code, Remark
from lightning_rlprof.system.post_import import when_imported

is_compiling: Callable[[], bool] = bool
"""Tells whether torch.compile traces the caller: no, until its front end is imported."""

RULE = "wrap: "
"""What is before the target of a rule, unlike the name of a mark in code, for `leave_out`."""

NOT_MARKED = (
    "inside torch.compile, so not marked: {}. "
    "Mark the call of the compiled module or function instead"
)

_left_out: set[str] = set()


def leave_out(what: str) -> bool:
    """Remember what a mark was left out of; return True. It runs as the caller is traced.

    Args:
        what: A constant for torch.compile, which refuses another one.
    """
    _left_out.add(what)
    return True


def is_left_out(what: str) -> bool:
    """Return whether a mark was left out of something."""
    return what in _left_out


def remark() -> list[Remark]:
    """Say which marks in code were left out; nothing if all were made.

    They are those of the process: what is compiled in one run may be called in the next.

    Example::

        >>> remark()
        []
    """
    names = sorted(name for name in _left_out if not name.startswith(RULE))
    return [Remark(Code.COMPILED_CODE, NOT_MARKED.format(", ".join(names)))] if names else []


def when_traced(function: Callable[..., Any], stand_in: Callable[..., Any]) -> None:
    """Let torch.compile trace another function in place of one that makes or writes marks."""
    # A version of torch that refuses the other function runs this one outside of the graph.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]

    def register(module: ModuleType) -> None:
        import torch

        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(stand_in)

    when_imported("torch._dynamo", register)


def no_marker(what: str) -> Callable[..., Any]:
    """Return a function that stands for one that makes markers."""

    def made(target: Any, /, **options: Any) -> Any:
        if isinstance(target, str):
            leave_out(what)
            return nullcontext()
        return target

    return made


def nothing(*given: object, **numbers: object) -> None:
    """Do nothing, in place of what writes marks."""


def _prepare(module: ModuleType) -> None:
    global is_compiling
    import torch

    torch.compiler.assume_constant_result(leave_out)
    is_compiling = torch.compiler.is_compiling


when_imported("torch._dynamo", _prepare)
