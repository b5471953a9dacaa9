"""Recognize the log of a framework by its beginning, and read logs of one kind together."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lightning_rlprof.loaders.frameworks.areal import read_events, read_sessions
from lightning_rlprof.loaders.frameworks.log_lines import LONGEST, as_object
from lightning_rlprof.loaders.frameworks.rl_insight import read_rl_insight
from lightning_rlprof.loaders.frameworks.slime import read_slime
from lightning_rlprof.loaders.frameworks.verl import read_verl
from lightning_rlprof.records.run_directory import RankTrace
from lightning_rlprof.system.files import open_file

Log = Literal["areal events", "areal sessions", "slime", "verl", "rl-insight"]

READERS: Mapping[Log, Callable[[Sequence[Path]], list[RankTrace]]] = {
    "areal events": read_events,
    "areal sessions": read_sessions,
    "slime": read_slime,
    "verl": read_verl,
    "rl-insight": read_rl_insight,
}
"""What reads the files of each kind."""

SUFFIXES = (".jsonl", ".json")
"""Of files that may be logs."""

_FEW_LINES = 16  # of which the first may be damaged
_HEAD = 4096
_DUMP = re.compile(rb'\s*\{\s*"(?:rollout_id|samples)"\s*:')


def kind_of_log(path: Path) -> Log | None:
    """Return what kind of log a file is, by its beginning; None for anything else."""
    try:
        with open_file(path) as file:
            if path.suffix == ".jsonl":
                parts = iter(lambda: file.readline(LONGEST), b"")
                return _kind_of_lines(islice(parts, _FEW_LINES))
            return "slime" if _DUMP.match(file.read(_HEAD)) else None
    except OSError:
        return None


def _kind_of_lines(lines: Iterable[bytes]) -> Log | None:
    found = (as_object(each) for each in lines)
    kinds = (_kind_of_object(each) for each in found if each is not None)
    return next((kind for kind in kinds if kind is not None), None)


def _kind_of_object(first: Mapping[str, Any]) -> Log | None:
    if isinstance(first.get("data"), dict) and "step" in first:
        return "verl"
    if {"task_id", "session_id", "submit_ts"} <= first.keys():
        return "areal sessions"
    if isinstance(first.get("trace"), dict) or isinstance(first.get("events"), list):
        return "slime"
    if {"role", "rank_id", "start_time_ms", "end_time_ms"} <= first.keys():
        return "rl-insight"
    about = first.get("args")
    own = isinstance(about, dict) and ("global_step" in about or "role" in about)
    known = first.get("ph") in ("M", "X", "i") and (own or "pid" in first)
    return "areal events" if known else None
