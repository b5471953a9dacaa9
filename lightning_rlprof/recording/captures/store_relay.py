"""Requests on their way to hosts that don't share the run directory: the process group's store."""

import sys
import threading
from typing import Any, Protocol

import msgspec

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.capture_request import CaptureRequest, decode_request

POLL_S = 0.5
"""How often the store is asked: an answer takes its thread some 0.15 ms."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str | bytes, /) -> None:
        """Keep a value; it may never arrive, without an error."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys have values."""


class StoreRelay:
    """Pass the newest request of a run between its ranks, by a thread of its own.

    A store whose server has stopped answers no call, and heeds no timeout: then its thread waits
    for ever, and the training does not.

    Attributes:
        refused: Why the newest request that came was none.

    Args:
        store: The store, for this thread alone.
        run: Name of the run, which all ranks know.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._key = store, f"rlprof/{run}/capture-request"
        self._outgoing: CaptureRequest | None = None
        self._received: CaptureRequest | None = None
        self.refused = ""
        self._news, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="rlprof capture relay", daemon=True)
        self._thread.start()

    def send(self, request: CaptureRequest) -> None:
        """Pass a request to the other ranks."""
        self._outgoing = request
        self._news.set()

    def received(self) -> CaptureRequest | None:
        """Return the newest request that has arrived."""
        return self._received

    def close(self) -> None:
        """End the thread, when it is free."""
        self._ended = True
        self._news.set()

    def _work(self) -> None:
        try:
            while not self._ended:
                self.exchange()
                self._news.wait(POLL_S)
                self._news.clear()
        except Exception:  # the server has ended, as it does at the end of a job
            return

    def exchange(self) -> None:
        """Ask the store once."""
        request, self._outgoing = self._outgoing, None
        if request is not None:
            self._store.set(self._key, msgspec.json.encode(request))
        if self._store.check([self._key]):
            try:
                self._received = decode_request(self._store.get(self._key))
            except RlprofError as error:
                self.refused = str(error)


def store_of_the_job() -> Store | None:
    """Return the store of the process group for one more thread; None if there is none yet."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    try:
        return distributed.distributed_c10d._get_default_store().clone()  # type: ignore[no-any-return]
    except Exception:  # torch does not document the function, and not every store has copies
        return None
