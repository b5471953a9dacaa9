"""A training as a child process: started without a shell, signals passed on, its status kept."""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from lightning_rlprof.errors import RlprofError

# Signals passed to the child. nsys drops the reports if one of them arrives twice (measured with
# 2022.4 and 2023.4). SLURM sends the last three to the training; what nsys does with them was not
# measured.
_PASSED_ON = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGTERM),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
}


_FIRST_S = 0.1


def run_child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    look: Callable[[int], object] | None = None,
) -> int:
    """Run a command, pass signals on, and return its status as a shell does.

    Ctrl-C on a terminal reaches the child directly; a signal from a process reaches only rlprof.

    Args:
        argv: The command.
        environment: Its variables.
        look: Called with its process id about once a second while it runs, and more often at first.

    Raises:
        RlprofError: The program cannot be started.
    """
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise RlprofError(
            f"cannot run {argv[0]}: {error.strerror}",
            hint=f"A script needs its interpreter: python {argv[0]}"
            if argv[0].endswith(".py")
            else "",
        ) from error
    wanted = {*_PASSED_ON, signal.SIGCHLD}
    wait_s = _FIRST_S
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        while process.poll() is None:
            arrived = signal.sigtimedwait(wanted, wait_s)
            wait_s = min(2 * wait_s, 1.0)
            if look is not None:
                look(process.pid)
            # si_code above 0: the kernel sent it, for the terminal
            if arrived and arrived.si_signo in _PASSED_ON and arrived.si_code <= 0:
                process.send_signal(arrived.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
