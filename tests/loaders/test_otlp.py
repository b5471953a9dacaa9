"""Spans of OpenTelemetry from files: steps, stages, waits, ranks, threads, clocks."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.notes import Code
from lightning_rlprof.run import Run, load
from tests.loaders.otlp_records import DRIVER, attributes, batch, nemo_step, span


def written(path: Path, *lines: Mapping[str, Any]) -> Path:
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def shares(run: Run) -> dict[str, float]:
    table = run.stages()
    return dict(zip(table.column("stage"), table.column("share"), strict=True))


def of(role: str, rank: int, world: int = 2, **more: Any) -> dict[str, Any]:
    told = {"rl.role": role, "nv.dl.rank": rank, "nv.dl.world_size": world}
    return told | {name.replace("_", "."): own for name, own in more.items()}


STAGES = {"buffer_starvation": 0.4, "actor_update": 0.3, "weight_sync": 0.1, "untraced": 0.2}


@pytest.mark.parametrize("name", ["traces.jsonl", "traces.json", "traces.jsonl.gz", "x.log", "y"])
def test_a_file_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, *(batch(nemo_step(at)) for at in range(20)))
    run = load(path)
    assert run.step[run.rows(kind="step")].tolist() == [*range(1, 21)]
    assert shares(run) == pytest.approx(STAGES)
    assert {header.role for header in run.headers.values()} == {"driver"}
    assert (run.warnings, run.notes) == ((), ())


def test_waits_are_the_first_finding(tmp_path: Path) -> None:
    run = load(written(tmp_path / "t.jsonl", *(batch(nemo_step(at)) for at in range(20))))
    found = run.findings()
    assert found.column("id")[0] == "data-wait"
    assert found.column("share")[0] == pytest.approx(0.4)


def test_an_object_on_several_lines_and_an_answer_of_tempo_are_read(tmp_path: Path) -> None:
    whole = batch([each for at in range(5) for each in nemo_step(at)])
    (tmp_path / "a.json").write_text(json.dumps(whole, indent=2))
    (tmp_path / "b.json").write_text(json.dumps({"batches": whole["resourceSpans"]}))
    for name in ("a.json", "b.json"):
        run = load(tmp_path / name)
        assert (len(run.rows(kind="step")), run.warnings) == (5, ()), name


def test_lines_of_a_formatted_file_that_are_objects_themselves_do_not_hide_it(
    tmp_path: Path,
) -> None:
    whole = batch([each for at in range(5) for each in nemo_step(at)])
    of_resource = whole["resourceSpans"][0]["resource"].pop("attributes")
    text = json.dumps(whole, indent=2).replace(
        '"resource": {}', '"resource": {"attributes": [\n@\n]}'
    )
    lines = ",\n".join(json.dumps(each) for each in of_resource)
    (tmp_path / "a.json").write_text(text.replace("@", lines + ",\n{}"))
    run = load(tmp_path / "a.json")
    assert (len(run.rows(kind="step")), run.warnings) == (5, ())
    assert run.headers[0].role == "driver"


def test_servers_counted_apart_do_not_make_ranks_missing(tmp_path: Path) -> None:
    steps = [each for at in range(5) for each in nemo_step(at)]
    tools = {"rl.role": "tools", "nv.dl.rank": 10_000, "nv.dl.world_size": 1}
    run = load(written(tmp_path / "t.jsonl", batch(steps), batch(steps, tools)))
    assert (run.ranks, run.warnings) == ((0, 10_000), ())


def test_a_file_whose_only_line_is_cut_off_says_so(tmp_path: Path) -> None:
    whole = json.dumps(batch([each for at in range(5) for each in nemo_step(at)]))
    (tmp_path / "t.jsonl").write_text(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="a line of it is damaged or cut off"):
        load(tmp_path / "t.jsonl")


def test_a_process_without_a_run_takes_no_other_process_away(tmp_path: Path) -> None:
    steps = [each for at in range(5) for each in nemo_step(at)]
    of_run = DRIVER | {"rl.run.id": "a"}
    late = [span(900, "rl.grpo.generation", 200, 290)]
    path = tmp_path / "t.jsonl"
    run = load(written(path, batch(steps, of_run), batch(late, {"service.name": "tools"})))
    assert {each.role for each in run.headers.values()} == {"driver", "tools"}
    assert len(run.rows(kind="step", rank=0)) == 5


def test_spans_in_any_order_and_written_twice_are_one_run(tmp_path: Path) -> None:
    lines = [batch([each]) for at in range(5) for each in nemo_step(at)]
    run = load(written(tmp_path / "t.jsonl", *reversed(lines), *lines[:7]))
    assert len(run) == 20
    assert shares(run) == pytest.approx(STAGES)


def test_spans_of_libraries_and_of_the_job_are_left_out(tmp_path: Path) -> None:
    spans = [
        span(99, "rl.grpo.job", 0, 500),
        span(98, "GET /health", 10, 20, 1),
        span(97, "optimizer.step", 45, 50, 3),
        *(each for at in range(5) for each in nemo_step(at)),
    ]
    run = load(written(tmp_path / "t.jsonl", batch(spans)))
    assert shares(run) == pytest.approx(STAGES)


def test_resources_are_ranks_with_their_roles(tmp_path: Path) -> None:
    for rank in range(2):
        spans = [each for at in range(5) for each in nemo_step(at)]
        written(tmp_path / f"{rank}.jsonl", batch(spans, of("trainer", rank)))
    run = load(tmp_path)
    found = {rank: (each.role, each.world_size) for rank, each in run.headers.items()}
    assert found == {0: ("trainer", 2), 1: ("trainer", 2)}
    assert len(run.rows(kind="step")) == 10
    assert [each.code for each in run.notes] == [Code.OF_LOG.value]  # no host is told
    alone = load(tmp_path / "1.jsonl")
    assert alone.ranks == (1,)
    assert [each.code for each in alone.warnings] == [Code.RANKS_MISSING.value]


def test_roles_that_count_from_0_are_numbered_one_behind_the_other(tmp_path: Path) -> None:
    """NeMo-RL's collector, and each of its groups of workers, has a rank 0."""
    steps = [each for at in range(5) for each in nemo_step(at)]
    rollout = [span(900 + at, "rl.grpo.generation", 80 * at, 80 * at + 75) for at in range(6)]
    lines = [batch(rollout, of("rollout", rank)) for rank in (1, 0)]
    run = load(written(tmp_path / "t.jsonl", *lines, batch(steps)))
    roles = {rank: each.role for rank, each in run.headers.items()}
    assert roles == {0: "driver", 1: "rollout", 2: "rollout"}
    assert [len(run.rows(kind="step", rank=rank)) for rank in range(3)] == [5, 5, 5]
    assert {"rollout", "driver"} == {*run.roles().column("role")}


