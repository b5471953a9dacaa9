"""Recording without a change of code: Lightning asks this module for callbacks in every Trainer."""

import os
from typing import Any

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def is_on() -> bool:
    """Return whether the variable ``RLPROF`` asks for a recording.

    Raises:
        ConfigError: Its value says neither yes nor no.
    """
    value = os.environ.get("RLPROF", "").strip().lower()
    if value in _ON or value in _OFF:
        return value in _ON
    from lightning_rlprof.errors import ConfigError

    known = f"use {', '.join(_ON)} to record, or {', '.join(filter(None, _OFF))}"
    raise ConfigError(f"RLPROF={os.environ['RLPROF']!r} is neither on nor off: {known}")


def callbacks() -> list[Any]:
    """Return a `ProfilerCallback` when ``RLPROF=1`` is set, configured by ``RLPROF_CONFIG``.

    Without the variable nothing is imported. What fails with it, other than a wrong setting, is
    logged: the training that Lightning asks for does not end with it.

    Raises:
        ConfigError: ``RLPROF``, the file or the ``RLPROF__…`` variables are wrong.

    Example::

        >>> callbacks()
        []
    """
    if not is_on():
        return []
    from lightning_rlprof.errors import RlprofError

    try:
        from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

        callback = ProfilerCallback(os.environ.get("RLPROF_CONFIG") or None)
    except RlprofError:
        raise
    except Exception as error:  # The installation may be broken.
        import logging

        text = "RLPROF=1: nothing is recorded, training continues: %s"
        logging.getLogger(__name__).error(text, error, exc_info=error)
        return []
    callback.by_environment = True
    return [callback]
