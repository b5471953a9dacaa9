"""Lightning without its chatter, on one torch thread: the demo's caller does the talking."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning.strategies import DDPStrategy

# Both names: whichever was imported last owns the logger of the messages that only rank 0 sends.
_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")

_ADVICE = (
    ".*does not have many workers",  # the data loader hands out eight numbers a step
    ".*GPU available but not used",
    ".*srun.*",
    ".*LeafSpec.*is deprecated",  # Lightning's own use of torch
)


def _ignore_advice() -> None:
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning logs errors only and gives no advice inside the block."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            _ignore_advice()
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread inside the block.

    More are slower here: the matrices are small, and with a busy neighbour a step on two threads
    took 3 s instead of 0.4 s.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class QuietDDP(DDPStrategy):
    """DDP over gloo in spawned processes, each as quiet and as single-threaded as the parent.

    Spawned, not forked: autograd refuses to run in a fork of a process that has used it beside a
    GPU, and the warm start uses it.
    """

    def __init__(self) -> None:
        super().__init__(start_method="spawn", process_group_backend="gloo")

    def setup_environment(self) -> None:
        """Silence this process, a spawned one that ends with the training, then join the others."""
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        _ignore_advice()
        torch.set_num_threads(1)
        super().setup_environment()
