"""Parts of the configuration that name every mistake: dotted key, what is allowed, near match."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

__all__ = ["Section", "explain", "near", "near_match", "refused"]

_LONGEST = 80
_ABSENT = object()


class Section(BaseModel):
    """Frozen and strictly typed; refuses unknown keys and reads ``-`` in a key as ``_``.

    ``True`` is no step, ``"0"`` is no rank and ``"yes"`` is no switch. An empty block
    (``integrated:`` with nothing below it) means its defaults.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = {}
        for given, value in data.items():
            key = str(given).replace("-", "_")
            if key not in cls.model_fields:
                raise refused(cls._unknown(str(given)), key=str(given))
            if value is not None or cls.model_fields[key].default_factory is None:
                known[key] = value
        return known

    @classmethod
    def _unknown(cls, key: str) -> str:
        names = cls.model_fields
        return f"is not a key here{near(key, names)} (allowed: {', '.join(names)})"


def refused(text: str, value: object = _ABSENT, key: str = "") -> PydanticCustomError:
    """The error to raise in a validator; the dotted place of the section is put in front later.

    Args:
        text: What is wrong, as the rest of a sentence that begins with key and value.
        value: What was given; left out when the key itself is wrong.
        key: Key below the validated place, where the place alone does not name it.
    """
    given = "" if value is _ABSENT else _short(value)
    said = f"{'='.join(filter(None, (key, given)))} {text}".lstrip()
    context = {"said": said, "key": key, "given": given, "text": text}
    return PydanticCustomError("refused", "{said}", context)


def near(word: str, allowed: Iterable[str], likeness: float = 0.6) -> str:
    """``; did you mean 'x'?`` where an allowed word looks like the given one, else nothing.

    Example::

        >>> near("actor_updat", ["actor_update", "critic_update"])
        "; did you mean 'actor_update'?"
        >>> near("banana", ["actor_update"])
        ''
    """
    close = near_match(word, allowed, likeness)
    return f"; did you mean {close!r}?" if close else ""


def near_match(word: str, allowed: Iterable[str], likeness: float = 0.6) -> str:
    """The allowed word that looks most like the given one, or an empty text."""
    close = difflib.get_close_matches(word.lower(), list(allowed), 1, likeness)
    return close[0] if close else ""


def explain(error: ValidationError, origins: Mapping[str, str] | None = None) -> str:
    """One line for people out of what Pydantic found.

    Args:
        error: What Pydantic raised.
        origins: Dotted key to the variable or foreign spelling that set it, named in the line.
    """
    problems = [_one(found, origins or {}) for found in error.errors(include_url=False)]
    if len(problems) == 1:
        return problems[0]
    numbered = (f"({number}) {text}" for number, text in enumerate(problems, 1))
    return f"{len(problems)} problems: {'; '.join(numbered)}"


def _one(found: ErrorDetails, origins: Mapping[str, str]) -> str:
    context: dict[str, Any] = found.get("ctx", {})
    if isinstance(context.get("error"), ValueError):
        return str(context["error"])
    place = _dotted(found["loc"])
    if found["type"] == "refused":
        head = ".".join(filter(None, (place, context["key"])))
        said = f"{'='.join(filter(None, (head, context['given'])))} {context['text']}"
    elif found["type"] == "missing":
        head, said = place, f"{place} is missing"
    else:
        head, said = place, f"{place}={_short(found['input'])} {_reworded(found, context)}"
    source = _origin(head, origins)
    return f"{said} (set by {source})" if source else said


def _reworded(found: ErrorDetails, context: Mapping[str, Any]) -> str:
    text = found["msg"].replace("Input should", "should").replace("String should", "should")
    if found["type"] == "literal_error":
        allowed = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return text + near(str(found["input"]), allowed)
    return text + ("; write true or false" if found["type"] == "bool_type" else "")


def _dotted(place: tuple[int | str, ...]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _origin(key: str, origins: Mapping[str, str]) -> str:
    below = (source for name, source in origins.items() if name.startswith(f"{key}."))
    return origins.get(key) or next(below, "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
