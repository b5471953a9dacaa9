"""GRPO or RLOO of a tiny Llama made here, on a CPU: `rlprof run -- python train_grpo.py GRPO`."""

import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

SIGNS = ["<pad>", "<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz +=?"]
KINDS = {"GRPO": (GRPOConfig, GRPOTrainer), "RLOO": (RLOOConfig, RLOOTrainer)}


def save_model(folder):
    """Save a tokenizer and a model of two layers."""
    tokenizer = Tokenizer(models.WordLevel({sign: at for at, sign in enumerate(SIGNS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SIGNS), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
            bos_token_id=1,
        )
    ).save_pretrained(folder)  # fmt: skip


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
