"""Damaged files, one after the other: each is read or refused, within bounds of time and memory.

``python -m tests.chaos.mutants 100000`` reads so many: two of three are rank files of ours.
"""

import gc
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz.bounds import bounded, read
from tests.fuzz.mutations import damage, damage_values_of
from tests.fuzz.originals import MADE

SMALL = [name for name in MADE if name != "native"]


class Mutants(NamedTuple):
    """What became of them.

    Attributes:
        tried: How many were made.
        read: Of these, how many were read, if only in part.
        refused: How many were refused with one line.
        failed: The others, by file and seed, with what was raised.
        slowest_s: The longest time that one took.
    """

    tried: int
    read: int
    refused: int
    failed: dict[str, str]
    slowest_s: float


def damaged(name: str, number: int, first_seed: int = 0) -> Mutants:
    """Damage one of the originals in many ways, every second time only its values."""
    found: Counter[str] = Counter()
    failed, slowest = {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        file, path = MADE[name](Path(folder))
        whole = file.read_bytes()
        for seed in range(first_seed, first_seed + number):
            noise = Random(f"{name} {seed}")
            file.write_bytes(whole)
            began = time.perf_counter()
            try:
                if seed % 2:
                    file.write_bytes(damage(whole, noise))
                else:
                    damage_values_of(file, noise)
                began = time.perf_counter()
                with bounded():
                    found["refused" if read(path) is None else "read"] += 1
            except Exception as error:
                failed[f"{name}, seed {seed}"] = f"{type(error).__name__}: {error}"
            slowest = max(slowest, time.perf_counter() - began)
    return Mutants(number, found["read"], found["refused"], failed, slowest)


def all_damaged(number: int) -> dict[str, Mutants]:
    """Damage rank files two times of three, and files of every other kind equally often."""
    gc.collect()
    gc.freeze()  # each look begins with a collection
    try:
        shares = dict.fromkeys(SMALL, number // 3 // len(SMALL))
        shares["native"] = number - sum(shares.values())
        return {name: damaged(name, share) for name, share in shares.items()}
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    for original, mutants in all_damaged(int(sys.argv[1])).items():
        print(original, mutants, flush=True)
