"""A run's samples as JSON lines: one line per sample, with its phases, fate and numbers."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.analysis.samples.sample_book import (
    NO_FATE,
    NO_SAMPLES,
    UNKNOWN,
    SampleBook,
    sample_book,
)
from lightning_rlprof.analysis.samples.sample_tables import updates_of
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import FATES, Number
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.system.files import draft_of
from lightning_rlprof.tables.sample_names import SAMPLE_NAMES
from lightning_rlprof.tables.spans import Spans

_TOGETHER = 1_000  # lines that are written at once


def write_sample_log(
    spans: Spans, path: Path, progress: Callable[[int, int], None] | None = None
) -> int:
    """Write the samples at once or not at all, ordered by number; return how many there are.

    Times are nanoseconds since the run's first event, as in the table ``spans``. What was not
    recorded is null.

    Args:
        spans: The run.
        path: The file; one that exists is replaced.
        progress: Called with (samples written, samples in all).

    Raises:
        TraceError: The run has no samples.
        OSError: The file cannot be written.
    """
    book = sample_book(spans)
    if not len(book):
        raise TraceError(f"{spans.path}: {NO_SAMPLES}")
    with (
        draft_of(path, mode_made_of(spans.path)) as part,
        part.open("w", encoding="utf-8") as file,
    ):
        for number, line in enumerate(_lines(spans, book), start=1):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if progress is not None and number % _TOGETHER == 0:
                progress(number, len(book))
    return len(book)


def _lines(spans: Spans, book: SampleBook) -> Iterator[dict[str, Any]]:
    """Yield the facts of each sample."""
    groups = _groups(spans)
    fated = np.flatnonzero(book.fate_row != UNKNOWN)
    updates = np.full(len(book), UNKNOWN)
    updates[fated] = updates_of(spans, book.fate_row[fated])
    for at, number in enumerate(book.id.tolist()):
        told = int(book.fate_row[at])
        counters = {} if told == UNKNOWN else dict(spans.counters_of(told) or {})
        code = int(book.fate[at])
        phases = [_phase(spans, row) for row in book.spans_of(at).tolist()]
        yield {
            "id": number,
            "prompt": None if book.prompt[at] == UNKNOWN else book.prompts[book.prompt[at]],
            "group": groups.get(number),
            "attempt": _known(book.attempt[at]),
            "fate": None if code == NO_FATE else FATES[code],
            "fate_ns": None if told == UNKNOWN else int(spans.start_ns[told]),
            "tokens": _known(book.tokens[at]),
            "reward": _finite(float(book.reward[at])),
            "advantage": _finite(counters.get("advantage")),
            "version": _known(book.version[at]),
            "version_end": _known(book.version_end[at]),
            "trainer_version": _finite(counters.get("trainer_version")),
            "unix_ns": spans.unix_ns + phases[0]["start_ns"] if phases and spans.unix_ns else None,
            "phases": phases,
            "update": None if updates[at] == UNKNOWN else _phase(spans, int(updates[at])),
        }


def _groups(spans: Spans) -> dict[int, str]:
    """Return the group of each sample that has a name; of several ranks the first one counts."""
    table = spans.try_table(SAMPLE_NAMES, [])
    if table is None:
        return {}
    named = zip(table.column("sample"), table.column("prompt group"), strict=True)
    found: dict[int, str] = {}
    for number, group in named:
        found.setdefault(int(number or 0), str(group))
    return found


def _phase(spans: Spans, row: int) -> dict[str, Any]:
    rank = int(spans.rank[row])
    counters = spans.counters_of(row) or {}
    own = {
        "name": spans.names[spans.name[row]],
        "rank": rank,
        "role": spans.headers[rank].role,
        "step": int(spans.step[row]),
        "start_ns": int(spans.start_ns[row]),
        "end_ns": int(spans.end_ns[row]),
    }
    taken = {*own, "sample"}
    return own | {name: _finite(value) for name, value in counters.items() if name not in taken}


def _known(value: Any) -> int | None:
    return None if value == UNKNOWN else int(value)


def _finite(value: Number | None) -> Number | None:
    """Return a number; None if there is none, or if it has no form in JSON."""
    return value if value is not None and math.isfinite(value) else None
