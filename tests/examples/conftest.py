"""Tests of the examples run the command, too."""

from tests.cli.conftest import rlprof

__all__ = ["rlprof"]
