"""Name trace files by window, role, rank, place in the parallel grid and process."""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed

__all__ = ["label", "topology", "trace_name", "unused"]

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
    """Return the name of a trace of this process.

    Args:
        window: Name of the window's folder.
        role: Role of the process.
        rank: Its global rank.
        world_size: Number of ranks.
        batches: The mini-batches in it (``mb3-4``), where a window has several traces.

    Example::

        >>> trace_name("step-000003", "value_model", 3, 8)  # doctest: +ELLIPSIS
        'step-000003_value-model_rank3-of-8_pid...trace.json.gz'
    """
    grid = "-".join(f"{name}{place}" for name, place in topology().items())
    fields = [label(window), label(role), f"rank{rank}-of-{world_size}", grid]
    fields += [f"pid{os.getpid()}", batches]
    return "_".join(field for field in fields if field) + ".trace.json.gz"


def unused(path: Path) -> Path:
    """Return the path, or where it is taken the first of ``…-2.trace.json.gz``, ``-3`` and so on.

    A plain file beside it takes it, too: that is a trace on its way into it.

    Example::

        >>> unused(Path("step-000003.trace.json.gz"))
        PosixPath('step-000003.trace.json.gz')
    """
    stem, dot, suffix = path.name.partition(".trace.")
    number = 1
    while path.exists() or path.with_suffix("").exists():
        number += 1
        path = path.with_name(f"{stem}-{number}{dot}{suffix}")
    return path


def topology() -> Mapping[str, int]:
    """Return this process's place along each axis of parallelism that Megatron or DeviceMesh made.

    Keys are ``tp``, ``pp``, ``dp`` and ``cp``; an axis that nobody set up is left out. Nothing is
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
