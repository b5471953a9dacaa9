"""Samples: what is recorded of them, on any process, and that it costs little."""

import asyncio
import json
import multiprocessing
import pickle
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lightning_rlprof import count, load, sample, stage, start_session
from lightning_rlprof.analysis.samples.sample_tables import samples
from lightning_rlprof.recording.samples import Sample
from lightning_rlprof.tables.spans import Spans


def counts(spans: Spans) -> dict[Any, Any]:
    table = samples(spans)
    return dict(zip(table.column("fate"), table.column("samples"), strict=True))


def begin(folder: Path, **more: Any) -> Any:
    return start_session(profile_save_path=str(folder), summary=False, **more)


def test_phases_carry_the_sample_and_names_stand_in_the_run(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        session.begin_step(1)
        own = sample(17, group="g", version=3, replica=1)
        with stage("actor_generate"), own, own.phase("actor_generate"):
            own.first_token()
            count(tokens=20)
            count(version=4)
        with own.phase("compute_reward"):
            pass
        own.end("trained", reward=0.5, trainer_version=4)
        session.end_step()
    spans = load(session.run)
    rows, numbers = spans.amounts("sample")
    found = {(spans.names[spans.name[row]], spans.span(row).kind) for row in rows.tolist()}

    assert {int(number) for number in numbers} == {own.id}
    assert found == {
        ("actor_generate", "region"),
        ("compute_reward", "stage"),
        ("first token", "mark"),
        ("sample trained", "mark"),
    }
    phase = next(each for each in spans if each.kind == "region")
    assert phase.counters is not None
    assert {**phase.counters, "sample": 0} == {
        "sample": 0,
        "version": 3,
        "version_end": 4,
        "replica": 1,
        "tokens": 20,
    }
    assert list(spans.table("sample_names").rows) == [(0, own.id, "17", "g", 0)]
    names = load(session.run).sql("select sample, prompt, prompt_group from sample_names")
    assert list(names.rows) == [(own.id, "17", "g")]


def test_nothing_is_recorded_and_nothing_raised_without_a_session() -> None:
    with sample("p") as own, own.phase("actor_generate", tokens=object()):
        own.first_token()
    own.end("trained")
    assert own.retry().attempt == 1


def test_an_exception_aborts_the_sample_and_passes(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        with pytest.raises(KeyError), sample("a"):
            raise KeyError("own")
        with pytest.raises(KeyError), sample("b") as told:
            told.end("filtered")
            raise KeyError("own")

        async def cancelled() -> None:
            with sample("c"):
                await asyncio.sleep(60)

        async def main() -> None:
            task = asyncio.create_task(cancelled())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(main())
    assert counts(load(session.run)) == {"generated": 3, "aborted": 2, "filtered": 1, "trained": 0}


def test_an_unknown_fate_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with begin(tmp_path) as session:
        for name in ("a", "b"):
            sample(name).end("filtred")  # type: ignore[arg-type]
    said = [each for each in caplog.messages if "filtred" in each]
    assert len(said) == 1
    assert "allowed: trained, zero_advantage" in said[0]
    assert counts(load(session.run))["unknown"] == 2


def _work(folder: str, tasks: Any, done: Any) -> None:
    with begin(Path(folder), name="run", rank=1, world_size=2):
        for own in iter(tasks.get, None):
            with own.phase("compute_reward"):
                pass
            again = own.attempt == 0 and own.prompt.endswith("3")
            done.put(own.retry() if again else own)


def test_samples_cross_processes_and_a_restart_and_the_books_stay_exact(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    tasks, done = context.Queue(), context.Queue()
    worker = context.Process(target=_work, args=(str(tmp_path), tasks, done))
    kept = tmp_path / "kept.pickle"
    with begin(tmp_path, name="run", rank=0, world_size=2) as session:
        worker.start()
        for number in range(20):
            with sample(f"p{number}") as own, own.phase("actor_generate", tokens=5):
                pass
            tasks.put(own)
        tasks.put(None)
        back: list[Sample] = [done.get(timeout=120) for _ in range(20)]
        worker.join(120)
        for own in back[:12]:
            own.end("trained")
        for own in back[:4]:  # delivered twice
            pickle.loads(pickle.dumps(own)).end("stale")
        kept.write_bytes(pickle.dumps(back[12:18]))  # 18 and 19 are dropped without a word
    with begin(tmp_path, name="later") as later:
        for own in pickle.loads(kept.read_bytes()):
            own.end("filtered")

    first, both = load(session.run), load([session.run, later.run])
    assert counts(first) == {"generated": 22, "retried": 2, "unknown": 8, "trained": 12}
    assert counts(both) == {
        "generated": 22,
        "retried": 2,
        "filtered": 6,
        "unknown": 2,
        "trained": 12,
    }
    again = {row[1] for row in first.table("sample_names").rows if row[4] == 1}
    assert len(again) == 2


def test_a_thousand_at_once_in_asyncio_keep_their_own_phases(tmp_path: Path) -> None:
    async def one(number: int) -> None:
        with sample(number, group=number // 8) as own:
            for name in ("actor_generate", "tool_call", "actor_generate"):
                with own.phase(name):
                    count(tokens=number)
                    await asyncio.sleep(0.001 * (number % 7))
        own.end("trained")

    async def main() -> None:
        await asyncio.gather(*map(one, range(1000)))

    with begin(tmp_path) as session:
        session.begin_step(1)
        with stage("actor_generate"):
            asyncio.run(main())
        session.end_step()
    spans = load(session.run)
    table = samples(spans)
    assert counts(spans) == {"generated": 1000, "trained": 1000}
    assert table.rows[0][3] == 2 * sum(range(1000))  # the tool's tokens are not generated


def test_a_phase_costs_no_more_than_ten_spans_of_a_stage(tmp_path: Path) -> None:
    # 10 µs on a quiet machine: beside a stage's span of the same run, which costs 1 to 2 µs. By the
    # time of the CPU, in short turns: others share this machine.
    marker, spans, phases = stage("tool_call"), [], []
    with begin(tmp_path) as session:
        own = sample("p")
        for _ in range(50):
            session.begin_step(session.next_step)
            start = time.thread_time()
            for _ in range(200):
                with marker:
                    pass
            middle = time.thread_time()
            for _ in range(200):
                with own.phase("tool_call"):
                    pass
            spans.append(middle - start)
            phases.append(time.thread_time() - middle)
            session.end_step()
    assert median(phases) < 8 * median(spans)


# ---- carried to a server


def test_a_server_continues_a_sample_that_a_request_carries(tmp_path: Path) -> None:
    own = sample("gsm8k/17 €", group="g&=;", version=3, replica=1).retry()
    headers = own.inject({"Host": "tools"})
    assert headers.keys() == {"Host", "rlprof-sample"}
    arrived = {name.title(): value for name, value in json.loads(json.dumps(headers)).items()}
    with begin(tmp_path) as session, Sample.extract(arrived) as received:
        with received.phase("env_step"):
            pass
        received.end("aborted")
    spans = load(session.run)
    ((_, number, *names),) = spans.table("sample_names").rows
    assert [number, *names] == [own.id, "gsm8k/17 €", "g&=;", 1]
    (phase,) = (each for each in spans if each.name == "env_step")
    assert phase.counters is not None
    assert {name: phase.counters[name] for name in ("sample", "version", "replica")} == {
        "sample": own.id, "version": 3, "replica": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        "", "id", "id=", "id=x", "id=-1", "id=0", "id=1.5", "id=¹", "prompt=p",
        f"id={1 << 52}", f"id={'9' * 5000}", "id=7&" * 9, f"id=7&prompt={'x' * 9000}",
        None, 7, b"id=7", ["id=7"],
    ],
)  # fmt: skip
def test_no_header_that_a_client_may_send_is_an_error_or_a_sample(
    value: Any, tmp_path: Path
) -> None:
    with begin(tmp_path) as session:
        received = Sample.extract({"RLPROF-SAMPLE": value})
        with received, received.phase("env_step", calls=1):
            received.first_token()
        received.retry().end("aborted")
    spans = load(session.run)
    assert [(each.name, (each.counters or {}).get("sample")) for each in spans] == [
        ("env_step", None)
    ]
    assert not spans.amounts("sample")[0].size
    assert not received.inject()["rlprof-sample"].startswith("id=7")


@pytest.mark.parametrize("headers", [{}, None, [("rlprof-sample", "id=7")], {7: "id=7"}])
def test_what_has_no_such_header_is_of_no_known_sample(headers: Any) -> None:
    assert Sample.extract(headers).id == 0


def test_names_in_a_header_are_as_short_and_plain_as_those_in_code() -> None:
    received = Sample.extract({"rlprof-sample": f"id=7&version=x&prompt=%1B[31m%FF{'p' * 300}"})
    assert (received.id, received.version, received.group) == (7, None, "")
    assert received.prompt == "[31m\ufffd" + "p" * 195 + "…"
    longest = sample("€" * 300, group="€" * 300).inject()
    assert Sample.extract(longest).group == "€" * 200 + "…"
