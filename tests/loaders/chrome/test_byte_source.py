"""Plain and compressed files as one stream of bytes, whole, cut and damaged."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.chrome import byte_source
from lightning_rlprof.loaders.chrome.byte_source import Source

zstandard = pytest.importorskip("zstandard", reason="the zstandard package is not installed")

NOISE = np.random.default_rng(5).integers(97, 123, 300_000, dtype=np.uint8).tobytes()
FORMS = {
    "plain": NOISE,
    "gz": gzip.compress(NOISE),
    "two members": gzip.compress(NOISE[:1000]) + gzip.compress(NOISE[1000:]),
    "padded": gzip.compress(NOISE) + b"\0" * 500,
    "zst": zstandard.compress(NOISE),
    "two frames": zstandard.compress(NOISE[:1000]) + zstandard.compress(NOISE[1000:]),
}
SECOND = len(zstandard.compress(NOISE[:1000]))  # where the second frame begins


def read(path: Path, size: int = 10_000) -> tuple[bytes, str | None]:
    view, found = memoryview(bytearray(size)), b""
    with Source(path) as source:
        while count := source.readinto(view):
            found += view[:count]
        assert source.readinto(view) == 0
        return found, source.problem


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_the_first_bytes_tell_how_to_read_the_rest(form: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "any-name").write_bytes(FORMS[form])

    assert read(tmp_path / "any-name", size) == (NOISE, None)


def test_an_empty_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "x.json.gz").touch()

    assert read(tmp_path / "x.json.gz") == (b"", None)


@pytest.mark.parametrize("kept", [2, 5, 12, 100, 50_000, -9, -1])
def test_a_cut_gz_gives_what_comes_before_the_cut(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(FORMS["gz"][:kept])

    found, problem = read(path)

    assert NOISE.startswith(found)
    assert kept > 0 or found == NOISE
    assert problem == "its compressed data is truncated"


@pytest.mark.parametrize(("form", "at"), [("gz", 100_000), ("two frames", SECOND)])
def test_damage_ends_the_stream_with_a_problem(form: str, at: int, tmp_path: Path) -> None:
    data = bytearray(FORMS[form])
    data[at : at + 60] = b"\xff" * 60
    path = tmp_path / "x"
    path.write_bytes(data)

    found, problem = read(path)

    assert found[:600] == NOISE[:600]
    assert problem is not None
    assert problem.startswith("its compressed data is damaged")


def test_something_behind_a_gz_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(FORMS["gz"] + b"more")

    assert read(path) == (NOISE, "its compressed data is followed by other data")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_is_refused_with_a_message(
    pack: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_source, "BOMB_BYTES", 100_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(pack(b" " * 10_000_000))  # type: ignore[operator]

    with pytest.raises(TraceError, match="200 times as many; decompress it yourself") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_small_file_may_expand_by_any_ratio(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))

    assert len(read(path, 1 << 20)[0]) == 10_000_000


def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "x").write_bytes(FORMS["zst"])

    with pytest.raises(TraceError, match="pip install zstandard"):
        Source(tmp_path / "x")


@pytest.mark.parametrize("name", ["", "missing"])
def test_what_cannot_be_opened_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        Source(tmp_path / name)


@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("form", ["gz", "two members"])
def test_a_wrong_check_sum_costs_one_block_at_most(form: str, size: int, tmp_path: Path) -> None:
    data = bytearray(FORMS[form])
    data[-8] ^= 1
    path = tmp_path / "x"
    path.write_bytes(data)

    found, problem = read(path, size)

    assert NOISE.startswith(found)
    assert len(found) > len(NOISE) - byte_source._STEP
    assert problem is not None
    assert problem.startswith("its compressed data is damaged")


def test_damage_costs_what_lies_behind_it(tmp_path: Path) -> None:
    data = bytearray(FORMS["gz"])
    data[150_000:150_060] = b"\xff" * 60
    path = tmp_path / "x"
    path.write_bytes(data)

    found, _ = read(path, 1 << 20)

    kept = round(len(NOISE) * 150_000 / len(data)) - 5_000 - byte_source._STEP
    assert len(found) >= kept
    assert found[:kept] == NOISE[:kept]


def test_a_zst_cut_off_before_its_first_block_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(FORMS["zst"][:40])

    assert read(path) == (b"", "its compressed data is truncated")
