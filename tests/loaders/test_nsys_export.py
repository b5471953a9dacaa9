"""Reports (.nsys-rep), read through a fake nsys on PATH that copies an export made before."""

import gc
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders import nsys
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.nsys import read_nsys
from tests.builders.nsys_export import EPOCH, NsysExport

# Strict: only the one command that the loader may give; it "exports" the report by copying it.
FAKE_NSYS = """#!{python}
import pathlib, shutil, sys
arguments = sys.argv[1:]
fixed = ["export", "--type", "sqlite", "--force-overwrite", "true", "--output"]
if arguments[:6] != fixed or len(arguments) != 8:
    sys.exit("unknown arguments: " + " ".join(arguments))
into, report = map(pathlib.Path, arguments[6:])
if not report.is_absolute() or not into.is_absolute() or into.exists():
    sys.exit("bad paths")
{then}
"""


@pytest.fixture
def fake_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a fake nsys on PATH, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def make(then: str) -> None:
        script = folder / "nsys"
        script.write_text(FAKE_NSYS.format(python=sys.executable, then=then))
        script.chmod(0o755)

    return make


@pytest.fixture
def report(tmp_path: Path) -> Path:
    made = NsysExport(tmp_path / "data" / "made.sqlite")
    made.own("actor_update", "stage", 100, 500, step=3)
    made.kernel("gemm", 600, 700, 1)
    made.call(200, 1)
    return made.write().rename(tmp_path / "data" / "-a b'c_rank4.nsys-rep")


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("rlprof-nsys-*"))


def hidden(report: Path) -> None:
    """Make a report of the copy, so that it not an SQLite export itself."""
    data = report.read_bytes()
    report.write_bytes(b"QDSTRM" + data)


COPY = "into.write_bytes(report.read_bytes()[6:])"


def test_a_report_is_exported_and_its_tables_can_be_read_later(
    tmp_path: Path, fake_nsys: Any, report: Path
) -> None:
    fake_nsys(COPY)
    hidden(report)

    spans = load(report)
    (folder,) = left(tmp_path)

    assert folder.stat().st_mode & 0o077 == 0
    assert (spans.path, spans.ranks, spans.unix_ns) == (report, (4,), EPOCH + 100)
    assert [row[:9] for row in spans.table("kernels").rows] == [
        (4, 0, 7, "gemm", 500, 100, "actor_update", 3, "actor_update")
    ]
    del spans
    gc.collect()
    assert left(tmp_path) == []


def test_kernels_of_a_report_leave_nothing_behind(
    tmp_path: Path, fake_nsys: Any, report: Path
) -> None:
    fake_nsys(COPY)
    hidden(report)

    assert read_nsys(report).table("kernels").column("start") == [500]

    gc.collect()
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (
            "sys.exit('old\\n\\nreport is newer than this nsys\\n')",
            "failed with code 1: report is newer",
        ),
        ("print('done')", "failed with code 0: done"),
        ("sys.exit(3)", "failed with code 3: it says nothing"),
        ("into.write_bytes(b'junk')", "not an SQLite export"),
    ],
)
def test_an_nsys_that_fails_is_one_line(
    tmp_path: Path, fake_nsys: Any, report: Path, then: str, reason: str
) -> None:
    fake_nsys(then)
    hidden(report)

    with pytest.raises(TraceError, match=reason) as caught:
        load(report)

    assert str(caught.value).startswith(f"{report}: ")
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


def test_an_nsys_that_hangs_is_given_up(
    tmp_path: Path, fake_nsys: Any, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nsys("import time; time.sleep(600)")
    monkeypatch.setattr(nsys, "_SECONDS", 0.01)
    hidden(report)

    with pytest.raises(TraceError, match=r"nsys export took more than 0\.01 s"):
        load(report)

    assert left(tmp_path) == []


def test_an_nsys_that_cannot_be_run_is_one_line(fake_nsys: Any, report: Path) -> None:
    fake_nsys("")
    script = Path(report.parents[1] / "bin" / "nsys")
    script.write_text("#!/nowhere/python\n")
    hidden(report)

    with pytest.raises(TraceError, match=r"bin/nsys cannot be run \(No such file"):
        load(report)


def test_without_nsys_the_error_says_what_to_run_where_there_is_one(
    fake_nsys: Any, report: Path
) -> None:
    hidden(report)

    with pytest.raises(TraceError) as caught:
        load(report)

    command = str(caught.value).split("`")[1]
    assert shlex.split(command)[:4] == ["nsys", "export", "--type", "sqlite"]
    assert shlex.split(command)[-2:] == ["./-a b'c_rank4.sqlite", "./-a b'c_rank4.nsys-rep"]


def test_an_export_with_the_name_of_a_report_needs_no_nsys(fake_nsys: Any, report: Path) -> None:
    assert load(report).ranks == (4,)
