"""Trainings on the CANN double, in processes of their own; not a test.

Each part of a process is set off by a line in the double's log, so that one process serves many
tests: starting one with torch_npu and Lightning takes four seconds.
"""

import asyncio
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.profilers import PyTorchProfiler

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import annotate, mark, stage
from lightning_rlprof.recording.start import start_session
from tests.builders.models import Tiny, loader, make_trainer

RUNS = Path("runs")
LIGHTWEIGHT = {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}
WHOLE = {"profile_step_start": 2, "profile_step_end": 4}
MARKS = {"mstx": True}
DEEP = {"profile_level": "level1"}

# What each is told shows in the arguments of aclprofCreateConfig and in profiler_info.json.
OPTIONS: dict[str, dict[str, Any]] = {
    "level_none": {"profile_level": "level_none"},
    "level0": {"profile_level": "level0"},
    "level1": DEEP,
    "level2": {"profile_level": "level2"},
    "mstx": MARKS,
    "lightweight": LIGHTWEIGHT,
    "host": {"profile_with_npu": False, "profile": True},
    "device": {"profile_with_cpu": False},
    "shapes": {"profile_record_shapes": True},
    "memory": {"profile_with_memory": True},
    "modules": {"profile_with_module": True},
    "db": {"profile_export_type": "db"},
    "stack": {"with_stack": True},
    "arithmetic": {**DEEP, "npu": {"experimental": {"aic_metrics": "ArithmeticUtilization"}}},
    "l2_cache": {"npu": {"experimental": {"l2_cache": True}}},
    "op_attr": {"profile_export_type": "db", "npu": {"experimental": {"op_attr": True}}},
    "raw": {"npu": {"experimental": {"data_simplification": False}}},
    "gc": {"npu": {"experimental": {"gc_detect_threshold": 1.5}}},
    "host_sys": {"npu": {"experimental": {"host_sys": ["cpu", "mem"]}}},
    "sys_io": {"npu": {"experimental": {"sys_io": True}}},
    "sys_interconnection": {"npu": {"experimental": {"sys_interconnection": True}}},
    "included": {**MARKS, "npu": {"experimental": {"mstx_domain_include": ["rlprof"]}}},
    "excluded": {**MARKS, "npu": {"experimental": {"mstx_domain_exclude": ["default"]}}},
    "streams": {**MARKS, "npu": {"device_ranges": True}},
}


class Marked(Tiny):
    """Marks of every sort in each step; breaks in the third where it is told to."""

    breaks = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with stage("actor_generate"):
            asyncio.run(self._score())
            mark("sampled")
        if self.breaks and batch_idx == 2:
            with stage("weight_sync"), annotate("broken"):
                raise RuntimeError("told to break")
        return super().training_step(batch, batch_idx)

    @annotate("score")
    async def _score(self) -> None:
        await asyncio.sleep(0)


def fit(name: str, module: Any = None, profiler: Any = None, **options: Any) -> None:
    """Train four steps on the host; the profiler takes the NPU for the device."""
    callback = ProfilerCallback(profile_save_path=str(RUNS / name), **options)
    make_trainer(callback, profiler=profiler).fit(module or Marked(), loader())


def steps(name: str, count: int = 2, **options: Any) -> None:
    """Record steps of a loop without a Trainer."""
    options = {"profile_save_path": str(RUNS / name), "device_time": False, **options}
    with start_session(ProfilerConfig.build(**options), name="run", device="npu") as session:
        for step in range(1, count + 1):
            session.begin_step(step)
            with stage("actor_update"):
                torch.ones(2, 2) @ torch.ones(2, 2)
            session.end_step()


