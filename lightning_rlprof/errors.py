"""The tree of exceptions that this package raises.

RlprofError
├── ConfigError    a configuration that cannot be honoured, found before training
├── TraceError     a run or trace file that cannot be read
└── RecorderError  a recorder that cannot start on this machine, found before training
"""

import msgspec

NOT_JSON = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoders of JSON raise for what they cannot read.

msgspec's errors are no ValueError before 0.21; a thousand brackets in a row are a RecursionError.
"""


class RlprofError(Exception):
    """Base of everything that this package raises on purpose; its text is one line for people.

    Attributes:
        hint: What to do about it, as the command line prints it below the error.
        code: A name of this error for programs, as ``rlprof --json`` prints it.

    Example::

        >>> from lightning_rlprof.errors import RlprofError, TraceError
        >>> issubclass(TraceError, RlprofError)
        True
    """

    def __init__(self, *args: object, hint: str = "", code: str = "") -> None:
        super().__init__(*args)
        self.hint, self.code = hint, code


class ConfigError(RlprofError, ValueError):
    """A configuration is wrong; the text names the dotted key, what is allowed and a near match."""

    def __init__(self, text: str) -> None:
        # A key may contain a line break.
        super().__init__(text.replace("\n", "\\n").replace("\r", "\\r"))


class TraceError(RlprofError):
    """A run directory or trace file cannot be read; the text names the path and the reason."""


class RecorderError(RlprofError):
    """A recorder cannot work on this machine; the text says what is missing and how to get it."""


def described(error: BaseException) -> str:
    """Return the name and the text of an exception, also of one that fails to tell its text.

    Example::

        >>> described(KeyError("tokens"))
        "KeyError: 'tokens'"
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
