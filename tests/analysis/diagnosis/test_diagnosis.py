"""The registry as a whole: shares and their limits, order, remedies, what contradicted itself."""

import dataclasses
import importlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import (
    FRAMEWORKS,
    PROBLEMS,
    REMEDIES,
    Diagnosis,
    diagnose,
    explained,
    findings,
    known_id,
)
from lightning_rlprof.analysis.diagnosis.evidence import (
    Evidence,
    Measured,
    Quantity,
    exact,
    shown,
)
from lightning_rlprof.analysis.diagnosis.problem import Finding
from lightning_rlprof.analysis.diagnosis.step_quantities import DATA_WAIT, ROLLOUT
from lightning_rlprof.analysis.ledger.ledger import Accounts, ledger
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import NO_PARENT, RankNote, Spans, Thread
from lightning_rlprof.tables.table import rows_of
from tests.builders.advised import Fact, Work, advised
from tests.builders.device_trace import Feed, feed, traced
from tests.builders.diagnosed import found, judged, only
from tests.builders.paced import REGIMES, Job
from tests.builders.paced import play as play_paced
from tests.builders.pairs import run_of
from tests.builders.runs import Row, header, loaded
from tests.builders.scripted import Script, play, without
from tests.places import ROOT

# Of each problem that is a share of the step: a name that spans it.
NAMES = {
    "rollout": "actor_generate",
    "rollout-tail": "rollout_tail",
    "data-wait": "data_fetch",
    "backpressure": "back_pressure",
    "collective-wait": "barrier",
    "communication": "all_reduce",
    "host-work": "tokenize",
    "weight-sync": "weight_sync",
    "reward": "compute_reward",
    "checkpoint-eval": "validation",
    "logging": "log_metrics",
    "critic": "critic_update",
    "garbage-collection": "garbage_collection",
    "profiler-overhead": "rlprof open capture",
    "untraced": "",
}
LENGTH = 1_000_000
STEPS = 12


def job(name: str, shares: list[float], *, fill: str = "actor_update") -> Spans:
    """Return a rank whose steps give such shares to one name, and the rest to another stage."""
    rows: list[tuple[int, str, int, int, int]] = []
    for step, share in enumerate(shares):
        begin, cut = step * LENGTH, step * LENGTH + int(share * LENGTH)
        rows += [(KINDS.index("step"), "step", step + 1, begin, begin + LENGTH)]
        if name and cut > begin:
            rows += [(KINDS.index("region"), name, step + 1, begin, cut)]
        rows += [(KINDS.index("stage"), fill, step + 1, cut, begin + LENGTH)]
    names = tuple(dict.fromkeys(row[1] for row in rows))
    kind, _, number, start, end = zip(*rows, strict=True)
    count = len(rows)
    name_of, zeros = [names.index(row[1]) for row in rows], [0] * count
    last = (zeros, range(1, count + 1), [NO_PARENT] * count)
    columns = (name_of, kind, zeros, number, start, end, *last)
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    return Spans(
        Path("job"),
        names,
        (Thread(0, 1, "Main"),),
        *arrays,
        headers={0: header(0, 1)},
        statuses={0: "finished"},
    )


every_share = pytest.mark.parametrize("name", NAMES)


def limit(name: str) -> float:
    return PROBLEMS[name].when[0].limit


def ids(spans: Spans) -> list[str]:
    return [each.id for each in diagnose(spans).found]


def one(spans: Spans, name: str) -> Finding:
    return next(each for each in diagnose(spans).found if each.id == name)


def shared(name: str, share: float, steps: int = STEPS) -> Spans:
    """Return a run with such a share; a rollout is elsewhere in it, so that loaders load."""
    kind = "stage" if name == "critic" else "region"
    spans = job(NAMES[name], [share] * steps)
    if kind == "stage":
        at = spans.names.index(NAMES[name])
        spans = replace(spans, kind=np.where(spans.name == at, KINDS.index("stage"), spans.kind))
    return spans


