"""A small training with one planted problem: ``python -m … PROBLEM FOLDER STEPS``.

It sleeps for most of its time, as if a device computed: who else runs here changes that little.
"""

import sys
import time

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

VOCABULARY, LENGTH, BATCH = 64, 32, 8
FORWARD_SECONDS, UPDATE_SECONDS = 0.004, 0.02
PROMPT_SECONDS = 0.012
LATE_SECONDS = 0.06
LEAKED_FLOATS = 2**20  # 4 MiB a step


class Prompts(Dataset[torch.Tensor]):
    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.randint(0, VOCABULARY, (LENGTH,))


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 96)
        layer = torch.nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(96, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        return self.head(self.body(self.embedding(tokens)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(UPDATE_SECONDS)
        logits = self(tokens[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class Training(lightning.LightningModule):
    """Next-token prediction; ``problem`` says what is wrong with it."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.policy, self.problem = Policy(), problem
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.problem == "late_rank" and self.global_rank == 1:
            end = time.perf_counter() + LATE_SECONDS
            while time.perf_counter() < end:
                pass
        if self.problem == "leak":
            self.kept.append(torch.ones(LEAKED_FLOATS))
        loss = self.policy.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Sampling(Training):
    """A loop of rollout and update, by hand; generate() calls its own forward for each token."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.automatic_optimization = False

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.policy(tokens)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        tokens = self.generate(batch)
        with torch.no_grad():
            self(tokens)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.policy.loss(tokens))
        optimizer.step()


RECIPE = {"generate": "actor_generate", "forward": "actor_compute_log_prob"}


def main(problem: str, folder: str, steps: int) -> None:
    """Train with the callback alone; only ``recipe`` has the README's rules."""
    torch.set_num_threads(1)
    rules = {"wrap": RECIPE} if problem == "recipe" else {}
    ranks = 2 if problem in ("late_rank", "healthy_ranks") else 1
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ProfilerCallback(profile_save_path=folder, **rules)],
    )
    module = Sampling if problem in ("generation", "recipe") else Training
    slow = problem in ("slow_loader", "slow_worker")
    prompts = Prompts(BATCH * steps * ranks, PROMPT_SECONDS if slow else 0.0)
    workers = int(problem == "slow_worker")
    trainer.fit(module(problem), DataLoader(prompts, batch_size=BATCH, num_workers=workers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
