"""Copies, memsets, waits and metrics of small exports."""

from pathlib import Path

import pytest

from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.loaders.load import load
from tests.builders.nsys_export import PID, NsysExport, global_pid


@pytest.fixture
def export(tmp_path: Path) -> NsysExport:
    """Step 3 with a stage from 100 to 500 on the main thread."""
    made = NsysExport(tmp_path / "x_rank0.sqlite")
    made.own("step", "step", 0, 1000, step=3)
    made.own("actor_update", "stage", 100, 500, step=3)
    return made


def test_copies_have_kind_and_bytes(export: NsysExport) -> None:
    place = {"deviceId": 1, "streamId": 14, "globalPid": global_pid(PID)}
    for number, (kind, size) in enumerate([(1, 4096), (10, 7), (99, None), (None, 0)]):
        times = {"start": 600 + number, "end": 610, "correlationId": number}
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=kind, bytes=size, **place, **times)
    export.call(150, 0, took=40)

    table = load(export.write()).table("memcpy")

    assert table.columns[4].unit == "bytes"
    assert list(table.rows) == [
        (0, 1, 14, "HtoD", 4096, 600, 10, "actor_update", 3, 150, 40, 100, None),
        (0, 1, 14, "PtoP", 7, 601, 9, None, None, None, None, None, None),
        (0, 1, 14, "kind 99", None, 602, 8, None, None, None, None, None, None),
        (0, 1, 14, None, 0, 603, 7, None, None, None, None, None, None),
    ]


def test_memsets_are_among_the_copies_by_start(export: NsysExport) -> None:
    place = {"deviceId": 0, "streamId": 7, "globalPid": global_pid(PID), "bytes": 64}
    for at in (600, 640):
        times = {"start": at, "end": at + 5, "correlationId": at}
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=8, **place, **times)
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", value=0, start=620, end=630, correlationId=9, **place)

    assert load(export.write()).table("memcpy").column("kind") == ["DtoD", "memset", "DtoD"]


def test_copies_and_memsets_of_a_replay_have_the_number_of_its_kernels(export: NsysExport) -> None:
    place = {"globalPid": global_pid(PID), "graphNodeId": 3}
    for at, number in ((600, 1), (700, 2)):
        export.kernel("k", at, at + 5, number, graphNodeId=7)
        export.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=at + 6, end=at + 9, correlationId=number, **place
        )
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=500, end=510, correlationId=3, **place)
    export.add(
        "CUPTI_ACTIVITY_KIND_MEMSET", start=800, end=810, correlationId=4, globalPid=global_pid(PID)
    )

    spans = load(export.write())

    assert spans.table("kernels").column("graph") == [1, 2]
    assert spans.table("memcpy").column("graph") == [0, 1, 2, None]


def test_memsets_alone_are_a_table_of_copies(export: NsysExport) -> None:
    times = {"start": 600, "end": 610, "correlationId": 1, "globalPid": global_pid(PID)}
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", bytes=64, **times)

    assert load(export.write()).table("memcpy").column("kind") == ["memset"]


def test_waits_have_their_kind(export: NsysExport) -> None:
    times = {"start": 600, "end": 700, "correlationId": 1, "globalPid": global_pid(PID)}
    export.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", syncType=3, deviceId=0, streamId=7, **times)
    export.call(550, 1)

    table = load(export.write()).table("sync")

    assert list(table.rows) == [(0, 0, 7, "stream", 600, 100, None, 3)]


def test_metrics_are_named_per_source_and_gpu(export: NsysExport) -> None:
    for gpu, name in ((0, "SMs Active"), (1, "DRAM Read")):
        export.add("TARGET_INFO_GPU_METRICS", typeId=256 + gpu, metricId=4, metricName=name)
        export.add(
            "GPU_METRICS", timestamp=100 * gpu, typeId=256 + gpu, metricId=4, value=gpu + 0.5
        )
    export.add("GPU_METRICS", timestamp=300, typeId=256, metricId=5, value=80)
    export.add("GPU_METRICS", timestamp=300, typeId=256, metricId=5, value="x")

    table = load(export.write()).table("gpu_metrics")

    assert list(table.rows) == [
        (None, 0, 0, "SMs Active", 0.5),
        (None, 1, 100, "DRAM Read", 1.5),
        (None, 0, 300, None, 80.0),
    ]
    assert table.note == "1 samples are left out: they have no time or no value"


def test_a_gpu_has_the_rank_whose_kernels_ran_on_it(tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "x.sqlite")
    # GPU 0 is of rank 1, 1 of nobody, 2 of both, 3 of a process that the export does not place.
    for pid, rank, devices in ((PID, 0, {0: 2}), (200, 1, {0: 0, 1: 2}), (300, 2, {0: 3})):
        export.said("rlprof.rank", rank, pid=pid)
        for device, gpu in devices.items():
            export.kernel("k", 600, 610, 1, pid=pid, deviceId=device)
            if pid != 300:
                export.add("TARGET_INFO_CUDA_DEVICE", pid=pid, cudaId=device, gpuId=gpu)
    for gpu in range(4):
        export.add("GPU_METRICS", timestamp=100, typeId=256 + gpu, metricId=4, value=1)

    table = load(export.write()).table("gpu_metrics")

    assert table.column("rank") == [1, None, None, None]


@pytest.mark.parametrize("kind", ["MEMSET", "MEMCPY"])
def test_copies_alone_are_work_of_a_device(tmp_path: Path, kind: str) -> None:
    export = NsysExport(tmp_path / "x.sqlite")
    times = {"start": 600, "end": 610, "correlationId": 1, "globalPid": global_pid(PID)}
    export.add(f"CUPTI_ACTIVITY_KIND_{kind}", bytes=64, **times)

    spans = load(export.write())

    assert [header.device for header in spans.headers.values()] == ["cuda"]
    assert spans.table("memcpy").note.startswith("1 copies have no recorded launch")
    assert "no kernels: only copies" in [note.text for note in spans.notes]
    assert ledger(spans).column("category")[0] == "exposed memcpy"


def test_replays_alone_hide_their_kernels(export: NsysExport) -> None:
    times = {"start": 600, "end": 610, "correlationId": 1, "globalPid": global_pid(PID)}
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", graphId=1, **times)

    spans = load(export.write())

    table = spans.table("kernels")
    assert not table.rows
    assert "1 CUDA graph replays: kernels inside CUDA graphs aren't visible" in table.note
    assert any("replays of CUDA graphs hide them" in note.text for note in spans.notes)
    assert "Kernels inside CUDA graphs aren't visible" in ledger(spans).note
    assert [header.device for header in spans.headers.values()] == ["cuda"]


def test_a_sample_without_a_source_has_no_device(export: NsysExport) -> None:
    export.add("GPU_METRICS", timestamp=5, typeId=None, metricId=1, value=1)

    table = load(export.write()).table("gpu_metrics")

    assert [row[:2] for row in table.rows] == [(None, None)]
