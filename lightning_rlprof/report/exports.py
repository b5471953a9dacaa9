"""Further exports of a run: its samples as JSON lines, and its captures for MindStudio Insight.

Insight takes a folder for a cluster, with one ``*_ascend_pt`` folder per rank; several captures of
one rank in it are mixed up. Files are hard links where the file system has them, so that they take
no disk.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
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
from lightning_rlprof.loaders.ascend.capture import OUTPUT
from lightning_rlprof.records.records import FATES, Number
from lightning_rlprof.records.run_directory import (
    capture_in_name,
    is_inside,
    mode_made_of,
    rank_directory,
    rank_files,
)
from lightning_rlprof.system.files import draft_of, new_folder
from lightning_rlprof.tables.rank_tables import SAMPLE_NAMES
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of


def write_sample_log(spans: Spans, path: Path) -> int:
    """Write the samples at once or not at all, ordered by number; return how many there are.

    Times are nanoseconds since the run's first event, as in the table ``spans``. What was not
    recorded is null.

    Args:
        spans: The run.
        path: The file; one that exists is replaced.

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
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(spans, book))
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
    rows = [] if table is None else rows_of(table)
    return {int(row["sample"] or 0): str(row["prompt group"]) for row in reversed(rows)}


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


# ---- captures in the folders of MindStudio Insight


def insight_folders(run: Path, out: Path) -> tuple[list[Path], list[Path]]:
    """Write the parsed captures of torch_npu for MindStudio Insight, a folder per capture.

    Each contains the ``*_ascend_pt`` folders of all ranks, with what Insight reads: parsed files
    and the description of the capture. Raw data is left out: a database in it would hide the text
    format. Databases are copied, since Insight adds tables to them.

    Returns:
        The folders, and the captures that are left out because they are not parsed.

    Raises:
        TraceError: The run is not a run directory, or has no such captures.
        OSError: The folder cannot be written.
    """
    folders: set[Path] = set()
    mode = mode_made_of(run)
    raw: list[Path] = []
    for window in _windows(run):
        for capture in sorted(window.glob("*_ascend_pt")):
            if not is_inside(run, capture):
                continue
            if not any((capture / OUTPUT).glob("*")):
                raw.append(capture)
                continue
            folder = out / window.name
            new_folder(out, mode)
            new_folder(folder, mode)
            folders.add(folder)
            for path in (*capture.glob("profiler_*.json"), *(capture / OUTPUT).rglob("*")):
                if path.is_file():
                    _put(path, folder / capture.name / path.relative_to(capture))
    if not folders and not raw:
        raise TraceError(f"{run} contains no captures of torch_npu.profiler")
    return sorted(folders), raw


def _windows(run: Path) -> Iterator[Path]:
    """Yield the folders of captures, by rank and step."""
    files = rank_files(run) if run.is_dir() else []
    if not files:
        raise TraceError(f"{run} is not a run directory of rlprof")
    for file in files:
        for path in sorted(rank_directory(run, int(file.stem[5:])).glob("step-*")):
            if capture_in_name(path.name) and path.is_dir() and is_inside(run, path):
                yield path


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if source.suffix != ".db":
        try:
            os.link(source, target)
            return
        except OSError:  # The target is on another file system, or links are not supported.
            pass
    shutil.copy2(source, target)