@every_share
def test_a_share_above_its_limit_is_exact_with_its_events(name: str) -> None:
    share = min(limit(name) * 1.5, 0.95)
    spans = shared(name, share)
    problem = PROBLEMS[name]
    own = only(spans, name)
    assert own.weight == pytest.approx(share * STEPS * LENGTH, rel=1e-5)
    if problem.kind != "idea":
        assert own.price is not None
        assert own.price.share == pytest.approx(share, rel=1e-5)
        assert (own.price.low, own.price.high) == (None, None), "what a job did cost is exact"
    if own.query:
        rows = Run.of(spans).sql(own.query)
        assert set(rows.column("name")) == {NAMES[name] or "step"}
        assert own.place is not None
        assert rows.rows[0][:6] == (
            NAMES[name] or "step",
            rows.rows[0][1],
            *(own.place.rank, own.place.step, own.place.from_ns, own.place.to_ns),
        )


@every_share
def test_a_share_below_its_limit_is_silent(name: str) -> None:
    assert judged(shared(name, limit(name) * 0.5), name) == []


@every_share
def test_of_few_steps_a_share_is_undecided(name: str) -> None:
    [each] = judged(shared(name, min(limit(name) * 1.5, 0.95), 4), name)
    assert not isinstance(each, Finding)
    assert "4 complete steps" in each.why


def test_an_evaluation_every_tenth_step_is_decided_as_what_it_cost_is_exact() -> None:
    """It took exactly 23.1% and was "not checked, 95% CI 7–38% includes 10%"."""
    spans = job("validation", ([0.0] * 3 + [0.924]) * 10)
    own = one(spans, "checkpoint-eval").price
    assert own is not None
    assert own.share == pytest.approx(0.231)


def test_warm_up_counts_for_nothing() -> None:
    """The first step takes as long as thirty, and only syncs weights."""
    rows = [Row("step", "step", 0, 0, 30 * LENGTH), Row("weight_sync", "region", 0, 0, 30 * LENGTH)]
    for step in range(1, STEPS):
        begin = (29 + step) * LENGTH
        rows += [Row("step", "step", step, begin, begin + LENGTH)]
        rows += [Row("actor_update", "stage", step, begin, begin + LENGTH)]
    assert judged(loaded(rows), "weight-sync") == []


# ---- order


def test_a_problem_comes_before_an_idea_that_takes_more_time() -> None:
    spans = job("weight_sync", [0.3] * STEPS, fill="actor_generate")
    assert ids(spans) == ["weight-sync", "rollout"]
    sync, rollout = diagnose(spans).found
    assert sync.weight < rollout.weight
    assert rollout.price is None, "what a rollout takes has no price"


def test_what_ended_the_run_comes_first_then_what_makes_times_untrue() -> None:
    spans = job("weight_sync", [0.3] * 24)
    spans = replace(spans, headers={0: header(0, 2)})
    assert ids(spans)[:2] == ["lost-data", "weight-sync"]
    ended = replace(spans, statuses={0: "interrupted by OutOfMemoryError"})
    assert ids(ended)[:3] == ["out-of-memory", "lost-data", "weight-sync"]
    note = RankNote(0, 1, "warning", "in words", Code.NO_PROGRESS, {"quiet_s": 300, "step": 25})
    hung = replace(spans, statuses={0: None}, notes=(note,))
    assert ids(hung)[0] == "hang"


def test_the_table_and_json_have_the_order_of_the_diagnosis() -> None:
    spans = job("weight_sync", [0.3] * STEPS, fill="actor_generate")
    assert list(findings(spans).column("id")) == ids(spans)
    facts = diagnose(spans).to_dict()
    assert [each["id"] for each in facts["problems"] + facts["ideas"]] == ids(spans)
    assert facts["problems"][0]["price"]["kind"] == "lost"


def test_a_slow_rank_explains_that_others_wait_for_it() -> None:
    spans = play(Script(slow={3: 0.2}), 5).spans
    assert ids(spans)[0] == "straggler"
    assert "collective-wait" not in ids(spans)


