"""Which steps of an optimizer are one iteration of a program's own loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.cli.app import main
from lightning_rlprof.loaders.iterations import optimizer_steps_per_iteration
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import FIRST_ROLE_RANK, OPTIMIZER_STEP
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.run import Run
from lightning_rlprof.run import load as load_run
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.testing import make_header

_MS = 1_000_000
MS = 1_000_000


def lengths(seed: int, *, iterations: int, size: int, share: float, noise: float) -> Int64s:
    """Return steps of a loop with rollouts of a share of the time, noise, and a slow first step."""
    draw = np.random.default_rng(seed)
    updates = _MS * draw.lognormal(0, noise, iterations * size)
    rollouts = _MS * size * share / (1 - share) * draw.lognormal(0, noise, iterations)
    updates[::size] += rollouts
    updates[0] += 30 * _MS
    return updates.astype(np.int64)


@pytest.mark.parametrize("size", [2, 3, 8, 20, 64, 320])
def test_iterations_with_rollouts_are_found(size: int) -> None:
    share = max(0.25, 10 / (10 + size))  # a rollout as long as ten updates, or a quarter of all
    drawn = [
        lengths(seed, iterations=5 + seed % 9, size=size, share=share, noise=0.1)
        for seed in range(100)
    ]
    found = [optimizer_steps_per_iteration(each) for each in drawn]
    assert found.count(size) >= 98


@pytest.mark.parametrize("noise", [0.02, 0.3, 0.8])
def test_steps_of_a_loop_without_rollouts_stay(noise: float) -> None:
    draw = np.random.default_rng(7)
    found = []
    for _ in range(300):
        steps = _MS * draw.lognormal(0, noise, draw.integers(3, 200))
        stalls = draw.random(len(steps)) < 0.03  # a machine that is busy with something else
        steps[stalls] *= draw.uniform(5, 50, stalls.sum())
        steps[0] += 30 * _MS
        found.append(optimizer_steps_per_iteration(steps.astype(np.int64)))
    assert found.count(1) >= 299


def test_a_validation_now_and_then_makes_no_iterations() -> None:
    steps = np.full(400, _MS)
    steps[::100] += 15 * _MS
    assert optimizer_steps_per_iteration(steps) == 1


def written(folder: Path, *, unit: str, fetches: bool = False) -> Spans:
    """Write two ranks of four iterations of two optimizer steps, and read them."""
    for rank in (0, 1):
        header = replace(make_header(rank=rank, world_size=2), step_unit=unit)
        writer, number, end = TraceWriter(folder, header), 0, 0
        for step in range(1, 9):
            start, end = end, end + (50 if step % 2 else 1) * _MS
            name = "data_fetch" if fetches else "actor_update"
            counters = {"cpu_wait_ns": step, "host_rss_bytes": 100 - step}
            lines = [
                [
                    "span",
                    name,
                    "stage",
                    step,
                    end - 10,
                    end - 5,
                    1,
                    number + 1,
                    None,
                    {"tokens": 1},
                ],
                ["span", "step", "step", step, start, end, 1, number + 2, None, counters],
            ]
            writer.write(lines)
            number += 2
        writer.write([("end", end, "finished")])
        writer.close()
    return load(folder)


def rows_of(run: Spans, kind: str) -> list[tuple[int, int, int, dict[str, int]]]:
    return [
        (span.rank, span.step, span.duration_ns // _MS, dict(span.counters))
        for span in run
        if span.kind == kind
    ]


def test_steps_of_an_iteration_are_one_with_their_times_and_counters(tmp_path: Path) -> None:
    run = written(tmp_path, unit=OPTIMIZER_STEP)
    wait = {number: 4 * number - 1 for number in (1, 2, 3, 4)}
    assert rows_of(run, "step") == [
        (rank, number, 51, {"cpu_wait_ns": wait[number], "host_rss_bytes": 101 - 2 * number})
        for rank in (0, 1)
        for number in (1, 2, 3, 4)
    ]
    assert [row[1] for row in rows_of(run, "stage")] == 2 * [1, 1, 2, 2, 3, 3, 4, 4]
    assert [row[3] for row in rows_of(run, "stage")] == 16 * [{"tokens": 1}]
    assert "with 2 steps of optimizers" in run.notes[0].text


@pytest.mark.parametrize(("unit", "fetches"), [("", False), (OPTIMIZER_STEP, True)])
def test_marked_steps_and_batches_of_a_loader_stay(
    unit: str, fetches: bool, tmp_path: Path
) -> None:
    run = written(tmp_path, unit=unit, fetches=fetches)
    assert [row[1] for row in rows_of(run, "step")] == 2 * [*range(1, 9)]
    assert run.notes == ()


def wrote(
    run: Path,
    rank: int,
    role: str,
    *spans: tuple[Any, ...],
    open_world: bool = True,
    threads: int = 1,
) -> None:
    """Write a rank: name, kind, step, start and end in milliseconds, and counters, of each span."""
    header = replace(make_header(rank, rank + 1), role=role, open_world=open_world)
    writer = TraceWriter(run, header)
    writer.write(
        [
            ["span", name, kind, step, start * MS, end * MS, 1 + at % threads, at, None]
            + (more or [None])
            for at, (name, kind, step, start, end, *more) in enumerate(spans, start=1)
        ]
    )
    writer.close()


def trainer(first: int = 0) -> list[tuple[Any, ...]]:
    """Two steps of 10 ms with an update of 6 ms each."""
    return [
        span
        for step in (1, 2)
        for span in (
            ("actor_update", "stage", step, first + 10 * step - 8, first + 10 * step - 2),
            ("step", "step", step, first + 10 * step - 10, first + 10 * step),
        )
    ]


def shares(run: Run, rank: int) -> dict[str, int]:
    """Return milliseconds of each stage on a rank."""
    table = run.stages(ranks=[rank])
    pairs = zip(table.column("stage"), table.column("total"), strict=True)
    return {str(name): round(int(str(total)) / MS) for name, total in pairs}


def test_a_server_without_steps_gets_those_of_the_trainer(tmp_path: Path) -> None:
    wrote(tmp_path, 0, "actor", *trainer())
    requests = [("generate", "stage", 0, at, at + 3, {"tokens": at}) for at in (1, 5, 12)]
    wrote(tmp_path, 1, "rollout", *requests)
    run = load_run(tmp_path)
    own = [span for span in run if span.rank == 1]
    assert [(span.name, span.step) for span in own] == [
        *(("step", 1), ("generate", 1), ("generate", 1), ("step", 2), ("generate", 2))
    ]
    assert [span.counters.get("tokens") for span in own if span.kind == "stage"] == [1, 5, 12]
    assert shares(run, 1) == {"generate": 9, "untraced": 11}
    assert {header.world_size for header in run.headers.values()} == {2}
    assert not run.warnings


def test_without_any_step_a_server_has_one_as_long_as_its_record(tmp_path: Path) -> None:
    requests = [("generate", "stage", 0, at, at + 3) for at in (1, 5, 12)]
    wrote(tmp_path, 0, "rollout", *requests)
    run = load_run(tmp_path)
    assert run.steps().column("step") == [1]
    assert shares(run, 0) == {"generate": 9, "untraced": 5}


def test_a_server_is_idle_between_the_requests_that_its_threads_answer(tmp_path: Path) -> None:
    wrote(tmp_path, 0, "actor", *trainer())
    requests = [("env_step", "stage", 0, start, end) for start, end in ((1, 4), (2, 7), (12, 13))]
    wrote(tmp_path, FIRST_ROLE_RANK, "tools", *requests, threads=3)
    run = load_run(tmp_path)
    assert shares(run, FIRST_ROLE_RANK) == {"env_step": 7, "idle": 13, "untraced": 0}
    idle = [(each.step, each.duration_ns) for each in run if each.name == "idle"]
    assert idle == [(1, MS), (1, 3 * MS), (2, 2 * MS), (2, 7 * MS)]
    totals = run.ledger()
    of = dict(zip(totals.column("category"), totals.column("total"), strict=True))
    assert (of["unattributed idle"], of["reward/tool/env"]) == (13 * MS, 7 * MS)
    assert {head.world_size for head in run.headers.values()} == {1}
    assert not run.warnings


def test_a_rank_of_a_known_world_keeps_what_it_wrote(tmp_path: Path) -> None:
    wrote(tmp_path, 0, "actor", ("generate", "stage", 0, 1, 4), open_world=False)
    assert not len(load(tmp_path).rows(kind="step"))


@pytest.mark.parametrize("with_workers", [False, True])
def test_a_driver_waits_where_its_workers_work(with_workers: bool, tmp_path: Path) -> None:
    wrote(tmp_path, 0, "controller", *trainer())
    if with_workers:
        wrote(tmp_path, 1, "worker", *trainer())
    run = load_run(tmp_path)
    table = run.stages()
    pairs = zip(table.column("stage"), table.column("total"), strict=True)
    assert {str(name): round(int(str(total)) / MS) for name, total in pairs} == {
        "actor_update": 12,
        "untraced": 8,
    }
    ledger = run.ledger()
    assert sum(int(str(each)) for each in ledger.column("total") if each is not None) == 20 * MS
    regions = [span.name for span in run if span.kind == "region"]
    assert regions == ["step", "actor_update", "step", "actor_update"] * with_workers


def test_roles_say_who_worked_who_waited_and_when(tmp_path: Path) -> None:
    wrote(tmp_path, 0, "controller", *trainer())
    wrote(tmp_path, 1, "actor", *trainer())
    waits = [("wait_for_samples", "stage", 1, 1, 5), ("idle", "stage", 1, 5, 7)]
    wrote(
        tmp_path, 2, "rollout", *waits, ("generate", "stage", 1, 7, 15), ("step", "step", 1, 0, 20)
    )
    table = load_run(tmp_path).roles()
    assert [row[:5] for row in table.rows] == [
        ("controller", 1, 1, 0, 20 * MS),
        ("actor", 1, 1, 0, 20 * MS),
        ("rollout", 1, 1, 0, 20 * MS),
    ]
    assert [row[5:] for row in table.rows] == [
        (None,) * 7,
        (0.6, 0, 0, 0.4, 0, 0, 0),
        (0.4, 0.2, 0.1, 0.3, 0.2, 0, 0),
    ]


def test_one_role_is_no_table(tmp_path: Path) -> None:
    wrote(tmp_path, 0, "actor", *trainer())
    assert load_run(tmp_path).roles().abstained == "all ranks have the role actor"


def apart(folder: Path) -> tuple[Path, Path]:
    """A trainer and a rollout server, which know nothing of one another; both are rank 0."""
    wrote(folder / "trainer", 0, "actor", *trainer(), open_world=False)
    requests = [("generate", "stage", 0, at, at + 3, {"tokens": at}) for at in (1, 5, 12)]
    wrote(folder / "server", 0, "rollout", *requests)
    return folder / "trainer", folder / "server"


def test_runs_that_were_recorded_apart_are_read_as_one(tmp_path: Path) -> None:
    run = load_run([*apart(tmp_path)])
    assert {rank: header.role for rank, header in run.headers.items()} == {0: "actor", 1: "rollout"}
    assert shares(run, 0) == {"actor_update": 12, "untraced": 8}
    assert shares(run, 1) == {"generate": 9, "untraced": 5}
    assert run.amounts("tokens")[1].tolist() == [1, 5, 12]
    assert {run.threads[code].rank for code in run.thread[run.rank == 1]} == {1}
    assert [row[0] for row in run.roles().rows] == ["actor", "rollout"]
    assert {header.world_size for header in run.headers.values()} == {2}


def test_the_command_line_reads_them_as_one_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(path) for path in apart(tmp_path)]

    def ran(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["rlprof", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    status, out, _ = ran("summary", *paths, "--as-one")
    assert (status, "2 ranks" in out, "rollout" in out) == (0, True, True)
    assert ran("report", *paths, "--as-one", "-o", str(tmp_path / "x.html"))[0] == 0
    status, _, err = ran("summary", *paths)
    assert (status, err) == (
        2,
        "rlprof: error: 2 runs were given\n"
        "  hint: --as-one reads them as one. To compare them: rlprof compare\n",
    )
