"""Write stopped traces, and compress them off the training thread, in bounded memory.

Name trace files by window, role, rank, place in the parallel grid and process.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed
from isal import isal_zlib

from lightning_rlprof.errors import described
from lightning_rlprof.records.notes import Code, Notes

# Underscores part the fields of a name; the folder's and the role's own must not look like them.
_FOREIGN = re.compile(r"[^0-9A-Za-z.=+-]+")
_LONGEST = 80
_MEGATRON = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
}
# DeviceMesh describes the group of each of its dimensions; these are the usual names of them.
_MESH = {
    "tp": ("mesh_tp", "mesh_tensor_parallel"),
    "pp": ("mesh_pp", "mesh_pipeline_parallel"),
    "dp": ("mesh_dp", "mesh_data_parallel"),
    "cp": ("mesh_cp", "mesh_context_parallel"),
}


def label(text: str) -> str:
    """Return a text as one field of a file name: ``[0-9A-Za-z.=+-]``, 80 characters at most.

    Example::

        >>> label("update actor/2")
        'update-actor-2'
    """
    return _FOREIGN.sub("-", text)[:_LONGEST]


def trace_name(window: str, role: str, rank: int, world_size: int, batches: str = "") -> str:
    """Return the name of a trace of this process; TensorBoard's plugin needs its ending.

    Args:
        window: Name of the window's folder.
        role: Role of the process.
        rank: Its global rank.
        world_size: Number of ranks.
        batches: The mini-batches in it (``mb3-4``), where a window has several traces.

    Example::

        >>> trace_name("step-000003", "value_model", 3, 8)  # doctest: +ELLIPSIS
        'step-000003_value-model_rank3-of-8_pid...pt.trace.json.gz'
    """
    grid = "-".join(f"{name}{place}" for name, place in topology().items())
    fields = [label(window), label(role), f"rank{rank}-of-{world_size}", grid]
    fields += [f"pid{os.getpid()}", batches]
    return "_".join(field for field in fields if field) + ".pt.trace.json.gz"


def unused(path: Path) -> Path:
    """Return the path, or if it is taken the first of ``…-2.pt.trace.json.gz``, ``-3``, and so on.

    A plain file beside it takes it, too: that is a trace on its way into it.

    Example::

        >>> unused(Path("step-000003.pt.trace.json.gz"))
        PosixPath('step-000003.pt.trace.json.gz')
    """
    stem, dot, suffix = path.name.partition(".pt.trace.")
    number = 1
    while path.exists() or path.with_suffix("").exists():
        number += 1
        path = path.with_name(f"{stem}-{number}{dot}{suffix}")
    return path


def topology() -> Mapping[str, int]:
    """Return this process's place along each axis of parallelism that Megatron or DeviceMesh made.

    Keys are ``tp``, ``pp``, ``dp`` and ``cp``; an axis that is not set up is left out. Nothing is
    imported for it, and nothing is raised: a name without a place is better than no trace.
    """
    with suppress(Exception):
        if found := _megatron():
            return found
    with suppress(Exception):
        return _meshes()
    return {}


def _megatron() -> dict[str, int]:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    sizes = {axis: _ask(state, f"get_{name}_world_size") for axis, name in _MEGATRON.items()}
    places = {axis: _ask(state, f"get_{name}_rank") for axis, name in _MEGATRON.items()}
    # Context parallelism is the one axis that most trainings do not have.
    return {
        axis: place
        for axis, place in places.items()
        if place is not None and (axis != "cp" or (sizes[axis] or 1) > 1)
    }


def _ask(state: object, question: str) -> int | None:
    with suppress(Exception):  # an axis that this version of Megatron does not know
        return int(getattr(state, question)())
    return None


def _meshes() -> dict[str, int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    from torch.distributed.distributed_c10d import _world

    groups = {group.group_desc: group for group in _world.pg_map}
    return {
        axis: torch.distributed.get_rank(groups[name])
        for axis, names in _MESH.items()
        for name in names
        if name in groups
    }


log = logging.getLogger(__name__)

# Of a trace of 400 MB, level 1 makes 1/12 at 1,150 MB/s; 0 makes 1/10 no faster, 3 no less at 180.
# Python's gzip makes 1/17 at 52 MB/s (its level 6), torch's own export 1/19 at 9 MB/s.
_LEVEL = 1
_GZIP = 31  # zlib's way to ask for gzip's header and check sum
# Between two blocks it waits for the interpreter, which a busy training gives up every 5 ms.
_BLOCK = 4 << 20
_TAIL = 64
_KERNEL = b'"cat": "kernel"'


class TraceExporter:
    """Write traces on the calling thread, and compress them on threads that end with them.

    torch holds the interpreter's lock while it writes a trace (322 of 327 ms for 250,000 events).
    Another thread would stop the training as well, only later, in a step outside the capture.
    Written at once, the events (1.4 kB each) are freed before the next capture begins.
    Compressing needs no lock, reads 4 MiB at a time, and is faster than the next trace comes.

    Args:
        note: Tells the run's reader what went wrong; from any thread.
        release: Frees what a list holds.
    """

    def __init__(self, note: Notes, release: Callable[[list[Any]], None]) -> None:
        self._note, self._release = note, release
        self._last: threading.Thread | None = None
        self._told = False

    def write(self, held: list[Any], path: Path, *, kernels: bool) -> None:
        """Write a trace; what fails is noted.

        Args:
            held: The stopped torch profiler, alone in a list that is emptied when it is written.
            path: Where to; a number is added to a name that is taken.
            kernels: It should hold some, and its reader is told where it does not.
        """
        path = unused(path)
        plain = path.with_suffix("")
        try:
            held[0].export_chrome_trace(str(plain))
        except Exception as error:
            self._lost(path, error)
            return
        finally:
            self._release(held)
        self._last = threading.Thread(
            target=self._compress, args=(plain, path, kernels, self._last), name="rlprof-compress"
        )
        self._last.start()

    def finish(self) -> None:
        """Wait until everything is compressed."""
        if self._last is not None and self._last.is_alive():
            log.info("waiting until all traces are compressed")
            self._last.join()

    def _compress(
        self, plain: Path, path: Path, kernels: bool, before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        part = path.with_name(f"{path.name}.part")
        try:
            found = compress(plain, part, needle=_KERNEL if kernels else b"")
            part.replace(path)
        except Exception as error:
            self._lost(path, error)
        else:
            if not found:
                self._tell_no_kernel(path)
        finally:
            for leftover in (plain, part):
                with suppress(OSError):  # the folder itself may be gone
                    leftover.unlink()

    def _lost(self, path: Path, error: Exception) -> None:
        text = f"{path.name} was not written ({described(error)})"
        self._note(Code.TRACE_LOST, text, trace=path.name)

    def _tell_no_kernel(self, path: Path) -> None:
        """Note it once: a run whose first trace has no kernel seldom has one in the others."""
        if self._told:
            return
        self._told = True
        text = (
            f"{path.name} has no kernels: the device was idle, or another profiler in "
            "this process uses CUPTI (an nsys, an NVTX_INJECTION64_PATH, a monitor like DCGM)"
        )
        self._note(Code.CAPTURE_WITHOUT_KERNELS, text, trace=path.name)


def compress(plain: Path, part: Path, needle: bytes = b"") -> bool:
    """Compress a trace block by block; tell whether ``needle`` is in it.

    Raises:
        OSError: It cannot be read or written, or ends in the middle: torch does not tell when it
            runs out of disk.
    """
    found, tail = not needle, b""
    packer = isal_zlib.compressobj(_LEVEL, wbits=_GZIP)
    with plain.open("rb") as source, part.open("wb") as target:
        while block := source.read(_BLOCK):
            target.write(packer.compress(block))
            found = found or needle in tail + block
            tail = (tail + block[-_TAIL:])[-_TAIL:]
        target.write(packer.flush())
    if not tail.rstrip().endswith(b"}"):
        raise OSError("the file is truncated; is the disk full?")
    return found
