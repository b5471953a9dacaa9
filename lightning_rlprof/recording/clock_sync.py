"""Ping-pongs between hosts over the process group's store, so that a reader knows their clocks.

One rank of each host meets rank 0: at the start, after steps that rank 0 names in its last answer
of the meeting before, and at the end of a run that went through. It uses neither collectives nor
threads. An absent rank costs a second once, and is not waited for again.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import ClockLine
from lightning_rlprof.system.post_import import process_group

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

_PINGS = 5  # A ping takes some 100 µs over TCP.
# Rank 0 waits this long in all; a rank that waits for it waits twice as long.
_PATIENCE_NS = 1_000_000_000
_GROWTH = 4  # The first steps say little about how long steps take.
_MARKER = Marker("rlprof compare clocks", "region")


def default_store() -> Any:
    """Return the store of torch.distributed's default process group, None without one."""
    distributed = process_group()
    return None if distributed is None else distributed.distributed_c10d._get_default_store()


def leaders(world_size: int, hosts: int) -> range:
    """Return the first rank of each host but rank 0's; none where ranks do not divide evenly.

    Example::

        >>> list(leaders(32, 4)), list(leaders(8, 1)), list(leaders(7, 2))
        ([8, 16, 24], [], [])
    """
    if hosts < 2 or world_size % hosts:
        return range(0)
    return range(0, world_size, world_size // hosts)[1:]


class Exchange:
    """Compare this rank's clock with rank 0's, from time to time; never raises.

    Each meeting of a rank other than 0 is a line in its file::

        ["clock", 0, [[sent, arrived, answered, received], …]]

    where ``arrived`` and ``answered`` are of rank 0's clock.

    Args:
        store: Where all ranks can leave values.
        run: The session that it belongs to.
        rank: This one.
        peers: The ranks that meet rank 0; the same on all of them.
        name: Of the run: no two share their keys.
        every_ns: How much time to leave between two meetings, about.
    """

    def __init__(
        self, store: Any, run: "Session", rank: int, peers: Iterable[int], name: str, every_ns: int
    ) -> None:
        self._store, self._run, self._rank = store, run, rank
        self._peers = [peer for peer in peers if rank in (0, peer)]
        self._name, self._every_ns = f"rlprof/{name}", every_ns
        self._round = self._gap = 0
        self._next = 1
        self._last: tuple[int, int] | None = None

    def after(self, step: int) -> bool:
        """Meet if it is time after this step; tell whether it was."""
        if step < self._next or not self._peers:
            return False
        self.meet(step)
        return True

    def meet(self, step: int = 0) -> None:
        """Meet now; what fails is noted, and not tried again."""
        if not self._peers:
            return
        start = self._run.clock()
        self._next = self._plan(step, start)
        for peer in tuple(self._peers):
            try:
                self._with(peer, start)
            except Exception as error:
                self._peers.remove(peer)
                there = peer if self._rank == 0 else 0
                text = f"clock synchronization with rank {there} stopped: {_line(error)}"
                self._run.note(Code.CLOCK_NOT_SYNCED, text, rank=there)
        self._round += 1
        self._run.record(_MARKER, start, self._run.clock())

    def _with(self, peer: int, start: int) -> None:
        keys = [f"{self._name}/{self._round}/{peer}/{ping}" for ping in range(_PINGS)]
        if self._rank == 0:
            for key in keys:
                self._answer(key, start)
            return
        readings, self._next = self._ask(keys)
        self._run.add(ClockLine(0, readings))

    def _answer(self, key: str, start: int) -> None:
        store, clock = self._store, self._run.clock
        self._wait(f"{key}/ping", start, _PATIENCE_NS)
        arrived = clock()
        store.set(f"{key}/pong", f"{arrived} {clock()} {self._next}")
        store.delete_key(f"{key}/ping")

    def _ask(self, keys: Sequence[str]) -> tuple[list[tuple[int, int, int, int]], int]:
        """Return the readings, and after which step to meet again."""
        store, clock = self._store, self._run.clock
        readings, following = list[tuple[int, int, int, int]](), 0
        for key in keys:
            sent = clock()
            store.set(f"{key}/ping", "")
            self._wait(f"{key}/pong", sent, 2 * _PATIENCE_NS)
            received = clock()
            arrived, answered, following = map(int, store.get(f"{key}/pong").split())
            store.delete_key(f"{key}/pong")
            readings.append((sent, arrived, answered, received))
        return readings, following

    def _wait(self, key: str, since: int, patience: int) -> None:
        """Wait for a key as long as patience lasts, a tenth of it where others have used it up."""
        left = max(patience - (self._run.clock() - since), patience // 10)
        self._store.wait([key], timedelta(microseconds=left // 1000))

    def _plan(self, step: int, now: int) -> int:
        """Return after which step to meet again, by how long steps took since the last time."""
        if self._last is None or step <= self._last[0]:
            self._last = (step, now)
            return step + 1
        steps, took = step - self._last[0], max(now - self._last[1], 1)
        self._last = (step, now)
        self._gap = max(min(self._every_ns * steps // took, max(self._gap, 1) * _GROWTH), 1)
        return step + self._gap


def _line(error: Exception) -> str:
    """Return the first line of what an error says, or its kind."""
    return (str(error).splitlines() or [type(error).__name__])[0]
