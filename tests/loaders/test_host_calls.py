import numpy as np
import pytest

from lightning_rlprof.loaders.host_calls import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.records.records import KINDS

Range = tuple[int, int, str, int, int, int, int]  # process, thread, kind, name, step, start, end


def stages(*ranges: Range) -> Stages:
    columns = list(zip(*ranges, strict=True)) or [()] * 7
    columns[2] = tuple(KINDS.index(kind) for kind in columns[2])  # type: ignore[arg-type]
    return Stages(*(np.array(column, dtype=np.int64) for column in columns))


def launches(*each: tuple[int, int, int]) -> Launches:
    columns = zip(*each, strict=True)
    return Launches(*(np.array(column, dtype=np.int64) for column in columns))


def test_stage_and_step_are_those_of_the_innermost_ranges_around() -> None:
    known = stages(
        (1, 10, "step", 0, 5, 0, 100),
        (1, 10, "stage", 1, 5, 10, 50),
        (1, 10, "stage", 2, 6, 20, 30),
        (1, 10, "region", 3, 7, 25, 28),
    )

    found = stages_at(known, launches(*((1, 10, when) for when in (5, 10, 26, 30, 50, 100))))

    assert found.stage.tolist() == [-1, 1, 2, 1, -1, -1]
    assert found.step.tolist() == [5, 5, 7, 5, 5, 0]
    assert not found.lent.any()


def test_silent_threads_borrow_from_the_thread_with_most_steps_of_their_process() -> None:
    known = stages(
        *((1, 10, "stage", 1, 1, 10 * at, 10 * at + 9) for at in range(5)),
        (1, 11, "step", 0, 2, 0, 40),
        (1, 11, "stage", 2, 2, 0, 40),
        (2, 20, "stage", 3, 3, 0, 40),
    )

    found = stages_at(known, launches((1, 99, 5), (1, 10, 5), (2, 99, 5), (3, 99, 5), (1, 99, 50)))

    assert found.stage.tolist() == [2, 1, 3, -1, -1]
    assert found.step.tolist() == [2, 1, 3, 0, 0]
    assert found.thread.tolist() == [11, 10, 20, NOWHERE, 11]
    assert found.lent.tolist() == [True, False, True, False, False]


def test_without_steps_most_stages_decide() -> None:
    known = stages(
        (1, 10, "region", 9, 9, 0, 40),
        (1, 10, "region", 9, 9, 0, 40),
        (1, 11, "stage", 2, 2, 0, 40),
    )

    assert stages_at(known, launches((1, 99, 5))).stage.tolist() == [2]


def test_unknown_launches_find_nothing() -> None:
    known = stages((1, 10, "stage", 1, 1, 0, 9))

    found = stages_at(known, launches((NOWHERE, NOWHERE, 5)))

    assert (found.stage.tolist(), found.step.tolist()) == ([-1], [0])


@pytest.mark.parametrize("count", [0, 3])
def test_without_ranges_nothing_is_found(count: int) -> None:
    asked = Launches(*(np.arange(count, dtype=np.int64) for _ in range(3)))

    found = stages_at(stages(), asked)

    assert found.stage.tolist() == [-1] * count
    assert found.step.tolist() == [0] * count
