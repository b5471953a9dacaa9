"""Traces on their way to a file: real ones of torch, made-up text, and disks that fail.

Names of trace files; places in the grid from a fake Megatron and from real DeviceMeshes.
"""

import errno
import gzip
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.recording.recorders import torch_profiler as export
from lightning_rlprof.recording.recorders.torch_profiler import (
    TraceExporter,
    compress,
    label,
    trace_name,
)
from lightning_rlprof.records.notes import level_of
from tests.builders.recorder_traces import Noted, events_of, forward, options

KERNEL = '{"ph": "X", "cat": "kernel", "name": "gemm"}'
NAME = "window.pt.trace.json.gz"


class Text:
    """Stands for a stopped profiler whose trace is this text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(self.text)


class Exports:
    """An exporter, its notes, and the lists that it released."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.exporter = TraceExporter(
            lambda code, text, **facts: self.notes.append((level_of(code), text))
        )

    def write(self, trace: Any, path: Path, *, kernels: bool = False) -> list[Any]:
        held = [trace]
        self.exporter.write(held, path, kernels=kernels)
        return held


@pytest.fixture
def exports() -> Exports:
    return Exports()


def test_a_trace_is_compressed_unchanged_and_nothing_else_is_left(
    exports: Exports, tmp_path: Path
) -> None:
    text = '{"traceEvents": [' + "0, " * 5_000_000 + "0]}"
    held = exports.write(Text(text), tmp_path / NAME)
    assert held == []
    exports.exporter.finish()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert gzip.decompress((tmp_path / NAME).read_bytes()).decode() == text
    assert exports.notes == []


def test_compressing_runs_on_a_thread_of_its_own_one_trace_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began, may_go, threads = threading.Event(), threading.Event(), []
    real: Callable[..., bool] = compress

    def slowly(plain: Path, part: Path, needle: bytes) -> bool:
        threads.append((threading.current_thread(), threading.active_count()))
        began.set()
        assert may_go.wait(60)
        return real(plain, part, needle)

    monkeypatch.setattr(export, "compress", slowly)
    monkeypatch.setattr(export.log, "info", lambda text: may_go.set())
    recorder = Noted(*options())
    for name in ("first", "second"):  # neither close nor the next open waits for the file
        recorder.open(tmp_path / name)
        forward()
        recorder.close()
        assert [path.suffix for path in (tmp_path / name).iterdir()] == [".json"]
    assert began.wait(60)
    assert len(threads) == 1
    recorder.finish()
    assert len({thread for thread, _ in threads}) == 2
    assert threading.main_thread() not in {thread for thread, _ in threads}
    for name in ("first", "second"):
        (path,) = (tmp_path / name).iterdir()
        assert len(events_of(path)) > 5


def test_a_device_trace_without_a_kernel_is_told_once_as_a_warning(
    exports: Exports, tmp_path: Path
) -> None:
    names = NAME, "2.pt.trace.json.gz", "3.pt.trace.json.gz"
    for name, kernels in zip(names, (True, True, False), strict=True):
        exports.write(Text('{"cat": "kernels"}'), tmp_path / name, kernels=kernels)
    exports.write(Text(KERNEL), tmp_path / "4.pt.trace.json.gz", kernels=True)
    exports.exporter.finish()
    assert [level for level, _ in exports.notes] == ["warning"]
    assert exports.notes[0][1].startswith(
        "window.pt.trace.json.gz has no kernels: the device was idle, or another profiler in"
    )
    assert "NVTX_INJECTION64_PATH" in exports.notes[0][1]


