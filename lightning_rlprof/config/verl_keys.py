"""Table of verl's keys, old and new, and the rlprof keys that they become.

Translate a value of verl to values of rlprof, by dotted key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_STAGES = {
    "rollout_generate": "actor_generate",
    "ref_compute_log_prob": "reference_compute_log_prob",
}


def interval(value: Any) -> Mapping[str, Any]:
    """Read the SFT trainer's pair of steps: both ends included, negative is off.

    Anything but a pair is left to validation.
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


def contents(value: Any) -> dict[str, Any]:
    """Read what torch.profiler records; an empty list is host and device, as verl's code has it."""
    if not value:
        return {}
    activities = {"cpu", "cuda", "npu"} & set(value)
    keys = {
        "integrated.profile_with_memory": "memory" in value,
        "integrated.profile_record_shapes": "shapes" in value,
        "integrated.profile_with_module": "module" in value,
        "with_stack": "stack" in value,
    }
    if activities:  # verl records the host when only details are asked for
        keys["integrated.profile_with_cpu"] = "cpu" in activities
        keys["integrated.profile_with_npu"] = activities != {"cpu"}
    return keys


def npu_contents(value: Any) -> Mapping[str, Any]:
    """Read what torch_npu's profiler records; without the device there are no markers."""
    keys = contents(value)
    markers = {"integrated.mstx": False}
    return keys | (markers if keys.get("integrated.profile_with_npu") is False else {})


def npu_device(value: Any) -> Mapping[str, Any]:
    """Read whether the device is recorded, in verl's old options; without it, no markers."""
    markers = {"integrated.mstx": False} if value is False else {}
    return {"integrated.profile_with_npu": value, **markers}


def device(value: Any) -> Mapping[str, Any]:
    """Read the trainer's device: which of `OLD_TOOLS` it means depends on the rest of the file."""
    return {}


def every_rank(value: Any) -> Mapping[str, Any]:
    """Read whether a role is captured on all ranks; if not, its list of ranks says on which."""
    return {} if value is False else {f"roles.{ROLE}.ranks": "all" if value is True else value}


def first_token(value: Any) -> Mapping[str, Any]:
    """Read the first token of a capture; its end is another key of verl, see `end_of_tokens`."""
    return {"tokens[0]": value}


def end_of_tokens(value: Any) -> Mapping[str, Any]:
    """Read the first token after a capture."""
    return {"tokens[1]": value}


ROLE = "<role>"
"""Stands in a spelling for each place of `ROLES`."""

ANYTHING = "anything"
"""In ``accepts``: every value is fine, the key has no meaning here."""

SCHEDULE = "torch_profiler.schedule"
"""Our block of keys that count together, per role and only with ``active`` above 0."""

ROLES: dict[str, tuple[str, ...]] = {
    "actor_rollout_ref": ("actor", "rollout", "reference"),
    "actor_rollout_ref.actor": ("actor",),
    "actor_rollout_ref.rollout": ("rollout",),
    "actor_rollout_ref.ref": ("reference",),
    "actor": ("actor",),
    "rollout": ("rollout",),
    "ref": ("reference",),
    "critic": ("critic",),
    "reward_model": ("reward",),
    "reward.reward_model": ("reward",),
    "": ("actor",),
}
"""Where verl keeps a role's ``profiler`` block, and the roles it speaks for. The empty place is the
SFT trainer's; the shared block comes first, so that a role's own block is laid over it."""

TOOLS: dict[str, dict[str, Any]] = {
    "nsys": {"tools": ["nsight"]},
    "torch": {"tools": ["torch_profiler"]},
    "torch_memory": {"tools": ["memory"], "memory.level": "snapshot"},
    # verl writes databases with markers on Ascend, and nothing else
    "npu": {"integrated.mstx": True, "integrated.profile_export_type": "db"},
}
"""verl's ``tool`` and what it says in our keys."""

OLD_TOOLS: dict[str, dict[str, Any]] = {
    "nsys": TOOLS["nsys"],
    "npu": {"integrated.mstx": True},  # its reports were text still
}
"""What a tool says in our keys where verl's file names none: in verl up to 0.5.

There ``trainer.device`` decides: ``npu`` is Ascend, anything else Nsight Systems.
"""

NSIGHT_GUIDE = (
    "trainer.profile_steps",
    "trainer.profile_continuous_steps",
    "global_profiler.discrete",
    f"{ROLE}.profiler.discrete",
)
"""Keys of verl's Nsight guide: where a file names no tool, they choose one of `OLD_TOOLS`."""

