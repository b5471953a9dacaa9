"""GRPO of TRL with a Llama made here, and the fault of the first argument, such as `reward`."""

import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
sys.path.append(str(Path(__file__).parents[2] / "examples" / "trl"))

from datasets import Dataset
from tiny_llama import save_model
from trl import GRPOConfig, GRPOTrainer

fault = sys.argv[1] if len(sys.argv) > 1 else ""


def reward(completions, **kwargs):
    """Score a completion by how many different signs it has; the judge may be slow."""
    if fault == "reward":
        time.sleep(1.0)
    return [float(len(set(each))) for each in completions]


save_model("model")
prompts = [f"{one}+{other}=?" for one in range(10) for other in range(10)]
trainer = GRPOTrainer(
    model="model",
    reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    args=GRPOConfig(
        output_dir="out", per_device_train_batch_size=4, num_generations=4, max_steps=10,
        max_completion_length=8, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="steps" if fault == "checkpoint-eval" else "no", save_steps=1,
        dataloader_pin_memory=False,
    ),
)  # fmt: skip
trainer.train()
