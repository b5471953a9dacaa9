"""The last collectives, of torch as it is here and of versions that differ."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from lightning_rlprof.recording.watchdog import keep_dump, last_collectives
from lightning_rlprof.records.hang_reports import FOLDER, dump_file

NAME = "torch.distributed.distributed_c10d"


def entry(seq: int, group: str = "0", *, done: bool = True) -> dict[str, object]:
    return {
        "process_group": [group, "default_pg"],
        "collective_seq_id": seq,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]],
        "retired": done,
    }


@pytest.fixture
def recorder(monkeypatch):
    """Replace torch's recorder by functions that return entries."""

    def use(**dumps):
        module = SimpleNamespace(**dumps)
        monkeypatch.setattr(torch._C, "_distributed_c10d", module, raising=False)

    return use


def dumping(*entries):
    return lambda collectives, active: json.dumps({"entries": entries}).encode()


def test_the_last_of_each_group_and_all_that_are_open_are_kept(recorder):
    old = entry(1, done=False)
    recorder(_dump_nccl_trace_json=dumping(old, *map(entry, range(2, 40)), entry(3, "tp")))
    found, _, remarks = last_collectives()
    assert [(each.group, each.seq) for each in found] == [
        ("0", 1),
        *(("0", seq) for seq in range(32, 40)),
        ("tp", 3),
    ]
    assert (found[0].name, found[0].sizes, found[0].is_done) == (
        "nccl:all_reduce",
        "[[4, 2]]",
        False,
    )
    assert remarks == ()


def test_the_groups_are_those_of_torch(recorder, monkeypatch):
    recorder(_dump_fr_trace_json=dumping())
    group = object()
    world = SimpleNamespace(pg_names={group: "tp"}, pg_group_ranks={group: {4: 0, 2: 1}})
    monkeypatch.setattr(sys.modules[NAME], "_world", world)
    assert last_collectives()[1] == {"tp": ((2, 4, 2),)}


@pytest.mark.parametrize(
    ("dumps", "remark"),
    [
        ({}, "this version of torch has no flight recorder"),
        ({"_dump_fr_trace_json": lambda: None}, "torch's flight recorder: "),
        ({"_dump_fr_trace_json": lambda *given: b"{"}, "torch's flight recorder: "),
    ],
    ids=["absent", "another signature", "not JSON"],
)
def test_what_another_version_lacks_is_remarked(recorder, dumps, remark):
    recorder(**dumps)
    found, _, (text,) = last_collectives()
    assert found == ()
    assert text.startswith(remark)


def test_without_torch_there_is_nothing_to_say(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME)
    assert last_collectives() == ((), {}, ())


def test_a_file_that_torch_wrote_since_the_start_is_copied_once(tmp_path, monkeypatch):
    (tmp_path / FOLDER).mkdir()
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "nccl_"))
    written, copy = tmp_path / "nccl_3", dump_file(tmp_path, 3)
    now = time.time()
    keep_dump(tmp_path, 3, now)
    assert not copy.exists()

    written.write_bytes(b"old")
    os.utime(written, (now - 100, now - 100))
    keep_dump(tmp_path, 3, now)
    assert not copy.exists(), "of another training"

    written.write_bytes(b"new")
    os.utime(written, (now + 1, now + 1))
    keep_dump(tmp_path, 3, now)
    written.write_bytes(b"newer")
    keep_dump(tmp_path, 3, now)
    assert copy.read_bytes() == b"new"
    assert copy.stat().st_mode & 0o777 == 0o600
