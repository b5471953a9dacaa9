"""Asynchronous GRPO: rollout actors on Ray run ahead of the trainer, every sample followed.

    pip install "lightning-rlprof[demo,ray]"
    python examples/ray/async_grpo.py --steps 30
    python examples/ray/async_grpo.py --kill-rollout

The trainer is this process. Each rollout actor generates a batch of groups token by token, as an
engine with continuous batching does, and scores them; a verifier takes a while for some. The
trainer takes the groups in the order in which they come, leaves out stale ones, and publishes its
weights after each update.
"""

import argparse
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor

from lightning_rlprof.cli.demo.grpo import (
    CLIP,
    GRADIENT_CLIP,
    clipped_loss,
    exact_match,
    group_advantages,
    masked_mean,
    warm_start,
)
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.demo.policy import END, PAD, Policy, Task, answer_mask, token_log_probs
from lightning_rlprof.cli.demo.run import policy_and_task
from lightning_rlprof.integrations.loop import start_session, step
from lightning_rlprof.recording.annotations import annotate, count, mark, stage
from lightning_rlprof.recording.samples import Sample, sample
from lightning_rlprof.records.records import JOB_VARIABLE

STEPS = 60
"""Updates, unless the options say otherwise."""

ACTORS, BATCH, UPDATE, SAMPLES = 2, 6, 4, 8
"""Rollout actors, groups that they generate at once, groups of an update, samples of a group."""

MAX_STALENESS = 2
"""Versions that a group may be behind the weights that it updates."""

_MOST_AHEAD = UPDATE * MAX_STALENESS  # groups, before another batch is asked for
_SLOTS = 24  # sequences that an actor decodes at the same time
_SLOW_VERIFIER, _VERIFIER_S = 0.04, 0.15


class Group(NamedTuple):
    """The samples of one prompt with what the trainer learns from."""

    samples: list[Sample]
    prompts: Tensor
    answers: Tensor
    old: Tensor
    rewards: list[float]


class Asked(NamedTuple):
    """One call of an actor that has not returned, and what it is to answer."""

    actor: int
    samples: list[Sample]
    entries: list[int]


class Rollout:
    """A rollout actor: the policy, and the samples that it is asked for."""

    def __init__(self, options: DemoOptions, number: int) -> None:
        torch.set_num_threads(options.recipe.threads)
        torch.manual_seed(options.seed + number)
        self.number = number
        self.policy, self.task = policy_and_task(options)
        self.draw = random.Random(f"{options.seed}/{number}")
        start_session(role="rollout", profile_save_path=str(options.save_path), summary=False)

    def update(self, weights: dict[str, Tensor], version: int) -> None:
        """Load weights."""
        with stage("weight_sync", version=version), annotate("load_weights"):
            count(bytes=sum(each.nbytes for each in weights.values()))
            self.policy.load_state_dict(weights)

    def is_ready(self) -> bool:
        """Answer once the actor has started."""
        return True

    def rollout(self, samples: list[Sample], entries: list[int], version: int) -> list[Group]:
        """Answer and score one prompt per sample; return the groups."""
        with step(), stage("actor_generate", version=version):
            return self._rollout(samples, entries, version)

    def _rollout(self, samples: list[Sample], entries: list[int], version: int) -> list[Group]:
        """Decode as many sequences at a time as there are slots, and end each at its own end."""
        prompts = self.task.encode_prompts([self.task.train[each] for each in entries])
        answers = torch.full((len(samples), self.task.answer_width), PAD)
        waiting = deque(range(len(samples)))
        began: dict[int, int] = {}  # by sequence that is decoded, when
        place = [0] * len(samples)
        while waiting or began:
            while waiting and len(began) < _SLOTS:
                began[waiting.popleft()] = time.perf_counter_ns()
            self._decode(prompts, answers, [*began], place)
            for at in [*began]:
                if place[at] == answers.shape[1] or answers[at, place[at] - 1] == END:
                    own = samples[at]
                    own.version, own.replica = version, self.number
                    now = time.perf_counter_ns()
                    own.record("generate", began.pop(at), now, tokens=place[at])
        return self._scored(samples, entries, prompts, answers)

    @torch.no_grad()
    def _decode(
        self, prompts: Tensor, answers: Tensor, active: list[int], place: list[int]
    ) -> None:
        """Add one token to each active sequence, however many it has."""
        longest = prompts.shape[1] + max(place[at] for at in active)
        tokens = torch.cat([prompts[active], answers[active]], 1)[:, :longest]
        ends = torch.tensor([prompts.shape[1] + place[at] - 1 for at in active])
        logits = self.policy(tokens)[torch.arange(len(active)), ends, END:]
        picked = torch.multinomial(logits.softmax(1), 1)[:, 0] + END
        for at, token in zip(active, picked.tolist(), strict=True):
            answers[at, place[at]] = token
            place[at] += 1

    def _scored(
        self, samples: list[Sample], entries: list[int], prompts: Tensor, answers: Tensor
    ) -> list[Group]:
        """Score the answers, of which the verifier keeps some waiting; return them by group."""
        with torch.no_grad():
            old = token_log_probs(self.policy, prompts, answers)
        found = []
        for low in range(0, len(samples), SAMPLES):
            rows = slice(low, low + SAMPLES)
            given = [self.task.train[each] for each in entries[rows]]
            with samples[low].phase("compute_reward"):
                rewards = self.task.rewards(given, self.task.decode(answers[rows]))
                if self.draw.random() < _SLOW_VERIFIER:
                    time.sleep(_VERIFIER_S)
            found.append(Group(samples[rows], prompts[rows], answers[rows], old[rows], rewards))
        return found


