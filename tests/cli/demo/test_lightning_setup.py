"""Quiet and single-threaded inside, as it was before outside."""

import logging
import warnings

import pytest
import torch

from lightning_rlprof.cli.demo.lightning_setup import one_thread, quiet


def test_torch_has_one_thread_inside_and_its_own_number_after() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_lightning_says_nothing_inside_but_errors() -> None:
    log = logging.getLogger("pytorch_lightning.somewhere")
    level = log.getEffectiveLevel()
    with quiet():
        assert not log.isEnabledFor(logging.WARNING)
        assert log.isEnabledFor(logging.ERROR)
        warnings.warn("The dataloader does not have many workers", UserWarning, stacklevel=1)
    assert log.getEffectiveLevel() == level


def test_other_warnings_pass() -> None:
    with pytest.warns(UserWarning, match="mine"), quiet():
        warnings.warn("mine", UserWarning, stacklevel=1)
