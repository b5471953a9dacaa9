import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.comparison.compare import (
    AS_THE_REST,
    INCONCLUSIVE,
    compare,
    gate,
    judge,
    verdict,
)
from lightning_rlprof.analysis.comparison.equal_work import Change, between_steps, fit, range_bounds
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.paced import REGIMES, Job, autoregression, play
from tests.builders.pairs import Half, run_of, scripted
from tests.builders.runs import Row, grpo_rows, loaded, spans_of
from tests.effort import DEEP

STAGES = ("actor_generate", "actor_update", "compute_reward")


def _by(table: Table, column: str) -> dict[object, object]:
    return dict(zip(table.column("stage"), table.column(column), strict=True))


def _verdicts(table: Table) -> dict[object, object]:
    return _by(table, "verdict")


def _times(seed: int, steps: int = 30, noise: float = 0.02) -> np.ndarray:
    return 1e8 * np.exp(np.random.default_rng(seed).normal(0, noise, steps))


def test_a_real_change_is_told_from_noise(tmp_path: Path) -> None:
    a = spans_of(tmp_path / "a", grpo_rows(40, 0), grpo_rows(40, 1))
    faster = {"actor_generate": 0.5, "compute_reward": 1.5}
    b = spans_of(tmp_path / "b", grpo_rows(40, 2, slow=faster), grpo_rows(40, 3, slow=faster))

    table = compare(a, b)

    assert _verdicts(table) == {
        "actor_generate": "faster",
        "compute_reward": "slower",
        "actor_update": "unchanged",
        "actor_compute_log_prob": "unchanged",
        "training_step": INCONCLUSIVE,
        "untraced": INCONCLUSIVE,
        "step": "faster",
    }
    assert table.column("stage")[0] == "actor_generate"
    assert table.column("stage")[-2:] == ["untraced", "step"]
    assert table.column("raw B/A")[0] == pytest.approx(0.5, abs=0.03)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_a_run_compared_with_itself_is_the_same_in_all(seed: int) -> None:
    run = scripted(Half(), seed)
    table = compare(run, run)
    assert set(table.column("delta")) == {0}
    assert set(table.column("raw B/A")) == {1.0}
    assert table.column("adjusted") == pytest.approx([1.0] * 5)
    assert set(table.column("verdict")) <= {"unchanged", AS_THE_REST}


@pytest.mark.deep
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.6, 1.6), st.floats(-0.3, 0.3))
def test_swapping_the_runs_inverts_every_ratio(seed: int, length: float, slower: float) -> None:
    a = scripted(Half(), seed)
    b = scripted(Half(length=length, slower={"actor_update": slower}), seed + 1)
    forth, back = compare(a, b), compare(b, a)
    for name, inverse in (
        ("raw B/A", "raw B/A"),
        ("work B/A", "work B/A"),
        ("adjusted", "adjusted"),
    ):
        _inverse(_by(forth, name), _by(back, inverse))
    _inverse(_by(forth, "CI low"), _by(back, "CI high"))
    _inverse(_by(forth, "CI high"), _by(back, "CI low"))
    swapped = {"faster": "slower", "slower": "faster"}
    assert {name: swapped.get(str(v), v) for name, v in _verdicts(forth).items()} == _verdicts(back)


def _inverse(forth: dict[object, object], back: dict[object, object]) -> None:
    assert forth.keys() == back.keys()
    for name, ratio in forth.items():
        assert float(str(ratio)) * float(str(back[name])) == pytest.approx(1.0, rel=1e-4)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 20.0))
def test_times_scaled_by_k_give_k_at_equal_work(seed: int, k: float) -> None:
    half = Half(length=1.2)
    a = scripted(half, seed)
    b = scripted(replace(half, slower=dict.fromkeys(STAGES, k - 1)), seed)
    table = compare(a, b)
    for name in STAGES:
        assert _by(table, "adjusted")[name] == pytest.approx(k, rel=1e-4)
        assert _by(table, "work B/A")[name] == pytest.approx(1.0, rel=1e-4)