LATER = ("precision_debugger",)
"""Tools of verl that are refused by name."""


@dataclass(frozen=True)
class Spelling:
    """One key of another framework and what it means here.

    Attributes:
        theirs: Dotted key; ``<role>`` stands for each place of `ROLES`, a last ``*`` for every key.
        ours: Dotted key of rlprof, or several by commas; empty without one.
        reads: Turns the value into ours by dotted key, where it is not taken as it is.
        tool: The key counts only when this tool of verl is the selected one.
        accepts: Values that change nothing. Without a key of rlprof, any other is refused.
        items: Words that the value, a list, may hold.
        instead: What to do, if any other value is refused and rlprof has another way.
    """

    theirs: str
    ours: str = ""
    reads: Callable[[Any], Mapping[str, Any]] | None = None
    tool: str | None = None
    accepts: tuple[Any, ...] | str = ()
    items: tuple[str, ...] = ()
    instead: str = ""


def _nsys(place: str) -> tuple[Spelling, ...]:
    return (
        Spelling(f"{place}.controller_nsight_options", "nsight.controller"),
        Spelling(f"{place}.worker_nsight_options", "nsight.worker"),
    )


_CALLABLE = "pass on_finish=function to ProfilerCallback or start_session"


def _hooks(place: str) -> tuple[Spelling, ...]:
    return (
        Spelling(f"{place}._target_", accepts=ANYTHING),
        Spelling(f"{place}.save_path", "integrated.profile_save_path"),
        Spelling(f"{place}.relocate_results", accepts=ANYTHING),
        Spelling(f"{place}.finish_hook_cmd", accepts=("",), instead=_CALLABLE),
        Spelling(f"{place}.finish_hook_all_ranks", accepts=ANYTHING),
        Spelling(f"{place}.finish_hook_ranks", accepts=ANYTHING),
    )


def _tokens(tool: str) -> tuple[Spelling, ...]:
    place = f"{ROLE}.profiler.tool_config.{tool}"
    return (
        Spelling(f"{place}._target_", accepts=ANYTHING),
        Spelling(f"{place}.name", accepts=ANYTHING),
        Spelling(f"{place}.discrete", f"roles.{ROLE}.discrete", tool=tool),
        Spelling(f"{place}.profile_token_start", "tokens", first_token, tool=tool),
        Spelling(f"{place}.profile_token_end", "tokens", end_of_tokens, tool=tool),
    )


def _memory(place: str) -> tuple[Spelling, ...]:
    tool = "torch_memory"
    return (
        Spelling(f"{place}._target_", accepts=ANYTHING),
        Spelling(f"{place}.name", accepts=ANYTHING),
        Spelling(f"{place}.trace_alloc_max_entries", "memory.max_entries", tool=tool),
        Spelling(f"{place}.stack_depth", "memory.stack_depth", tool=tool),
        Spelling(f"{place}.memory_snapshot_num_steps", tool=tool, accepts=(1,)),
        Spelling(f"{place}.context", tool=tool, accepts=("all",)),
        Spelling(f"{place}.stacks", tool=tool, accepts=("all",)),
        Spelling(f"{place}.kw_args", tool=tool, accepts=({},)),
    )


def _schedule(place: str) -> tuple[Spelling, ...]:
    keys = ("skip_first", "wait", "warmup", "active", "repeat")
    return tuple(Spelling(f"{place}.{key}", f"{SCHEDULE}.{key}", tool="torch") for key in keys)


_WITH = "integrated.profile_with_*"
_OPTIONS = "trainer.npu_profile.options"
_WITH_STACK = f"{_WITH}, with_stack"
_GLOBAL = "global_profiler"
_NSYS = f"{_GLOBAL}.global_tool_config.nsys"
_ROLE = f"{ROLE}.profiler"
_NPU = f"{_ROLE}.tool_config.npu"
_TORCH = f"{_ROLE}.tool_config.torch"

