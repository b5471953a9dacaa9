"""The settings of a training that its run recorded, and those that differ between two runs."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.records.records import stated_world_size
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table, columns_of

REPLICAS = "replicas"
"""Counter that says by how many replicas a stage's work was shared."""

FACTS = (
    *("devices", "rollout_devices", REPLICAS, "tp", "pp", "cp", "ep", "sharded", "offload"),
    *("rollout_tp", "rollout_ep", "max_num_seqs", "eager", "group", "updates"),
    *("micro_tokens", "recompute", "lora", "host_adam", "streamed"),
)
"""Counters that are settings: doors to frameworks count them, or a training does."""

_MOST_VALUES = 4  # Stages may have a value each; a counter with more is an amount.
_OF_TRAINING = ("model", "parallel")  # The other keys say what rlprof records.
_OF_PROFILER = ("lightning-rlprof", "nvtx")
_NOT_RECORDED = ("", "null", "unknown")
_COLUMNS = columns_of("text", "setting", "A", "B")


def settings_diff(a: Spans, b: Spans) -> Table:
    """Return the settings of the training that both runs recorded and that differ.

    Args:
        a: Run A.
        b: Run B.
    """
    left, right = settings(a), settings(b)
    names = [name for name, value in left.items() if right.get(name, value) != value]
    return Table("settings", _COLUMNS, [(name, left[name], right[name]) for name in names])


def settings(spans: Spans) -> dict[str, str]:
    """Return what a run recorded of its training: ranks, device, facts, model and versions."""
    heads = spans.headers
    config = by_key({rank: head.config for rank, head in heads.items()})
    versions = by_key({rank: head.versions for rank, head in heads.items()})
    found = {
        "ranks": str(stated_world_size(spans.headers.values())),
        "device": devices(spans),
        **{name: _counted(spans, name) for name in FACTS},
        **{key: listed(own) for key, own in config.items() if key.split(".")[0] in _OF_TRAINING},
        **{key: listed(own) for key, own in versions.items() if key not in _OF_PROFILER},
    }
    return {name: value for name, value in found.items() if value not in _NOT_RECORDED}


def _counted(spans: Spans, name: str) -> str:
    values = np.unique(spans.amounts(name).values)
    return listed([f"{each:g}" for each in values]) if len(values) <= _MOST_VALUES else ""


def devices(spans: Spans) -> str:
    """Return the models of the devices; empty if the run has no header."""
    return listed(sorted({head.hardware for head in spans.headers.values()}))


def by_key(values: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Return what nested mappings of ranks say by dotted key: each value with its ranks.

    Ranks that agree in all are looked at once.

    Example::

        >>> by_key({0: {"a": {"b": 1}}, 1: {"a": {"b": 2}}})
        {'a.b': {'1': [0], '2': [1]}}
    """
    alike: dict[str, list[int]] = {}
    for rank, own in values.items():
        alike.setdefault(json.dumps(own, default=str), []).append(rank)
    found: dict[str, dict[str, list[int]]] = {}
    for ranks in alike.values():
        for key, value in flat(values[ranks[0]]):
            found.setdefault(key, {}).setdefault(value, []).extend(ranks)
    return found


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Return the values of nested mappings as text, by dotted key."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item, default=str)
