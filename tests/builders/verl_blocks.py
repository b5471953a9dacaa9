"""Blocks of verl, and what became of them, for tests."""

from typing import Any

import pytest

from lightning_rlprof.config.verl import translate
from lightning_rlprof.errors import ConfigError

ACTOR = "actor_rollout_ref.actor.profiler"


def new(actor: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"global_profiler": {"tool": "torch", "steps": [1, 2], **keys}}
    if actor is not None:
        data["actor_rollout_ref"] = {"actor": {"strategy": "fsdp", "profiler": actor}}
    return data


def values(data: dict[str, Any]) -> dict[str, Any]:
    translation = translate(data)
    assert translation is not None
    return translation.values


def said(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        translate(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)
