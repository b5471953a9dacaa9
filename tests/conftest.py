"""What every test stands on: no RLPROF variables from outside, one torch thread."""

import os

import pytest

# Before torch is imported, here and in every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
# Lightning would otherwise read a cluster's variables from the machine that runs the tests.
for _name in [name for name in os.environ if name.startswith(("RLPROF", "SLURM_", "PL_"))]:
    del os.environ[_name]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RLPROF")]:
        monkeypatch.delenv(name)
