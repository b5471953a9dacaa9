"""Samples of verl's batches, on a double of its `DataProto` and of `compute_advantage`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlprof.analysis.samples.sample_book import sample_book
from lightning_rlprof.analysis.samples.sample_tables import lengths, samples
from lightning_rlprof.integrations.doors import verl
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.run import load
from lightning_rlprof.tables.table import rows_of

_OFFLOAD = {"optimizer_offload": True, "offload_policy": False}
CONFIG = {
    "actor_rollout_ref": {
        "rollout": {"enforce_eager": False, "max_num_seqs": 256, "tensor_model_parallel_size": 2},
        "actor": {
            **{"strategy": "fsdp2", "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16384},
            **{"ppo_mini_batch_size": 256, "fsdp_config": _OFFLOAD},
        },
        "model": {"enable_gradient_checkpointing": True},
    },
    "trainer": {"nnodes": 2, "n_gpus_per_node": 8},
    "data": {"train_batch_size": 1024},
}


def batch_of(rewards: list[list[float]]) -> Any:
    """Return responses of 2 to 4 tokens, of which the last one has the reward, in groups."""
    flat = torch.tensor([each for group in rewards for each in group])
    lengths = torch.arange(len(flat)) % 3 + 2
    mask = (torch.arange(4)[None] < lengths[:, None]).long()
    scores = torch.zeros(len(flat), 4)
    scores[torch.arange(len(flat)), lengths - 1] = flat
    uid = np.array([f"uid-{at}" for at, group in enumerate(rewards) for _ in group], object)
    whole = torch.cat([torch.ones(len(flat), 3, dtype=torch.long), mask], dim=1)
    batch = {"response_mask": mask, "token_level_rewards": scores, "attention_mask": whole}
    return SimpleNamespace(batch=batch, non_tensor_batch={"uid": uid})


def module() -> Any:
    """Return a module whose advantages are rewards less the mean of their group."""

    def compute_advantage(data: Any, adv_estimator: str, **options: Any) -> Any:
        rewards, uid = data.batch["token_level_rewards"].sum(-1), data.non_tensor_batch["uid"]
        means = torch.tensor([rewards[torch.tensor(uid == each)].mean() for each in uid])
        data.batch["advantages"] = (rewards - means)[:, None] * data.batch["response_mask"]
        return data

    trainer = type("RayPPOTrainer", (), {"config": CONFIG, "fit": lambda self: None})
    return SimpleNamespace(
        __name__="verl.trainer.ppo.ray_trainer",
        compute_advantage=compute_advantage,
        RayPPOTrainer=trainer,
    )


def test_each_response_of_a_batch_is_a_sample_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_SAVE_PATH", str(tmp_path))
    trainer, data = module(), batch_of([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    verl.install(trainer)
    trainer.compute_advantage(data, "grpo")  # nothing records
    trainer.RayPPOTrainer().fit()
    session = verl.KIT.session(role="controller")
    assert session is not None
    with session:
        session.begin_step(1)
        with stage("compute_advantage"):
            assert trainer.compute_advantage(data, adv_estimator="grpo") is data
        session.end_step()
    run = load(session.run)
    table = samples(run)
    assert [row[:2] for row in table.rows] == [
        ("generated", 6), ("zero_advantage", 3), ("trained", 3)
    ]  # fmt: skip
    assert table.column("tokens") == [18, 9, 9]
    [responses] = rows_of(lengths(run))
    assert (responses["stage"], responses["samples"]) == ("compute_advantage", 6)
    assert {*run.amounts("response_limit").values.tolist()} == {4}
    facts = {
        **{"eager": 0, "max_num_seqs": 256, "rollout_tp": 2, "micro_tokens": 16384, "sharded": 1},
        **{
            "offload": 1,
            "recompute": 1,
            "devices": 16,
            "updates": 4,
            "prompt_tokens": 3,
            "streamed": 0,
        },
    }
    for name, value in facts.items():
        assert run.amounts(name).values.tolist() == [value], name
    assert not len(run.amounts("lora").rows)
    book = sample_book(run)
    assert sorted(book.reward.tolist()) == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert sorted(book.prompts[each] for each in book.prompt) == ["uid-0"] * 3 + ["uid-1"] * 3


def test_a_batch_of_another_form_trains_as_before_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_SAVE_PATH", str(tmp_path))
    trainer = SimpleNamespace(
        __name__="verl.trainer.ppo.ray_trainer", compute_advantage=lambda data: data
    )
    verl.install(trainer)
    session = verl.KIT.session(role="controller")
    assert session is not None
    with session:
        session.begin_step(1)
        assert [trainer.compute_advantage("batch") for _ in range(2)] == ["batch"] * 2
        session.end_step()
    assert caplog.text.count("the training continues") == 1
