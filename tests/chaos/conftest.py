from tests.cli.conftest import rlprof

__all__ = ["rlprof"]
