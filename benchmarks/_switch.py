"""A Lightning training in which each step can have another profiler."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter_ns, thread_time_ns
from typing import Any

import pytorch_lightning as pl
import torch
from _contenders import Span, TimerSums, TreeFloor
from _measure import fresh
from pytorch_lightning.profilers import PassThroughProfiler, SimpleProfiler
from torch.optim import optimizer as torch_optimizer

from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import current

__all__ = [
    "AGAIN",
    "CONTENDERS",
    "FLOOR",
    "HOOKS",
    "NO_PROFILER",
    "OURS",
    "SIMPLE",
    "STAGES",
    "Policy",
    "Switch",
]

STAGES = (
    "weight_sync",
    "actor_generate",
    "actor_image_embeds",
    "compute_reward",
    "actor_compute_log_prob",
    "reference_compute_log_prob",
    "critic_compute_values",
    "compute_advantage",
    "critic_update",
    "kl_penalty",
    "actor_update",
)
NO_PROFILER, AGAIN = "no profiler", "no profiler again (A/A)"
OURS, HOOKS = "ProfilerCallback, 11 stages", "ProfilerCallback, hooks only"
SIMPLE, VERL = "SimpleProfiler, hooks and 11 stages", "verl marked_timer formula, 11 stages"
FLOOR = "floor: a callback, 11 spans, kept 100 ms"
CONTENDERS = (NO_PROFILER, AGAIN, OURS, HOOKS, FLOOR, SIMPLE, VERL)

_TABLES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def _marked(pieces: Sequence[tuple[str, Any]], span: Span, batch: torch.Tensor) -> None:
    for name, work in pieces:
        with span(name):
            work(batch)


class Policy(pl.LightningModule):
    """Eleven pieces of work per step, the last one an update; ``span`` marks them or is None."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers = [torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)]
        self.model = torch.nn.Sequential(*layers)
        self.pieces = [(name, self.score) for name in STAGES[:-1]] + [(STAGES[-1], self.update)]
        self.span: Span | None = None
        self.marked: Callable[..., None] = _marked

    def score(self, batch: torch.Tensor) -> None:
        """Run the model forward, a few times."""
        with torch.no_grad():
            for _ in range(3):
                self.model(batch)

    def update(self, batch: torch.Tensor) -> None:
        """Make one optimizer step, the way that manual optimisation does."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.model(batch).square().mean())
        optimizer.step()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Do the pieces, marked or not."""
        if self.span is None:
            for _, work in self.pieces:
                work(batch)
        else:
            self.marked(self.pieces, self.span, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the update."""
        return torch.optim.AdamW(self.model.parameters())


class Forgetting(pl.Callback):
    """The least that a callback can do about the floor's spans: keep them for some 100 ms."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Forget the spans of 20 steps, where ours are written."""
        if len(TreeFloor.kept) >= 20 * len(STAGES):
            TreeFloor.kept.clear()


class Switch:
    """Change who watches between two steps, by a plan, and take the time of each step.

    Attributes:
        wall: Nanoseconds of each step.
        cpu: Nanoseconds of CPU time of the same steps, on the training thread.

    Args:
        trainer: Its only callback is the `ProfilerCallback`.
        policy: What it is about to train, one step longer than the plan.
        plan: A contender for each step.
    """

    def __init__(self, trainer: Any, policy: Policy, plan: Sequence[str]) -> None:
        self.wall: list[int] = []
        self.cpu: list[int] = []
        self._trainer, self._policy, self._plan = trainer, policy, plan
        simple: Any = SimpleProfiler()
        usual: Any = PassThroughProfiler()
        # The callback keeps the profiler that it has covered: covering and uncovering one between
        # steps would make the interpreter forget what it knows of forty places in Lightning.
        covered = trainer.profiler
        self._profilers = dict.fromkeys(CONTENDERS, usual)
        self._profilers |= {OURS: covered, HOOKS: covered, SIMPLE: simple}
        self._spans: dict[str, Span] = {
            OURS: stage,
            SIMPLE: simple.profile,
            VERL: TimerSums().span,
            FLOOR: lru_cache(TreeFloor),
        }
        self._marked = {name: fresh(_marked) for name in self._spans}
        self._advance = trainer.fit_loop.epoch_loop.advance
        trainer.fit_loop.epoch_loop.advance = self._timed
        self._start_wall = self._start_cpu = 0

    def _timed(self, fetcher: Any) -> None:
        if self._start_wall:
            self.wall.append(perf_counter_ns() - self._start_wall)
            self.cpu.append(thread_time_ns() - self._start_cpu)
        else:
            self._note()
        done = len(self.wall)
        # The step after the last is the callback's: its own end must find it installed.
        self._change(self._plan[done] if done < len(self._plan) else OURS)
        self._start_cpu = thread_time_ns()
        self._start_wall = perf_counter_ns()
        self._advance(fetcher)

    def _note(self) -> None:
        """Note what the callback's own set-up left behind."""
        self._callbacks = {name: list(self._trainer.callbacks) for name in (OURS, HOOKS)}
        self._callbacks[FLOOR] = [Forgetting()]
        self._hooks = [dict(getattr(torch_optimizer, table)) for table in _TABLES]
        if not ("profile" in vars(self._trainer.profiler) and all(self._hooks)):
            raise RuntimeError("the callback installs itself elsewhere now; teach _switch.py where")

    def _change(self, name: str) -> None:
        ours = name in (OURS, HOOKS)
        self._trainer.callbacks[:] = self._callbacks.get(name, [])
        for table, hooks in zip(_TABLES, self._hooks, strict=True):
            getattr(torch_optimizer, table).clear()
            getattr(torch_optimizer, table).update(hooks if ours else {})
        self._trainer.profiler = self._profilers[name]
        self._policy.span = self._spans.get(name)
        self._policy.marked = self._marked.get(name, _marked)
        if ours:
            self._begin_step()

    def _begin_step(self) -> None:
        session = current()
        if session is None:
            raise RuntimeError("the callback has stopped recording; its log says why")
        # Numbered as in its on_train_start: total_batch_idx is the batch before, from 0.
        step = self._trainer.fit_loop.epoch_loop.total_batch_idx + 2
        if session.step != step:
            session.begin_step(step)
