import pytest

from lightning_rlprof.analysis.canonical import canonical, paired
from lightning_rlprof.model import STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_a_known_stage_means_itself(stage: str) -> None:
    assert canonical(stage) == stage


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ("gen generate_sequences vLLM.generate rollout", "actor_generate"),
        ("old_log_prob Actor.compute_log_prob", "actor_compute_log_prob"),
        ("ref ref_log_prob", "reference_compute_log_prob"),
        ("values Critic.compute_values", "critic_compute_values"),
        ("update_critic critic_train", "critic_update"),
        ("update_actor actor_train policy_training", "actor_update"),
        ("reward reward_fn rm", "compute_reward"),
        ("adv Compute-Advantages", "compute_advantage"),
        ("update_weights refit reshard", "weight_sync"),
    ],
)
def test_names_of_other_frameworks_mean_our_stages(names: str, stage: str) -> None:
    assert {canonical(name) for name in names.split()} == {stage}


@pytest.mark.parametrize("name", ["my_filter", "train", "", "#", "backward", "缓存"])
def test_a_name_that_is_no_stage_stays(name: str) -> None:
    assert canonical(name) == name


def test_a_name_that_both_have_is_never_changed() -> None:
    assert paired(["gen", "reward"], ["gen", "score"]) == {"gen": "gen", "reward": "compute_reward"}
