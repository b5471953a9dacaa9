"""The version of this package; `pyproject.toml` takes it from here.

Asking `importlib.metadata` costs 30 ms, a third of what ``rlprof --version`` would take.
"""

VERSION = "0.1.0"
"""Version of the installed package."""
