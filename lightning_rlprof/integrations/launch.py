"""Variables with which all processes of a program record, Ray workers included."""

import importlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB = "RLPROF_JOB"
"""Variable that all processes of a program share: they write one run."""

INJECT = Path(__file__).with_name("inject")
"""Folder whose ``sitecustomize`` opens the doors."""

_RAY_HOOK, _OWN_HOOK = "RAY_RUNTIME_ENV_HOOK", "lightning_rlprof.integrations.launch.ray_hook"
_HIDDEN_HOOK = "RLPROF_RAY_HOOK"
_VERL, _PLUGIN = "VERL_USE_EXTERNAL_MODULES", "lightning_rlprof.integrations.doors.verl_plugin"


def launched(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables to lay over those of a program, by which its processes record one run.

    Example::

        >>> found = launched({"PYTHONPATH": "/mine", "RLPROF_JOB": "7"})
        >>> found["RLPROF"], found["RLPROF_JOB"], found["PYTHONPATH"].endswith("inject:/mine")
        ('1', '7', True)
    """
    found = {"RLPROF": "1", JOB: environ.get(JOB) or secrets.token_hex(8)}
    before = environ.get("PYTHONPATH", "")
    paths = [path for path in before.split(os.pathsep) if path and path != str(INJECT)]
    found["PYTHONPATH"] = os.pathsep.join([str(INJECT), *paths])
    hook = environ.get(_RAY_HOOK, "")
    if hook and hook != _OWN_HOOK:
        found[_HIDDEN_HOOK] = hook
    found[_RAY_HOOK] = _OWN_HOOK
    modules = [each for each in environ.get(_VERL, "").split(",") if each and each != _PLUGIN]
    found[_VERL] = ",".join([*modules, _PLUGIN])
    return found


def ray_hook(runtime_env: dict[str, Any] | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a ``runtime_env`` whose workers record; Ray calls this in ``ray.init``.

    What the program says wins. Another hook that was set is called first.
    """
    if hidden := os.environ.get(_HIDDEN_HOOK):
        module, _, name = hidden.rpartition(".")
        runtime_env = getattr(importlib.import_module(module), name)(runtime_env, *args, **kwargs)
    found = dict(runtime_env or {})
    own = {key: value for key, value in os.environ.items() if key.startswith("RLPROF")}
    own |= {key: os.environ[key] for key in ("PYTHONPATH", _VERL) if key in os.environ}
    found["env_vars"] = {**own, **(found.get("env_vars") or {})}
    return found
