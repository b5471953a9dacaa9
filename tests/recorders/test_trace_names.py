"""Names of trace files; places in the grid from a fake Megatron and from real DeviceMeshes."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlprof.recorders.trace_names import label, topology, trace_name, unused

SUFFIX = f"_pid{os.getpid()}.trace.json.gz"


class FakeParallelState(SimpleNamespace):
    """Megatron's module, which answers for the axes that it was given as ``tp=(place, size)``."""

    def __init__(self, initialised: bool = True, **axes: tuple[int, int]) -> None:
        super().__init__(model_parallel_is_initialized=lambda: initialised)
        words = {
            "tp": "tensor_model_parallel",
            "pp": "pipeline_model_parallel",
            "dp": "data_parallel",
            "cp": "context_parallel",
        }
        for axis, (place, size) in axes.items():
            setattr(self, f"get_{words[axis]}_rank", lambda place=place: place)
            setattr(self, f"get_{words[axis]}_world_size", lambda size=size: size)


def megatron(monkeypatch: pytest.MonkeyPatch, state: object) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)  # type: ignore[arg-type]


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
    assert name == f"step-000003_rank0-of-1_pid{os.getpid()}_mb3-4.trace.json.gz"


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


def test_megatrons_grid_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, FakeParallelState(tp=(0, 2), pp=(1, 4), dp=(0, 1), cp=(0, 1)))
    assert trace_name("step-000003", "actor", 3, 8) == (
        f"step-000003_actor_rank3-of-8_tp0-pp1-dp0{SUFFIX}"
    )


def test_context_parallelism_is_told_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, FakeParallelState(tp=(1, 2), pp=(0, 1), dp=(2, 4), cp=(0, 2)))
    assert topology() == {"tp": 1, "pp": 0, "dp": 2, "cp": 0}


def test_an_axis_that_megatron_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, FakeParallelState(tp=(1, 2), dp=(0, 1)))
    assert topology() == {"tp": 1, "dp": 0}


def test_a_megatron_that_is_not_set_up_or_not_megatron_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    megatron(monkeypatch, FakeParallelState(initialised=False, tp=(1, 2)))
    assert topology() == {}
    megatron(monkeypatch, SimpleNamespace())
    assert topology() == {}


def test_without_any_grid_nothing_is_imported_for_it() -> None:
    assert topology() == {}
    assert "megatron" not in sys.modules


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=4)
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tp"))
    Path(folder, f"rank{rank}").write_text(trace_name("window", "actor", rank, 4))
    dist.barrier()
    dist.destroy_process_group()


def test_the_grid_of_a_real_device_mesh_is_in_the_name_of_every_rank(tmp_path: Path) -> None:
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=4)
    grids = [(tmp_path / f"rank{rank}").read_text().split("_")[3] for rank in range(4)]
    assert grids == ["tp0-dp0", "tp1-dp0", "tp0-dp1", "tp1-dp1"]


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    path = tmp_path / "window_pid4.trace.json.gz"
    assert unused(path) == path
    path.touch()
    assert unused(path).name == "window_pid4-2.trace.json.gz"
    (tmp_path / "window_pid4-2.trace.json").touch()  # on its way into a .gz
    assert unused(path).name == "window_pid4-3.trace.json.gz"
