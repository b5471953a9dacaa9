"""Answers about a whole run, kept in its cache, so that they are computed once.

An answer is plain data: numbers, texts and tables. It is made of a run that is called `RUN`, as the
cache moves with its run.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_origin

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.tables.spans import RUN, Spans

if TYPE_CHECKING:
    from lightning_rlprof.store.cache import Cache

_FEWEST_SPANS = 100_000  # A smaller run answers within the time that Python takes to start.

Answer = TypeVar("Answer")


class Answers:
    """The answers in a cache.

    Args:
        cache: Of the run.
    """

    def __init__(self, cache: "Cache") -> None:
        self._cache = cache
        self._run: Spans | None = None

    def __call__(
        self, spans: Spans, name: str, kind: Any, make: Callable[[Spans], Answer]
    ) -> Answer:
        """Return an answer that is kept, or make it and keep it; as `tables.spans.answer`."""
        file = f"answer-{name}.json"
        with suppress(*NOT_JSON, OSError, TypeError):
            kept = self._cache.read_json(file)
            if kept is not None:
                found: Answer = msgspec.json.decode(kept, type=kind, dec_hook=_decoded)
                return found
        # Of a single rank's file, analyses look at the name.
        if len(spans) < _FEWEST_SPANS or spans.path.suffix == ".jsonl":
            return make(spans)
        if self._run is None:  # What is computed for one answer serves the next one.
            self._run = replace(spans, path=RUN)
        made = make(self._run)
        with suppress(OSError, TypeError, OverflowError):
            self._cache.write_json(file, msgspec.json.encode(made, enc_hook=_plain))
        return made


def _plain(value: Any) -> Any:
    """Return what JSON holds of a value; nothing of a function, which the registry has."""
    if isinstance(value, Path | str):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return None if callable(value) else list(value)


def _decoded(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin is np.ndarray:
        return np.array(value, np.int64)
    return _lost if origin is Callable else kind(value)


def _lost(*args: Any) -> NoReturn:
    """Stand for a function of the registry, whose entries the reader puts back."""
    raise TypeError("an answer holds no functions")