@pytest.mark.parametrize("offset", range(0, 18, 3))
def test_a_kernel_is_found_across_blocks(
    offset: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(export, "_BLOCK", 10)
    plain, part = tmp_path / "plain", tmp_path / "part"
    plain.write_text(" " * offset + KERNEL)
    assert compress(plain, part, b'"cat": "kernel"')
    assert gzip.decompress(part.read_bytes()) == plain.read_bytes()
    plain.write_text(" " * offset + KERNEL.replace("kernel", "kernes"))
    assert not compress(plain, part, b'"cat": "kernel"')


@pytest.mark.parametrize("text", ["", '{"traceEvents": [', '{"a": 1},\n', "x" * 100])
def test_a_trace_that_ends_in_the_middle_is_lost_and_told(
    text: str, exports: Exports, tmp_path: Path
) -> None:
    exports.write(Text(text), tmp_path / NAME)
    exports.write(Text('{"whole": 1}\n'), tmp_path / "next.pt.trace.json.gz")
    exports.exporter.finish()
    ((level, told),) = exports.notes
    assert level == "error"
    assert told == f"{NAME} was not written (OSError: the file is truncated; is the disk full?)"
    assert [path.name for path in tmp_path.iterdir()] == ["next.pt.trace.json.gz"]


def test_a_disk_that_fills_up_costs_that_trace_alone(
    exports: Exports, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(plain: Path, part: Path, needle: bytes) -> bool:
        part.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "compress", full)
        exports.write(Text("{}"), tmp_path / NAME)
        exports.exporter.finish()
    exports.write(Text("{}"), tmp_path / NAME)
    exports.exporter.finish()
    assert [text for _, text in exports.notes] == [
        f"{NAME} was not written (OSError: [Errno 28] No space left on device)"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_trace_that_torch_cannot_write_is_told_and_freed(
    exports: Exports, tmp_path: Path
) -> None:
    class Broken:
        def export_chrome_trace(self, path: str) -> None:
            raise RuntimeError("no results")

    assert exports.write(Broken(), tmp_path / NAME) == []
    exports.exporter.finish()
    assert exports.notes == [("error", f"{NAME} was not written (RuntimeError: no results)")]


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Noted(*options())
    with pytest.raises(NotADirectoryError):
        recorder.open(tmp_path / "file" / "window")
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    recorder.close()
    recorder.finish()


def test_a_folder_lost_during_the_window_costs_that_trace_alone(tmp_path: Path) -> None:
    recorder = Noted(*options())
    out = tmp_path / "window"

    def lose() -> None:
        out.rmdir()
        out.write_text("")

    recorder.window(out, lose)
    ((level, text),) = recorder.notes
    assert level == "error"
    assert text.startswith("window_actor_rank0-of-1_pid")
    assert ".pt.trace.json.gz was not written (" in text
    recorder.window(tmp_path / "next", forward)
    assert len(list((tmp_path / "next").iterdir())) == 1
    assert len(recorder.notes) == 1


SUFFIX = f"_pid{os.getpid()}.pt.trace.json.gz"


def test_a_name_tells_window_role_rank_and_process() -> None:
    name = trace_name("step-000003", "actor", 3, 8)
    assert name == f"step-000003_actor_rank3-of-8{SUFFIX}"


def test_roles_on_one_rank_and_steps_have_names_of_their_own() -> None:
    names = {
        trace_name(window, role, 5, 16)
        for window in ("step-000001", "step-000002")
        for role in ("reference", "value_model")
    }
    assert len(names) == 4
    assert f"step-000001_value-model_rank5-of-16{SUFFIX}" in names


def test_mini_batches_come_last_and_an_empty_role_leaves_no_gap() -> None:
    name = trace_name("step-000003", "", 0, 1, batches="mb3-4")
    assert name == f"step-000003_rank0-of-1_pid{os.getpid()}_mb3-4.pt.trace.json.gz"


@pytest.mark.parametrize(
    "text",
    [
        "actor/rollout",
        "update actor",
        "../..",
        "a:b*c?",
        "演员",
        "x" * 300,
        "a\nb",
        "-rf",
        "é" * 50,
    ],
)
def test_labels_hold_nothing_that_a_file_system_or_a_shell_minds(text: str) -> None:
    assert re.fullmatch(r"[0-9A-Za-z.=+-]{1,80}", label(text))
    assert re.fullmatch(r"[0-9A-Za-z.=+_-]{1,255}", trace_name(text, text, 0, 1))


def test_labels_keep_what_can_be_kept() -> None:
    assert label("step-000001-lr=1e+3.v2") == "step-000001-lr=1e+3.v2"
