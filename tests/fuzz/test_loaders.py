"""Whatever a file holds: it is read or refused, in time and in little memory, never a crash.

``FUZZ_EXAMPLES=5000`` looks longer than the tests of every day do.
"""

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bounds import Answer, TooMuchError, bounded, read
from tests.fuzz.mutations import damage, damage_values_of
from tests.fuzz.originals import MADE, REAL, Original
from tests.places import ROOT

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
ours = settings(
    max_examples=EXAMPLES,
    deadline=None,  # bounds are ours
    derandomize=EXAMPLES < 100,
    database=None,
    suppress_health_check=list(HealthCheck),
)
theirs = settings(ours, max_examples=max(EXAMPLES // 6, 1))  # real files are larger
chance = st.randoms(use_true_random=False)
Change = Callable[[Random], Callable[[Path], None]]


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Keep the garbage collector, which each look begins with, off what other tests left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def changed(original: Original, change: Callable[[Path], None]) -> Answer | None:
    """Write a file, change it and read it, within the bounds."""
    with tempfile.TemporaryDirectory() as folder:
        file, path = original(Path(folder))
        change(file)
        with bounded():
            return read(path)


def any_bytes(noise: Random) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_bytes(damage(file.read_bytes(), noise))

    return change


def its_values(noise: Random) -> Callable[[Path], None]:
    return lambda file: damage_values_of(file, noise)


@pytest.mark.parametrize("change", [any_bytes, its_values])
@pytest.mark.parametrize("name", MADE)
@ours
@given(noise=chance)
def test_a_damaged_file_is_read_or_refused(name: str, change: Change, noise: Random) -> None:
    changed(MADE[name], change(noise))


@pytest.mark.skipif(not REAL, reason="no real traces in ../shared/data")
@pytest.mark.parametrize("change", [any_bytes, its_values])
@pytest.mark.parametrize("name", REAL)
@theirs
@given(noise=chance)
def test_a_damaged_real_file_is_read_or_refused(name: str, change: Change, noise: Random) -> None:
    changed(REAL[name], change(noise))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.95])
def test_what_a_cut_takes_is_told(name: str, part: float) -> None:
    def cut(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * part)])

    answer, whole = changed(MADE[name], cut), changed(MADE[name], lambda _: None)
    assert whole is not None
    assert answer is None or not answer.told <= whole.told


@pytest.mark.parametrize("name", MADE)
def test_an_original_is_read_without_a_doubt(name: str) -> None:
    """Or else the tests above would look at nothing."""
    answer = changed(MADE[name], lambda _: None)
    assert answer is not None
    assert len(answer.spans) >= 1
    assert answer.spans.warnings == ()
    assert name == "native" or answer.rows["kernels"] >= 1


def test_the_bounds_hold_who_takes_too_much() -> None:
    with pytest.raises(TooMuchError, match="too long"), bounded(seconds=1):
        while True:
            pass
    with pytest.raises(TooMuchError, match=r"took \d+ MB"), bounded(megabytes=50):
        assert len(b"x" * 100_000_000)
    with pytest.raises(MemoryError), bounded(megabytes=50):
        bytearray(2_000_000_000)


@pytest.mark.parametrize("name", ["chrome", "native", "nsys", "ascend events", "ascend database"])
def test_atheris_finds_nothing_in_a_short_look(name: str, tmp_path: Path) -> None:
    look(name, tmp_path)


@pytest.mark.skipif(not REAL, reason="no real traces in ../shared/data")
@pytest.mark.parametrize("ending", ["rank-0.json.gz", ".sqlite", ".db", "kernel_details.csv"])
def test_atheris_finds_nothing_in_a_short_look_at_a_real_file(ending: str, tmp_path: Path) -> None:
    look(next(name for name in REAL if name.endswith(ending)), tmp_path)


def look(name: str, folder: Path) -> None:
    """Let atheris damage a file sixty times."""
    pytest.importorskip("atheris", reason="atheris is not installed: it needs x86-64 or macOS")
    words = [sys.executable, "-m", "tests.fuzz.atheris_loaders", name, "-runs=60", "-seed=1"]
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run(
        words, cwd=folder, env=told, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    told_runs = re.search(r"Done (\d+) runs", done.stderr)  # libFuzzer may repeat one.
    assert told_runs is not None
    assert int(told_runs[1]) >= 60
