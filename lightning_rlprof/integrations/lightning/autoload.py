"""Recording without a change of code: Lightning asks this module for callbacks in every Trainer."""

import os
from typing import Any


def callbacks() -> list[Any]:
    """Return a `ProfilerCallback` when ``RLPROF=1`` is set, configured by ``RLPROF_CONFIG``.

    Without the variable nothing is imported.

    Raises:
        ConfigError: The file or the ``RLPROF__…`` variables are wrong.

    Example::

        >>> callbacks()
        []
    """
    if os.environ.get("RLPROF") != "1":
        return []
    from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

    callback = ProfilerCallback(os.environ.get("RLPROF_CONFIG") or None)
    callback.by_environment = True
    return [callback]
