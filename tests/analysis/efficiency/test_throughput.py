"""Tokens per second and MFU of stages, against sums over every nanosecond."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.efficiency.throughput import flops_of, throughput
from lightning_rlprof.analysis.models.flops import (
    decode_weight_bytes,
    forward,
)
from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.report.summary import lead_tables
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell
from tests.analysis.models.published import CONFIGS, cache_bytes_per_token
from tests.builders.runs import Row, loaded
from tests.effort import examples

SECOND = 10**9
H100 = "NVIDIA H100 80GB HBM3"


def stage(name: str, start: float, end: float, step: int = 1, **counters: float) -> Row:
    return Row(name, "stage", step, int(start * SECOND), int(end * SECOND), counters=counters)


def on(device: str, spans: Spans) -> Spans:
    headers = {rank: replace(head, device=device) for rank, head in spans.headers.items()}
    return replace(spans, headers=headers)


def found(spans: Spans, **options: Any) -> dict[Any, dict[str, Cell]]:
    table = throughput(spans, **options)
    assert table.abstained is None
    names = [column.name for column in table.columns]
    return {row[:2]: dict(zip(names[2:], row[2:], strict=True)) for row in table.rows}


def test_tokens_and_samples_per_second_of_each_rank_and_of_the_job() -> None:
    spans = loaded(
        [stage("actor_generate", 0, 2, tokens=300, samples=4), stage("compute_reward", 2, 3)],
        [stage("actor_generate", 0, 4, tokens=100, samples=4)],
    )
    rows = found(spans)
    assert list(rows) == [("actor_generate", rank) for rank in (None, 0, 1)]
    assert [row["tokens/s in stage"] for row in rows.values()] == [400 / 3, 150.0, 25.0]
    assert [row["samples/s in stage"] for row in rows.values()] == [8 / 3, 2.0, 1.0]
    assert [row["time"] for row in rows.values()] == [3 * SECOND, 2 * SECOND, 4 * SECOND]
    assert [row["tokens"] for row in rows.values()] == [400, 300, 100]
    assert {row["MFU"] for row in rows.values()} == {None}
    assert "No MFU: pass --params N" in throughput(spans).note


def test_spans_that_overlap_count_their_time_once() -> None:
    rows = [stage("actor_generate", at, at + 3, tokens=10) for at in (0, 1, 2)]
    (row,) = found(loaded(rows)).values()
    assert (row["time"], row["tokens/s in stage"]) == (5 * SECOND, 6.0)


def test_spans_without_the_counter_are_not_in_the_time() -> None:
    spans = loaded([stage("a", 0, 1, tokens=10), stage("a", 1, 9), stage("a", 9, 10, samples=1)])
    (row,) = found(spans).values()
    assert (row["tokens/s in stage"], row["samples/s in stage"]) == (10.0, 1.0)


def test_captured_steps_are_left_out_and_noted_but_roles_without_steps_are_not() -> None:
    steps = [Row("step", "step", n, n * SECOND, (n + 1) * SECOND) for n in (0, 1)]
    steps[1] = steps[1]._replace(counters={"capture": 1})
    mine = [stage("a", 0.2, 0.7, 0, tokens=50), stage("a", 1.2, 1.9, 1, tokens=50)]
    spans = loaded([*steps, *mine], [stage("a", 1, 2, 1, tokens=7)])
    rows = found(spans)
    assert (rows["a", 0]["tokens"], rows["a", 1]["tokens"]) == (50, 7)
    assert "Excluded steps: 1 captured." in throughput(spans).note


def test_flops_come_from_the_counter_else_a_formula() -> None:
    trained = stage("actor_update", 0, 1, tokens=10_000, flops=2e14)
    spans = on(H100, loaded([trained, stage("actor_generate", 1, 2, tokens=100)]))
    rows = found(spans, parameters=7e9)
    sources = {key[0]: (row["FLOPs source"], row["TFLOP/s"]) for key, row in rows.items()}
    assert sources == {"actor_update": ("counter", 200.0), "actor_generate": ("2N estimate", 1.4)}
    assert rows["actor_update", 0]["MFU"] == 200 / 989.4
    assert rows["actor_update", 0]["peak TFLOP/s"] == 989.4


def test_formulas_by_stage() -> None:
    names = ("actor_update", "critic_update", "compute_reward", "my_filter")
    spans = loaded([stage(name, at, at + 1, tokens=1000) for at, name in enumerate(names)])
    rows = found(spans, parameters=1e9, peak_tflops=10.0)
    assert rows["actor_update", 0]["TFLOP/s"] == pytest.approx(6)
    assert rows["critic_update", 0]["FLOPs source"] == "6N estimate"
    assert rows["critic_update", 0]["MFU"] == pytest.approx(0.6, rel=1e-3)
    # The name of a stage does not show whether a reward model is trained in it.
    assert [rows[name, 0]["FLOPs source"] for name in names[2:]] == [None, None]


def test_mfu_above_100_per_cent_is_omitted() -> None:
    spans = on("NVIDIA A10", loaded([stage("actor_update", 0, 1, flops=1.3e14)]))
    (row,) = found(spans).values()
    assert (row["MFU"], row["TFLOP/s"], row["peak TFLOP/s"]) == (None, 130.0, 125.0)
    assert "MFU above 100% in actor_update: FLOPs, tokens or peak" in throughput(spans).note
    assert found(spans, peak_tflops=130.0)["actor_update", 0]["MFU"] == 1.0


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("parameters", -1, "parameters -1: must be above 0"),
        ("parameters", float("nan"), "parameters nan: must be above 0"),
        ("peak_tflops", -5, "peak_tflops -5: must be above 0"),
        ("peak_tflops", float("inf"), "peak_tflops inf: must be above 0"),
        ("peak_tflops", 0, "peak_tflops 0: must be above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(option: str, value: Any, text: str) -> None:
    spans = loaded([stage("actor_update", 0, 10, tokens=5)])
    with pytest.raises(RlprofError, match=re.escape(text)):
        throughput(spans, **{option: value})


def test_unknown_hardware_has_no_mfu() -> None:
    spans = on("NVIDIA H100", loaded([stage("actor_update", 0, 1, flops=2e13)]))
    (row,) = found(spans).values()
    assert (row["MFU"], row["peak TFLOP/s"], row["TFLOP/s"]) == (None, None, 20.0)
    assert (
        "No MFU on NVIDIA H100: the peak is unknown. Pass --peak-tflops N."
        in throughput(spans).note
    )


def test_the_job_on_unlike_devices_is_measured_by_both_peaks_and_their_times() -> None:
    rows = [stage("actor_update", 0, 1, flops=1e14)]
    spans = loaded(rows, [rows[0]._replace(end_ns=3 * SECOND)])
    heads = [replace(spans.headers[0], device=H100), replace(spans.headers[1], device="NVIDIA A10")]
    spans = replace(spans, headers=dict(enumerate(heads)))
    job = found(spans)["actor_update", None]
    assert job["TFLOP/s"] == 50.0
    assert job["peak TFLOP/s"] == (989.4 + 3 * 125) / 4
    unlike = replace(spans, headers={0: heads[0], 1: replace(heads[1], device="cpu")})
    assert found(unlike)["actor_update", None]["MFU"] is None
    assert found(unlike)["actor_update", 0]["MFU"] == 100 / 989.4


def test_tokens_that_one_rank_counts_for_all_are_computed_by_the_devices_of_all() -> None:
    own = stage("actor_update", 0, 1)
    spans = on(H100, loaded([stage("actor_update", 0, 1, tokens=10_000)], [own], [own], [own]))
    rows = found(spans, parameters=3e9)
    assert rows["actor_update", None]["MFU"] == pytest.approx(180 / 4 / 989.4)
    assert rows["actor_update", None]["tokens/s in stage"] == 10_000
    assert {rows["actor_update", 0][name] for name in ("MFU", "TFLOP/s", "FLOPs source")} == {None}
    note = throughput(spans, parameters=3e9).note
    assert "FLOPs of actor_update are known for the whole job only" in note
    both = [stage("actor_update", 0, 1, flops=1e14)] * 2
    spans = on(H100, loaded([stage("actor_update", 0, 1, tokens=9, flops=1e14)], *[both[:1]] * 2))
    assert found(spans)["actor_update", 0]["TFLOP/s"] == 100.0
    assert "whole job only" not in throughput(spans).note


def test_it_abstains_without_counts() -> None:
    for spans in (loaded([]), loaded([stage("a", 0, 1)]), loaded([Row("x", "region", 1, 0, 5)])):
        assert str(throughput(spans).abstained).startswith("No stage of this run has token")


SPANS = st.tuples(
    st.sampled_from(["actor_update", "b"]),
    st.integers(0, 20),
    st.integers(0, 8),
    st.dictionaries(st.sampled_from(["tokens", "samples"]), st.integers(0, 99)),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(SPANS, max_size=7), min_size=1, max_size=3))
def test_it_agrees_with_brute_force_and_a_job_is_between_its_slowest_and_fastest_rank(
    drawn: list[list[Any]],
) -> None:
    ranks = [
        [Row(name, "stage", 1, at, at + size, counters=own) for name, at, size, own in rank]
        for rank in drawn
    ]
    spans = loaded(*ranks)
    expected = brute(spans)
    if not expected:
        assert throughput(spans).abstained is not None
        return
    rows = found(spans)
    assert {key for key in rows if key[1] is not None} == set(expected)
    for key, own in expected.items():
        for name in ("tokens", "samples"):
            assert rows[key][f"{name}/s in stage"] == pytest.approx(own.get(name))
    for (name, rank), row in rows.items():
        own_rates = [rows[key]["tokens/s in stage"] for key in expected if key[0] == name]
        rates = [float(rate) for rate in own_rates if rate is not None]
        if rank is None and row["tokens/s in stage"] is not None and len(rates) == row["ranks"]:
            each = float(row["tokens/s in stage"]) / len(rates)
            assert min(rates) * (1 - 1e-9) <= each <= max(rates) * (1 + 1e-9)


def brute(spans: Spans) -> dict[Any, Mapping[str, float | None]]:
    """Return what each stage did per second on each rank, instant by instant."""
    amounts: Any = defaultdict(lambda: defaultdict(int))
    instants: Any = defaultdict(lambda: defaultdict(set))
    for one in spans:
        for name, value in (one.counters or {}).items():
            amounts[one.name, one.rank][name] += value
            instants[one.name, one.rank][name] |= set(range(one.start_ns, one.end_ns))
    return {
        key: {
            name: amount / len(instants[key][name]) * SECOND if instants[key][name] else None
            for name, amount in own.items()
        }
        for key, own in amounts.items()
    }


def test_thousands_of_stages_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(f"stage {at}", "stage", 1, 9 * at, 9 * at + 8, counters={"tokens": at + 1})
        for at in range(2_000)
    ]
    spans = loaded([*rows, Row("step", "step", 1, 0, 18_000)])
    looked, isin = [0], np.isin

    def counted(values: Any, wanted: Any) -> Any:
        looked[0] += len(values)
        return isin(values, wanted)

    monkeypatch.setattr(np, "isin", counted)
    table = throughput(spans)
    assert sorted(table.column("tokens")) == [*range(1, 2_001)]  # type: ignore[type-var]
    assert looked[0] < 30 * len(spans), "the spans are not searched for each stage"


QWEN = CONFIGS["Qwen2.5-7B"]


def test_flops_from_the_model_are_those_of_sequences_of_the_mean_length() -> None:
    names = ("actor_update", "actor_compute_log_prob", "critic_update", "compute_reward")
    rows = [
        stage(name, at, at + 1, tokens=30_000, samples=30 * (name != "actor_compute_log_prob"))
        for at, name in enumerate(names)
    ]
    rows[1].counters.pop("samples")
    spans = on(H100, loaded(rows))
    table = found(spans, model=QWEN)
    model, lengths = read_model(QWEN), [1000] * 30
    update = forward(model, lengths)
    expected = {
        "actor_update": update.training,
        "actor_compute_log_prob": update.linear + update.head,
        "critic_update": forward(model.critic(), lengths).training,
    }
    for name, flops in expected.items():
        assert table[name, 0]["FLOPs source"] == "model"
        assert table[name, 0]["TFLOP/s"] == pytest.approx(flops / 1e12)
        assert table[name, 0]["% of bandwidth"] is None
    assert table["compute_reward", 0]["FLOPs source"] is None
    assert table["actor_update", 0]["MFU"] is None  # above the peak
    assert "model: FLOPs of sequences of the mean length" in throughput(spans, model=QWEN).note


def test_a_batch_counted_by_the_helper_is_the_same_as_from_the_model() -> None:
    counted = stage("actor_update", 0, 9, tokens=30_000, samples=30)
    by_hand = stage("actor_update", 0, 9, flops=flops_of(QWEN, [1000] * 30), tokens=1)
    own = [found(on(H100, loaded([row])), model=QWEN) for row in (counted, by_hand)]
    assert [row["actor_update", 0]["FLOPs source"] for row in own] == ["model", "counter"]
    first, second = (row["actor_update", 0]["MFU"] for row in own)
    assert first == pytest.approx(second)
    assert flops_of(QWEN, [10], "forward") * 3 == flops_of(QWEN, [10])


def test_decoding_uses_at_least_the_bandwidth_for_weights_and_cache() -> None:
    calls = [stage("actor_generate", at, at + 20, tokens=64_000, samples=64) for at in (0, 20)]
    spans = on(H100, loaded(calls))
    row = found(spans, model=QWEN)["actor_generate", 0]
    model = read_model(QWEN)
    weights = 1000 * decode_weight_bytes(model, 64)
    cache = 64 * cache_bytes_per_token(model) * 1000 * 1001 / 2
    assert row["% of bandwidth"] == pytest.approx((weights + cache) / 20 / 3350e9)
    assert "in bf16: the weights once per token" in throughput(spans, model=QWEN).note
    assert found(on("cpu", spans), model=QWEN)["actor_generate", 0]["% of bandwidth"] is None
    fast = loaded([stage("actor_generate", 0, 1, tokens=64_000, samples=64)])  # cannot be
    assert found(on(H100, fast), model=QWEN)["actor_generate", 0]["% of bandwidth"] is None


def test_replicas_of_several_ranks_share_their_bandwidth() -> None:
    one = stage("actor_generate", 0, 20, tokens=64_000, samples=64)
    silent = stage("actor_generate", 0, 20)
    alone = found(on(H100, loaded([one])), model=QWEN)["actor_generate", 0]
    both = found(on(H100, loaded([one], [silent])), model=QWEN)["actor_generate", None]
    assert both["% of bandwidth"] == pytest.approx(float(alone["% of bandwidth"] or 0) / 2)


def trained_and_decoded(*devices: str) -> Spans:
    rows = [
        stage("actor_generate", 0, 20, tokens=64_000, samples=64),
        stage("actor_update", 20, 29, tokens=1000, samples=1),
    ]
    spans = loaded(*[rows] * len(devices))
    heads = {
        rank: replace(spans.headers[rank], device=device, config={"model": QWEN})
        for rank, device in enumerate(devices)
    }
    return replace(spans, headers=heads)


def test_what_is_seen_first_of_a_run_has_mfu_and_the_bandwidth_of_decoding() -> None:
    for devices in ([H100], [H100, H100]):
        spans = trained_and_decoded(*devices)
        *_, table = lead_tables(spans)
        assert table.name == "throughput"
        rank = None if len(devices) == 2 else 0
        whole = {row[0]: row for row in throughput(spans).rows if row[1] == rank}
        assert {row[0]: row for row in table.rows} == whole
        assert whole["actor_generate"][7] is not None
        assert whole["actor_update"][4] is not None
    names = [each.name for each in lead_tables(trained_and_decoded("cpu"))]
    assert "throughput" not in names


def test_a_recorded_model_is_used_unless_parameters_are_given() -> None:
    spans = on(H100, loaded([stage("actor_update", 0, 9, tokens=1000, samples=1)]))
    heads = {0: replace(spans.headers[0], config={"model": QWEN})}
    spans = replace(spans, headers=heads)
    assert found(spans)["actor_update", 0]["FLOPs source"] == "model"
    assert found(spans, parameters=1e9)["actor_update", 0]["FLOPs source"] == "6N estimate"
    heads = {0: replace(spans.headers[0], config={"model": {"model_type": "mamba2"}})}
    note = throughput(replace(spans, headers=heads)).note
    assert "No FLOPs from the model: unknown model type 'mamba2'." in note
    with pytest.raises(RlprofError, match="unknown model type"):
        throughput(spans, model={"model_type": "mamba2"})


def test_an_unconfirmed_peak_is_noted_where_it_is_used() -> None:
    spans = on("Ascend910B3", loaded([stage("actor_update", 0, 1, flops=1e14)]))
    assert "Unconfirmed: Ascend910B3 ~294.9 TFLOP/s." in throughput(spans).note
    assert "Unconfirmed" not in throughput(spans, peak_tflops=300).note
