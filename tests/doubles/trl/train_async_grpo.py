"""Asynchronous GRPO of a tiny Llama on a CPU, with the URL of a `vllm_server` and how many steps.

Real TRL in both processes. Stand-ins: the server; the transfer of weights, whose NCCL is left out
and whose HTTP is TRL's; and the kernel of attention, FlashAttention 3, which needs a GPU.
"""

import os
import sys
import time

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient

from examples.trl.tiny_llama import save_model
from lightning_rlprof import stage


def reward(completions, **kwargs):
    """Score a completion by how many different signs it has."""
    time.sleep(0.01)
    return [float(len(set(each[0]["content"]))) for each in completions]


class Raises(TrainerCallback):
    """Ends the training by an exception."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("the disk is full")


class Attention:
    """The kernel's function as TRL calls it."""

    @staticmethod
    def flash_attn_varlen_func(
        query, key, value, starts, key_starts, longest, longest_key, *, softmax_scale, causal,
        window_size,
    ):  # fmt: skip
        """Return attention of each segment to its path; queries are the last of the keys."""
        assert causal
        assert window_size == (-1, -1)
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        found = []
        for at in range(len(starts) - 1):
            own, theirs = (slice(int(s[at]), int(s[at + 1])) for s in (starts, key_starts))
            q, k, v = (each.transpose(0, 1) for each in (query[own], key[theirs], value[theirs]))
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(
                k.shape[1] - q.shape[1]
            )
            weights = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, -torch.inf)
            found.append((weights.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(found)


class Transfer:
    """Weight transfer by TRL's own client, without the bytes."""

    def __init__(self, url):
        self.vllm = VLLMClient(url)

    def init_weight_transfer(self):
        self.vllm.wait_for_server_ready()

    def pause(self):
        self.vllm.pause()

    @stage("weight_sync")
    def send_weights(self, iterator):
        self.vllm.start_weight_update()
        self.vllm.update_weights({"names": [name for name, _ in iterator]})
        self.vllm.finish_weight_update()

    def resume(self):
        self.vllm.resume()

    def destroy(self):
        pass


if __name__ == "__main__":  # the rollout process imports this file, too
    url, steps = sys.argv[1], int(sys.argv[2])
    async_grpo_trainer.get_peak_flops_per_device = lambda *of: None  # of a GPU
    packing._flash_attn = lambda: Attention
    async_rollout_worker.is_vllm_available = lambda: True
    save_model("model", chat_template=qwen2_5_chat_template)
    questions = [f"{one}+{other}=?" for one in range(10) for other in range(10)]
    trainer = AsyncGRPOTrainer(
        model="model",
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": each}] for each in questions]}
        ),
        args=AsyncGRPOConfig(
            output_dir="out", per_device_train_batch_size=4, num_generations=4,
            gradient_accumulation_steps=2, max_steps=steps, max_completion_length=24,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, logging_steps=100, gradient_checkpointing=False,
            vllm_server_base_url=url, max_inflight_tasks=8, queue_maxsize=4,
        ),
        weight_transfer=Transfer(url),
        callbacks=[Raises()] * ("raise" in sys.argv),
    )  # fmt: skip
    trainer.train()