def test_one_fix_has_two_named_prices() -> None:
    own = one(play(Script(slow={3: 0.2}), 5).spans, "straggler")
    assert own.price is not None
    assert own.price.kind == "lost"
    saves = own.remedies[0].saves
    assert saves is not None
    assert (saves.kind, saves.low is not None) == ("saves", True)
    assert 0 < saves.share < 1


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_events_never_names_a_wrong_rank(seed: int) -> None:
    spans = without(play(Script(slow={1: 0.1}, uneven=0.3, steps=40), seed).spans, 0.2, seed)
    named = [each.by_name["rank"].value for each in found(spans, "straggler")]
    assert all(each == 1 for each in named)


def test_steps_that_became_slower_have_step_stage_size_and_price() -> None:
    own = one(play_paced(Job(slower={"actor_generate": 2.0}, since=30), 4), "slower-since")
    values = {name: fact.value for name, fact in own.by_name.items()}
    assert values["since step"] in (30, 31)
    assert values["stage"] == "actor_generate"
    assert 1.0 < float(values["times as long"]) < 2.0
    assert own.price is not None
    assert own.place is not None
    assert own.place.step in (30, 31)


def test_an_outlier_step_is_a_problem_only_if_it_costs_enough() -> None:
    times = 1e8 * np.exp(np.random.default_rng(1).normal(0, 0.02, 60))
    times[40] *= 5
    assert one(run_of({"a": times}), "outlier-step").by_name["step"].value == 41
    long = np.tile(times, 10)
    long[100:] = 1e8
    assert "outlier-step" not in ids(run_of({"a": long}))


@pytest.mark.parametrize("regime", ["iid 2%", "common AR(.9) 3%", "GC 10% x 200 ms"])
def test_a_healthy_run_is_accused_of_no_change(regime: str) -> None:
    names = ("slower-since", "slower-over-time", "outlier-step")
    assert found(play_paced(Job(regime=REGIMES[regime]), 3), *names) == []


def test_without_steps_and_devices_there_is_no_answer() -> None:
    empty = job("", [0.0])
    none = replace(empty, kind=np.full(len(empty), KINDS.index("stage"), dtype=np.int64))
    assert findings(none).abstained == diagnose(none).abstained == "no complete step was recorded"


def test_a_trace_of_a_device_needs_no_steps() -> None:
    spans = traced(*feed(Feed()))
    assert "short-gaps" in ids(spans)


# ---- measured once, kept as long as the run


def test_a_quantity_is_measured_once_per_run_for_all_that_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    own = Quantity("", "share", lambda run: asked.append(run) or exact(0.5))  # type: ignore[func-returns-value]
    spans = job("weight_sync", [0.3] * STEPS)
    assert Evidence(spans).measure(own) == Evidence(spans).measure(own) == exact(0.5)
    assert len(asked) == 1
    assert diagnose(spans) is diagnose(spans)


def test_findings_and_ledger_compute_the_accounts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = job("weight_sync", [0.3] * STEPS)
    alone = ledger(job("weight_sync", [0.3] * STEPS))
    asked: list[Spans] = []
    module = importlib.import_module("lightning_rlprof.analysis.ledger.ledger")
    whole = module.compute_accounts

    def compute_accounts(spans: Spans) -> Accounts:
        asked.append(spans)
        return whole(spans)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "compute_accounts", compute_accounts)
    findings(spans)
    assert ledger(spans) == alone
    assert len(asked) == 1


# ---- remedies

HALF = {"actor_generate": 0.6, "actor_update": 0.4}
SYNC = {"weight_sync": 0.2, "actor_generate": 0.1, "actor_update": 0.7}
VERL = {"verl": "0.6", "vllm": "0.11"}
GEMM = Work("gemm", 0.3, 1.0)


def talk(name: str, **more: Any) -> Fact:
    """Return a run whose device communicates in 30% of each step, exposed."""
    nccl = Work(f"ncclDevKernel_{name}", 0.0, 0.3, stream=9)
    return Fact(spans={"actor_update": 1.0}, work=(nccl, GEMM), versions=VERL, **more)


