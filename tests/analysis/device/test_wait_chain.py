"""Critical paths of a simulated host and device: what is on the path lengthens the step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.device_critical_path import GAP, HOST, LAUNCH, critical_paths
from lightning_rlprof.analysis.device.work import NOT_RECORDED
from tests.effort import examples

LATENCY, TURN = 5, 2


class Segment(NamedTuple):
    """A segment of a path: from, to, and what it is."""

    start_ns: int
    end_ns: int
    what: int


class Do(NamedTuple):
    """What the host does next: works, waits for all streams, or launches work on one."""

    length: int
    stream: int | None = None
    wait: bool = False
    after: int | None = None  # the segment of another stream that an event makes it wait for


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

    def path(self, unknown: Sequence[int] = (), low: int = 0) -> list[Segment]:
        """Return the path from the end back to some moment, the last segment first."""
        columns = np.array(self.pieces, np.int64).reshape(-1, 4).T.copy()
        columns[3, list(unknown)] = NOT_RECORDED
        waits = np.array(self.waits, np.int64).reshape(-1, 2).T
        ends = columns[1].tolist()
        last = ends.index(self.end) if self.end in ends else HOST
        path = critical_paths(*columns, (waits[0], waits[1]), [(low, self.end, last)])
        columns = (path.start.tolist(), path.end.tolist(), path.what.tolist())
        return sorted(map(Segment, *columns), reverse=True)


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
def test_what_is_on_the_path_lengthens_the_step(program: list[Do], data: st.DataObject) -> None:
    machine = Machine().run(program)
    path = machine.path()
    assert [segment.end_ns for segment in path] == [
        machine.end,
        *(each.start_ns for each in path[:-1]),
    ]
    assert path[-1].start_ns == 0
    assert all(segment.start_ns < segment.end_ns for segment in path)
    low = data.draw(st.integers(0, machine.end - 1))
    assert sum(end - start for start, end, _ in machine.path(low=low)) == machine.end - low

    launched = [at for at, each in enumerate(program) if each.stream is not None]
    on_path = [launched[segment.what] for segment in path if segment.what >= 0]
    if on_path:
        at = data.draw(st.sampled_from(on_path))
        longer = [*program]
        longer[at] = program[at]._replace(length=program[at].length + 1_000)
        assert Machine().run(longer).end == machine.end + 1_000


def test_a_step_that_the_host_holds_up_is_the_hosts() -> None:
    machine = Machine().run([Do(100), Do(10, 0), Do(100), Do(10, 0), Do(0, wait=True), Do(50)])
    assert machine.path() == [
        Segment(217, 267, HOST),
        Segment(207, 217, 1),
        Segment(202, 207, LAUNCH),
        Segment(0, 202, HOST),
    ]


def test_a_step_whose_device_is_late_is_the_devices() -> None:
    machine = Machine().run([Do(10), Do(100, 0), Do(100, 0), Do(5), Do(0, wait=True)])
    assert machine.path() == [
        Segment(118, 218, 1),
        Segment(116, 118, GAP),
        Segment(16, 116, 0),
        Segment(11, 16, LAUNCH),
        Segment(0, 11, HOST),
    ]


def test_work_that_an_event_holds_up_leads_to_the_other_stream() -> None:
    own = [Do(10, 1)] * 4
    machine = Machine().run([Do(300, 0), *own, Do(10, 1, after=0), Do(0, wait=True)])
    assert [segment.what for segment in machine.path()] == [5, GAP, 0, LAUNCH, HOST]


def test_work_without_a_launch_waited_for_what_ran_before() -> None:
    machine = Machine().run([Do(10, 0), Do(200), Do(10, 0), Do(0, wait=True)])
    assert [segment.what for segment in machine.path()] == [1, LAUNCH, HOST]
    assert [segment.what for segment in machine.path(unknown=[1])] == [1, GAP, 0, LAUNCH, HOST]
    assert [segment.what for segment in machine.path(unknown=[0, 1])] == [1, GAP, 0, HOST]


def test_a_wait_in_which_nothing_ended_is_time_of_the_host() -> None:
    machine = Machine().run([Do(10, 0), Do(90), Do(0, wait=True), Do(10)])
    machine.waits.append((95, 101))
    assert [segment.what for segment in machine.path()] == [HOST]


def test_of_waits_that_overlap_each_counts() -> None:
    machine = Machine().run([Do(1), Do(100, 0), Do(0, wait=True), Do(10)])
    machine.waits.append((20, 22))  # another thread's, which begins later and ends at once
    assert [segment.what for segment in machine.path()] == [HOST, 0, LAUNCH, HOST]


@pytest.mark.parametrize("low", [0, 12, 60, 130])
def test_a_path_may_begin_anywhere(low: int) -> None:
    machine = Machine().run([Do(10), Do(100, 0), Do(100, 0), Do(0, wait=True), Do(7)])
    path = machine.path(low=low)
    assert path[-1].start_ns == low
    assert sum(end - start for start, end, _ in path) == machine.end - low
