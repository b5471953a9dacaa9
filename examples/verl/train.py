"""GRPO with verl's worker groups on Ray, its timers and its algorithms; on a CPU.

verl's own trainers need GPUs. This driver has the stages of its `RayPPOTrainer.fit` in their order.
"""

import copy

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_policy_loss,
    kl_penalty,
)
from verl.utils.profiler import DistProfiler, DistProfilerExtension, marked_timer

VOCABULARY, LENGTH, GROUP, STEPS = 64, 32, 8, 10


class ActorRolloutRefWorker(Worker, DistProfilerExtension):
    """Generates with a recurrent policy, scores its tokens, updates it."""

    def __init__(self):
        Worker.__init__(self)
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank))
        torch.manual_seed(0)
        torch.distributed.init_process_group("gloo")
        embed, memory = torch.nn.Embedding(VOCABULARY, 128), torch.nn.GRU(128, 256)
        self.actor = torch.nn.ModuleList([embed, memory, torch.nn.Linear(256, VOCABULARY)])
        self.ref = copy.deepcopy(self.actor)
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @DistProfiler.annotate(color="red", role="rollout_generate")
    @torch.no_grad()
    def generate_sequences(self, data):
        """Sample responses, one token at a time."""
        embed, memory, head = self.actor
        token, state, tokens = data.batch["prompts"][:, -1], None, []
        for _ in range(LENGTH):
            seen, state = memory(embed(token)[None], state)
            token = torch.distributions.Categorical(logits=head(seen[0])).sample()
            tokens.append(token)
        return DataProto.from_dict({"responses": torch.stack(tokens, 1)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    @torch.no_grad()
    def compute_log_prob(self, data):
        """Return the log-probabilities of the policy that generated."""
        return DataProto.from_dict({"old_log_probs": self.log_probs(self.actor, data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @DistProfiler.annotate(color="olive", role="ref_compute_log_prob")
    @torch.no_grad()
    def compute_ref_log_prob(self, data):
        """Return the log-probabilities of the reference."""
        return DataProto.from_dict({"ref_log_prob": self.log_probs(self.ref, data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @DistProfiler.annotate(color="red", role="actor_update")
    def update_actor(self, data):
        """Take one step on the clipped loss; gradients are averaged over the workers."""
        batch = data.batch
        log_prob = self.log_probs(self.actor, data)
        mask = torch.ones_like(log_prob)
        loss, _, _, _ = compute_policy_loss(
            batch["old_log_probs"], log_prob, batch["advantages"], mask, cliprange=0.2
        )
        kl = kl_penalty(log_prob, batch["ref_log_prob"], "low_var_kl")
        self.optimizer.zero_grad()
        (loss + 0.01 * agg_loss(kl, mask, "token-mean")).backward()
        for each in self.actor.parameters():
            torch.distributed.all_reduce(each.grad, torch.distributed.ReduceOp.AVG)
        self.optimizer.step()
        return DataProto.from_dict({"loss": loss.detach().expand(len(data))})

    def log_probs(self, model, data):
        """Return the log-probability of each token of the responses."""
        embed, memory, head = model
        tokens = torch.cat([data.batch["prompts"], data.batch["responses"]], 1)
        logits = head(memory(embed(tokens[:, :-1]).transpose(0, 1))[0]).transpose(0, 1)
        logits = logits[:, -LENGTH:].log_softmax(-1)
        return logits.gather(-1, data.batch["responses"][..., None])[..., 0]


@ray.remote(num_cpus=0)
class TaskRunner:
    """The driver, in an actor of its own, as verl has it."""

    def __init__(self):
        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        worker = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker))
        self.group = RayWorkerGroup(pool, worker)

    def fit_step(self):
        """Train one step; returns the mean reward and what verl's timers have measured."""
        timing_raw, group = {}, self.group
        with marked_timer("step", timing_raw):
            prompts = torch.randint(VOCABULARY, (16, 4)).repeat_interleave(GROUP, 0)
            batch = DataProto.from_dict({"prompts": prompts})
            with marked_timer("gen", timing_raw, color="red"):
                batch = batch.union(group.generate_sequences(batch))
            with marked_timer("reward", timing_raw, color="yellow"):
                scores = (batch.batch["responses"] < VOCABULARY // 8).float()
            with marked_timer("old_log_prob", timing_raw, color="blue"):
                batch = batch.union(group.compute_log_prob(batch))
            with marked_timer("ref", timing_raw, color="olive"):
                batch = batch.union(group.compute_ref_log_prob(batch))
            with marked_timer("adv", timing_raw, color="brown"):
                mask, index = torch.ones_like(scores), torch.arange(16).repeat_interleave(GROUP)
                advantages, _ = compute_grpo_outcome_advantage(scores, mask, index.numpy())
                batch = batch.union(DataProto.from_dict({"advantages": advantages}))
            with marked_timer("update_actor", timing_raw, color="red"):
                group.update_actor(batch)
        return scores.mean().item(), timing_raw


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    runner, seconds = TaskRunner.remote(), {}
    for step in range(1, STEPS + 1):
        reward, timing_raw = ray.get(runner.fit_step.remote())
        print(f"step {step}: reward {reward:.3f}")
        seconds = {name: seconds.get(name, 0) + each for name, each in timing_raw.items()}
    for name, total in seconds.items():
        print(f"timing_s/{name}: {total / STEPS:.4f}")
    ray.shutdown()
