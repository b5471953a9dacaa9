"""Steps, ranks and times as people write them: numbers, no text, no truth values, none twice."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lightning_rlprof.config.section import refused

__all__ = ["AllOrRanks", "NotNegative", "Positive", "RankList", "StepNumber", "Steps"]

_MOST = 2**20  # as many ranks as a run is read of


def _listed(value: Any, what: str, least: int) -> Any:
    if isinstance(value, tuple | range):
        value = [*value[: _MOST + 1]]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=lambda each: (str(type(each)), each if type(each) is int else 0))
    if not isinstance(value, list):
        raise refused(f"is no list of {what}; write [{least}, {least + 1}]", value)
    seen: set[int] = set()
    for item in value[: _MOST + 1]:
        if type(item) is not int:
            raise refused(f"holds {item!r}; {what} are whole numbers without quotes", value)
        if item < least:
            raise refused(f"holds {item}; {what} count from {least}", value)
        if item in seen:
            raise refused(f"names {item} twice", value)
        seen.add(item)
    if len(value) > _MOST:
        raise refused(f"holds more than {_MOST:,} {what}", value)
    return value


def _ranks(value: Any) -> Any:
    return value if value is None else _listed(value, "ranks", 0)


def _all_or_ranks(value: Any) -> Any:
    if value == "all":
        return value
    if isinstance(value, str) or value is None:
        raise refused("is neither 'all' nor a list of ranks such as [0, 1]", value)
    ranks = _listed(value, "ranks", 0)
    if not ranks:
        raise refused("captures no rank; write 'all', a list such as [0], or profile: false", value)
    return ranks


def _step(value: Any) -> Any:
    if type(value) is not int:
        raise refused("is no whole number; write a step without quotes", value)
    if value < 1:
        raise refused("is no step; steps count from 1", value)
    return value


def _steps(value: Any) -> Any:
    if value is None or value == "all":
        return value
    if isinstance(value, str):
        raise refused("is neither 'all' nor a list of steps such as [1, 2]", value)
    return _listed(value, "steps", 1)


# What the validators say first, the schema says to editors.
_UNIQUE: dict[str, Any] = {"uniqueItems": True}
_Rank = Annotated[int, Field(ge=0)]
_Step = Annotated[int, Field(ge=1)]
_Some = Annotated[list[_Rank], Field(min_length=1, json_schema_extra=_UNIQUE)]

RankList = Annotated[list[_Rank], Field(json_schema_extra=_UNIQUE), BeforeValidator(_ranks)]
"""Ranks from 0, none twice; may be empty."""

AllOrRanks = Annotated[Literal["all"] | _Some, BeforeValidator(_all_or_ranks)]
"""``all``, or a list of ranks that is not empty."""

StepNumber = Annotated[_Step, BeforeValidator(_step)]
"""A step, counted from 1."""

Steps = Annotated[list[_Step] | Literal["all"] | None, BeforeValidator(_steps)]
"""``all``, or a list of steps from 1; empty means none."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number, 0 included."""