# Not drawn anew each time: by chance one of a hundred intervals of 99 % misses.
@pytest.mark.parametrize(("seed", "noise"), [(7 + at, at * 0.004) for at in range(8)])
def test_twice_the_tokens_are_work_two_and_no_change(seed: int, noise: float) -> None:
    random = np.random.default_rng(seed)
    tokens = [1_000 * scale * np.exp(random.normal(0, 0.4, 60)) for scale in (1.0, 1.0)]
    tokens[1] = 2 * tokens[0]
    times = [each * 1e5 * np.exp(random.normal(0, noise, 60)) for each in tokens]
    runs = [
        run_of({"actor_update": ns}, {"tokens": {"actor_update": own}})
        for ns, own in zip(times, tokens, strict=True)
    ]
    table = compare(*runs)
    assert _by(table, "adjusted")["actor_update"] == pytest.approx(1.0, abs=1e-4 + noise)
    assert _by(table, "work B/A")["actor_update"] == pytest.approx(2.0, abs=1e-3 + 2 * noise)
    low, high = _by(table, "CI low")["actor_update"], _by(table, "CI high")["actor_update"]
    assert low <= 1.0 + 1e-6 <= high + 2e-6  # type: ignore[operator]


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_the_total_is_work_times_equal_work_exactly(seed: int, counted: bool) -> None:
    halves = Half(counted=counted), Half(counted=counted, length=1.3)
    table = compare(*(scripted(half, seed + at) for at, half in enumerate(halves)))
    columns = (table.column(name) for name in ("raw B/A", "work B/A", "adjusted", "adjusted by"))
    for total, work, equal, by in zip(*columns, strict=True):
        assert (work is None) == (by == "work not counted") == (not counted)
        product = (1.0 if work is None else float(work)) * float(equal or 0)
        assert product == pytest.approx(float(total or 0), rel=1e-12)


def test_longer_answers_are_no_regression_and_hide_none() -> None:
    """Blind to work, the first would be 30 % slower, and the second faster."""
    longer = compare(scripted(Half(), 1), scripted(Half(length=1.3), 2))
    assert _by(longer, "raw B/A")["actor_update"] > 1.2  # type: ignore[operator]
    assert _verdicts(longer)["actor_update"] == "unchanged"

    slower = {"actor_update": 0.08}
    hidden = compare(scripted(Half(), 3), scripted(Half(length=0.7, slower=slower), 4))
    assert _by(hidden, "raw B/A")["actor_update"] < 0.9  # type: ignore[operator]
    assert _verdicts(hidden)["actor_update"] == "slower"


def test_without_counted_work_the_plain_ratio_is_judged_and_that_is_said() -> None:
    a, b = (scripted(Half(counted=False, length=length), 1) for length in (1.0, 1.5))
    table = compare(a, b)
    assert _verdicts(table)["actor_update"] == "slower"
    assert _by(table, "adjusted") == _by(table, "raw B/A")
    assert "judged by the raw ratio. Call count(tokens=...)" in table.note


def test_work_that_differs_between_the_runs_alone_proves_nothing() -> None:
    """One length per run: whether time or length is to blame, nobody can tell."""
    a, b = _times(1), 2 * _times(2)
    runs = [
        run_of({"a": ns}, {"tokens": {"a": np.full(30, tokens)}})
        for ns, tokens in ((a, 100.0), (b, 200.0))
    ]
    table = compare(*runs)
    assert _verdicts(table) == {"a": INCONCLUSIVE, "untraced": "unchanged", "step": INCONCLUSIVE}
    assert (_by(table, "work B/A")["a"], _by(table, "adjusted")["a"]) == (None, None)


def test_pace_that_drifts_counts_fewer_steps() -> None:
    """Two runs whose machine warms slowly: each step says little that is new."""
    random, wrong = np.random.default_rng(4), 0
    for _ in range(12):
        runs = []
        for _ in range(2):
            pace = np.zeros(200)
            for at in range(1, 200):
                pace[at] = 0.95 * pace[at - 1] + random.normal(0, 0.02)
            runs.append(run_of({"a": 1e8 * np.exp(pace)}))
        table = compare(*runs)
        wrong += _verdicts(table)["a"] in ("faster", "slower")
        assert "Step times are autocorrelated" in table.note
    assert wrong <= 1


@pytest.mark.deep
def test_noise_alone_is_seldom_called_a_change() -> None:
    noise = np.random.default_rng(3)
    runs = [run_of({"a": noise.lognormal(13, 0.4, 12)}) for _ in range(120)]
    verdicts = [_verdicts(compare(a, b))["a"] for a, b in zip(runs[::2], runs[1::2], strict=True)]
    assert sum(verdict in ("faster", "slower", "minor") for verdict in verdicts) <= 2


