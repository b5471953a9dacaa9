"""Run the commands that pages show about the example runs, and write what they print.

The runs are in examples/runs.tar.gz: ``demo``, ``slow`` (rank 1 is slowed down) and ``kv`` (with a
KV cache). A block below ``<!-- example runs -->`` has commands, each after ``$``, and their output.

``--check`` fails if a page is stale. ``--pictures`` also draws the report. ``--record`` records the
runs first, in two minutes on two cores that have nothing else to do.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_rlprof.cli.app import app

__all__ = ["main", "pack", "renewed", "unpacked"]

ROOT = Path(__file__).parents[1]
ARCHIVE = ROOT / "examples" / "runs.tar.gz"

_WIDTH = "118"
_HOST = "node-1"
_RECORDED = {
    "demo": ("--steps", "120"),
    "slow": ("--steps", "60", "--slow-rank", "1"),
    "kv": ("--steps", "120", "--kv-cache"),
}
_BLOCK = re.compile(r"(?<=<!-- example runs -->\n\n)```console\n(.*?)^```$", re.M | re.S)
_PICTURES = {  # width, height, colors
    "report": (1280, 900, "light"),
    "report-dark": (1280, 900, "dark"),
    "report-phone": (390, 844, "light"),
}


@contextmanager
def unpacked() -> Iterator[Path]:
    """Make a folder of the runs the working directory, as a terminal of fixed width sees it."""
    place, before = Path.cwd(), dict(os.environ)
    with TemporaryDirectory() as folder, tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
        os.environ.update(COLUMNS=_WIDTH, NO_COLOR="1", XDG_CACHE_HOME=folder)
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            os.environ.pop(name, None)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(place)
            os.environ.clear()
            os.environ.update(before)


@cache
def _printed(command: str) -> str:
    """Return what a command prints in the working directory."""
    program, *words = shlex.split(command)
    if program != "rlprof":
        raise SystemExit(f"{command!r} is not a command of rlprof")
    with redirect_stdout(io.StringIO()) as output:
        app(words, prog_name=program, standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().strip().splitlines())


def renewed(text: str) -> str:
    """Return a page with what its commands print now."""

    def block(found: re.Match[str]) -> str:
        commands = [line[2:] for line in found[1].splitlines() if line.startswith("$ ")]
        shown = "\n".join(f"$ {each}\n{_printed(each)}" for each in commands)
        return f"```console\n{shown}```"

    return _BLOCK.sub(block, text)


def pack(runs: dict[str, Path], archive: Path) -> None:
    """Write runs into an archive that names neither the machine nor the user who recorded them."""
    with tarfile.open(archive, "w:gz") as file:
        for name, run in runs.items():
            for path in sorted(run.glob("rank-*.jsonl")):
                header, lines = path.read_bytes().split(b"\n", 1)
                known = json.loads(header) | {"host": _HOST}
                data = json.dumps(known, separators=(",", ":")).encode() + b"\n" + lines
                member = tarfile.TarInfo(f"{name}/{path.name}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def _record() -> None:
    """Record the runs on this machine, and pack them."""
    with TemporaryDirectory() as folder:
        runs = {}
        for name, options in _RECORDED.items():
            place = Path(folder, name)
            place.mkdir()
            demo = ["rlprof", "demo", "--ranks", "2", *options]
            subprocess.run(demo, cwd=place, check=True)
            (runs[name],) = (place / "profiler_data").iterdir()
        pack(runs, ARCHIVE)


def _draw(images: Path) -> None:
    """Write pictures of the report of the run with a slow rank."""
    from tests.builders.browser import Tab, find_browser

    browser = find_browser()
    if browser is None:
        raise SystemExit("no Chromium was found; set CHROMIUM to one")
    _printed("rlprof report slow -o slow.html")
    for name, (width, height, colors) in _PICTURES.items():
        with (
            TemporaryDirectory() as profile,
            Tab(browser, Path(profile), width=width, height=height) as tab,
        ):
            tab.theme(colors)
            tab.open(Path("slow.html"))
            tab.picture(images / f"{name}.png")
            print(f"Wrote {name}.png")


def main(arguments: list[str], folder: Path = ROOT) -> int:
    """Write the pages of a folder, or with ``--check`` compare them; returns the exit status."""
    if "--record" in arguments:
        _record()
    pages = [*folder.glob("*.md"), *folder.glob("docs/**/*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(pages)}
    with unpacked():
        fresh = {path: renewed(text) for path, text in texts.items()}
        if "--pictures" in arguments:
            _draw(folder / "docs" / "images")
    stale = [path for path, text in texts.items() if fresh[path] != text]
    for path in stale:
        name = path.relative_to(folder)
        if "--check" in arguments:
            print(f"{name} is stale: python docs/generate_examples.py", file=sys.stderr)
        else:
            path.write_text(fresh[path], encoding="utf-8")
            print(f"Wrote {name}")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
