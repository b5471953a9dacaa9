"""Pickles of strangers give data or one line, and run nothing."""

import os
import pickle
import struct
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.hang_reports import read_plain_pickle

PLAIN = {
    "entries": [{"collective_seq_id": 6, "input_sizes": [[4, 2]], "retired": False}],
    "more": (1.5, None, b"raw", {1, 2}, 2**70, "é"),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_containers_numbers_and_text_are_read(tmp_path, protocol):
    path = tmp_path / "dump"
    data = PLAIN if protocol >= 4 else {"entries": PLAIN["entries"]}
    path.write_bytes(pickle.dumps(data, protocol))
    assert read_plain_pickle(path) == data


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


HOSTILE = {
    "calls a program": pickle.dumps(Runs()),
    "names a class": pickle.dumps(Path("x")),
    "names an extension": b"\x82\x01.",
    "names an object outside": b"Pabc\n.",
    "has a memo of 64 GB": b"]r\xff\xff\xff\x7f.",
    "has a text of 8 EB": b"\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "is cut": pickle.dumps(PLAIN)[:-9],
    "is text": b"hello",
    "is empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_anything_else_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dump"
    path.write_bytes(HOSTILE[name])
    if name == "has a memo of 64 GB":  # which here is a dict with one entry
        assert read_plain_pickle(path) == []
        return
    with pytest.raises(TraceError, match=r"dump: is not a pickle of plain data \("):
        read_plain_pickle(path)
    assert not (tmp_path / "ran").exists()


def test_a_large_file_and_one_that_is_not_there_are_refused(tmp_path):
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(TraceError, match="larger than 64 MiB"):
        read_plain_pickle(large)
    with pytest.raises(TraceError, match="cannot be read"):
        read_plain_pickle(tmp_path / "none")
