"""Files of other programs are named by content or by name, with what to do about them."""

import json
import pickle
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.foreign_files import foreign
from lightning_rlprof.loaders.load import load
from tests.builders.chrome import ChromeTrace
from tests.places import SHARED_DATA

SNAPSHOT = {"segments": [{"device": 0}], "device_traces": [[]], "allocator_settings": {}}
PLANE = b"/host:CPU"
XSPACE = b"\x0a" + bytes([0x80 | len(PLANE) + 4, 1]) + b"\x08\x01\x12" + bytes([len(PLANE)]) + PLANE
FILES = {
    "empty.json": (b"", "the file is empty"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c\0\4", "7z x"),
    "a.rar": (b"Rar!\x1a\x07\1\0", "unrar x"),
    "a.json.xz": (b"\xfd7zXZ\0\0\4", "xz -d"),
    "a.json.bz2": (b"BZh91AY&SY\0", "bzip2 -d"),
    "pointer.json": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "page.json.gz": (b"\n<!doctype html>\n<html>", "web page"),
    "snapshot.pickle": (pickle.dumps(SNAPSHOT), "snapshot of CUDA memory"),
    "old_snapshot": (pickle.dumps(SNAPSHOT, protocol=2), "snapshot of CUDA memory"),
    "other.pkl": (pickle.dumps({"weights": [1.5]}), "Python pickle"),
    "host.xplane.pb": (XSPACE, "profile of XLA"),
    "renamed.json": (XSPACE, "profile of XLA"),
    "a.pftrace": (b"\x0a\x04h\x01P\x01", "traceconv json"),
    "a.perfetto-trace": (b"\x0a\x04h\x01P\x01", "traceconv json"),
    "no_suffix": (b"\x0a\x04h\x01P\x01\x0a\x1d\xe2", "traceconv json"),
    "k.ncu-rep": (b"NVR\0\1", "Nsight Compute"),
    "r.qdstrm": (b"\0\1", "QdstrmImporter"),
    "r.qdrep": (b"\0\1", "needs nsys"),
    "r.nsys-rep": (b"\0\1", "needs nsys"),
    "notes.txt": (b"hello", "not a run or trace"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", "")
    data, text = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)

    with pytest.raises(TraceError, match=text) as error:
        load(path)

    assert "\n" not in str(error.value)
    assert "rank file" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("notes.txt",)])
def test_a_directory_of_it_says_the_same_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", "")
    data, text = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError, match=text):
        load(tmp_path)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "done",))

    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": Bomb()}))
    with pytest.raises(TraceError, match="snapshot of CUDA memory"):
        load(path)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_a_trace_is_not_foreign(tmp_path: Path, indent: int | None) -> None:
    trace = ChromeTrace()
    trace.launched(1, 20)
    path = trace.write(tmp_path / "a.json")
    path.write_text("\n" + json.dumps(json.loads(path.read_text()), indent=indent))
    assert foreign(path) is None


REAL = SHARED_DATA / "nsys" / "cpu_only" / "rl.pftrace"


@pytest.mark.skipif(not REAL.is_file(), reason="no real traces in ../shared/data/nsys")
def test_a_real_trace_of_perfetto_is_named_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(REAL.read_bytes())
    assert "Perfetto" in str(foreign(tmp_path / "trace"))


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no folder ../shared/data")
def test_no_real_trace_is_foreign() -> None:
    files = [path for path in SHARED_DATA.rglob("*") if path.suffix in (".gz", ".sqlite", ".db")]
    assert files
    assert [path.name for path in files if foreign(path) is not None] == []
