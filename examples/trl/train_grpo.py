"""GRPO or RLOO of a tiny Llama made here, on a CPU: `rlprof run -- python train_grpo.py GRPO`."""

import os
import sys

if sys.argv[1:2] not in (["GRPO"], ["RLOO"]):
    sys.exit("usage: rlprof run -- python train_grpo.py GRPO (or RLOO)")
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

from datasets import Dataset
from tiny_llama import save_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

KINDS = {"GRPO": (GRPOConfig, GRPOTrainer), "RLOO": (RLOOConfig, RLOOTrainer)}


def reward(completions, **kwargs):
    """Score a completion by how many different signs it has."""
    if "raise" in sys.argv and reward.calls > 1:
        raise RuntimeError("the judge is gone")
    reward.calls += 1
    return [float(len(set(each))) for each in completions]


reward.calls = 0

if not os.path.exists("model"):
    save_model("model")
config, kind = KINDS[sys.argv[1]]
prompts = [f"{one}+{other}=?" for one in range(10) for other in range(10)]
trainer = kind(
    model="model",
    reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    args=config(
        output_dir="out", per_device_train_batch_size=4, num_generations=4, beta=0.1, max_steps=4,
        max_completion_length=24, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    ),
)  # fmt: skip
trainer.train()
if "again" in sys.argv:
    trainer.train()
