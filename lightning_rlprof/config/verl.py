"""verl's profiling keys, old and new: the table of them, how to find and how to translate them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rlprof.config.omegaconf import plain
from lightning_rlprof.config.validation import near, near_match
from lightning_rlprof.errors import ConfigError

_STAGES = {
    "rollout_generate": "actor_generate",
    "ref_compute_log_prob": "reference_compute_log_prob",
}
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
    # On Ascend, verl writes databases with markers, and nothing else.
    "npu": {"integrated.mstx": True, "integrated.profile_export_type": "db"},
}
"""verl's ``tool`` and what it says in our keys."""

OLD_TOOLS: dict[str, dict[str, Any]] = {
    "nsys": TOOLS["nsys"],
    "npu": {"integrated.mstx": True},  # Its reports were still text.
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

_CALLABLE = "pass on_finish=function to ProfilerCallback or start_session"
_WITH = "integrated.profile_with_*"
_OPTIONS = "trainer.npu_profile.options"
_WITH_STACK = f"{_WITH}, with_stack"
_GLOBAL = "global_profiler"
_NSYS = f"{_GLOBAL}.global_tool_config.nsys"
_ROLE = f"{ROLE}.profiler"
_NPU = f"{_ROLE}.tool_config.npu"
_TORCH = f"{_ROLE}.tool_config.torch"
_TOOL = re.compile(r"tool_config\.([^.]+)")
_HELD = ("profiler", "profile")


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
    if activities:  # If only details are asked for, verl records the host.
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
    # It is in verl's guide, although verl's code does not know it.
    Spelling(f"{_GLOBAL}.discrete", "discrete"),
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


@dataclass(frozen=True)
class Found:
    """A profiling key of verl as written, its row and, below a role, the place of that role.

    Below the block of a tool it may be unknown; ``wrong`` then says so, for where the tool counts.
    """

    key: str
    row: Spelling
    value: Any
    place: str | None
    wrong: str = ""


def find(data: Mapping[str, Any]) -> list[Found]:
    """Find every profiling key, unchanged and unchecked but for its name.

    Only ``profiler`` blocks, ``global_profiler`` and the trainer's ``device``, ``profile_*``,
    ``*nsight*`` and ``npu_profile*`` are looked at: ``trainer.profiler`` is Lightning's, and a
    ``profiler`` block at the top whose ``_target_`` is not of verl belongs to another library.

    Raises:
        ConfigError: An unknown key, or a value where a block of keys belongs, outside of the blocks
            of single tools; `refuse_unknown` is for these.
    """
    return [*_trainer(data), *_global(data), *_roles(data)]


def refuse_unknown(found: Sequence[Found], tool: str | None) -> None:
    """Refuse what is unknown in the block of the selected tool, or in one that is nearly its name.

    Raises:
        ConfigError: There is such a key.
    """
    for item in found:
        if item.wrong and near_match(item.row.tool or "", [tool or ""], 0.8):
            raise ConfigError(item.wrong)


def by_role(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Sort what stands below roles by role; a role's own block wins over one that it shares."""
    roles: dict[str, dict[str, Found]] = {}
    for item in found:
        for name in ROLES[item.place] if item.place is not None else ():
            roles.setdefault(name, {})[item.row.theirs] = item
    return {name: list(items.values()) for name, items in roles.items()}


def _trainer(data: Mapping[str, Any]) -> Iterator[Found]:
    trainer = _block(data, "trainer")
    for key in map(str, trainer):
        if key.startswith(("profile_", "npu_profile")) or "nsight" in key or key == "device":
            yield from _leaves(f"trainer.{key}", f"trainer.{key}", plain(trainer[key]), None)


def _global(data: Mapping[str, Any]) -> Iterator[Found]:
    # For a while, verl's Nsight guide had `profiler` at the top, with the keys of
    # `global_profiler`.
    for key in ("global_profiler", *(["profiler"] if "steps" in _block(data, "profiler") else [])):
        yield from _leaves(key, "global_profiler", plain(data.get(key)), None)


def _roles(data: Mapping[str, Any]) -> Iterator[Found]:
    for place in ROLES:
        node = data
        for part in filter(None, place.split(".")):
            node = _block(node, part)
        for block in _HELD:
            if block in node and (place or _is_a_role(node[block])):
                key = f"{place}.{block}".removeprefix(".")
                yield from _leaves(key, f"{ROLE}.{block}", plain(node[block]), place)


def _is_a_role(block: Any) -> bool:
    """Tell whether a block at the top is; `profile: true` is our own key in the wrong place."""
    target = block.get("_target_", "verl.") if isinstance(block, Mapping) else ""
    return str(target).startswith("verl.") and "steps" not in block


def _block(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = data.get(key)
    return block if isinstance(block, Mapping) else {}


def _leaves(key: str, pattern: str, value: Any, place: str | None) -> Iterator[Found]:
    row = lookup(pattern)
    if row:
        yield Found(key, row, value, place)
    elif pattern in BLOCKS and isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", f"{pattern}.{name}", below, place)
    elif pattern not in BLOCKS or value is not None:
        wrong, tool = _unknown(key, pattern), _TOOL.search(pattern)
        if not tool:
            raise ConfigError(wrong)
        yield Found(key, Spelling(pattern, tool=tool[1]), value, place, wrong)


def _unknown(key: str, pattern: str) -> str:
    here, _, word = pattern.rpartition(".")
    if pattern in BLOCKS:
        return f"{key} is a block of keys, not a value"
    below = [row.theirs[len(here) + 1 :] for row in SPELLINGS if row.theirs.startswith(f"{here}.")]
    names = list(dict.fromkeys(name.partition(".")[0] for name in below))
    return f"{key} is not a key{near(word, names)} (allowed: {', '.join(names)})"


@dataclass
class Translation:
    """Our keys by dotted name, and for each the key of verl that it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, ours: str, value: Any, theirs: str) -> None:
        """Set a key; a second, different value is refused.

        A process, in which roles may live together, has one capture.
        """
        if ours in self.values and self.values[ours] != value:
            raise ConfigError(
                f"{self.origins[ours]} and {theirs} disagree: they mean {ours}="
                f"{self.values[ours]!r} and {value!r}; give the same or only one "
                "(different tools or contents per role are not supported yet)"
            )
        self.values[ours], self.origins[ours] = value, theirs


def translate(data: Mapping[str, Any]) -> Translation | None:
    """Our keys for the profiling keys in a mapping of verl, or None where it has none.

    Options of a tool that is not selected and blocks of a role that is off count for nothing, as in
    verl; so does ``null``, which everywhere means "inherit" or "default".

    Raises:
        ConfigError: An unknown key or tool, a feature that is not supported yet, two spellings that
            disagree.
    """
    if not (every := find(data)):
        return None
    found = [item for item in every if not item.wrong]
    common = [item for item in found if item.place is None]
    roles = by_role(found)
    enabled = [name for name, items in roles.items() if _enabled(items)]
    blocks = [roles[name] for name in enabled] if roles else [common]
    tool = _selected_tool(common, blocks) if _named(found) else _old_tool(found)
    refuse_unknown(every, tool)
    shared, own = Translation(), Translation()
    for item in common:
        _apply(item, tool, shared)
    for name, items in roles.items():
        _apply_role(name, items, tool, own)
        if name in enabled:
            for item in items:
                _apply(item, tool, own)
            if tool == "torch":
                _apply_schedule(items, own)
    out = Translation(shared.values | own.values, shared.origins | own.origins)
    _choose_tool(found, tool, out)
    _join_tokens(out)
    _complete(found, out)
    return out


def _value(items: Sequence[Found], last: str) -> Any:
    keys = (f"{ROLE}.profiler.{last}", f"global_profiler.{last}")
    return next((item.value for item in items if item.row.theirs in keys), None)


def _enabled(items: Sequence[Found]) -> bool:
    # The old spelling has no enable: a role takes part as soon as ranks are chosen for it.
    enable = _value(items, "enable")
    chosen = _value(items, "all_ranks") or _value(items, "ranks")
    return bool(chosen if enable is None else enable)


def _named(found: Sequence[Found]) -> list[str]:
    return [item.key for item in found if item.row.theirs.endswith(".tool")]


def _selected_tool(common: Sequence[Found], blocks: Sequence[Sequence[Found]]) -> str | None:
    tools: dict[str, str] = {}
    for items in blocks:
        for item in (*items, *common):
            if item.row.theirs.endswith(".tool") and item.value is not None:
                tools.setdefault(_known_tool(item), item.key)
                break
    if len(tools) > 1:
        given = " and ".join(f"{key}={tool!r}" for tool, key in tools.items())
        raise ConfigError(
            f"{given}: different tools per role are not supported, because roles may share a "
            "process and its one capture; choose one"
        )
    return next(iter(tools), None)


def _known_tool(item: Found) -> str:
    tool = str(item.value)
    if tool not in TOOLS:
        raise ConfigError(
            f"{item.key}={tool!r} is not a tool{near(tool, TOOLS)} (allowed: {', '.join(TOOLS)})"
        )
    return tool


def _apply(item: Found, tool: str | None, out: Translation) -> None:
    row, value = item.row, item.value
    elsewhere = row.theirs.endswith(".tool") or row.ours.startswith(("roles.", SCHEDULE))
    if value is None or elsewhere or (row.tool and row.tool != tool):
        return
    if row.accepts == ANYTHING or value in row.accepts:
        return
    if not row.ours:
        usual = " or ".join(repr(each) for each in (*row.accepts, None))
        instead = f", and {row.instead}" if row.instead else ""
        raise ConfigError(f"{item.key}={value!r} is not supported yet; set it to {usual}{instead}")
    if row.items:
        _check_items(item)
    for ours, said in _read(item).items():
        out.put(ours, said, item.key)


def _read(item: Found) -> Mapping[str, Any]:
    """Return our keys of one key of verl, and their values."""
    row = item.row
    return row.reads(item.value) if row.reads else {row.ours: item.value}


def _check_items(item: Found) -> None:
    allowed = ", ".join(item.row.items)
    if not isinstance(item.value, list):
        raise ConfigError(f"{item.key}={item.value!r} is not a list (allowed items: {allowed})")
    for word in map(str, item.value):
        if word not in item.row.items:
            raise ConfigError(
                f"{item.key} holds {word!r}{near(word, item.row.items)} (allowed: {allowed})"
            )


def _apply_schedule(items: Sequence[Found], out: Translation) -> None:
    """Apply the schedule of a role; without ``active`` it is none, whatever else it says."""
    counts = [item for item in items if item.value is not None and item.row.tool == "torch"]
    said = {item.row.ours.rpartition(".")[2]: item for item in counts}
    if "active" not in said or not said["active"].value:
        return
    schedule = {item.row.ours: item for item in counts if item.row.ours.startswith(SCHEDULE)}
    repeat = f"{SCHEDULE}.repeat"
    discrete = "discrete" in said and said["discrete"].value
    if not (discrete or (repeat in schedule and schedule[repeat].value)):
        schedule.pop(repeat, None)
        out.put(repeat, 1, said["active"].key)  # Unless configured, verl runs one cycle per step.
    for ours, item in schedule.items():
        out.put(ours, item.value, item.key)


def _apply_role(name: str, items: Sequence[Found], tool: str | None, out: Translation) -> None:
    keys = {"enable": (_enabled(items), f"{name}.profiler")}
    # As in verl, `all_ranks` wins.
    for item in sorted(items, key=lambda item: item.row.reads is every_rank):
        block, _, key = item.row.ours.rpartition(".")
        if block == f"roles.{ROLE}" and item.value is not None and item.row.tool in (None, tool):
            for value in _read(item).values():
                keys[key] = value, item.key
    for key, (value, theirs) in keys.items():
        out.put(f"roles.{name}.{key}", value, theirs)


def _join_tokens(out: Translation) -> None:
    """Make one key of the first token and the end, which are two keys of verl."""
    given = {key: out.values.pop(key) for key in ("tokens[0]", "tokens[1]") if key in out.values}
    if given:
        origins = ", ".join(out.origins.pop(key) for key in given)
        window = [given.get("tokens[0]", 0), given.get("tokens[1]")]
        out.values["tokens"], out.origins["tokens"] = window, origins


def _choose_tool(found: Sequence[Found], tool: str | None, out: Translation) -> None:
    named = _named(found)
    if named and not tool:  # In verl, `tool: null` profiles nothing.
        out.put("tools", [], named[0])
    keys = sorted(found, key=lambda item: item.row.theirs != "trainer.device")
    theirs = named or [item.key for item in keys]
    says = TOOLS if named else OLD_TOOLS
    for ours, value in says[tool].items() if tool else ():
        out.values.setdefault(ours, value)
        out.origins.setdefault(ours, theirs[0])


def _old_tool(found: Sequence[Found]) -> str | None:
    """The tool where verl's file names none: as in verl up to 0.5, that of the trainer's device.

    Mere presence of options says little, for verl's own file has those for Ascend and for Nsight
    Systems side by side. They choose only where the file does not say the device: Nsight Systems
    first, since without it verl runs on GPUs.
    """
    given = [item for item in found if item.value is not None]
    runs_on = next((item.value for item in given if item.row.theirs == "trainer.device"), None)
    ascend = any(item.row.tool == "npu" for item in given)
    nsight = any(item.row.ours.startswith("nsight.") or item.row.tool == "nsys" for item in given)
    old = any(item.row.theirs in NSIGHT_GUIDE for item in given)
    if not (nsight or ascend or old):
        return None
    return "npu" if (runs_on == "npu" if runs_on else ascend and not nsight) else "nsys"


def _complete(found: Sequence[Found], out: Translation) -> None:
    found = [item for item in found if item.row.theirs != "trainer.device"]
    if found and not {"steps", "integrated.profile_step_start"} & out.values.keys():
        steps = (item.key for item in found if item.row.ours == "steps")
        out.put("steps", [], next(steps, found[0].key))  # Without steps, verl profiles nothing.
