"""Actions that other threads have the main thread do."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_rlprof.recorders.main_thread import soon
from tests.recorders.traces import untraced


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    with untraced():
        yield


def ask(*actions: Callable[[], object]) -> None:
    """Ask from another thread."""

    def every() -> None:
        for action in actions:
            soon(action)

    thread = threading.Thread(target=every)
    thread.start()
    thread.join()


def turn() -> None:
    """Give the interpreter a moment between two instructions."""
    for _ in range(100):
        pass


def test_the_action_runs_on_the_main_thread() -> None:
    seen: list[int] = []
    ask(lambda: seen.append(threading.get_ident()))
    turn()
    assert seen == [threading.main_thread().ident]


def test_an_action_asked_for_twice_runs_once() -> None:
    seen: list[int] = []

    def action() -> None:
        seen.append(1)

    def twice() -> None:
        soon(action)
        soon(action)

    gate = threading.Lock()
    gate.acquire()
    thread = threading.Thread(target=lambda: (twice(), gate.release()))
    thread.start()
    gate.acquire()  # one call into C, from which the main thread comes back once
    thread.join()
    turn()
    assert seen == [1]
    ask(action)
    turn()
    assert seen == [1, 1]


def test_an_action_that_raises_stops_no_other_and_disturbs_nobody() -> None:
    seen: list[int] = []

    def fails() -> None:
        raise KeyError("dropped")

    ask(fails, lambda: seen.append(1))
    turn()
    assert seen == [1]


def test_under_a_debugger_nothing_runs_and_nothing_hangs() -> None:
    seen: list[int] = []
    sys.settrace(lambda frame, event, argument: None)
    try:
        ask(lambda: seen.append(1))
        turn()
    finally:
        sys.settrace(None)
    turn()
    assert seen == []
