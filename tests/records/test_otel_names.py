"""What spans of OpenTelemetry mean, and the names that spans of a run get there."""

from typing import Any

import pytest

from lightning_rlprof.analysis.steps.time_categories import Category, category_of
from lightning_rlprof.records.otel_names import (
    Meaning,
    Place,
    StepNumbers,
    meaning_of,
    name_of,
    number_in,
    place_in,
)
from lightning_rlprof.records.records import STAGES

IDLE = {"rl.bucket": "idle"}


@pytest.mark.parametrize(
    ("name", "told", "meaning"),
    [
        ("rl.grpo.step", {}, "step"),
        ("rl.loop", {}, "step"),
        ("pipeline_step_total", {}, "step"),
        ("rl.sample", {}, "actor_generate"),
        ("rl.reward", {}, "compute_reward"),
        ("rl.train", {}, "actor_update"),
        ("rl.sync", {}, "weight_sync"),
        ("rl.grpo.generation", {}, "actor_generate"),
        ("rl.grpo.policy_training", {"rl.bucket": "productive"}, "actor_update"),
        ("rl.grpo.data_processing", {}, "data_processing"),
        ("rl.grpo.job", {}, None),
        ("rl.idle.buffer_starvation", {}, "buffer_starvation"),
        ("rl.idle.generation_limit_pause", {}, "generation_limit_pause"),
        ("rl.idle.refit_bubble", IDLE, "weight_sync"),
        ("rl.idle.generation", {}, "wait_for_data#generation"),
        ("rl.grpo.generation", IDLE, "wait_for_data#generation"),
        ("my.phase", {"rl.bucket": "overhead"}, "phase"),
        ("generate_sequences", {}, "actor_generate"),
        ("loop", {}, None),
        ("train", {}, None),
        ("step", {}, "step"),
        ("optimizer.step", {}, None),
        ("GET /v1/rl.step", {}, None),
        ("", {}, None),
    ],
)
def test_a_span_is_known_by_the_last_part_and_its_attributes(
    name: str, told: dict[str, Any], meaning: str | None
) -> None:
    found = meaning_of(name, told)
    assert (found and found.name) == meaning
    assert found is None or found.kind == ("step" if meaning == "step" else "stage")


def test_every_idle_span_is_a_wait_or_a_weight_sync() -> None:
    waits = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.WEIGHT_SYNC)
    for last in (*STAGES, "validation", "queue", "buffer_full_backoff", "idle", "refit_event_wait"):
        found = meaning_of(f"rl.idle.{last}", {})
        assert found is not None
        assert category_of(found.name) in waits, last


@pytest.mark.parametrize("name", [*STAGES, "buffer_starvation", "my_filter", "weight_sync"])
def test_a_name_that_is_written_is_read_as_itself(name: str) -> None:
    assert meaning_of(name_of(Meaning("stage", name)), {}) == Meaning("stage", name)


def test_what_this_package_wrote_is_what_it_was() -> None:
    told = {"rlprof.kind": "region", "rlprof.name": "Foo.bar"}
    assert meaning_of("rl.Foo.bar", told) == Meaning("region", "Foo.bar")
    assert meaning_of("rl.Foo.bar", {**told, "rlprof.kind": []}) == Meaning("stage", "bar")


def test_ranks_may_be_texts_and_roles_have_two_names() -> None:
    told = {"nv.dl.rank": "3", "nv.dl.world_size": 8, "nv.dl.role": "trainer"}
    assert place_in(told) == Place(3, 8, "trainer")
    assert place_in(told | {"rl.role": "driver"}).role == "driver"
    assert place_in({"nv.dl.rank": -1, "nv.dl.world_size": 2**70}) == Place(None, None, None)


@pytest.mark.parametrize("value", [True, -1, 1.0, "", "x", "-1", "9" * 99, None, [], 2**60])
def test_what_is_no_number_of_a_thing_is_none(value: object) -> None:
    assert number_in({"rl.step": value}, "rl.step") is None


def test_steps_count_from_1_and_forwards() -> None:
    numbers, last = StepNumbers(), 0
    found = []
    for told in (0, 1, None, 2, 7, "9"):
        last = numbers.next({} if told is None else {"rl.iteration": told}, last)
        found.append(last)
    assert found == [1, 2, 3, 4, 8, 10]
    assert StepNumbers().next({"rl.step": 500, "rl.iteration": 3}, 0) == 500
