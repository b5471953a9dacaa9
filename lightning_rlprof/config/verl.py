"""Translate a configuration of verl, whole or in part, through the table of spellings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rlprof.config.omega import plain
from lightning_rlprof.config.section import near
from lightning_rlprof.config.spellings import (
    ANYTHING,
    BLOCKS,
    LATER,
    ROLE,
    ROLES,
    SPELLINGS,
    TOOLS,
    Spelling,
    lookup,
)
from lightning_rlprof.errors import ConfigError

__all__ = ["Translation", "translate"]

_HELD = ("profiler", "profile")


@dataclass(frozen=True)
class _Found:
    """A profiling key of verl as written, its row and, below a role, the place of that role."""

    key: str
    row: Spelling
    value: Any
    place: str | None


@dataclass
class Translation:
    """Our keys by dotted name, and for each the key of verl that it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, ours: str, value: Any, theirs: str) -> None:
        """Set a key; a second, different value is refused because a process has one capture."""
        if self.values.get(ours, value) != value:
            raise ConfigError(
                f"{self.origins[ours]} and {theirs} disagree: they mean {ours}="
                f"{self.values[ours]!r} and {value!r}; give the same or only one "
                "(different tools or contents per role are not supported yet)"
            )
        self.values[ours], self.origins[ours] = value, theirs


def translate(data: Mapping[str, Any]) -> Translation | None:
    """Our keys for the profiling keys in a mapping of verl, or None where it has none.

    Only ``profiler`` blocks, ``global_profiler`` and ``trainer.*profile*|*nsight*`` are looked at.
    Options of a tool that is not selected and blocks of a role that is off count for nothing, as in
    verl; so does ``null``, which everywhere means "inherit" or "default".

    Raises:
        ConfigError: An unknown key or tool, a feature that is not supported yet, two spellings that
            disagree.
    """
    found = [*_trainer(data), *_global(data), *_roles(data)]
    if not found:
        return None
    common = [item for item in found if item.place is None]
    roles = _by_role(found)
    enabled = [name for name, items in roles.items() if _enabled(items)]
    tool = _selected_tool(common, [roles[name] for name in enabled] if roles else [common])
    shared, own = Translation(), Translation()
    for item in common:
        _apply(item, tool, shared)
    for name, items in roles.items():
        _apply_role(name, items, tool, own)
        for item in items if name in enabled else ():
            _apply(item, tool, own)
    out = Translation(shared.values | own.values, shared.origins | own.origins)
    _complete(found, tool, out)
    return out


def _trainer(data: Mapping[str, Any]) -> Iterator[_Found]:
    trainer = _block(data, "trainer")
    for key in map(str, trainer):
        if "profile" in key or "nsight" in key:
            yield from _leaves(f"trainer.{key}", f"trainer.{key}", plain(trainer[key]), None)


def _global(data: Mapping[str, Any]) -> Iterator[_Found]:
    block = plain(data.get("global_profiler"))
    yield from _leaves("global_profiler", "global_profiler", block, None)


def _roles(data: Mapping[str, Any]) -> Iterator[_Found]:
    for place in ROLES:
        node = data
        for part in filter(None, place.split(".")):
            node = _block(node, part)
        for block in _HELD:
            if block in node:
                key = f"{place}.{block}".removeprefix(".")
                yield from _leaves(key, f"{ROLE}.{block}", plain(node[block]), place)


