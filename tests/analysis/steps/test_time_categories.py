"""The table of names: complete for our own, without contradictions, and forgiving in spelling."""

import re

import pytest

from lightning_rlprof.analysis.steps.time_categories import (
    NAMES,
    NO_CATEGORY,
    Category,
    align_stage_names,
    category_of,
    kind_of,
)
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.records.stage_aliases import standard_stage
from tests.places import ROOT


@pytest.mark.parametrize("stage", STAGES)
def test_a_known_stage_means_itself(stage: str) -> None:
    assert standard_stage(stage) == stage


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
    assert {standard_stage(name) for name in names.split()} == {stage}


@pytest.mark.parametrize("name", ["my_filter", "train", "", "#", "backward", "缓存"])
def test_a_name_that_is_no_stage_stays(name: str) -> None:
    assert standard_stage(name) == name


def test_a_name_that_both_have_is_never_changed() -> None:
    assert align_stage_names(["gen", "reward"], ["gen", "score"]) == {
        "gen": "gen",
        "reward": "compute_reward",
    }


def test_all_known_stages_have_a_label() -> None:
    assert [stage for stage in STAGES if category_of(stage) == NO_CATEGORY] == []


def test_what_the_callback_records_by_itself_has_a_label() -> None:
    names = ("data_fetch", "batch_transfer", "training_step", "backward", "optimizer_step")
    names += ("save_checkpoint", "validation", "sanity_check")
    names += ("rlprof open capture", "rlprof close capture")
    assert [name for name in names if category_of(name) == NO_CATEGORY] == []


def test_no_name_means_two_labels() -> None:
    names = [name for listed in NAMES.values() for name in listed.split()]
    assert len(names) == len({*names})


def test_every_name_of_the_table_is_found_as_it_stands_there() -> None:
    for category, listed in NAMES.items():
        assert {category_of(name) for name in listed.split()} == {category}


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("Actor-Update", Category.COMPUTE),
        ("wake up", Category.OFFLOAD),
        ("Engine.wake_up", Category.OFFLOAD),
        ("Optimizer.step#AdamW.step", Category.COMPUTE),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Category.DATA_WAIT),
        ("ModelCheckpoint.on_train_batch_end", Category.EVALUATION),
        ("EMA.on_train_batch_end", NO_CATEGORY),
        ("actor_update_2", NO_CATEGORY),
        ("", NO_CATEGORY),
        ("#", NO_CATEGORY),
        ("…", NO_CATEGORY),
    ],
)
def test_capitals_signs_and_owners_do_not_count_and_the_rest_does(name: str, category: int) -> None:
    assert category_of(name) == category


def test_the_order_of_precedence_is_that_of_the_pages_table() -> None:
    assert [category.text for category in Category] == [
        "compute",
        "exposed communication",
        "collective wait",
        "exposed memcpy",
        "host-bound idle",
        "launch latency",
        "unattributed idle",
        "rollout",
        "rollout tail",
        "weight sync",
        "reward/tool/env",
        "data wait",
        "backpressure",
        "offload/onload",
        "checkpoint/eval",
        "garbage collection",
        "profiler overhead",
        "custom stage",
        "warm-up",
        "untraced",
        "outside steps",
    ]


def test_the_page_lists_the_same_names_under_the_same_categories() -> None:
    page = (ROOT / "docs" / "reference" / "stage-names.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    listed = {row[0].strip(): row[1] for row in rows}
    assert [*listed][-len(Category) :] == [each.text for each in Category]
    for category, names in NAMES.items():
        assert re.findall(r"`(\w+)`", listed[category.text]) == names.split()


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("training", "actor_update critic_update update_actor update_policy policy_training train"),
        ("forward", "actor_generate rollout gen generate_sequences old_log_prob ref_log_prob"),
        ("forward", "reference_compute_log_prob actor_compute_log_prob critic_compute_values"),
        (None, "compute_reward compute_advantage weight_sync optimizer_step backward retrain_x"),
    ],
)
def test_the_kind_of_a_stage_follows_from_its_name(kind: str, stages: str) -> None:
    assert {kind_of(stage) for stage in stages.split()} == {kind}
