"""A Llama of two layers and its tokenizer, made here: no download."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIGNS = ["<pad>", "<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz +=?"]


def save_model(folder, **options):
    """Save a model and its tokenizer, which takes the options."""
    tokenizer = Tokenizer(models.WordLevel({sign: at for at, sign in enumerate(SIGNS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        **options,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SIGNS), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=512, pad_token_id=0, eos_token_id=1,
            bos_token_id=1,
        )
    ).save_pretrained(folder)  # fmt: skip
