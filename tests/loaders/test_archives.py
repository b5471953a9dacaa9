"""Archives of traces are opened as the directories that they hold, and never believed blindly."""

import contextlib
import io
import os
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders import archives
from lightning_rlprof.loaders.archives import is_archive, unpack
from lightning_rlprof.loaders.load import load
from lightning_rlprof.store.open_run import open_run
from tests.builders.chrome import ChromeTrace
from tests.builders.runs import grpo_run

Files = dict[str, bytes]


def trace(rank: int = 0, world: int = 1) -> bytes:
    job = {"distributedInfo": {"rank": rank, "world_size": world}}
    made = ChromeTrace({"schemaVersion": 1, "host_name": "node-a", **job})
    made.mark("actor_update", 0, 100)
    made.launched(1, 20)
    return made.encode()


def zipped(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def tarred(path: Path, files: Files) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def packed(path: Path, files: Files) -> Path:
    return (zipped if path.suffix == ".zip" else tarred)(path, files)


NAMES = ("a.zip", "a.tar", "a.tar.gz", "a.tgz")
LAYOUTS: dict[str, Files] = {
    "one": {"trace.json": trace()},
    "one in a folder": {"x/y/trace.json": trace(), "x/readme.txt": b"hello"},
    "a trace per rank": {f"x/rank{rank}.json": trace(rank, 2) for rank in (0, 1)},
    "a folder per rank": {f"rank{rank}/t.json": trace(rank, 2) for rank in (0, 1)},
    "macOS": {"t.json": trace(), "__MACOSX/._t.json": b"\0\5", "._t.json": b"\0\5"},
}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_archive_is_read_as_what_it_holds(
    tmp_path: Path, scratch: Path, name: str, layout: str
) -> None:
    path = packed(tmp_path / name, LAYOUTS[layout])
    ranks = 2 if "rank" in layout else 1

    for run in (load(path), open_run(path)):
        assert (run.path, len(run.ranks)) == (path, ranks)
        assert run.table("kernels").column("duration") == [10] * ranks
        assert [note.code for note in run.notes].count("run-copied") == 1
        assert run.warnings == ()
    assert [*scratch.iterdir()]
    del run
    assert not [*scratch.iterdir()]


def test_a_run_of_rlprof_is_read_from_an_archive(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=2)
    files = {f"run/{each.name}": each.read_bytes() for each in (tmp_path / "run").iterdir()}

    assert len(load(tarred(tmp_path / "run.tgz", files))) == len(load(tmp_path / "run"))


def hostile_tar(path: Path, target: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, kind, link in (
            ("link.json", tarfile.SYMTYPE, str(target)),
            ("hard.json", tarfile.LNKTYPE, str(target)),
            ("pipe.json", tarfile.FIFOTYPE, ""),
            ("dir", tarfile.SYMTYPE, str(target.parent)),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            archive.addfile(info)
        for name in ("../out.json", "/abs.json", "dir/../../out.json", "x\\..\\..\\out.json"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
        info = tarfile.TarInfo("t.json")
        info.size = len(trace())
        archive.addfile(info, io.BytesIO(trace()))
    return path


def hostile_zip(path: Path, target: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("link.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, str(target))
        for name in ("../out.json", "/abs.json", "a/../../out.json", "c:\\out.json"):
            archive.writestr(zipfile.ZipInfo(name), b"{}")
        archive.writestr("t.json", trace())
    return path


@pytest.mark.parametrize("make", [hostile_tar, hostile_zip])
def test_links_and_paths_that_lead_out_are_left_out_and_counted(
    tmp_path: Path, scratch: Path, make: Callable[[Path, Path], Path]
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_bytes(trace())

    copies, remarks = unpack(make(tmp_path / "a", secret))

    there = [each for each in scratch.rglob("*") if not each.is_dir()]
    assert [each.name for each in there] == ["t.json"]
    assert not (tmp_path / "out.json").exists()
    assert remarks[0].endswith("links or paths out of the archive are left out")
    copies.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_bomb_is_refused_before_it_fills_the_disk(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(archives, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr("lightning_rlprof.loaders.chrome_events.BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(archives, "BOMB_RATIO", 2)
    monkeypatch.setattr(archives, "free_space", lambda folder: 3 << 20)
    path = packed(tmp_path / name, {"t.json": trace(), "b": bytes(8 << 20)})

    with pytest.raises(TraceError, match="more than") as error:
        load(path)

    assert "\n" not in str(error.value)
    assert not [*scratch.iterdir()]


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MAX_FILES", 5)
    with pytest.raises(TraceError, match="more than 5 files"):
        load(zipped(tmp_path / "a.zip", {f"{number}": b"" for number in range(6)}))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"notes.txt": b"hello"}, "no run or trace"),
        ({"k.ncu-rep": b"NVR\0"}, "a report of Nsight Compute"),
        ({"a.json": trace(), "b.json": trace()}, r"a\.json, b\.json"),
    ],
)
@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_why_nothing_in_it_can_be_read_is_said_without_the_folder_of_copies(
    tmp_path: Path, scratch: Path, name: str, files: Files, reason: str
) -> None:
    with pytest.raises(TraceError, match=reason) as error:
        load(packed(tmp_path / name, files))
    assert str(scratch) not in str(error.value)
    assert not [*scratch.iterdir()]


def test_an_empty_archive_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="an archive without a file"):
        load(zipped(tmp_path / "a.zip", {}))


def test_an_encrypted_archive_says_so(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"t.json": trace()})
    data = bytearray(path.read_bytes())
    for sign, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(sign) + at] |= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match="encrypted"):
        load(path)


def test_an_archive_that_is_cut_off_is_read_up_to_its_cut_and_says_so(tmp_path: Path) -> None:
    noise = {f"{number}.bin": os.urandom(60_000) for number in range(3)}
    path = tarred(tmp_path / "a.tar.gz", {"t.json": trace(), **noise})
    path.write_bytes(path.read_bytes()[:-70_000])

    run = load(path)

    assert len(run.table("kernels").rows) == 1
    assert [warning.code for warning in run.warnings] == ["file-cut"]


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = tarred(tmp_path / "a.tar", {"t.json": trace(), "b": b"x" * 600, "c": b"y" * 600})
    data = bytearray(path.read_bytes())
    at = data.index(b"b\0\0\0")
    data[at : at + 200] = b"\xff" * 200
    path.write_bytes(data)
    copies, remarks = unpack(path)
    assert (copies.files, "is missing" in remarks[0]) == (1, True)


@given(name=st.sampled_from(NAMES), cut=st.floats(0, 1), place=st.floats(0, 0.99), byte=st.binary())
def test_whatever_is_damaged_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, cut: float, place: float, byte: bytes
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = packed(folder / name, {"x/t.json": trace(), "b.bin": os.urandom(5_000)})
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at : at + len(byte)] = byte
    path.write_bytes(data[: int(cut * len(data)) + 1])
    with contextlib.suppress(TraceError):
        load(path).table("kernels")


def test_a_trace_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(trace())
    assert not is_archive(tmp_path / "t.json")
    assert not is_archive(tmp_path / "nowhere")


def test_a_directory_with_an_archive_alone_says_to_pass_it(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    zipped(folder / "a.zip", {"t.json": trace()})
    with pytest.raises(TraceError, match=r"an archive: pass .*a\.zip$"):
        load(folder)