def _block(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = data.get(key)
    return block if isinstance(block, Mapping) else {}


def _leaves(key: str, pattern: str, value: Any, place: str | None) -> Iterator[_Found]:
    row = lookup(pattern)
    if row:
        yield _Found(key, row, value, place)
    elif pattern in BLOCKS and isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", f"{pattern}.{name}", below, place)
    elif pattern not in BLOCKS or value is not None:
        _refuse_key(key, pattern)


def _refuse_key(key: str, pattern: str) -> None:
    here, _, word = pattern.rpartition(".")
    if pattern in BLOCKS:
        raise ConfigError(f"{key} is a block of keys, not a value")
    below = [row.theirs[len(here) + 1 :] for row in SPELLINGS if row.theirs.startswith(f"{here}.")]
    names = list(dict.fromkeys(name.partition(".")[0] for name in below))
    raise ConfigError(f"{key} is not a key{near(word, names)} (allowed: {', '.join(names)})")


def _by_role(found: Sequence[_Found]) -> dict[str, list[_Found]]:
    roles: dict[str, dict[str, _Found]] = {}
    for item in found:
        for name in ROLES[item.place] if item.place is not None else ():
            roles.setdefault(name, {})[item.row.theirs] = item
    return {name: list(items.values()) for name, items in roles.items()}


def _value(items: Sequence[_Found], last: str) -> Any:
    keys = (f"{ROLE}.profiler.{last}", f"global_profiler.{last}")
    return next((item.value for item in items if item.row.theirs in keys), None)


def _enabled(items: Sequence[_Found]) -> bool:
    # The old spelling has no enable: a role takes part as soon as ranks are chosen for it.
    enable = _value(items, "enable")
    chosen = _value(items, "all_ranks") or _value(items, "ranks")
    return bool(chosen if enable is None else enable)


def _selected_tool(common: Sequence[_Found], blocks: Sequence[Sequence[_Found]]) -> str | None:
    tools: dict[str, str] = {}
    for items in blocks:
        for item in (*items, *common):
            if item.row.theirs.endswith(".tool") and item.value is not None:
                tools.setdefault(_known_tool(item), item.key)
                break
    if len(tools) > 1:
        given = " and ".join(f"{key}={tool!r}" for tool, key in tools.items())
        raise ConfigError(f"{given}: different tools per role are not supported yet; choose one")
    return next(iter(tools), None)


def _known_tool(item: _Found) -> str:
    tool = str(item.value)
    if tool in LATER:
        raise ConfigError(
            f"{item.key}={tool!r} is not supported yet (supported: {', '.join(TOOLS)})"
        )
    if tool not in TOOLS:
        raise ConfigError(
            f"{item.key}={tool!r} is not a tool{near(tool, TOOLS)} (allowed: {', '.join(TOOLS)})"
        )
    return tool


def _apply(item: _Found, tool: str | None, out: Translation) -> None:
    row, value = item.row, item.value
    elsewhere = row.theirs.endswith(".tool") or row.ours.startswith("roles.")
    if value is None or elsewhere or (row.tool and row.tool != tool):
        return
    if not row.ours:
        if row.accepts != ANYTHING and value not in row.accepts:
            usual = " or ".join(repr(each) for each in (*row.accepts, None))
            raise ConfigError(f"{item.key}={value!r} is not supported yet; set it to {usual}")
        return
    if row.items:
        _check_items(item)
    for ours, said in (row.reads(value) if row.reads else {row.ours: value}).items():
        out.put(ours, said, item.key)


def _check_items(item: _Found) -> None:
    allowed = ", ".join(item.row.items)
    if not isinstance(item.value, list):
        raise ConfigError(f"{item.key}={item.value!r} is no list (allowed in it: {allowed})")
    for word in map(str, item.value):
        if word in LATER:
            raise ConfigError(
                f"{item.key} holds {word!r}, which is not supported yet; leave it out"
            )
        if word not in item.row.items:
            raise ConfigError(
                f"{item.key} holds {word!r}{near(word, item.row.items)} (allowed: {allowed})"
            )


def _apply_role(name: str, items: Sequence[_Found], tool: str | None, out: Translation) -> None:
    keys = {"enable": (_enabled(items), f"{name}.profiler")}
    for item in items:
        ours = item.row.ours.rpartition(".")
        if ours[0] == f"roles.{ROLE}" and item.value is not None and item.row.tool in (None, tool):
            keys[ours[2]] = item.value, item.key
    if keys.get("all_ranks", (False,))[0]:
        keys.pop("ranks", None)  # verl: all_ranks wins
    for key, (value, theirs) in keys.items():
        out.put(f"roles.{name}.{key}", value, theirs)


def _complete(found: Sequence[_Found], tool: str | None, out: Translation) -> None:
    tools = [item.key for item in found if item.row.theirs.endswith(".tool")]
    steps = [item.key for item in found if item.row.ours == "steps" or "global_" in item.row.theirs]
    for ours, value in TOOLS[tool].items() if tool else ():
        out.values.setdefault(ours, value)
        out.origins.setdefault(ours, tools[0])
    if tools and not tool:  # verl: tool: null profiles nothing
        out.put("tools", [], tools[0])
    if steps and not {"steps", "integrated.profile_step_start"} & out.values.keys():
        out.put("steps", [], steps[0])  # verl: no steps, no profiling
