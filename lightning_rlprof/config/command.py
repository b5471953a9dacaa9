"""A program and its arguments, started without a shell: what only a shell would read is refused."""

import re
import shlex
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from lightning_rlprof.config.section import refused

__all__ = ["Command"]

_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
_UNQUOTED = re.compile(r"\$\{?\w+\}?|&&|\|\||>>|[`$|&;<>()*?\[\n]|(?<!\S)[~#]|^\s*[A-Za-z_]\w*=")
_IN_A_WORD = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(|`")
# Of a shell or an interpreter, whose next word is a program that may hold anything.
_SCRIPT_FOLLOWS = re.compile(r"-\w*c")


def _words(value: Any) -> Any:
    words = _split(value.strip()) if isinstance(value, str) else value
    words = list(words) if isinstance(words, tuple) else words
    if words is None:
        return None
    if not isinstance(words, list):
        raise refused("is no command: give a list of words, or one line", value)
    if not words or words[0] == "":
        raise refused("is empty: give the program and its arguments, or null", value)
    texts = [word for word in words if isinstance(word, str)]
    if any("\0" in text for text in texts):
        raise refused("holds a zero byte, which no argument can", value)
    if not any(_SCRIPT_FOLLOWS.fullmatch(text) for text in texts):
        for found in filter(None, map(_IN_A_WORD.search, texts)):
            raise _only_a_shell(found.group(), value)
    return words


def _split(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise refused(f"cannot be split into words ({error})", line) from error
    found = _UNQUOTED.search(_QUOTED.sub("x", line))
    if found:
        raise _only_a_shell(found.group().strip(" "), line)
    return words


def _only_a_shell(part: str, given: object) -> PydanticCustomError:
    return refused(
        f"holds {part!r}, which only a shell understands, and none is started: put it into a "
        "script, or name the shell in a list, [sh, -c, 'the whole line']",
        given,
    )


_LIST = {"type": "array", "items": {"type": "string"}}
_SCHEMA = {"anyOf": [{"type": "string"}, _LIST, {"type": "null"}]}

Command = Annotated[list[str] | None, BeforeValidator(_words), WithJsonSchema(_SCHEMA)]
"""Words of a program that is started without a shell, from a list or from one line."""