OFFERED = {
    "weight-sync-backend": Fact(spans=SYNC, versions=VERL),
    "weight-sync-bucket": Fact(
        spans=SYNC, versions=VERL, counters={"weight_sync": {"bytes": 2**20}}
    ),
    "reward-workers": Fact(
        spans={"compute_reward": 0.3, "actor_update": 0.7},
        versions=VERL,
        of_step={"cpu_wait_ns": 1},
    ),
    "cut-tail": Fact(
        spans={"actor_generate": 0.3, "actor_update": 0.7},
        requests=[0.2] * 9 + [1.0],
        versions=VERL,
    ),
    "offload-less": Fact(spans={"offload": 0.2, "actor_update": 0.8}, versions=VERL),
    "evaluation-cost": Fact(spans={"validation": 0.3, "actor_update": 0.7}, versions=VERL),
    "checkpoint-cost": Fact(spans={"save_checkpoint": 0.3, "actor_update": 0.7}, versions=VERL),
    "logging-cost": Fact(spans={"logging": 0.2, "actor_update": 0.8}, versions=VERL),
    "pinned-copies": Fact(spans={"batch_transfer": 0.3, "actor_update": 0.7}),
    "more-training-devices": Fact(spans={"backpressure": 0.3, "actor_update": 0.7}, versions=VERL),
    "more-rollout-devices": Fact(
        spans={"wait_for_samples": 0.5, "actor_update": 0.5},
        peers={"actor_generate": 1.0},
        versions=VERL,
    ),
    "critic-share": Fact(spans={"critic_update": 0.5, "actor_update": 0.5}, versions=VERL),
    "rollout-overlap": Fact(spans=HALF, versions=VERL),
    "untraced-time": Fact(spans={"actor_update": 0.5}),
    "collect-together": Fact(spans=HALF, of_step={"gc_pause_ns": 100_000}),
    "kv-preemptions": Fact(
        spans=HALF, versions=VERL, counters={"actor_generate": {"num_preempted": 3}}
    ),
    "longer-responses": Fact(
        spans=HALF,
        versions=VERL,
        samples=[("truncated", {"tokens": 9}), *[("trained", {"tokens": 9})] * 3],
    ),
    "discard-less": Fact(
        spans=HALF,
        versions=VERL,
        samples=[("stale", {"tokens": 9}), ("trained", {"tokens": 9})] * 2,
    ),
    "less-staleness": Fact(
        spans=HALF,
        versions=VERL,
        samples=[("trained", {"tokens": 9, "version": 3, "trainer_version": 7})] * 4,
    ),
    "host-memory": Fact(spans=HALF, free_host=0.05),
    "host-bound-update": Fact(spans=HALF, work=(Work(busy=0.5),)),
    "npu-task-queue": Fact(spans=HALF, work=(Work(busy=0.5),), device="Ascend910B2"),
    "fsdp-prefetch": talk("AllGather"),
    "expert-parallel": talk("AllToAll"),
    "pipeline-bubbles": talk("SendRecv"),
    "npu-collectives": talk("AllReduce", device="Ascend910B2"),
    "smaller-micro-batch": Fact(
        spans=HALF, versions=VERL, status="interrupted by OutOfMemoryError"
    ),
    "fragmentation": Fact(spans=HALF, status="interrupted by OutOfMemoryError"),
    "smaller-captures": Fact(spans={"start_profile": 0.2, "actor_update": 0.8}),
}


def offered(spans: Spans, framework: str | None = None) -> dict[str, list[str]]:
    """Return the keys of each remedy that is offered."""
    return {
        offer.remedy.id: [each.key for each in offer.settings]
        for own in diagnose(spans, framework).found
        for offer in own.remedies
    }


@pytest.mark.parametrize("name", OFFERED)
def test_a_remedy_is_offered_under_its_problem(name: str) -> None:
    assert name in offered(advised(OFFERED[name]))


