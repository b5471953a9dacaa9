"""Stage names as people write them: ``all``, one, or a list; known ones or declared ones."""

import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lightning_rlprof.config.validation import near, refused
from lightning_rlprof.records.records import STAGES

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_TAKEN = ("all", "untraced")  # every stage, and the time in none


def check_stages(names: Collection[str], custom: Collection[str], key: str, given: object) -> None:
    """Refuse the first name that is neither a known stage nor one of ``custom_stages``.

    Args:
        names: The stages that the key chooses.
        custom: The user's own stages.
        key: Dotted key, for the message.
        given: The value as written, for the message.
    """
    allowed = (*STAGES, *custom)
    for name in names:
        if name not in allowed:
            what = "is not a stage" if given == name else f"holds {name!r}, which is not a stage"
            hint = near(name, allowed) or "."
            listed = ", ".join(allowed)
            raise refused(
                f"{what}{hint} Allowed: {listed}; add your own to custom_stages", given, key
            )


def _choice(value: Any) -> Any:
    if isinstance(value, str):
        return value
    names = list(value) if isinstance(value, tuple | set | frozenset) else value
    if names == ["all"]:
        return "all"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused("is not a stage; write all, one stage, or a list of stages", value)
    if not names:
        raise refused("selects no stage; write all, a stage, or profile: false", value)
    if "all" in names:
        raise refused("lists names besides all, which already contains every stage", value)
    return _once(names)


def _custom(value: Any) -> Any:
    names = list(value) if isinstance(value, tuple) else value
    if not isinstance(names, list):
        raise refused("is not a list of stage names; write [my_stage]", value)
    for name in names:
        if not isinstance(name, str) or name in _TAKEN or not _NAME.fullmatch(name):
            raise refused(
                f"holds {name!r}; a stage is a word of letters, digits, '_', '-', '.', not 'all' "
                "or 'untraced'",
                value,
            )
    return _once(names)


def _in_order(value: Any) -> Any:
    names = list(value) if isinstance(value, tuple) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        text = "is not a list of stages; write [actor_update, critic_update]"
        raise refused(text, value)
    return names


def _once(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise refused(f"names {name!r} twice", names)
    return names


_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["all", *STAGES]},
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"enum": [*STAGES]}, {"type": "string"}]}},
    ]
}

StageChoice = Annotated[str | list[str], BeforeValidator(_choice), Field(json_schema_extra=_SCHEMA)]
"""``all``, one stage, or a list of stages."""

CustomStages = Annotated[list[str], BeforeValidator(_custom)]
"""Names of the user's own stages."""

OptimizerStages = Annotated[list[str], BeforeValidator(_in_order)]
"""One stage per optimizer."""
