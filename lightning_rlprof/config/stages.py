"""Stages as people write them: names, known or declared, and rules that give them to methods."""

import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from lightning_rlprof.config.validation import Section, near, refused
from lightning_rlprof.records.records import STAGES

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_TAKEN = ("all", "untraced")  # These mean every stage, and time outside stages.
_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["all", *STAGES]},
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"enum": [*STAGES]}, {"type": "string"}]}},
    ]
}
_DOTTED = re.compile(r"[^\W\d]\w*(\.([^\W\d]\w*|\d+))*")
_IMPORTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


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
    names = _names(value, "is not a stage; write all, one stage, or a list of stages")
    if names == ["all"]:
        return "all"
    if not names:
        raise refused("selects no stage; write all, a stage, or profile: false", value)
    if "all" in names:
        raise refused("lists names besides all, which already contains every stage", value)
    return _once(names)


def _custom(value: Any) -> Any:
    names = _names(value, "is not a list of stage names; write [my_stage]")
    for name in names:
        if name in _TAKEN or not _NAME.fullmatch(name):
            raise refused(
                f"holds {name!r}; a stage is a word of letters, digits, '_', '-', '.', not 'all' "
                "or 'untraced'",
                value,
            )
    return _once(names)


def _in_order(value: Any) -> list[str]:
    return _names(value, "is not a list of stages; write [actor_update, critic_update]")


def _names(value: Any, otherwise: str) -> list[str]:
    names = list(value) if isinstance(value, tuple) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused(otherwise, value)
    return names


def _once(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise refused(f"names {name!r} twice", names)
    return names


StageChoice = Annotated[str | list[str], BeforeValidator(_choice), Field(json_schema_extra=_SCHEMA)]
"""``all``, one stage, or a list of stages."""

CustomStages = Annotated[list[str], BeforeValidator(_custom)]
"""Names of the user's own stages."""

OptimizerStages = Annotated[list[str], BeforeValidator(_in_order)]
"""One stage per optimizer."""


def _target(value: Any) -> Any:
    if isinstance(value, str) and not (_DOTTED.fullmatch(value) or _IMPORTED.fullmatch(value)):
        known = "policy.generate, or package.module:Class.method"
        raise refused(f"is not a dotted method name, such as {known}", value)
    return value


def _argument(value: Any) -> Any:
    if isinstance(value, str) and not value.isidentifier():
        raise refused("is not an argument name, such as model_type", value)
    return value


def _texts(value: Any) -> Any:
    # YAML does not read keys such as 0, true or on as text, but arguments are matched as text.
    if isinstance(value, Mapping) and value:
        return {str(key): stage for key, stage in value.items()}
    raise refused("is not a mapping of argument values to stages", value)


class GradStages(Section):
    """Stages of a method that is called with gradients on and under ``torch.no_grad()``."""

    grad: str | None = None
    """Stage when gradients are enabled."""

    no_grad: str | None = None
    """Stage when gradients are disabled."""

    @model_validator(mode="after")
    def _given(self) -> "GradStages":
        if not (self.grad or self.no_grad):
            raise refused("is empty: give grad, no_grad or both", key="")
        return self


class ArgumentStages(Section):
    """Stages of a method that serves several, chosen by the value of one argument."""

    arg: Annotated[str, BeforeValidator(_argument)]
    """Name of the argument."""

    stages: Annotated[dict[str, str], BeforeValidator(_texts)]
    """Maps a value (its text, or name or value of an enum member) to a stage."""


class WrapRule(Section):
    """One method and its stage.

    Example::

        >>> rule = WrapRule(target="policy.forward", by_grad={"no_grad": "actor_generate"})
        >>> rule.stage_for(grad=False), rule.stage_for(grad=True)
        ('actor_generate', None)
    """

    target: Annotated[str, BeforeValidator(_target)]
    """Dotted method name, starting at the LightningModule or at what `session.wrap` is given:
    `policy.generate`. Of a class or module, by its import path: `package.module:Class.method`."""

    stage: str | None = None
    """Stage of every call."""

    by_grad: GradStages | None = None
    """Stage by gradient mode: `{grad: …, no_grad: …}`."""

    by_arg: ArgumentStages | None = None
    """Stage by an argument's value: `{arg: …, stages: {value: …}}`."""

    nested: bool = False
    """Make a call inside another stage a stage of its own, not a region of that."""

    @model_validator(mode="after")
    def _one_way(self) -> "WrapRule":
        ways = ("stage", "by_grad", "by_arg")
        given = [key for key in ways if getattr(self, key) is not None]
        if len(given) != 1:
            text = f"needs exactly one of {', '.join(ways)}; {len(given)} given"
            raise refused(text, self.target, "target")
        return self

    @property
    def is_imported(self) -> bool:
        """Whether the target is an import path, not a method of an object."""
        return ":" in self.target

    def names(self) -> dict[str, str]:
        """Every stage that this rule can give, by the key that names it."""
        if self.stage is not None:
            return {"stage": self.stage}
        if self.by_grad:
            modes = {"by_grad.grad": self.by_grad.grad, "by_grad.no_grad": self.by_grad.no_grad}
            return {key: stage for key, stage in modes.items() if stage}
        stages = self.by_arg.stages if self.by_arg else {}
        return {f"by_arg.stages.{value}": stage for value, stage in stages.items()}

    def stage_for(self, *, grad: bool, value: object = None) -> str | None:
        """The stage of one call, or None where the rule gives it none.

        Args:
            grad: Whether gradients are on.
            value: The value of the argument that ``by_arg.arg`` names.
        """
        if self.by_grad:
            return self.by_grad.grad if grad else self.by_grad.no_grad
        if self.by_arg:
            return next(filter(None, map(self.by_arg.stages.get, texts_of(value))), None)
        return self.stage


def as_rules(value: Any) -> Any:
    """Rules as a list, where they may be written by method.

    Example::

        >>> as_rules({"policy.generate": "actor_generate"})
        [{'target': 'policy.generate', 'stage': 'actor_generate'}]
    """
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        if "target" in value:
            raise refused("is a single rule; wrap takes a list: write [{target: …}]", value)
        return [
            {"target": target, **(says if isinstance(says, Mapping) else {"stage": says})}
            for target, says in value.items()
        ]
    if not isinstance(value, list):
        text = "is neither a list of rules nor a mapping such as {policy.generate: actor_generate}"
        raise refused(text, value)
    return value


def or_by_method(schema: dict[str, Any]) -> None:
    """Tell editors, in the schema of a list of rules, that they may be written by method."""
    listed = {key: schema.pop(key) for key in ("type", "items")}
    stage_or_ways = {"type": ["string", "object"]}
    schema["anyOf"] = [listed, {"type": "object", "additionalProperties": stage_or_ways}]


def texts_of(value: object) -> tuple[str, ...]:
    """Return the texts by which a rule may name an argument's value.

    Example::

        >>> texts_of(3), texts_of(Enum("Model", {"OLD": "old"}).OLD)
        (('3',), ('OLD', 'old', 'Model.OLD'))
    """
    if isinstance(value, Enum):
        return value.name, str(value.value), str(value)
    return (str(value),)
