"""Parts of the configuration that name every mistake: dotted key, what is allowed, near match.

Steps, ranks and times as people write them: numbers, no text, no truth values, none twice.
"""

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from itertools import islice, pairwise
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from lightning_rlprof.system.location import redact

_LONGEST = 80
_ABSENT = object()
_HOW = {
    "bool_type": "; write true or false",
    "dict_type": "; write KEY: VALUE, or {KEY: VALUE}",
    "float_type": "; write a number without quotes",
    "int_type": "; write a number without quotes",
    "string_type": "; put it in quotes",
}
"""How to write a value of another type, by Pydantic's name of the error."""


class Section(BaseModel):
    """Frozen and strictly typed; refuses unknown keys and reads ``-`` in a key as ``_``.

    ``True`` is not a step, ``"0"`` not a rank and ``"yes"`` not a switch. An empty block
    (``integrated:`` with nothing below it) means its defaults.
    """

    # Pydantic's error, which a traceback shows too, would print URLs with their passwords.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return what each key means: the text below it in the source, where there is a source.

        Pydantic could read it too, but does so whenever the class is made, in every training.
        """
        found: dict[str, str] = {}
        for section in reversed(cls.__mro__):
            if issubclass(section, Section):
                found |= _texts(section.__module__).get(section.__name__, {})
        return {key: found[key] for key in cls.model_fields if key in found}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        made = handler(schema)
        keys = handler.resolve_ref_schema(made).get("properties", {})
        for key, meaning in cls.meanings().items():
            keys[key]["description"] = meaning
        return made

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise refused(f"is not a block of keys (allowed: {', '.join(cls.model_fields)})", data)
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


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """Return by class and attribute the texts below the attributes of a module's classes."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # Only the compiled module is installed.
        return {}
    found: dict[str, dict[str, str]] = {}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            found[owner.name] = texts = {}
            for pair in pairwise(owner.body):
                match pair:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        texts[name] = " ".join(text.split())
    return found


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
    text = text.replace("a valid dictionary", "a mapping").replace("a valid string", "text")
    if found["type"] == "literal_error":
        allowed = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return text + near(str(found["input"]), allowed)
    return text + _HOW.get(found["type"], "")


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


_RANGE = re.compile(r"\s*(\d{1,12})\s*-\s*(\d{1,12})\s*")
_MOST = 2**20  # Numbers; loaders don't read more ranks of a run.
_URL = "http://localhost:8000/metrics"
_PRINTED = re.compile(r"[!-~]+")  # A space or a line break would end a line of a request.


def _all_or_numbers(value: Any, what: str, example: str, least: int) -> Any:
    if isinstance(value, str) and value == "all":
        return value
    if isinstance(value, tuple | range | set | frozenset):
        value = [*islice(value, _MOST + 1)]
    if not isinstance(value, list):
        raise refused(f"is neither 'all' nor a list of {what} such as {example}", value)
    seen: set[int] = set()
    for item in value[: _MOST + 1]:
        if type(item) is not int:
            raise refused(f"holds {item!r}; {what} are whole numbers without quotes", value)
        if item < least:
            raise refused(f"holds {item}; {what} count from {least}", value)
        if item in seen:
            raise refused(f"names {item} twice; name each once", value)
        seen.add(item)
    if len(value) > _MOST:
        raise refused(f"holds more than {_MOST:,} {what}", value)
    return value


_ranks = partial(_all_or_numbers, what="ranks", example="[0, 1]", least=0)


def _some_ranks(value: Any) -> Any:
    if not (ranks := _ranks(value)):
        raise refused("selects no rank; write 'all', a list such as [0], or profile: false", value)
    return ranks


def _tokens(value: Any) -> Any:
    pair = list(value) if isinstance(value, tuple) else value
    if value is None or (isinstance(pair, list) and len(pair) == 2 and _is_window(*pair)):
        return value if value is None else tuple(pair)
    text = "is not [start, end]: two whole numbers from 0, the end, which is excluded, after start"
    raise refused(text, value)


def _is_window(start: Any, end: Any) -> bool:
    return type(start) is int and start >= 0 and (end is None or (type(end) is int and end > start))


def _steps(value: Any) -> Any:
    if value is None:
        return value
    if isinstance(value, str) and _RANGE.fullmatch(value):
        value = [value]
    return _all_or_numbers(_without_ranges(value), "steps", "[1, 10-20]", 1)


def _without_ranges(value: Any) -> Any:
    """Return a list with each range, such as ``10-20``, as its numbers."""
    if not isinstance(value, list | tuple):
        return value
    numbers: list[Any] = []
    for item in value:
        found = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if found is None:
            numbers.append(item)
            continue
        first, last = int(found[1]), int(found[2])
        if last < first:
            raise refused(f"holds {item!r}, which ends before it begins", value)
        numbers += range(first, min(last, first + _MOST) + 1)
    return numbers


def _urls(value: Any) -> Any:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise refused(f"is neither a URL nor a list of URLs, such as {_URL}", value)
    seen: set[str] = set()
    for url in map(str, given):
        shown = redact(url)
        if not _is_http(url):
            shown = "***" if "@" in shown or "?" in shown else shown
            raise refused(f"is not a URL of http or https; write it as {_URL}", shown)
        if shown in seen:
            raise refused("is given twice; name each engine once", shown)
        seen.add(shown)
    return list(given)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_place = bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is not a number, or an address is not closed.
        return False
    return is_place and parts.scheme in ("http", "https") and bool(_PRINTED.fullmatch(url))


# Validators check this first; the schema is for editors.
_UNIQUE: dict[str, Any] = {"uniqueItems": True}
_Rank = Annotated[int, Field(ge=0)]
_Some = Annotated[list[_Rank], Field(min_length=1, json_schema_extra=_UNIQUE)]

_AnyNumber = Annotated[list[_Rank], Field(json_schema_extra=_UNIQUE)]

Ranks = Annotated[Literal["all"] | _AnyNumber, BeforeValidator(_ranks)]
"""``all``, or a list of ranks from 0, none twice; it may be empty."""

SomeRanks = Annotated[Literal["all"] | _Some, BeforeValidator(_some_ranks)]
"""``all``, or a list of ranks that is not empty."""

Tokens = Annotated[
    tuple[int, int | None],
    BeforeValidator(_tokens),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]
"""The first token and the first one after the last; None if the last one is open."""

StepNumber = Annotated[int, Field(ge=1)]
"""A step, counted from 1."""

_AS_RANGE = {"type": "string", "pattern": r"^\d+-\d+$"}
_STEP_OR_RANGE = {"anyOf": [{"type": "integer", "minimum": 1}, _AS_RANGE]}

Steps = Annotated[
    list[StepNumber] | Literal["all"] | None,
    BeforeValidator(_steps),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": _STEP_OR_RANGE, **_UNIQUE},
                {"const": "all"},
                _AS_RANGE,
                {"type": "null"},
            ]
        }
    ),
]
"""``all``, a range, or a list of steps from 1 and ranges; empty means none."""

Urls = Annotated[
    list[str],
    BeforeValidator(_urls),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Addresses of http or https; one may be given without a list."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number, 0 included."""
