"""DPO or online DPO of a tiny Llama, on a CPU: `rlprof run -- python train_dpo.py DPO`."""

import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

from datasets import Dataset
from tiny_llama import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


def reward(completions, **kwargs):
    """Score a completion by how many different signs it has."""
    return [float(len(set(each))) for each in completions]


if not os.path.exists("model"):
    save_model("model")
prompts = [f"{one}+{other}=?" for one in range(10) for other in range(10)]
options = {
    "output_dir": "out", "per_device_train_batch_size": 4, "max_steps": 4, "report_to": [],
    "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
    "dataloader_pin_memory": False, "gradient_accumulation_steps": 2,
}  # fmt: skip
if sys.argv[1] == "DPO":
    data = {
        "prompt": prompts,
        "chosen": [f"{at % 19}" * 40 for at in range(100)],
        "rejected": ["so it is" * 10] * 100,
    }
    trainer = DPOTrainer(
        model="model", args=DPOConfig(**options), train_dataset=Dataset.from_dict(data)
    )
else:
    trainer = OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("model"),
        processing_class=AutoTokenizer.from_pretrained("model"),
        reward_funcs=reward,
        args=OnlineDPOConfig(max_new_tokens=24, **options),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
trainer.train()
