"""Golden files: what the project promises, written down, so that a change of it is a diff.

A contract is a name and a function that returns what holds today. `text_of` makes text of that, and
the file ``expected/NAME`` holds the same text. ``python -m tests.golden.remake`` writes the files.

So that the text depends on nothing but the code, `world` sets the folder, time zone, width and
environment, each contract gets a fresh copy of the inputs, and `text_of` replaces what varies:
floats have six digits, and the folder and rlprof's version have a placeholder. Cells of `_VARYING`
columns are left out: measured seconds, and sizes of files that other libraries write.
"""

import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from difflib import unified_diff
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_rlprof.cli.app import main
from lightning_rlprof.system.version import VERSION

EXPECTED = Path(__file__).with_name("expected")
FEW, MANY = 5, 30
"""How many rows of a table are stored."""
Contract = Callable[[], Any]

_ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
_DIFF_LINES, _LINE = 40, 100
_VARYING = {"seconds", "bytes read"}


@contextmanager
def world(inputs: Path) -> Iterator[None]:
    """Work in a copy of the inputs, in a process whose surroundings are always the same."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "inputs"
        shutil.copytree(inputs, folder)
        with _surroundings(folder):
            yield


@contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLPROF")}
    place = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    os.chdir(folder)
    try:
        with patch.dict(os.environ, kept | _ENVIRONMENT | place, clear=True):
            time.tzset()
            yield
    finally:
        os.chdir(before)
        time.tzset()


def rlprof(*words: str, stdout: io.StringIO | None = None) -> tuple[int, str, str]:
    """Run a command line in this process; return its exit code, standard output and error."""
    out, err = stdout or io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["rlprof", *words]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("main() has to end with an exit code")


def answer(line: str, rows: int = MANY) -> Any:
    """Return what a command line with ``--json`` prints, and its exit code unless it is 0."""
    status, out, err = rlprof(*shlex.split(line), "--json")
    found = shortened(json.loads(out), rows) if out else {}
    if status:
        found = {"exit code": status, **found}
    return found | ({"stderr": json.loads(err)} if err else {})


def rows_of(*words: str) -> list[list[Any]]:
    """Return all rows of the first table that a command line prints."""
    found = json.loads(rlprof(*words, "--json", "--limit", "9999")[1])
    rows: list[list[Any]] = found["tables"][0]["rows"]
    return rows


def shortened(value: Any, rows: int) -> Any:
    """Return JSON whose tables name each column in one text and contain their first rows.

    A table with more rows also says how many there are, and the sum of each column of numbers.
    """
    if isinstance(value, list):
        return [shortened(each, rows) for each in value]
    if not isinstance(value, dict):
        return value
    if not {"columns", "rows"} <= value.keys():
        return {key: shortened(each, rows) for key, each in value.items()}
    names = [each["name"] for each in value["columns"]]
    own = [
        [None if n in _VARYING else c for n, c in zip(names, r, strict=True)] for r in value["rows"]
    ]
    short = value | {"columns": [" ".join(each.values()).strip() for each in value["columns"]]}
    if len(own) <= rows:
        return short | {"rows": own}
    sums = {
        name: sum(cell for cell in cells if isinstance(cell, int | float))
        for name, cells in zip(names, zip(*own, strict=True), strict=True)
        if any(isinstance(cell, int | float) for cell in cells)
    }
    return short | {"rows": own[:rows], "rows in all": len(own), "sums": sums}


def _plain(value: Any) -> Any:
    """Return JSON without what varies, with the keys of each object in order."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str):
        text = value.replace(str(Path.cwd()), "FOLDER")
        return re.sub(rf"\b{re.escape(VERSION)}\b", "VERSION", text)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in sorted(value.items(), key=str)}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _lines(value: Any, indent: str = "", *, is_row: bool = False) -> str:
    """Return JSON with a line for each item; what fits on one line is one, and so is each row."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, list | dict) or is_row or len(indent + flat) <= _LINE:
        return flat
    inner = indent + " "
    if isinstance(value, list):
        rows = [isinstance(each, list) for each in value]
        items = [inner + _lines(v, inner, is_row=row) for v, row in zip(value, rows, strict=True)]
        ends = "[]"
    else:
        pairs = value.items()
        items, ends = [f"{inner}{json.dumps(k)}: {_lines(v, inner)}" for k, v in pairs], "{}"
    return ends[0] + "\n" + ",\n".join(items) + "\n" + indent + ends[1]


def text_of(contract: Contract, inputs: Path) -> str:
    """Return what a contract says today; plain text as it is, everything else as JSON."""
    with world(inputs):
        value = contract()
        return value if isinstance(value, str) else _lines(_plain(value)) + "\n"


def difference(name: str, now: str) -> str:
    """Return how a text differs from the golden file of that name, or an empty text."""
    path = EXPECTED / name
    stored = path.read_text(encoding="utf-8") if path.is_file() else ""
    if now == stored:
        return ""
    lines = [*unified_diff(stored.splitlines(), now.splitlines(), "stored", "now", "", "", 1, "")]
    more = [f"... and {len(lines) - _DIFF_LINES} lines more"] if len(lines) > _DIFF_LINES else []
    command = f"If this is on purpose: python -m tests.golden.remake {name}"
    return "\n".join([f"{name} has changed. {command}", *lines[:_DIFF_LINES], *more])