class Trainer:
    """The trainer: asks the actors ahead, trains on what comes, and keeps the books."""

    def __init__(self, options: DemoOptions, task: Task, policy: Policy, actors: list[Any]) -> None:
        self.task, self.policy, self.actors = task, policy, dict(enumerate(actors))
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=options.recipe.learning_rate, weight_decay=0.0
        )
        self.version = 0
        self._draw = random.Random(options.seed)
        self._asked: dict[Any, Asked] = {}
        self._buffer: deque[Group] = deque()

    def measure(self) -> None:
        """Put as many bytes as the weights have into the object store, to compare with."""
        size = sum(each.nbytes for each in self.policy.state_dict().values())
        payload = torch.zeros(size, dtype=torch.uint8)
        for _ in range(5):
            with annotate("bandwidth_probe"):
                count(bytes=size)
                ray.put(payload)

    def publish(self) -> None:
        """Let every actor that lives load the weights before its next batch."""
        weights = {name: each.detach().clone() for name, each in self.policy.state_dict().items()}
        size = sum(each.nbytes for each in weights.values())
        with stage("weight_sync", version=self.version, bytes=size):
            with annotate("transfer"):
                count(bytes=size)
                sent = ray.put(weights)
            for actor in self.actors.values():
                actor.update.remote(sent, self.version)

    def ask(self) -> None:
        """Give batches to the actors with the fewest, until enough groups are on their way."""
        while self._ahead() <= _MOST_AHEAD:
            number = min(self.actors, key=self._calls)
            entries = self._draw.sample(range(len(self.task.train)), BATCH)
            names = [each for each in entries for _ in range(SAMPLES)]
            new = [sample(f"{self.task.name}/{each}", version=self.version) for each in names]
            self._send(self.actors[number], Asked(number, new, names))

    def _ahead(self) -> int:
        """Return how many groups are asked for or wait in the buffer."""
        asked = sum(len(each.samples) // SAMPLES for each in self._asked.values())
        return asked + len(self._buffer)

    def _calls(self, actor: int) -> int:
        return sum(each.actor == actor for each in self._asked.values())

    def _send(self, actor: Any, asked: Asked) -> None:
        self._asked[actor.rollout.remote(asked.samples, asked.entries, self.version)] = asked

    def collect(self) -> list[Group]:
        """Wait for the groups of an update; stale ones are left out, lost ones asked for again."""
        fresh: list[Group] = []
        while len(fresh) < UPDATE:
            self.ask()
            if not self._buffer:
                with stage("wait_for_samples"):
                    (ready,), _ = ray.wait([*self._asked], num_returns=1)
                    self._take(ready)
                continue
            group = self._buffer.popleft()
            if self.version - int(group.samples[0].version or 0) > MAX_STALENESS:
                for own in group.samples:
                    own.end("stale", trainer_version=self.version)
            else:
                fresh.append(group)
        self.ask()  # The actors work while this process updates.
        return fresh

    def _take(self, ready: Any) -> None:
        asked = self._asked.pop(ready)
        try:
            groups = ray.get(ready)
            self._buffer.extend(groups)
            for group in groups:
                mark("sample taken", sample=group.samples[0].id)
        except ray.exceptions.RayActorError:
            self.actors.pop(asked.actor, None)
            if not self.actors:
                raise RuntimeError("all rollout actors are dead") from None
            number = min(self.actors)
            again = [each.retry() for each in asked.samples]
            self._send(self.actors[number], Asked(number, again, asked.entries))

    def close(self) -> None:
        """Say that what is still asked for, or was not taken, is not used."""
        left = [each.samples for each in self._asked.values()]
        left += [group.samples for group in self._buffer]
        for own in chain.from_iterable(left):
            own.end("aborted")

    def train(self, groups: list[Group]) -> float:
        """Update the policy; say of each sample what became of it. Return the mean reward."""
        rewards = torch.tensor([group.rewards for group in groups])
        with stage("compute_advantage"):
            advantages = group_advantages(rewards)
            useful = [at for at in range(len(groups)) if bool(advantages[at].any())]
        with stage("actor_update"):
            prompts, answers, old = (
                torch.cat([getattr(groups[at], name) for at in useful] or [torch.zeros(0)])
                for name in ("prompts", "answers", "old")
            )
            if useful:
                count(tokens=int(answer_mask(answers).sum()))
                new = token_log_probs(self.policy, prompts, answers)
                loss = clipped_loss(new, old, advantages[useful].view(-1, 1), CLIP)
                self.optimizer.zero_grad()
                masked_mean(loss, answer_mask(answers)).backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), GRADIENT_CLIP)
                self.optimizer.step()
            for at, group in enumerate(groups):
                fate: Any = "trained" if at in useful else "zero_advantage"
                for own, reward in zip(group.samples, group.rewards, strict=True):
                    own.end(fate, reward=reward, trainer_version=self.version)
        self.version += 1
        return float(rewards.mean())