def test_no_remedy_is_offered_without_a_problem() -> None:
    """A healthy run with a rollout of 40% was told to generate during the update: saves 40%."""
    spans = advised(Fact(spans={"actor_generate": 0.4, "actor_update": 0.6}, versions=VERL))
    assert offered(spans) == {}


def test_another_design_is_an_idea_without_a_percent() -> None:
    """Overlap of rollout and update came on every run as "saves 40%", which others pay."""
    answer = diagnose(advised(Fact(spans=HALF, versions=VERL)))
    assert answer.problems == ()
    [rollout] = answer.ideas
    assert rollout.price is None
    assert [(each.remedy.id, each.saves) for each in rollout.remedies] == [
        ("rollout-overlap", None)
    ]


def test_a_lightning_job_on_a_cpu_is_told_nothing_of_verl_or_devices() -> None:
    versions = {"lightning": "2.6", "torch": "2.13"}
    spans = advised(Fact(spans=HALF, versions=versions, device="cpu"))
    assert offered(spans) == {}
    assert diagnose(spans).frameworks == ("Lightning",)
    names = {each.id for each in diagnose(spans).undecided}
    assert not names & {"short-gaps", "device-heat", "training-mfu", "dominant-kernel"}


def test_only_the_framework_that_the_run_names_is_shown_and_an_option_shows_others() -> None:
    fact = Fact(
        spans={"logging": 0.2, "actor_update": 0.8}, versions={"trl": "1", "lightning": "2"}
    )
    spans = advised(fact)
    assert [each.partition(".")[0] for each in offered(spans)["logging-cost"]] == ["GRPOConfig"] * 2
    assert offered(spans, "Lightning")["logging-cost"] == ["Trainer(log_every_n_steps=)"]
    with pytest.raises(TraceError, match="unknown framework 'jax'"):
        diagnose(spans, "jax")


@pytest.mark.parametrize(
    ("recorded", "keys"),
    [(True, ["wrap"]), (False, ["wrap", "auto_stages"]), (None, ["wrap", "auto_stages"])],
)
def test_a_setting_that_the_run_has_already_is_not_offered(
    recorded: bool | None, keys: list[str]
) -> None:
    spans = advised(OFFERED["untraced-time"])
    config = {} if recorded is None else {"auto_stages": recorded}
    own = replace(spans, headers={0: replace(spans.headers[0], config=config)})
    assert offered(own)["untraced-time"] == keys


def test_ids_of_the_configuration_are_left_out() -> None:
    spans = advised(Fact(spans={"logging": 0.2, "actor_generate": 0.6, "actor_update": 0.2}))
    config = {"ignore_findings": ["logging", "rollout-overlap", "of a later version"]}
    own = replace(spans, headers={0: replace(spans.headers[0], config=config)})
    assert "logging" in ids(spans)
    assert "logging" not in ids(own)
    assert diagnose(own).ignored == ("logging", "rollout-overlap")
    assert diagnose(own).unknown == ("of a later version",)


def every_run() -> list[Spans]:
    """Return runs with many facts at once, drawn at random."""
    drawn = []
    names = ["data_fetch", "weight_sync", "compute_reward", "backpressure", "wait_for_samples"]
    for seed in range(24):
        draw = random.Random(seed)
        own = draw.sample([*names, "offload", "validation", "save_checkpoint", "logging"], 3)
        spans = {name: draw.uniform(0.05, 0.25) for name in own}
        spans |= {"actor_generate": draw.uniform(0.05, 0.6)}
        counters = {"actor_generate": {"num_preempted": draw.choice((0, 3))}}
        behind = draw.choice((0, 5))
        sample = {"tokens": 9, "version": 3, "trainer_version": 3 + behind}
        fact = Fact(
            spans=spans,
            counters=counters,
            samples=[(draw.choice(("stale", "trained", "truncated")), sample) for _ in range(4)],
            of_step={
                "host_rss_bytes": 10**9,
                "cpu_wait_ns": draw.choice((1, 200_000)),
                **draw.choice(({}, {"children_rss_bytes": 10**8})),
            },
            background={"process_cpu_cores": draw.choice((0.2, 7.0)), "host_cpu_cores": 7.6},
            peers=draw.choice(({}, {"actor_generate": 1.0})),
            versions=draw.choice((VERL, {"trl": "1"}, {"lightning": "2"}, {"mindspeed-rl": "1"})),
            status=draw.choice(("finished", "interrupted by OutOfMemoryError")),
        )
        drawn.append(advised(fact))
    return drawn


