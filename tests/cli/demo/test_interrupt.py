"""Ctrl-C in a demo of several ranks ends all of them."""

import time
from multiprocessing import get_context

import pytest

from lightning_rlprof.cli.demo.run import no_rank_left


def test_no_rank_is_left_to_wait_for_another_that_never_started() -> None:
    other, rank = (get_context("spawn").Process(target=time.sleep, args=(600,)) for _ in range(2))
    other.start()
    with pytest.raises(KeyboardInterrupt), no_rank_left():
        rank.start()
        raise KeyboardInterrupt
    rank.join(60)
    assert rank.exitcode == -9
    assert other.is_alive()  # of whoever runs the demo in a process of his own
    other.kill()
    other.join(60)
