"""The way through steps of a simulated host and device: whatever lies on it lengthens the step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.wait_chain import GAP, HOST, LAUNCH, WaitChain
from lightning_rlprof.analysis.device.work import NOT_RECORDED
from tests.effort import examples

LATENCY, TURN = 5, 2


class Piece(NamedTuple):
    """A stretch of the way: from, to, and what it is."""

    start_ns: int
    end_ns: int
    what: int


class Do(NamedTuple):
    """What the host does next: works, waits for all streams, or launches work on one."""

    length: int
    stream: int | None = None
    wait: bool = False
    after: int | None = None  # the piece of another stream that an event makes it wait for


@dataclass
class Machine:
    """A host that launches and streams that run one thing after the other."""

    now: int = 0
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)

    def run(self, program: Sequence[Do]) -> "Machine":
        for each in program:
            if each.wait:
                over = max([self.now, *(end for _, end, _, _ in self.pieces)])
                self.waits.append((self.now, over))
                self.now = over
            elif each.stream is None:
                self.now += each.length
            else:
                self._launch(each, each.stream)
        return self

    def _launch(self, each: Do, stream: int) -> None:
        self.now += 1
        ready = [self.now + LATENCY]
        ready += [end + TURN for _, end, other, _ in self.pieces if other == stream]
        ready += [] if each.after is None else [self.pieces[each.after][1] + TURN]
        start = max(ready)
        self.pieces.append((start, start + each.length, stream, self.now))

    @property
    def end(self) -> int:
        return max([self.now, *(end for _, end, _, _ in self.pieces)])

    def way(self, unknown: Sequence[int] = (), low: int = 0) -> list[Piece]:
        """Return the way from the end back to some moment, the last piece first."""
        columns = np.array(self.pieces, np.int64).reshape(-1, 4).T.copy()
        columns[3, list(unknown)] = NOT_RECORDED
        waits = np.array(self.waits, np.int64).reshape(-1, 2).T
        chain = WaitChain(*columns, (waits[0], waits[1]))
        ends = columns[1].tolist()
        last = ends.index(self.end) if self.end in ends else HOST
        path = chain.paths([(low, self.end, last)])
        columns = (path.start.tolist(), path.end.tolist(), path.what.tolist())
        return sorted(map(Piece, *columns), reverse=True)


lengths = st.integers(1, 40)
programs = st.lists(
    st.one_of(
        lengths.map(Do),
        st.tuples(lengths, st.integers(0, 2)).map(lambda each: Do(*each)),
        st.just(Do(0, wait=True)),
    ),
    max_size=25,
).map(lambda program: [Do(1), *program])


@settings(max_examples=examples(300), deadline=None)
@given(programs, st.data())
def test_what_lies_on_the_way_lengthens_the_step(program: list[Do], data: st.DataObject) -> None:
    machine = Machine().run(program)
    way = machine.way()
    assert [piece.end_ns for piece in way] == [machine.end, *(each.start_ns for each in way[:-1])]
    assert way[-1].start_ns == 0
    assert all(piece.start_ns < piece.end_ns for piece in way)
    low = data.draw(st.integers(0, machine.end - 1))
    assert sum(end - start for start, end, _ in machine.way(low=low)) == machine.end - low

    launched = [at for at, each in enumerate(program) if each.stream is not None]
    on_way = [launched[piece.what] for piece in way if piece.what >= 0]
    if on_way:
        at = data.draw(st.sampled_from(on_way))
        longer = [*program]
        longer[at] = program[at]._replace(length=program[at].length + 1_000)
        assert Machine().run(longer).end == machine.end + 1_000


def test_a_step_that_the_host_holds_up_is_the_hosts() -> None:
    machine = Machine().run([Do(100), Do(10, 0), Do(100), Do(10, 0), Do(0, wait=True), Do(50)])
    assert machine.way() == [
        Piece(217, 267, HOST),
        Piece(207, 217, 1),
        Piece(202, 207, LAUNCH),
        Piece(0, 202, HOST),
    ]


def test_a_step_whose_device_is_late_is_the_devices() -> None:
    machine = Machine().run([Do(10), Do(100, 0), Do(100, 0), Do(5), Do(0, wait=True)])
    assert machine.way() == [
        Piece(118, 218, 1),
        Piece(116, 118, GAP),
        Piece(16, 116, 0),
        Piece(11, 16, LAUNCH),
        Piece(0, 11, HOST),
    ]


def test_work_that_an_event_holds_up_leads_to_the_other_stream() -> None:
    own = [Do(10, 1)] * 4
    machine = Machine().run([Do(300, 0), *own, Do(10, 1, after=0), Do(0, wait=True)])
    assert [piece.what for piece in machine.way()] == [5, GAP, 0, LAUNCH, HOST]


def test_work_without_a_launch_waited_for_what_ran_before() -> None:
    machine = Machine().run([Do(10, 0), Do(200), Do(10, 0), Do(0, wait=True)])
    assert [piece.what for piece in machine.way()] == [1, LAUNCH, HOST]
    assert [piece.what for piece in machine.way(unknown=[1])] == [1, GAP, 0, LAUNCH, HOST]
    assert [piece.what for piece in machine.way(unknown=[0, 1])] == [1, GAP, 0, HOST]


def test_a_wait_in_which_nothing_ended_is_time_of_the_host() -> None:
    machine = Machine().run([Do(10, 0), Do(90), Do(0, wait=True), Do(10)])
    machine.waits.append((95, 101))
    assert [piece.what for piece in machine.way()] == [HOST]


def test_of_waits_that_overlap_each_counts() -> None:
    machine = Machine().run([Do(1), Do(100, 0), Do(0, wait=True), Do(10)])
    machine.waits.append((20, 22))  # another thread's, which begins later and ends at once
    assert [piece.what for piece in machine.way()] == [HOST, 0, LAUNCH, HOST]


@pytest.mark.parametrize("low", [0, 12, 60, 130])
def test_a_way_may_begin_anywhere(low: int) -> None:
    machine = Machine().run([Do(10), Do(100, 0), Do(100, 0), Do(0, wait=True), Do(7)])
    way = machine.way(low=low)
    assert way[-1].start_ns == low
    assert sum(end - start for start, end, _ in way) == machine.end - low