def test_means_are_per_step_over_ranks() -> None:
    def run(*lengths: int) -> list[list[Row]]:
        return [
            [
                Row(kind, kind, n, n * 100, n * 100 + (100 if kind == "step" else length))
                for n in (1, 2, 3)
                for kind in ("step", "stage")
            ]
            for length in lengths
        ]

    table = compare(loaded(*run(10, 20)), loaded(*run(30)))
    columns = ("stage", "A", "B", "delta", "raw B/A", "verdict", "CI low", "CI high")
    assert list(zip(*map(table.column, columns), strict=True)) == [
        ("stage", 15, 30, 15, 2.0, INCONCLUSIVE, None, None),
        ("untraced", 85, 70, -15, 70 / 85, INCONCLUSIVE, None, None),
        ("step", 100, 100, 0, 1.0, INCONCLUSIVE, None, None),
    ]


def test_a_few_long_steps_against_all_the_others_are_called_mixed() -> None:
    def run(*lengths: int) -> Spans:
        rows, at = [], 0
        for step, length in enumerate(lengths, start=1):
            rows += [Row("step", "step", step, at, at + length)]
            at += length
        return loaded(rows)

    a = [100 + n * 7 % 20 for n in range(20)]
    b = [80 + n * 7 % 20 // 2 for n in range(19)] + [5_000]
    table = compare(run(*a), run(*b))
    assert table.column("stage")[-1] == "step"
    assert table.column("CI high")[-1] < 1 < table.column("raw B/A")[-1]  # type: ignore[operator]
    assert table.column("verdict")[-1] == "mixed"


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(0.97, "minor"), (1.03, "minor"), (0.9, "faster"), (1.1, "slower"), (1.0, "unchanged")],
)
def test_a_sure_change_under_five_percent_is_called_small(factor: float, verdict: str) -> None:
    base = 1e8 + 1e5 * (np.arange(40) % 5)
    assert _verdicts(compare(run_of({"a": base}), run_of({"a": base * factor})))["a"] == verdict


def test_a_lost_fifth_of_the_stages_makes_no_change() -> None:
    a, b = scripted(Half(), 1), scripted(Half(), 2)
    table = compare(a, _without(b, 0.2))
    changed = {"faster", "slower"}
    found = [v for name, v in _verdicts(table).items() if name in STAGES]
    assert not changed & set(found)


def _without(spans: Spans, share: float) -> Spans:
    keep = np.random.default_rng(0).random(len(spans)) > share
    keep |= np.char.equal(np.array(spans.names)[spans.name], "step")
    new = np.cumsum(keep) - 1
    columns = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    counters = {
        name: type(own)(new[own.rows[keep[own.rows]]], own.values[keep[own.rows]])
        for name, own in spans.counters.items()
    }
    kept = {name: getattr(spans, name)[keep] for name in columns}
    return replace(spans, **kept, counters=counters)


def test_intervals_are_wider_where_more_stages_are_asked() -> None:
    a, b = _times(1), _times(2)
    few = compare(run_of({"a": a}), run_of({"a": b}))
    extra = {f"x{n}": _times(n) for n in range(10)}
    many = compare(run_of({"a": a} | extra), run_of({"a": b} | extra))
    assert _width(many) > 1.1 * _width(few)


def _width(table: Table) -> float:
    high, low = _by(table, "CI high")["a"], _by(table, "CI low")["a"]
    return math.log(float(str(high)) / float(str(low)))


def _work(seed: int, steps: int = 60, spread: float = 0.2) -> np.ndarray:
    return 1_000 * np.exp(np.random.default_rng(seed).normal(0, spread, steps))


def _bounds(
    times: Sequence[np.ndarray], work: Sequence[Sequence[np.ndarray]] = (), chance: float = 0.01
) -> tuple[float, float] | None:
    """Return the bounds of B/A at equal work."""
    fitted = fit(times, work)
    known = between_steps(fitted.rest, fitted.columns, [np.arange(len(each)) for each in times])
    if known is None:
        return None
    low, high = Change(known, range_bounds(*fitted.rest)).interval(chance)
    return math.exp(low), math.exp(high)


def test_without_work_it_is_the_ratio_of_typical_times() -> None:
    a, b = _work(1), 1.5 * _work(2)
    low, high = _bounds([a, b]) or (0.0, 0.0)
    assert low < float(np.median(b) / np.median(a)) < high


def test_a_constant_column_explains_nothing() -> None:
    a, b = _work(1), _work(2)
    same = np.full(60, 7.0)
    assert _bounds([a, b], [(same, same)]) == _bounds([a, b])


def test_fixed_costs_are_told_from_those_that_grow() -> None:
    """Half the time is fixed: twice the tokens take 1.5 times as long."""
    a, b = _work(1), 2 * _work(2)
    times = [1_000 + a, 1_000 + b]
    usual = fit(times, [(a, b)]).usual
    assert _bounds(times, [(a, b)]) == pytest.approx((1.0, 1.0), abs=1e-5)
    assert usual[1].mean() / usual[0].mean() == pytest.approx(
        times[1].mean() / times[0].mean(), rel=1e-4
    )


