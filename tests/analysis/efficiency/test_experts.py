"""Balance of experts: what is kept of `count`, brute force over loads, groups of ranks."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.efficiency.experts import experts
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording import open_spans
from lightning_rlprof.recording.annotations import count, stage
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.records import expert_name
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.runs import Row, loaded
from tests.effort import examples

Loads = Mapping[int, list[int]]


def recorded(folder: Path, *given: Any) -> Spans:
    session = start_session(ProfilerConfig.build(profile_save_path=str(folder)))
    session.begin_step(1)
    with stage("actor_update"):
        for tokens in given:
            count(tokens_per_expert=tokens)
    session.end_step()
    session.close("finished")
    return load(session.run)


def counted(spans: Spans) -> dict[str, int]:
    names = [name for name in spans.counters if name.startswith("tokens_per_expert")]
    return {name: int(spans.counters[name].values[0]) for name in names}


@pytest.mark.parametrize(
    "tokens",
    [
        [[5, 0], [7, 1]],
        torch.tensor([[5, 0], [7, 1]]),
        torch.tensor([[5.0, 0.0], [7.0, 1.0]], requires_grad=True),
        np.array([[5, 0], [7, 1]]),
        {0: [5, 0], 1: torch.tensor([7, 1])},
    ],
)
def test_every_number_is_kept_by_layer_and_expert(tokens: Any, tmp_path: Path) -> None:
    assert counted(recorded(tmp_path, tokens)) == {
        expert_name(0, 0): 5,
        expert_name(0, 1): 0,
        expert_name(1, 0): 7,
        expert_name(1, 1): 1,
    }


def test_experts_of_one_layer_and_counts_of_micro_batches_add_up(tmp_path: Path) -> None:
    found = counted(recorded(tmp_path, [5, 0], [1, 2], {3: [4, 4]}))
    assert found == {
        expert_name(0, 0): 6,
        expert_name(0, 1): 2,
        expert_name(3, 0): 4,
        expert_name(3, 1): 4,
    }


def test_a_buffer_that_the_training_uses_on_is_kept_as_it_was(tmp_path: Path) -> None:
    for name, buffer in (("t", torch.tensor([5, 6])), ("n", np.array([5, 6])), ("l", [5, 6])):
        session = start_session(ProfilerConfig.build(profile_save_path=str(tmp_path / name)))
        session.begin_step(1)
        with stage("actor_update"):
            count(tokens_per_expert=buffer)
            buffer[0] = 0
        session.end_step()
        session.close("finished")
        assert counted(load(session.run)) == {expert_name(0, 0): 5, expert_name(0, 1): 6}


def test_counting_reads_no_value_before_the_step_has_ended() -> None:
    """A copy is made, but nothing is turned into numbers and no device is waited for."""

    class Counts:
        device = SimpleNamespace(type="cpu")
        reads = 0

        def detach(self) -> "Counts":
            return self

        clone = detach

        def tolist(self) -> list[int]:
            self.reads += 1
            return [3, 4]

    counts = Counts()
    ask = open_spans.later_experts(counts)
    assert counts.reads == 0
    assert ask() == {0: [3, 4]}


def test_tokens_of_a_device_are_copied_in_its_stream_and_read_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[bool] = []

    class Event:
        def record(self) -> None:
            done.append(False)

        def query(self) -> bool:
            return done[-1]

    class OnDevice:
        device = SimpleNamespace(type="fake")

        def detach(self) -> "OnDevice":
            return self

        def to(self, place: str, *, non_blocking: bool) -> torch.Tensor:
            assert (place, non_blocking) == ("cpu", True)
            return torch.tensor([3, 4])

    monkeypatch.setattr(torch, "fake", SimpleNamespace(Event=Event), raising=False)
    ask = open_spans.later_experts(OnDevice())
    assert ask() is None
    done[-1] = True
    assert ask() == {0: [3, 4]}


@pytest.mark.parametrize("tokens", [5, None, "many", [-1, 2], [[[1]]], [float("nan")]])
def test_what_no_experts_can_have_is_said_once_and_the_training_continues(
    tokens: Any, tmp_path: Path
) -> None:
    spans = recorded(tmp_path, tokens, tokens)
    assert counted(spans) == {}
    assert sum("tokens_per_expert" in note.text for note in spans.notes) == 1


def test_outside_of_a_session_nothing_is_counted() -> None:
    with stage("actor_update"):
        count(tokens_per_expert=[1, 2])


def run(*ranks: list[Loads], parallel: Mapping[str, int] | None = None) -> Spans:
    """Return a run in which each rank counts, step by step, tokens by layer."""
    every = []
    for steps in ranks:
        rows = []
        for number, layers in enumerate(steps, start=1):
            counters = {
                expert_name(layer, at): tokens
                for layer, loads in layers.items()
                for at, tokens in enumerate(loads)
            }
            start = number * 1_000
            rows += [
                Row("step", "step", number, start, start + 900),
                Row("actor_update", "stage", number, start, start + 900, counters=counters),
            ]
        every.append(rows)
    spans = loaded(*every)
    config = {"parallel": parallel} if parallel else {}
    heads = {rank: replace(head, config=config) for rank, head in spans.headers.items()}
    return replace(spans, headers=heads)


def rows_of(table: Table, of: str) -> list[dict[str, Any]]:
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    return [row for row in rows if row["of"] == of]


def test_balance_of_layers_and_ranks() -> None:
    table = experts(run([{0: [30, 30], 1: [10, 10]}], [{0: [20, 0], 1: [10, 10]}]))

    (whole,) = rows_of(table, "all layers")
    assert (whole["tokens"], whole["rank"]) == (120, 0)
    assert whole["rank load"] == pytest.approx((60 + 20) / (40 + 20))
    assert whole["saved"] == pytest.approx(1 - 60 / 80)
    assert whole["idle"] == pytest.approx(1 / 8)
    first, second = rows_of(table, "layer")
    assert (first["layer"], first["rank"], first["expert"]) == (0, 0, 0)
    assert (first["rank load"], first["expert load"]) == (1.5, 1.5)
    assert first["saved"] == pytest.approx(1 / 3)
    assert (second["layer"], second["rank load"], second["saved"]) == (1, 1.0, 0.0)
    ranks = rows_of(table, "rank")
    assert [row["rank load"] for row in ranks] == [pytest.approx(80 / 60), pytest.approx(40 / 60)]
    assert "All ranks are taken as one expert-parallel group." in table.note


def test_ranks_are_compared_within_their_expert_parallel_group() -> None:
    loads = [[{0: [10]}], [{0: [10]}], [{0: [90]}], [{0: [90]}]]
    apart = experts(run(*loads, parallel={"ep": 2}))
    together = experts(run(*loads))
    assert rows_of(apart, "all layers")[0]["saved"] == 0.0
    assert rows_of(together, "all layers")[0]["saved"] == pytest.approx(1 - 50 / 90)
    assert "one expert-parallel group" not in apart.note


def test_tensor_parallel_neighbors_are_not_of_one_group() -> None:
    loads = [[{0: [10]}], [{0: [90]}], [{0: [10]}], [{0: [90]}]]
    table = experts(run(*loads, parallel={"tp": 2, "ep": 2}))
    assert rows_of(table, "all layers")[0]["saved"] == 0.0
    whole = experts(run(*loads, parallel={"ep": 4}))
    assert rows_of(whole, "all layers")[0]["saved"] == pytest.approx(1 - 50 / 90)
    assert "one expert-parallel group" not in whole.note


def test_one_rank_knows_its_experts_alone() -> None:
    table = experts(run([{0: [3, 1]}]))
    (whole,) = rows_of(table, "all layers")
    assert (whole["rank load"], whole["saved"], whole["expert load"]) == (None, None, 1.5)
    assert "balance between ranks is unknown" in table.note


def test_it_abstains_without_counts() -> None:
    assert "Call count(tokens_per_expert=...)" in str(experts(loaded([])).abstained)


loads = st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=2, max_size=3)


@given(st.lists(loads, min_size=1, max_size=3))
@settings(max_examples=examples(50), deadline=None)
def test_saved_is_that_of_brute_force(steps: list[list[list[int]]]) -> None:
    """Each rank has two layers of two experts."""
    ranks = min(map(len, steps))
    given_to = [[{0: each[rank][:2], 1: each[rank][2:]} for each in steps] for rank in range(ranks)]
    (whole,) = rows_of(experts(run(*given_to)), "all layers")
    sums: dict[tuple[int, int], list[int]] = defaultdict(list)
    for own in given_to:
        for number, layers in enumerate(own):
            for layer, tokens in layers.items():
                sums[number, layer].append(sum(tokens))
    most = sum(map(max, sums.values()))
    mean = sum(sum(each) / len(each) for each in sums.values())
    assert whole["saved"] == (pytest.approx(1 - mean / most) if most else None)
    assert whole["tokens"] == sum(map(sum, sums.values()))