def test_several_hosts_have_unknown_clocks_and_one_host_has_none(tmp_path: Path) -> None:
    def codes(*hosts: str) -> Sequence[str]:
        lines = [
            batch(nemo_step(0), of("trainer", rank, len(hosts), host_name=host))
            for rank, host in enumerate(hosts)
        ]
        run = load(written(tmp_path / "t.jsonl", *lines))
        return [each.code for each in (*run.warnings, *run.notes)]

    assert codes("a", "a") == []
    assert codes("a", "b") == [Code.CLOCKS_DOUBTFUL.value]


def test_what_runs_beside_a_step_is_on_another_thread(tmp_path: Path) -> None:
    """A wait in the step stays a wait, though a rollout that is not in the step runs meanwhile."""
    beside = [
        span(900, "rl.grpo.job", 0, 1000),
        *(span(901 + at, "rl.grpo.generation", 90 * at, 90 * at + 80, 900) for at in range(5)),
        span(990, "rl.grpo.generation", 5, 450),
        span(991, "rl.grpo.checkpointing", 501, 550),
    ]
    steps = [each for at in range(5) for each in nemo_step(at)]
    run = load(written(tmp_path / "t.jsonl", batch([*beside, *steps])))
    assert shares(run) == pytest.approx(STAGES)
    (thread,) = {*run.thread[run.rows(kind="step")].tolist()}
    assert (run.thread[run.rows(name="actor_generate")] != thread).all()
    assert (run.thread[run.rows(name="checkpointing")] == thread).all()
    told = [span(1, "rl.step", 0, 50), span(2, "rl.train", 10, 30, 1, thread_id=7)]
    run = load(written(tmp_path / "t.jsonl", batch(told)))
    assert [each.ident for each in run.threads] == [0, 7]