def part(name: str, act: Callable[..., object], *given: Any, **options: Any) -> None:
    """Set what comes off in the log, do it, and print what it raised."""
    line = {"call": "part", "name": name, "pid": os.getpid()}
    with open(os.environ["CANN_DOUBLE_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")
    try:
        act(name, *given, **options)
    except (RlprofError, RuntimeError) as error:
        print(json.dumps({"part": name, "raised": f"{type(error).__name__}: {error}"}), flush=True)


def trainings() -> None:
    """Train in every mode."""
    part("together", fit, **LIGHTWEIGHT, **WHOLE)
    part("deep", fit, mstx=True, **WHOLE)
    part("stages", fit, stage=["actor_generate", "actor_update"], mstx=True, steps=[2, 3])
    module = Marked()
    module.breaks = True
    part("broken", fit, module, mstx=True, **{**WHOLE, "profile_step_end": 9})
    part("short", fit, mstx=True, **{**WHOLE, "profile_step_end": 9})
    part("beside", fit, profiler=PyTorchProfiler(), mstx=True)
    part("inside", inside)
    part("tokens", generation, stage="actor_generate", mstx=True, tokens=[2, 4])


def generation(name: str, **options: Any) -> None:
    """Record a step that decodes six tokens."""
    config = ProfilerConfig.build(profile_save_path=str(RUNS / name), device_time=False, **options)
    with start_session(config, name="run", device="npu") as session:
        session.begin_step(1)
        with stage("actor_generate"):
            for _ in range(6):
                with annotate("forward"):
                    pass
        session.end_step()


def inside(name: str) -> None:
    """Record while torch.profiler is active."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        steps(name, mstx=True)


def options() -> None:
    """Record one step with each of the options."""
    for name, given in OPTIONS.items():
        part(name, steps, 1, **given)


def one() -> None:
    """Record two steps, each in a capture of its own, where something is missing."""
    part("one", steps, mstx=True, steps=[1, 2])


def analysis() -> None:
    """Record a step and have it analysed when the recording is over."""
    part("analysis", steps, 1, mstx=True, profile_analysis=True)


class OnTheHost(Marked):
    """Trains without a device: otherwise torch_npu asks for one before each step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)


def spans() -> None:
    """Train where there is no device to capture."""
    part("spans", fit, OnTheHost(), mstx=True)


def in_the_way() -> None:
    """Record with a file where a folder belongs, and with msprof around the process."""
    folder = RUNS / "in the way" / "run"
    folder.mkdir(parents=True)
    (folder / "rank-00000").write_text("in the way")
    part("in the way", steps, mstx=True)
    (RUNS / "file").write_text("in the way")
    part("file", steps, mstx=True, profile_save_path="runs/file/below")
    os.environ["PROFILING_MODE"] = "dynamic"
    part("msprof", steps, mstx=True)


def ranks(count: int = 2) -> None:
    """Train on two ranks that speak by gloo; rank 1 is captured, too."""
    from pytorch_lightning.strategies import DDPStrategy

    callback = ProfilerCallback(profile_save_path=str(RUNS / "ranks"), **LIGHTWEIGHT, **WHOLE)
    strategy = DDPStrategy(start_method="spawn", process_group_backend="gloo")
    make_trainer(callback, devices=count, strategy=strategy, use_distributed_sampler=False).fit(
        Tiny(), loader()
    )


def contract() -> None:
    """Print the signatures of the installed torch_npu beside those of the contract."""
    import torch_npu.profiler
    from torch_npu.npu import mstx

    from tests.doubles.torch_npu.fake import CONTRACT
    from tests.recording.recorders.test_npu_fake import written

    profiler = torch_npu.profiler
    functions = {
        "profile.__init__": profiler.profile,
        "_ExperimentalConfig.__init__": profiler._ExperimentalConfig,
        "tensorboard_trace_handler": profiler.tensorboard_trace_handler,
        **{f"mstx.{name}": getattr(mstx, name) for name in ("mark", "range_start", "range_end")},
    }
    found = {name: written(function) for name, function in functions.items()}
    facts = CONTRACT.get(torch_npu.__version__) or [*CONTRACT.values()][-1]  # a newer one
    texts = {name: [re.sub("=.*", "=", text) for text in facts[name]] for name in functions}
    print(json.dumps({"found": found, "written": texts}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parts = (analysis, contract, in_the_way, one, options, ranks, spans, trainings)
    for word in sys.argv[1:]:
        {act.__name__: act for act in parts}[word]()
