"""Find the profiling keys in a mapping of verl, with their place and their row of the table."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlprof.config.omegaconf import plain
from lightning_rlprof.config.validation import near, near_match
from lightning_rlprof.config.verl.key_table import BLOCKS, ROLE, ROLES, SPELLINGS, Spelling, lookup
from lightning_rlprof.errors import ConfigError

_TOOL = re.compile(r"tool_config\.([^.]+)")
_HELD = ("profiler", "profile")


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
    # In verl's Nsight guide for a while: `profiler` at the top, with the keys of `global_profiler`.
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
