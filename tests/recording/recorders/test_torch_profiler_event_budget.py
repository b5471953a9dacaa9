"""How many events a capture holds, and what memory is left, from what the kernel and glibc say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_rlprof.recording.recorders import torch_profiler as event_budget
from lightning_rlprof.recording.recorders.torch_profiler import (
    Budget,
    available_bytes,
    event_bytes,
    memory_count,
    release,
)
from lightning_rlprof.system.process import resident_bytes

SIZE = (200, 1_300)


class Used:
    """Memory that holds what a test says."""

    def __init__(self, *bytes_used: int | None) -> None:
        self._values: Iterator[int | None] = iter(bytes_used)

    def used(self) -> int | None:
        return next(self._values)


def budget(*used: int | None, events: int = 1_000, most: int | None = None) -> Budget:
    return Budget(Used(*used).used, SIZE, events, most)


def test_events_are_the_growth_by_their_size() -> None:
    assert budget(5_000, 5_000 + 200 * 1_000).exceeded() is None
    text = budget(5_000, 5_000 + 200 * 1_001).exceeded()
    assert text == "about 1,001 events (at most 1,000)"


def test_what_stopping_takes_is_limited_too() -> None:
    assert budget(0, 200 * 900, most=1_300 * 900).exceeded() is None
    text = budget(0, 200 * 2_000_000, events=10**9, most=10**9).exceeded()
    assert text == (
        "about 2,000,000 events, whose writing takes 2.6 GB of host memory (allowed here: 1.0 GB)"
    )


def test_memory_that_shrinks_holds_no_events() -> None:
    assert budget(9_000, 10, events=1).exceeded() is None


@pytest.mark.parametrize("used", [(None, 10**9), (0, None)])
def test_memory_that_cannot_be_asked_exceeds_nothing(used: tuple[int | None, ...]) -> None:
    assert budget(*used, events=1, most=1).exceeded() is None


def test_contents_make_events_bigger() -> None:
    plain = sum(event_bytes(with_stack=False, record_shapes=False))
    shapes = sum(event_bytes(with_stack=False, record_shapes=True))
    assert 1_200 < plain < sum(event_bytes(with_stack=True, record_shapes=False)) < shapes
    assert shapes > sum(event_bytes(with_stack=True, record_shapes=True)) > plain


def test_memory_in_use_grows_by_what_is_kept_and_shrinks_when_it_is_released() -> None:
    used = memory_count()
    before = used()
    assert before is not None
    held = [bytes(1_000) for _ in range(10_000)]  # each in a block of malloc's
    grown = (used() or 0) - before
    assert 10_000_000 <= grown < 12_000_000
    release(held)
    assert held == []
    assert (used() or 0) - before < 1_000_000


def test_released_memory_goes_back_to_the_host_though_some_behind_it_is_kept() -> None:
    held = [bytes(1_000) for _ in range(50_000)]
    behind = [bytes(1_000) for _ in range(100)]
    before = resident_bytes()
    assert before is not None
    release(held)
    assert before - (resident_bytes() or 0) > 40_000_000
    assert len(behind) == 100


def test_another_allocator_is_asked_by_its_resident_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_budget, "_glibc", lambda: None)
    used = memory_count()
    before = used()
    assert before is not None
    assert before > 10_000_000
    held = bytearray(50_000_000)
    assert 45_000_000 < (used() or 0) - before < 60_000_000
    assert len(held) == 50_000_000


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 40), ("max", 40), ("20480", 11), ("20480000", 40), ("1", 0)],
)
def test_available_is_what_the_host_has_and_the_container_allows(
    limit: str | None, expected: int, tmp_path: Path
) -> None:
    write_files(tmp_path, {"/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    40 kB\n"})
    if limit is not None:
        stat = "anon 5\ninactive_file 1024\nactive_file 7\n"
        group = {"max": limit, "current": "10240", "stat": stat}
        write_files(
            tmp_path, {f"/sys/fs/cgroup/memory.{name}": text for name, text in group.items()}
        )
        write_files(
            tmp_path,
            {
                "/proc/self/cgroup": "0::/\n",
                "/proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            },
        )
    assert available_bytes(tmp_path) == expected * 1024


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_off_linux_nothing_is_available(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_host_has_memory_available() -> None:
    assert (available_bytes() or 0) > 1_000_000