@pytest.mark.deep
def test_no_two_remedies_turn_one_knob_in_opposite_directions() -> None:
    both = 0
    for spans in every_run():
        for framework in (None, *FRAMEWORKS):
            turned: dict[str, set[str]] = {}
            answer = diagnose(spans, framework)
            for own in answer.found:
                for offer in own.remedies:
                    for each in offer.settings:
                        turned.setdefault(each.turns, set()).add(each.turn)
            assert all(len(each) == 1 for each in turned.values()), turned
            both += opposed(answer)
    assert both > 0, "no drawn run has two problems that would turn a knob both ways"


def opposed(answer: Diagnosis) -> int:
    """Return how many knobs the problems of a run would turn both ways, if all were shown."""
    turned: dict[str, set[str]] = {}
    for own in answer.found:
        for remedy in own.problem.remedies:
            for each in remedy.settings:
                turned.setdefault(each.turns, set()).add(each.turn)
    return sum(len(each) > 1 for each in turned.values())


def test_of_one_knob_the_direction_of_the_more_expensive_problem_is_shown() -> None:
    """Old samples want less staleness, and a rollout that waits wants more of it."""
    sample = {"tokens": 9, "version": 3, "trainer_version": 9}
    fact = Fact(
        spans={"actor_generate": 0.2, "backpressure": 0.4, "actor_update": 0.4},
        samples=[("trained", sample)] * 4,
        versions=VERL,
    )
    answer = diagnose(advised(fact))
    assert {"backpressure", "stale-samples"} <= {each.id for each in answer.problems}
    turns = {
        each.turn
        for own in answer.found
        for offer in own.remedies
        for each in offer.settings
        if each.turns == "staleness"
    }
    assert turns == {"up"}


# ---- the registry


def test_only_texts_that_get_the_name_of_the_run_ask_for_it() -> None:
    others = [each.ruled_out_if for each in PROBLEMS.values()]
    others += [text for each in REMEDIES.values() for text in (each.title, each.risk)]
    assert not [text for text in others if "RUN" in text]


def test_ids_are_one_name_space() -> None:
    assert not PROBLEMS.keys() & REMEDIES.keys()


def test_each_id_has_one_text_without_a_template() -> None:
    for name in (*PROBLEMS, *REMEDIES):
        facts = explained(known_id(name))
        assert "{" not in str([facts["title"], facts.get("act"), facts["remedies"][:1]]).replace(
            "{'", ""
        )
        page, _, anchor = facts["guide"].partition("#")
        text = (ROOT / page).read_text()
        assert f"{{#{anchor}}}" in text or f'id="{anchor}"' in text, name
    with pytest.raises(TraceError, match="unknown problem 'data-wat'"):
        known_id("data-wat")


def test_values_and_bounds_are_written_alike() -> None:
    assert [shown(each, "share") for each in (0.0, 0.004, 0.5)] == ["0%", "0.4%", "50%"]
    assert (shown(2**21, "bytes"), shown(1.0, "yes/no")) == ("2 MiB", "yes")
    assert (ROLLOUT > 0.5).bound == "above 50%"
    measured = Evidence(job("data_fetch", [0.3] * STEPS)).measure(DATA_WAIT)
    assert isinstance(measured, Measured)
    assert dataclasses.replace(measured, facts=()).value == pytest.approx(0.3)
    assert rows_of(findings(job("weight_sync", [0.3] * STEPS)))[0]["price"] == "lost"
