"""A classifier of sentences, as accelerate's nlp_example: also with torchrun.

It accumulates gradients over two batches, and evaluates after each of two epochs.
"""

import torch
from _truth import Truth
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.set_num_threads(1)
set_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = BertForSequenceClassification(BertConfig(vocab_size=200, intermediate_size=128, **sizes))
words = torch.randint(200, (320, 32))
rows = [{"input_ids": each, "labels": each[0] % 2} for each in words]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 5, 40)
train = torch.utils.data.DataLoader(rows, shuffle=True, batch_size=4)
test = torch.utils.data.DataLoader(rows[:64], batch_size=16)
model, optimizer, train, test, schedule = accelerator.prepare(
    model, optimizer, train, test, schedule
)
truth = Truth()
for _ in range(2):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            truth.step()
    model.eval()
    for batch in test:
        with torch.no_grad():
            guesses = model(**batch).logits.argmax(-1)
        accelerator.gather_for_metrics((guesses, batch["labels"]))
truth.tell(model.parameters())