def main() -> None:
    """Train as the command line says, and record trainer and rollout actors as one run."""
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on Ray")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("-o", "--output", type=Path, default=Path("profiler_data"))
    parser.add_argument("--kill-rollout", action="store_true", help="kill an actor halfway")
    words = parser.parse_args()
    options = DemoOptions(steps=words.steps, save_path=words.output.absolute())
    torch.set_num_threads(options.recipe.threads)
    torch.manual_seed(options.seed)
    policy, task = policy_and_task(options)
    warm_start(policy, task, task.warmup_steps, options.seed, options.recipe)
    before = exact_match(policy, task)
    with _one_job():
        ray.init(num_cpus=ACTORS, include_dashboard=False, log_to_driver=False, logging_level=40)
        remote: Any = ray.remote(num_cpus=0, max_restarts=0)(Rollout)
        actors = [remote.remote(options, each) for each in range(ACTORS)]
        ray.get([actor.is_ready.remote() for actor in actors])
        where = str(options.save_path)
        with start_session(role="trainer", profile_save_path=where, summary=False) as session:
            trainer = Trainer(options, task, policy, actors)
            trainer.measure()
            trainer.publish()
            for number in range(1, words.steps + 1):
                with step():
                    trainer.train(trainer.collect())
                    trainer.publish()
                if words.kill_rollout and number == max(words.steps // 2, 1):
                    ray.kill(actors[-1])
            trainer.close()
    after = exact_match(policy, task)
    print(f"Held-out exact match: {before:.2f} before, {after:.2f} after")
    print(f"rlprof show {session.run} samples")


@contextmanager
def _one_job() -> Iterator[None]:
    """Let this process and the actors that it starts write one run; end Ray at last."""
    before = os.environ.get(JOB_VARIABLE)
    os.environ[JOB_VARIABLE] = before or f"demo {os.getpid()} {time.time_ns()}"
    try:
        yield
    finally:
        ray.shutdown()
        if before is None:
            del os.environ[JOB_VARIABLE]


if __name__ == "__main__":
    main()