def test_squares_of_lengths_are_learned_beside_tokens() -> None:
    a, b = _work(1), 1.5 * _work(2)
    squares = [_work(seed) ** 2 for seed in (3, 4)]
    times = [work + square / 500 for work, square in zip((a, b), squares, strict=True)]
    found = _bounds([times[0], times[1] * 1.1], [(a, b), (squares[0], squares[1])])
    assert found == pytest.approx((1.1, 1.1), abs=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("drift", [0.7, 1.0, 1.3])
def test_the_true_ratio_is_covered_as_often_as_promised(drift: float) -> None:
    random, missed = np.random.default_rng(11), 0
    for _ in range(100):
        a, b = (scale * 1_000 * np.exp(random.normal(0, 0.15, 30)) for scale in (1.0, drift))
        times = [(200 + own) * np.exp(random.normal(0, 0.03, 30)) for own in (a, b)]
        low, high = _bounds([times[0], times[1] * 1.05], [(a, b)], 0.05) or (0.0, 9.0)
        missed += not low <= 1.05 <= high
    assert missed <= 12  # 5 of 100 are promised; 13 have a chance below 1 in 500


def test_a_few_wild_steps_move_nothing() -> None:
    a, b = _work(1), _work(2)
    calm = _bounds([a * 2, b * 2], [(a, b)])
    times = a * 2
    times[::20] *= 50
    assert _bounds([times, b * 2], [(a, b)]) == pytest.approx(calm, abs=0.01)


def test_work_that_only_the_run_changes_is_no_evidence() -> None:
    one, two = np.full(60, 1_000.0), np.full(60, 2_000.0)
    times = [_work(1, spread=0.02), 2 * _work(2, spread=0.02)]
    assert _bounds(times, [(one, two)]) is None


def test_steps_like_their_neighbours_count_as_fewer() -> None:
    random = np.random.default_rng(2)
    white = [np.exp(random.normal(0, 0.1, 300)) for _ in range(2)]
    slow = [np.exp(np.cumsum(random.normal(0, 0.01, 300))) for _ in range(2)]
    calm, wandering = (np.log(_bounds(each) or (0.1, 9.0)) for each in (white, slow))
    assert wandering[1] - wandering[0] > 3 * (calm[1] - calm[0])


@pytest.mark.parametrize("shape", ["burst", "ramp", "autoregression"])
def test_times_that_never_come_near_each_other_are_decided_in_any_shape(shape: str) -> None:
    random = np.random.default_rng(5)
    pace = np.zeros((2, 24))
    if shape == "burst":
        pace[0, 5:15] = math.log(2)
    elif shape == "ramp":
        pace += np.linspace(0.4, 0, 24)
    else:
        pace += autoregression(random, (2, 24), 0.15, 0.97)
    times = np.array([[89e6], [19e6]]) * np.exp(pace + random.normal(0, 0.05, (2, 24)))
    table = compare(run_of({"a": times[0]}), run_of({"a": times[1]}))
    assert _verdicts(table)["a"] == "faster"


@pytest.mark.parametrize("seed", range(4))
def test_a_stage_is_named_although_the_machine_wanders(seed: int) -> None:
    regime = REGIMES["common AR(.95) 5%"]
    a = play(Job(regime=regime), 100 + seed)
    b = play(Job(regime=regime, slower={"actor_update": 1.05}), 200 + seed)
    table = compare(a, b)
    slower = _by(table, "adjusted")["actor_update"] > 1  # type: ignore[operator]
    told = "slower" if slower else "slower than the rest"
    assert _verdicts(table)["actor_update"] == told
    assert _by(table, "changed")["actor_update"] == "this stage"
    assert not {"slower", "faster"} & {
        verdict
        for name, verdict in _verdicts(table).items()
        if name not in ("actor_update", "step")
    }


def test_a_slower_machine_is_not_taken_for_code() -> None:
    regime = REGIMES["iid 2%"]
    judged = judge([play(Job(regime=regime), 1)], [play(Job(regime=regime, slower={"*": 1.1}), 2)])
    assert judged.machine
    waiting = {"untraced"}.union(*(run.waiting for run in (*judged.baseline, *judged.candidate)))
    assert {verdict(row) for row in judged.rows if row.name not in waiting} == {"slower"}
    assert not any(row.own for row in judged.rows)


def test_an_undecided_row_says_what_it_would_have_shown_and_how_many_steps_would_decide() -> None:
    regime = REGIMES["common AR(.9) 3%"]
    table = compare(*(play(Job(steps=24, regime=regime), seed) for seed in (9, 109)))
    assert _verdicts(table)["step"] == INCONCLUSIVE
    assert 0.05 < float(_by(table, "detectable")["step"]) < 0.4  # type: ignore[arg-type]
    assert int(_by(table, "steps needed")["step"]) > 24  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("slower", "result"), [(1.0, "PASS"), (1.1, "FAIL"), (0.7, "PASS")], ids=str
)
def test_the_gate_decides(slower: float, result: str) -> None:
    runs = [play(Job(regime=REGIMES["iid 5%"], slower={"*": each}), 9) for each in (1.0, slower)]
    assert gate(judge(runs[:1], runs[1:]), 0.03).result == result