def test_of_several_runs_in_a_file_the_newest_is_read(tmp_path: Path) -> None:
    old = batch(nemo_step(0), DRIVER | {"nv.dl.run.uuid": "a"})
    new = batch([*nemo_step(1), *nemo_step(2)], DRIVER | {"nv.dl.run.uuid": "b"})
    run = load(written(tmp_path / "t.jsonl", new, old))
    assert (run.ranks, len(run.rows(kind="step"))) == ((0,), 2)
    assert [each.text for each in run.notes] == ["the spans are of 2 runs: this is the newest"]


@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([500, 501, 503, 504], [500, 501, 503, 504]),
        ([3, 3, 1, 9], [3, 4, 5, 9]),
        (["7", -1, 2**62, True], [7, 8, 9, 10]),
        ([None] * 4, [1, 2, 3, 4]),
    ],
)
def test_steps_have_the_numbers_of_the_program(
    told: list[Any], numbers: list[int], tmp_path: Path
) -> None:
    spans = [span(at + 1, "rl.grpo.step", 100 * at, 100 * at + 90) for at in range(4)]
    for each, number in zip(spans, told, strict=True):
        if number is not None:
            each["attributes"] = attributes({"rl.iteration": number})
    run = load(written(tmp_path / "t.jsonl", batch(spans)))
    assert run.step[run.rows(kind="step")].tolist() == numbers


def test_damaged_spans_are_counted_and_cost_no_other(tmp_path: Path) -> None:
    good = [each for at in range(5) for each in nemo_step(at)]
    bad = [
        {},
        5,
        span(801, "rl.train", 20, 10),
        span(802, "rl.train", 0, 1) | {"endTimeUnixNano": "0"},
        span(803, "rl.train", 0, 1) | {"startTimeUnixNano": "9" * 5000},
        span(804, "rl.train", 0, 1) | {"startTimeUnixNano": 10**30},
        span(805, "rl.train", 0, 1) | {"name": None},
    ]
    run = load(written(tmp_path / "t.jsonl", batch([*bad, *good])))
    assert shares(run) == pytest.approx(STAGES)
    assert [each.level for each in run.notes] == ["warning"]
    assert run.notes[0].text.startswith("7 spans are left out")


def test_a_file_that_is_cut_off_while_compressed_is_read_to_there(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl.gz", *(batch(nemo_step(at)) for at in range(400)))
    path.write_bytes(path.read_bytes()[:-200])
    run = load(path)
    assert 300 < len(run.rows(kind="step")) < 400
    assert "can't be read" in run.warnings[0].text


def test_a_file_without_a_training_is_one_line(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": batch([span(1, "GET /", 0, 1)]),
        "b.jsonl": {"resourceSpans": []},
        "c.jsonl": {"resourceMetrics": [{}]},
        "d.json": {"resourceSpans": {"a": 1}},
    }.items():
        with pytest.raises(TraceError, match="has no span that is a step or a stage") as error:
            load(written(tmp_path / name, content))
        assert "\n" not in str(error.value)


def test_a_step_in_a_step_is_no_second_one(tmp_path: Path) -> None:
    loops = [span(900 + at, "rl.loop", 100 * at, 100 * at + 100) for at in range(5)]
    steps = [each for at in range(5) for each in nemo_step(at)]
    run = load(written(tmp_path / "t.jsonl", batch([*loops, *steps], DRIVER)))
    assert len(run.rows(kind="step")) == 5
    assert shares(run) == pytest.approx(STAGES)
