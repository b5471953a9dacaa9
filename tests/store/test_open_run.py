"""A run is read from its cache, whatever it contains."""

import json
from pathlib import Path

import pytest

from lightning_rlprof.store import open_run as opened
from lightning_rlprof.store.ingest import keep


def test_a_trace_without_spans_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5, "dur": 2}
    gpu = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
    path.write_text(json.dumps({"schemaVersion": 1, **gpu, "traceEvents": [kernel]}))
    keep(path, None)

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the trace was read")

    monkeypatch.setattr(opened, "load", read)
    run = opened.open_run(path)
    assert len(run) == 0
    assert run.table("kernels").column("duration") == [2_000]