def test_the_gate_says_what_would_decide() -> None:
    regime = REGIMES["common AR(.9) 3%"]
    runs = [play(Job(steps=24, regime=regime), seed) for seed in (3, 4)]
    found = gate(judge(runs[:1], runs[1:]), 0.03)
    assert found.result == "INCONCLUSIVE"
    assert re.fullmatch(
        r"these runs would show a slowdown of \d+\.\d% or more; "
        r"(about \d+ steps a run would decide|more steps do not help)",
        found.text,
    )


def test_repeats_are_judged_by_the_spread_between_runs() -> None:
    """Three runs a side: steps alone would call their spread of 2% a change."""
    random, regime = np.random.default_rng(8), REGIMES["iid 2%"]
    levels = np.exp(random.normal(0, 0.01, 6))
    runs = [play(Job(regime=regime, slower={"*": each}), 50 + at) for at, each in enumerate(levels)]
    assert gate(judge(runs[:3], runs[3:]), 0.03).result == "PASS"
    slow = [play(Job(regime=regime, slower={"*": 1.1}), 60 + at) for at in range(3)]
    assert gate(judge(runs[:3], slow), 0.03).result == "FAIL"


def waiting_run(seed: int, rollout: float = 1.0, update: float = 1.0, steps: int = 60) -> Spans:
    """Return a run of four ranks that wait for one another inside their update."""
    random = np.random.default_rng(seed)
    ranks: list[list[Row]] = [[] for _ in range(4)]
    begin = 0
    for step in range(1, steps + 1):
        tokens = random.lognormal(6.8, 0.4, 4) * 16
        noise = random.normal(1, 0.02, (4, 2))
        generated = begin + (rollout * (15e6 + 1e4 * tokens) * noise[:, 0]).astype(int)
        own = (update * 14e3 * tokens * noise[:, 1]).astype(int)
        done = int((generated + own).max())
        for rank, rows in enumerate(ranks):
            count = {"tokens": int(tokens[rank])}
            stages = (
                ("actor_generate", begin, int(generated[rank])),
                ("actor_update", int(generated[rank]), done),
                ("weight_sync", done, done + 30 * 10**6),
            )
            rows += [Row(name, "stage", step, *both, counters=count) for name, *both in stages[:2]]
            rows.append(Row("weight_sync", "stage", step, *stages[2][1:]))
            rows.append(Row("step", "step", step, begin, done + 31 * 10**6))
        begin = done + 31 * 10**6
    return loaded(*ranks)


def verdict_of(a: Spans, b: Spans, stage: str) -> tuple[str, float]:
    table = compare(a, b)
    at = table.column("stage").index(stage)
    return str(table.column("verdict")[at]), float(table.column("adjusted")[at])  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_an_update_that_waits_less_is_not_faster_and_a_slower_one_is_found(seed: int) -> None:
    before = waiting_run(seed)
    faster = waiting_run(100 + seed, rollout=1 / 3)
    assert verdict_of(before, faster, "actor_update")[0] in ("unchanged", "inconclusive", "minor")
    assert verdict_of(before, faster, "actor_generate")[0] == "faster"
    found, ratio = verdict_of(before, waiting_run(200 + seed, update=1.1), "actor_update")
    assert found == "slower"
    assert ratio == pytest.approx(1.1, abs=0.03)


@pytest.mark.parametrize("seed", range(40 if DEEP else 4))
def test_waiting_in_two_runs_of_one_code_is_not_called_a_change(seed: int) -> None:
    table = compare(waiting_run(seed), waiting_run(1_000 + seed))
    assert "waiting in actor_update" in table.column("stage")
    assert set(table.column("verdict")) <= {"unchanged", "inconclusive", "minor"}
