"""The tools that we hand to people who write recorders."""

import pytest

from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.testing import FakeClock, FakeRecorder, check_recorder


def test_the_fake_clock_stands_still():
    clock = FakeClock(5)
    assert clock() == clock() == 5
    clock.advance(2)
    assert clock() == 7


@pytest.mark.parametrize("recorder", [Recorder(), FakeRecorder()])
def test_good_recorders_pass_the_contract(recorder, tmp_path):
    check_recorder(recorder, tmp_path)


@pytest.mark.parametrize("where", ["open", "enter", "exit", "close", "finish"])
def test_a_recorder_that_raises_breaks_the_contract(where, tmp_path):
    with pytest.raises(RuntimeError, match=f"asked to fail at {where}"):
        check_recorder(FakeRecorder(fail_at=where), tmp_path)


@pytest.mark.parametrize("value", ["text", None, float("nan"), float("inf")])
def test_counters_that_are_no_numbers_break_the_contract(value, tmp_path):
    class Bad(Recorder):
        def exit(self, token):
            return {"x": value}

    with pytest.raises(AssertionError, match="counters must be finite numbers"):
        check_recorder(Bad(), tmp_path)
