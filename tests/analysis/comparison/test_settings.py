"""Settings of a training: what its run recorded, without what rlprof was told to record."""

from dataclasses import replace
from typing import Any

import numpy as np

from lightning_rlprof.analysis.comparison.settings import FACTS, settings, settings_diff
from lightning_rlprof.cli.size import _FACTS
from lightning_rlprof.tables.spans import Spans
from tests.builders.pairs import run_of
from tests.builders.runs import header

TIMES = np.full(20, 1e8)
LENGTHS = {"prompt_tokens", "mean", "longest"}


def _run(facts: dict[str, Any] | None = None, **changes: Any) -> Spans:
    counted = {name: {"a": TIMES * 0 + value} for name, value in (facts or {}).items()}
    return run_of({"a": TIMES}, counted, **changes)


def _headed(**changes: Any) -> Spans:
    return replace(_run(), headers={0: header(**changes)})


def test_a_run_and_itself_have_the_same_settings() -> None:
    run = _run({"tp": 2, "eager": 0}, world_size=2)
    assert settings(run)["ranks"] == "2"
    assert (settings(run)["tp"], settings(run)["eager"]) == ("2", "0")
    assert not settings_diff(run, run).rows


def test_what_only_one_run_recorded_is_no_difference() -> None:
    assert not settings_diff(_run({"tp": 2}), _run({"ep": 4})).rows
    assert settings_diff(_run({"tp": 2}), _run({"tp": 4})).rows == [("tp", "2", "4")]


def test_the_model_and_versions_are_settings_and_those_of_the_profiler_are_not() -> None:
    a, b = (
        _headed(
            config={"model": {"num_hidden_layers": layers, "x": {"y": 1}}, "steps": [layers]},
            versions={"torch": f"2.{layers}", "lightning-rlprof": f"0.{layers}", "nvtx": "1"},
        )
        for layers in (12, 24)
    )
    assert settings(a)["model.x.y"] == "1"
    assert settings_diff(a, b).rows == [
        ("model.num_hidden_layers", "12", "24"),
        ("torch", "2.12", "2.24"),
    ]
    none = _headed(config={"model": None}, versions={})
    assert not settings_diff(none, a).rows


def test_a_counter_that_varies_is_an_amount() -> None:
    run = run_of({"a": TIMES}, {"micro_tokens": {"a": np.arange(20.0)}, "tp": {"a": 1 + TIMES % 7}})
    assert "micro_tokens" not in settings(run)
    assert "tp" in settings(run)


def test_facts_that_size_asks_for_are_settings_unless_they_are_lengths() -> None:
    assert set(_FACTS.values()) - LENGTHS <= set(FACTS)