_OLD = (
    Spelling("trainer.device", "tools", device),
    Spelling("trainer.profile_steps", "steps"),
    Spelling("trainer.profile_continuous_steps", "profile_continuous_steps"),
    *_nsys("trainer"),
    Spelling("trainer.profile_interval", "integrated.profile_step_*", interval),
    Spelling(f"{_OPTIONS}.save_path", "integrated.profile_save_path", tool="npu"),
    Spelling(f"{_OPTIONS}.roles", "integrated.stage", stages, tool="npu"),
    Spelling(f"{_OPTIONS}.level", "integrated.profile_level", tool="npu"),
    Spelling(f"{_OPTIONS}.with_memory", "integrated.profile_with_memory", tool="npu"),
    Spelling(f"{_OPTIONS}.record_shapes", "integrated.profile_record_shapes", tool="npu"),
    Spelling(f"{_OPTIONS}.with_npu", "integrated.profile_with_npu", npu_device, tool="npu"),
    Spelling(f"{_OPTIONS}.with_cpu", "integrated.profile_with_cpu", tool="npu"),
    Spelling(f"{_OPTIONS}.with_module", "integrated.profile_with_module", tool="npu"),
    Spelling(f"{_OPTIONS}.with_stack", "with_stack", tool="npu"),
    Spelling(f"{_OPTIONS}.analysis", "integrated.profile_analysis", tool="npu"),
    Spelling(f"{_ROLE}.discrete", f"roles.{ROLE}.discrete"),
    Spelling(f"{ROLE}.profile.use_profile", accepts=(False,)),
    Spelling(f"{ROLE}.profile.*", accepts=ANYTHING),
)
_NEW = (
    Spelling(f"{_GLOBAL}.tool", "tools"),
    Spelling(f"{_GLOBAL}.steps", "steps"),
    Spelling(f"{_GLOBAL}.profile_continuous_steps", "profile_continuous_steps"),
    Spelling(f"{_GLOBAL}.discrete", "discrete"),  # in verl's guide, though its code knows it not
    *_hooks(_GLOBAL),
    Spelling(f"{_NSYS}._target_", accepts=ANYTHING),
    Spelling(f"{_NSYS}.discrete", "discrete", tool="nsys"),
    *_nsys(_NSYS),
    *_memory(f"{_GLOBAL}.global_tool_config.torch_memory"),
    Spelling(f"{_GLOBAL}.global_tool_config.precision_debugger.*", accepts=ANYTHING),
    Spelling(f"{_ROLE}.tool", "tools"),
    Spelling(f"{_ROLE}.enable", f"roles.{ROLE}.enable"),
    Spelling(f"{_ROLE}.all_ranks", f"roles.{ROLE}.ranks", every_rank),
    Spelling(f"{_ROLE}.ranks", f"roles.{ROLE}.ranks"),
    *_hooks(_ROLE),
    *_tokens("nsys"),
    *_tokens("npu"),
    Spelling(
        f"{_NPU}.contents",
        _WITH_STACK,
        npu_contents,
        tool="npu",
        items=("npu", "cpu", "memory", "shapes", "module", "stack"),
    ),
    Spelling(f"{_NPU}.level", "integrated.profile_level", tool="npu"),
    Spelling(f"{_NPU}.analysis", "integrated.profile_analysis", tool="npu"),
    *_tokens("torch"),
    Spelling(
        f"{_TORCH}.contents",
        _WITH_STACK,
        contents,
        tool="torch",
        items=("cuda", "cpu", "memory", "shapes", "stack", "module"),
    ),
    Spelling(f"{_TORCH}.step_start", tool="torch", accepts=(0,)),
    Spelling(f"{_TORCH}.step_end", tool="torch"),
    Spelling(f"{_TORCH}.manual_save", accepts=ANYTHING),
    Spelling(f"{_TORCH}.schedule._target_", accepts=ANYTHING),
    Spelling(f"{_TORCH}.schedule.name", accepts=ANYTHING),
    *_schedule(f"{_TORCH}.schedule"),
    *_memory(f"{_ROLE}.tool_config.torch_memory"),
    Spelling(f"{_ROLE}.tool_config.precision_debugger.*", accepts=ANYTHING),
)

SPELLINGS: tuple[Spelling, ...] = (*_OLD, *_NEW)
"""Every key of verl that concerns profiling; `docs/config.md` shows this table."""

_BY_KEY = {row.theirs: row for row in SPELLINGS}

BLOCKS: frozenset[str] = frozenset(
    ".".join(parts[:length])
    for parts in (key.split(".") for key in _BY_KEY)
    for length in range(1, len(parts))
)
"""Every dotted place that holds keys of the table; ``null`` and mappings may stand there."""


def lookup(theirs: str) -> Spelling | None:
    """The row of a dotted key in which ``<role>`` stands for the role's place.

    Example::

        >>> lookup("trainer.profile_steps").ours
        'steps'
    """
    place = theirs.rpartition(".")[0]
    return _BY_KEY.get(theirs) or _BY_KEY.get(f"{place}.*")
