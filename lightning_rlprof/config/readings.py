"""Values of verl as values of ours: what a key of theirs says, by our dotted keys."""

from collections.abc import Mapping
from typing import Any

__all__ = ["contents", "either", "interval", "npu_contents", "npu_device", "stages", "union"]

_STAGES = {
    "rollout_generate": "actor_generate",
    "ref_compute_log_prob": "reference_compute_log_prob",
}


def interval(value: Any) -> Mapping[str, Any]:
    """Read the SFT trainer's pair of steps: both ends included, negative is off.

    What is no pair is left to validation.
    """
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)):
        return {"steps": value}
    start, end = value
    if start < 0:
        return {"steps": []}
    return {"integrated.profile_step_start": start, "integrated.profile_step_end": end + 1}


def stages(value: Any) -> Mapping[str, Any]:
    """Read a list of stages under our names."""
    if not isinstance(value, list):
        return {"integrated.stage": value}
    names = [_STAGES.get(name, name) if isinstance(name, str) else name for name in value]
    return {"integrated.stage": names}


def contents(value: Any) -> Mapping[str, Any]:
    """Read what torch.profiler records; an empty list is host and device, as verl's code has it."""
    if not value:
        return {}
    return _watched(value) | {"torch_profiler.with_stack": "stack" in value}


def npu_contents(value: Any) -> Mapping[str, Any]:
    """Read what torch_npu's profiler records; without the device there are no markers."""
    keys = _watched(value) | {"npu.with_stack": "stack" in value} if value else {}
    if keys.get("integrated.profile_with_npu") is False:
        keys["integrated.mstx"] = False
    return keys


def npu_device(value: Any) -> Mapping[str, Any]:
    """Read whether the device is recorded, in verl's old options; without it, no markers."""
    markers = {"integrated.mstx": False} if value is False else {}
    return {"integrated.profile_with_npu": value, **markers}


def _watched(value: Any) -> dict[str, Any]:
    activities = {"cpu", "cuda", "npu"} & set(value)
    keys = {
        "integrated.profile_with_memory": "memory" in value,
        "integrated.profile_record_shapes": "shapes" in value,
        "integrated.profile_with_module": "module" in value,
    }
    if activities:  # verl records the host when only details are asked for
        keys["integrated.profile_with_cpu"] = "cpu" in activities
        keys["integrated.profile_with_npu"] = activities != {"cpu"}
    return keys


def either(one: Any, other: Any) -> Any:
    """Unite a switch of two roles: on where one of them has it on."""
    return one or other


def union(one: Any, other: Any) -> Any:
    """Unite the ranks of two roles; what is no list is left to validation.

    Example::

        >>> union([0, 1], [1, 2])
        [0, 1, 2]
    """
    if not (isinstance(one, list) and isinstance(other, list)):
        return other if isinstance(one, list) else one
    return [*one, *(rank for rank in other if rank not in one)]
