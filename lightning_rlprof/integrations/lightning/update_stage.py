"""The update is whole: what Lightning's loop runs of it belongs to its stage, marked or not.

Under automatic optimization the backward pass, gradient clipping and the optimizer's step run after
``training_step`` has returned, where no code of the user can mark them.
"""

from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_rlprof.config.stages import WrapRule
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.marks_in_code import names_in_code
from lightning_rlprof.integrations.lightning.trainer_hooks import Cover
from lightning_rlprof.recording.annotations import LoopMarker, Marker, in_stage
from lightning_rlprof.recording.capture import arms_stages
from lightning_rlprof.recording.open_spans import Span, opened
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.stage_aliases import STAGE_ALIASES

_ACTOR, _CRITIC = "actor_update", "critic_update"
_UPDATES = {_ACTOR, _CRITIC, *STAGE_ALIASES[_ACTOR].split(), *STAGE_ALIASES[_CRITIC].split()}
_MOST_NODES = 10_000  # Nodes of a loss's graph that are searched for a parameter.


class UpdateStages:
    """Complete the update stage of each training step until `remove`, in one of four cases.

    - Marked: a mark of the update that ends before the backward pass continues until the optimizer
      has stepped.
    - Closure: without a mark of the update, but with marks of other stages, Lightning's optimizer
      closure is the update stage of its optimizer. So it is where a capture of that stage is asked
      for.
    - By hand: under manual optimization such a stage ends with each step of an optimizer.
    - Bare: in a run without any mark nothing is added: the phases of the loop are its stages. Until
      a stage ends, a step asks for nothing else.

    Attributes:
        rules: What rlprof has marked by the names of methods.

    Args:
        session: Where spans go.
        trainer: Who trains.
        module: What is trained.
        give_up: Told what failed here; the training never hears of it.
    """

    def __init__(
        self, session: Session, trainer: Any, module: Any, give_up: Callable[[Exception], None]
    ) -> None:
        config = session.config
        self._session, self._trainer, self._module = session, trainer, module
        self._give_up, self._thread = give_up, get_ident()
        self.rules: Sequence[WrapRule] = ()
        self._names = _UPDATES | {*config.optimizer_stages}
        self._automatic = module.automatic_optimization
        self._markers: dict[str, LoopMarker] = {}
        self._of_optimizer: dict[int, str] = {}
        self._marked: bool | None = None  # Whether the user marks the update; None if unknown.
        self._found = False  # Whether a mark of the update was seen.
        self._others = False  # Whether any other stage was seen.
        self._asked: object = None  # The configuration of which the next one is known.
        self._by_stage = False  # Whether a stage may ask for a capture.
        self._since: int | None = None  # Start of the training step; None outside of it.
        self._open: tuple[LoopMarker, Span] | None = None
        self._stepping = 0  # The id of the optimizer that steps now.
        self._stepped = self._backward_done = 0
        strategy = trainer.strategy
        self._backward = Marker("backward", "region")(strategy.backward)
        self._covers = [Cover(strategy, "backward", self._run_backward)]
        self._hooks: list[Any] = []
        if self._automatic:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            self._covers.append(Cover(loop, "run", self._around(loop.run)))
        else:
            step = self._around(strategy.training_step)
            self._covers.append(Cover(strategy, "training_step", step))
            self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Restore what was covered, and stop listening."""
        for cover in self._covers:
            cover.remove()
        for hook in self._hooks:
            hook.remove()
        with suppress(Exception):  # A part that has failed once may fail again.
            self._end()

    # ---- what the loop runs

    def _around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._safely(self._begin)
            try:
                return run(*args, **kwargs)
            finally:
                self._safely(self._end)

        return training_step

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        loss, optimizer = (*args, None, None)[:2]
        self._safely(self._reach, optimizer, loss)
        now_open = self._open
        if now_open:
            now_open[0].yields = False  # A recomputed forward pass belongs to the update.
        try:
            return self._backward(*args, **kwargs)
        finally:
            if now_open:
                now_open[0].yields = True
            self._backward_done = self._session.clock()

    def _safely(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._give_up(error)

    def closure_done(self) -> None:
        """Know that the update follows now, also without a backward pass."""
        self._safely(self._reach)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._since is not None and not self._stepping and get_ident() == self._thread:
            self._stepping = id(optimizer)
            self._safely(self._reach, optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._since is not None and self._stepping == id(optimizer):
            self._stepping = 0
            self._safely(self._end_update, optimizer)

    # ---- the stage

    def _begin(self) -> None:
        session, config = self._session, self._session.config
        self._since, self._stepping = session.clock(), 0
        if config is not self._asked:  # A request for a capture brings one of its own.
            self._asked, self._by_stage = config, config.captures and config.per_stage
        if self._by_stage:
            session.keep_windows(self._continues)
        if self._marked is None:
            self._marked = self._is_marked()
        if self._marked or in_stage():
            return
        if not (self._by_stage or (self._automatic and self._has_marks())):
            return
        arms = arms_stages(config, session.header.rank, session.step)
        name, alone = self._name(None), self._captured_alone()
        if self._automatic:
            early = self._has_marks() and (alone or not arms)
            early = early or (alone and self._asks(name))
        else:  # A capture of the update has to include its forward pass.
            early = arms and alone and self._asks(name) and self._one_stage()
        if early:
            self._enter(name)

    def _is_marked(self) -> bool:
        """Whether rules or the code name an update, before the first one."""
        rules = [*self._session.config.wrap, *self.rules]
        known = {name for rule in rules for name in rule.names().values()}
        with suppress(Exception):  # The module's code may raise any error.
            known |= names_in_code(self._module)
        return bool(self._names & known)

    def _reach(self, optimizer: Any = None, loss: Any = None) -> None:
        """Open the stage of the update that has been reached, from where it began."""
        if self._since is None or self._open or get_ident() != self._thread or in_stage():
            return
        if not (self._has_marks() or self._by_stage):  # The case is bare.
            return
        last, update = self._session.buffer.last_stages(self._since, self._names)
        if update is not None and self._continues(update):  # It is marked.
            self._marked = self._found = True
            self._enter(
                update.name, last.end_ns if last else None, update if update is last else None
            )
            return
        if self._found:  # The code says which steps have an update.
            return
        name = self._name(optimizer, loss)
        if not (self._others or self._asks(name)) or not self._is_ours(optimizer):
            return
        start = self._since  # It is the closure, or done by hand.
        if not self._automatic:
            start = max(start, self._stepped, 0 if last is None else last.end_ns or 0)
        self._enter(name, start)

    def _has_marks(self) -> bool:
        """Whether any stage was seen in this run."""
        self._others = self._others or self._session.buffer.has_stages()
        return self._others

    def _continues(self, span: Span) -> bool:
        """Whether a stage is a mark of the update without an optimizer's step in it."""
        return span.name in self._names and span.start_ns >= self._stepped

    def _asks(self, name: str) -> bool:
        return self._by_stage and self._session.config.wants_stage(name)

    def _captured_alone(self) -> bool:
        """Whether captures are of the update alone: others cannot open inside of an open one."""
        wanted = self._session.config.integrated.stage
        return wanted != "all" and self._names.issuperset(
            [wanted] if isinstance(wanted, str) else wanted
        )

    def _enter(self, name: str, start: int | None = None, continued: Span | None = None) -> None:
        marker = self._markers.get(name) or self._markers.setdefault(name, LoopMarker(name))
        marker.__enter__()
        span = opened.get()
        if span is None or span.marker is not marker:  # Nothing is recorded.
            return
        self._open = marker, span
        span.start_ns = min(span.start_ns, start or span.start_ns)
        if continued is not None and self._session.buffer.take_back(continued):
            span.start_ns, span.id = continued.start_ns, continued.id
            span.counters = continued.counters

    def _end_update(self, optimizer: Any) -> None:
        if self._is_ours(optimizer):
            self._stepped = self._session.clock()
        self._leave()

    def _leave(self) -> None:
        if self._open is not None:
            (marker, span), self._open = self._open, None
            if self._by_stage and not self._automatic:  # One capture covers the training step.
                self._session.keep_windows(lambda span: True)
            marker.__exit__(None, None, None)
            self._session.buffer.join_late(span)
            if not self._automatic and self._stepped < span.start_ns:
                span.end_ns = max(span.start_ns, self._backward_done)
            if self._by_stage:
                self._session.keep_windows(self._continues)

    def _end(self) -> None:
        self._since = None
        self._leave()
        if self._by_stage:
            self._session.close_kept_window()

    # ---- whose update it is

    def _stages(self) -> dict[int, str]:
        """Return the update stage of each optimizer of Lightning's, by id."""
        optimizers, given = self._trainer.optimizers, self._session.config.optimizer_stages
        if len(self._of_optimizer) != len(optimizers):
            named = self._module.named_parameters()
            critics = {id(each) for name, each in named if _is_critics(name)}
            stages = given or [
                _CRITIC if {*map(id, _parameters(one))} <= critics else _ACTOR for one in optimizers
            ]
            self._of_optimizer = dict(zip(map(id, optimizers), stages, strict=True))
        return self._of_optimizer

    def _name(self, optimizer: Any, loss: Any = None) -> str:
        stages = self._stages()
        if self._one_stage():
            return next(iter(stages.values()))
        if optimizer is None and loss is not None:
            optimizer = _owner(loss, self._trainer.optimizers)
        inner = getattr(optimizer, "optimizer", None)  # A LightningOptimizer contains the real one.
        return stages.get(id(optimizer)) or stages.get(id(inner), _ACTOR)

    def _one_stage(self) -> bool:
        return len({*self._stages().values()}) == 1

    def _is_ours(self, optimizer: Any) -> bool:
        """Whether an optimizer trains the module, as far as Lightning knows; None may be any."""
        if self._automatic or optimizer is None or id(optimizer) in self._of_optimizer:
            return True
        stages = self._stages()
        return not stages or id(optimizer) in stages


def check_optimizer_stages(given: Sequence[str], optimizers: Sequence[Any]) -> None:
    """Refuse ``optimizer_stages`` that are not one for each optimizer.

    Raises:
        ConfigError: There are more or fewer of them.
    """
    if given and len(given) != len(optimizers):
        raise ConfigError(
            f"optimizer_stages={given} has {len(given)} stages, but configure_optimizers returned "
            f"{len(optimizers)} optimizers: give one stage for each, in the same order"
        )


def _is_critics(parameter: str) -> bool:
    parts = parameter.lower().split(".")
    return parts[0].startswith("value") or any("critic" in part for part in parts)


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _owner(loss: Any, optimizers: Sequence[Any]) -> Any:
    """Return the optimizer of a parameter that a loss depends on; None if it cannot be told."""
    owners = {id(each): one for one in optimizers for each in _parameters(one)}
    nodes, seen = [getattr(loss, "grad_fn", None)], set[Any]()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (found := owners.get(id(getattr(node, "variable", None)))) is not None:
            return found
        nodes += [each for each, _ in node.next_functions]
    return None
