"""How much work the tests do: a quick look in `make test`, everything in `make test-deep`."""

import os

DEEP = os.environ.get("TEST_EFFORT") == "deep"


def examples(thorough: int) -> int:
    """Return how many examples hypothesis tries: ``thorough`` in a deep run, else a sixth of it."""
    return thorough if DEEP else max(10, thorough // 6)
