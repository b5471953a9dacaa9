"""Door to TRL's asynchronous GRPO: the trainer, and the rollout process that it spawns.

The trainer's steps and updates are those of `doors.transformers`. The rollout process records into
the same run with the role ``rollout``; its step is one version of the weights, by its number. Each
rollout is a sample, which travels to the trainer with the number of its group.
"""

import functools
from collections.abc import Sequence
from itertools import islice
from time import perf_counter_ns
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit
from lightning_rlprof.recording.annotations import count, record, stage
from lightning_rlprof.recording.samples import Sample, sample
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.records.records import Fate

KIT = Kit("TRL", "trl", "vllm", "transformers")

_SYNC, _WAIT = stage("weight_sync"), stage("wait_for_samples")
_REWARD = stage("compute_reward")


def install_trainer(module: Any) -> None:
    """Mark where the trainer waits for samples, and where it publishes weights."""
    KIT.replace(KIT.find(module, "AsyncGRPOTrainer"), "_sync_weight", _publishes)
    KIT.replace(KIT.find(module, "RolloutQueueDataset"), "__init__", _takes_samples)


def install_worker(module: Any) -> None:
    """Mark the start of the rollout process, and record what its loop does, in that process."""
    KIT.marks(KIT.find(module, "AsyncRolloutWorker"), "start", "wait_for_rollout")
    KIT.replace(KIT.find(module, "_AsyncRolloutLoop"), "run", _recorded)


def _publishes(function: Any) -> Any:
    """Mark a weight sync, with the version that it publishes; only the main process knows that."""

    @KIT.quiet
    def published(trainer: Any) -> None:
        if trainer.accelerator.is_main_process:
            count(version=trainer.model_version)

    @functools.wraps(function)
    def sync_weight(self: Any) -> Any:
        with _SYNC:
            found = function(self)
            published(self)
            return found

    return sync_weight


def _takes_samples(function: Any) -> Any:
    @KIT.quiet
    def watch(dataset: Any) -> None:
        dataset.queue = _Taken(dataset.queue, dataset)

    @functools.wraps(function)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        function(self, *args, **kwargs)
        watch(self)

    return init


class _Watched:
    """A queue, of which one method is watched."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _Taken(_Watched):
    """The queue of rollouts as the trainer has it: to wait for one is a stage."""

    _last: int | None = None

    def __init__(self, queue: Any, dataset: Any) -> None:
        super().__init__(queue)
        self._dataset = dataset

    def get(self, *args: Any, **kwargs: Any) -> Any:
        with _WAIT:
            row = self._queue.get(*args, **kwargs)
        self._took(row)
        return row

    @KIT.quiet
    def _took(self, row: Any) -> None:
        """Tell the fate of a sample by its first row; a conversation may have more of them."""
        one = getattr(row.group_id, "sample", None)
        if one is None:  # of a rollout process that is not recorded
            one = sample(_name(row.group_id), version=row.model_version)
        if one.id == self._last:
            return
        self._last = one.id
        version = self._dataset.model_version_fn()
        fate: Fate = "trained" if row.advantage else "zero_advantage"
        if version - row.model_version > self._dataset.max_staleness:
            fate = "stale"
        tokens, reward = int(row.completion_mask.sum()), row.metrics["reward"]
        one.end(fate, tokens=tokens, reward=reward, trainer_version=version)


class _Group(int):
    """The number of a group, which takes the sample of a row along, also through a pickle."""

    sample: Sample


class _Given(_Watched):
    """The same queue as the rollouts have it: the time in which it was full is a stage."""

    _since: int | None = None

    def put_nowait(self, item: Any) -> None:
        try:
            self._queue.put_nowait(item)
        except Exception:  # TRL tries again
            self._full()
            raise
        self._put()

    @KIT.quiet
    def _full(self) -> None:
        session = current()
        if self._since is None and session is not None:
            self._since = session.clock()

    @KIT.quiet
    def _put(self) -> None:
        session, since = current(), self._since
        if since is not None and session is not None:
            record("backpressure", since, session.clock())
        self._since = None


def _recorded(function: Any) -> Any:
    @functools.wraps(function)
    def run(self: Any) -> Any:
        session = _begin()
        _watch(self)
        try:
            found = function(self)
        except BaseException as error:
            _end(session, f"interrupted by {type(error).__name__}")
            raise
        _end(session, "finished")  # here: a spawned process does not run what atexit knows
        return found

    return run


@KIT.quiet
def _begin() -> Session | None:
    """Record this process; None if a session of another records it."""
    return KIT.session(role="rollout") if current() is None else None


@KIT.quiet
def _end(session: Session | None, status: str) -> None:
    if session is not None:
        session.close(status)


@KIT.quiet
def _watch(loop: Any) -> None:
    """Mark the methods of the class of loops that runs in this process, and begin its step."""
    KIT.replace(_owner(loop, "_generate_one"), "_generate_one", _generates)
    KIT.replace(_owner(loop, "_score_group"), "_score_group", _scores)
    KIT.marks(_owner(loop, "_execute_tool_calls"), "_execute_tool_calls", "tool_calls")
    _follow(loop)
    loop.rollout_buffer = _Given(loop.rollout_buffer)


def _owner(loop: Any, name: str) -> Any:
    """Return the class that defines what a loop calls, which may be one of the user's."""
    return next((kind for kind in type(loop).__mro__ if name in vars(kind)), type(loop))


@KIT.quiet
def _follow(loop: Any) -> None:
    """Begin the step of a new version of the weights, if there is one."""
    session, version = current(), loop.model_version
    if session is None or session.header.role != "rollout" or version == session.step:
        return
    if session.step_start_ns is not None:
        session.end_step()
    session.begin_step(version)


def _generates(function: Any) -> Any:
    """Mark one rollout; the weights may change while it is written."""

    @functools.wraps(function)
    async def generate_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group_id")
        one = sample(_name(group), version=getattr(self, "model_version", None))
        with one, one.phase("actor_generate"):
            found = await function(self, *args, **kwargs)
            _generated(self, group, one, found)
        _follow(self)
        return found

    return generate_one


_MADE: dict[Any, list[tuple[Any, Sample]]] = {}
"""The rows of each conversation and its sample, by groups that are not scored yet."""


def _name(group: Any) -> str:
    return f"prompt {group}"


@KIT.quiet
def _generated(loop: Any, group: Any, one: Sample, found: Any) -> None:
    tokens = len(found[1])
    count(version=loop.model_version, tokens=tokens, samples=1, lengths=[tokens])
    _MADE.setdefault(group, []).append((found[2], one))


def _scores(function: Any) -> Any:
    """Mark the scoring of a group, which makes its samples."""

    @functools.wraps(function)
    async def score_group(self: Any, group: Any) -> Any:
        with _REWARD:
            since = perf_counter_ns()
            rows = await function(self, group)
            _scored(group, rows, since)
        return rows

    return score_group


@KIT.quiet
def _scored(group: Any, rows: Sequence[Any], since: int) -> None:
    """Record that the samples of a group were scored, and let its rows take them along.

    A conversation has one row or more; they follow one another.
    """
    made, until, rest = _MADE.pop(group.group_id, []), perf_counter_ns(), iter(rows)
    count(samples=len(group.completions_sequences))
    for own in group.completions_sequences:
        one = next((each for of, each in made if of is own), None)
        if one is not None:
            one.record("compute_reward", since, until)
        for row in islice(rest, len(own)):
            if one is not None:
                row.group_id = _Group(row.group_id)
                row.group_id.sample = one
