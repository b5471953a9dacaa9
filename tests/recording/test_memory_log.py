"""Lines about memory: a fake device, and the real process groups of gloo; the last needs a GPU."""

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.accelerator import log_memory, log_memory_around

OURS = "lightning_rlprof.recording.accelerator"
REST = (
    "memory allocated (GB): 1.50, memory reserved (GB): 2.00, "
    "device memory used/total (GB): 60.00/80.00"
)


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"device_allocated_bytes": 3 << 29, "device_reserved_bytes": 2 << 30}
    monkeypatch.setattr(accelerator, "memory_bytes", lambda kind: found)
    monkeypatch.setattr(accelerator, "device_memory", lambda: (60 << 30, 80 << 30))


class Keeping(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    caplog.set_level(logging.INFO, OURS)
    handler = Keeping()
    logging.getLogger(OURS).addHandler(handler)
    yield handler.lines
    logging.getLogger(OURS).removeHandler(handler)


def test_the_line_is_in_verls_words(lines: list[logging.LogRecord]) -> None:
    log_memory("after generate")
    (line,) = lines
    assert line.getMessage() == f"after generate, {REST}"
    assert (line.name, line.levelno) == (OURS, logging.INFO)
    assert line.funcName == "test_the_line_is_in_verls_words"  # who asked, not this package


def test_logger_and_level_are_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mine")
    log_memory("100% done", logging.getLogger("mine"), logging.DEBUG)
    assert caplog.record_tuples == [("mine", logging.DEBUG, f"100% done, {REST}")]


def test_what_the_device_does_not_tell_is_no_zero(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "memory_bytes", lambda kind: {"device_allocated_bytes": 0})
    monkeypatch.setattr(accelerator, "device_memory", lambda: (None, 80 << 30))
    log_memory("after load")
    assert lines[0].getMessage() == (
        "after load, memory allocated (GB): 0.00, memory reserved (GB): -, "
        "device memory used/total (GB): -/80.00"
    )


def test_nobody_asks_the_device_while_the_level_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "memory_bytes", lambda kind: pytest.fail("it was asked"))
    quiet = logging.getLogger("quiet")
    quiet.setLevel(logging.WARNING)
    log_memory("after generate", quiet)
    with log_memory_around("generate", quiet):
        pass


@pytest.fixture
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_the_rank_is_asked_when_a_line_is_due(
    lines: list[logging.LogRecord], request: pytest.FixtureRequest
) -> None:
    @log_memory_around("update", rank=3)
    def update() -> None: ...

    update()  # no process group: this process is the one
    assert len(lines) == 2
    request.getfixturevalue("process_group")
    update()  # now it is known to be rank 0
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("own", "wanted", "count"), [(0, 0, 1), (5, 0, 0), (5, 5, 1), (5, None, 1)]
)
def test_one_rank_speaks_or_all_of_them(
    own: int,
    wanted: int | None,
    count: int,
    lines: list[logging.LogRecord],
    process_group: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: own)
    log_memory("after generate", rank=wanted)
    assert len(lines) == count


def heads(lines: list[logging.LogRecord]) -> list[str]:
    return [line.getMessage().partition(",")[0] for line in lines]


def test_around_a_block_there_is_a_line_before_and_one_after(
    lines: list[logging.LogRecord],
) -> None:
    with log_memory_around("generate"):
        assert heads(lines) == ["Before generate"]
    assert heads(lines) == ["Before generate", "After generate"]
    assert {line.funcName for line in lines} == {
        "test_around_a_block_there_is_a_line_before_and_one_after"
    }


def test_a_function_keeps_its_name_its_value_and_its_error(lines: list[logging.LogRecord]) -> None:
    @log_memory_around("actor")
    def update(value: int) -> float:
        """Update."""
        return 1 / value

    assert (update(2), update.__name__, update.__doc__) == (0.5, "update", "Update.")
    with pytest.raises(ZeroDivisionError):
        update(0)
    assert heads(lines) == ["Before actor", "After actor"] * 2


def test_a_coroutine_is_logged_around_its_work(lines: list[logging.LogRecord]) -> None:
    seen: list[Any] = []

    @log_memory_around("rollout")
    async def rollout() -> int:
        await asyncio.sleep(0)
        seen.append(heads(lines))
        return 1

    waiting = rollout()
    assert heads(lines) == []
    assert asyncio.run(waiting) == 1
    assert seen == [["Before rollout"]]
    assert heads(lines) == ["Before rollout", "After rollout"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_line_of_a_gpu(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    logging.getLogger(OURS).setLevel(logging.INFO)
    kept = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    log_memory("after load")
    numbers = [float(number) for number in re.findall(r"[\d.]+", lines[0].getMessage())]
    allocated, reserved, used, total = numbers
    assert kept.numel() / 2**30 <= allocated <= reserved < used < total
