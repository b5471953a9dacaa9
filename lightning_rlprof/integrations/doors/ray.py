"""Door to Ray: workers of a cluster that runs already get the variables of the driver.

Those of a cluster that ``ray.init`` starts inherit them. What a worker runs is marked by the doors
of its framework, or by its own code.
"""

import functools
import os
from typing import Any

from lightning_rlprof.integrations.doors.kit import Kit

KIT = Kit("Ray", "ray")


def install(module: Any) -> None:
    """Let ``ray.init`` pass the variables on.

    Args:
        module: ``ray``.
    """
    KIT.replace(module, "init", _passing_on)


def _passing_on(function: Any) -> Any:
    passed = KIT.quiet(_variables)

    @functools.wraps(function)
    def init(address: Any = None, *args: Any, **kwargs: Any) -> Any:
        if address not in (None, "local") or os.environ.get("RAY_ADDRESS"):
            kwargs["runtime_env"] = passed(kwargs.get("runtime_env")) or kwargs.get("runtime_env")
        return function(address, *args, **kwargs)

    return init


def _variables(runtime_env: Any) -> dict[str, Any]:
    """Return a ``runtime_env`` with the variables; what the program says wins."""
    found = dict(runtime_env or {})
    own = {key: value for key, value in os.environ.items() if key.startswith("RLPROF")}
    if "PYTHONPATH" in os.environ:
        own["PYTHONPATH"] = os.environ["PYTHONPATH"]
    found["env_vars"] = {**own, **(found.get("env_vars") or {})}
    return found
