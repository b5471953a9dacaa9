"""Write how a run ended when a scheduler ends its process by SIGTERM, then let the process end.

Only where nothing else handles the signal: a framework's handler, or one of the program's own, goes
before. Python runs handlers between two instructions of the main thread, which may wait for a
collective that never ends. So a thread does the work, which the interpreter's wakeup file tells of
the signal at once. The process ends as it would have without rlprof: by the signal.
"""

import ctypes
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_PATIENCE_S = 2.0  # Seconds; even if the disk does not answer, the process ends.
_CREDENTIALS = struct.Struct("3i")  # Process, user and group id.
_SIGTERM, _NOTHING = bytes([signal.SIGTERM]), b"\0"


class Termination:
    """Call a function when SIGTERM arrives, then end by it; until `remove`.

    Does nothing where another handler is installed, or on another thread than the main one.

    Args:
        end: What to do, within two seconds.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._end, self._pid = end, os.getpid()
        self._told: socket.socket | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._handle)
        _Installed.here = self
        _watch_forks()
        if hasattr(socket, "SO_PASSCRED"):  # Only Linux has it.
            self._listen()

    def remove(self) -> None:
        """Let the signal end the process as before."""
        self._end = bool
        with suppress(ValueError):  # Only the main thread can remove the handler.
            if self._is_installed():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._told is not None:
                self._hears()
                with suppress(OSError):
                    self._told.send(_NOTHING)
        if _Installed.here is self:
            _Installed.here = None

    def _is_installed(self) -> bool:
        return getattr(signal.getsignal(signal.SIGTERM), "__self__", None) is self

    def _listen(self) -> None:
        before = signal.set_wakeup_fd(-1)
        if before >= 0:  # An event loop uses the wakeup file, so that the handler has to suffice.
            signal.set_wakeup_fd(before)
            return
        heard, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        heard.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        told.setblocking(False)
        listener = threading.Thread(
            target=self._wait, args=[heard, told], name="rlprof-termination", daemon=True
        )
        with suppress(RuntimeError):  # The process may have no more threads.
            listener.start()
            self._told = told
            signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)

    def _hears(self) -> bool:
        """Take the interpreter's wakeup file away if it is the listener's; return whether it is."""
        before = signal.set_wakeup_fd(-1)
        if self._told is not None and before == self._told.fileno():
            return True
        signal.set_wakeup_fd(before)
        return False

    def _wait(self, heard: socket.socket, told: socket.socket) -> None:
        with heard, told:
            while True:
                number, more, _, _ = heard.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                # A forked child has this socket, too, for a moment; its signals are ignored.
                sender = _CREDENTIALS.unpack(more[0][2])[0] if more else 0
                if sender != self._pid:
                    continue
                if number == _NOTHING:
                    return
                if number == _SIGTERM and self._is_installed():
                    work = threading.Thread(target=self._work, daemon=True)
                    work.start()
                    work.join(_PATIENCE_S)
                    _end_by_signal()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._hears():
            return  # The listener does the work.
        self._work()
        _end_by_signal()

    def _work(self) -> None:
        with suppress(Exception):  # The process ends in any case.
            self._end()


class _Installed:
    """What is installed in this process, if anything."""

    here: Termination | None = None
    watches_forks = False


def _watch_forks() -> None:
    """Let the signal end forked children as before, also one that comes as soon as they exist."""
    if not _Installed.watches_forks:
        os.register_at_fork(
            before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child
        )
        _Installed.watches_forks = True


_forking = threading.local()  # The signals that a forking thread had blocked before.


def _block() -> None:
    if _Installed.here is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _unblock() -> None:
    if (mask := vars(_forking).pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _restore_in_child() -> None:
    if (here := _Installed.here) is not None:
        with suppress(ValueError):  # Another thread than the main one may have forked.
            here._hears()
            if here._is_installed():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        here._end = bool
        _Installed.here = None
    _unblock()


def _end_by_signal() -> None:
    """End the process by SIGTERM, on any thread: Python's own function is for the main one."""
    with suppress(Exception):
        ctypes.CDLL(None).signal(_SIGTERM[0], ctypes.c_void_p(0))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    os._exit(128 + signal.SIGTERM)
