"""A harness for atheris, which looks at the code that runs and searches for more of it.

``PYTHONPATH=. python -m tests.fuzz.atheris_loaders chrome -max_total_time=600`` after
``pip install atheris`` (Linux on x86-64, macOS). Names are those of `tests.fuzz.originals`, real
files among them; what fails is written to a file ``crash-*``. Every second change is one of values,
by our own hand: libFuzzer's, of bytes, seldom leave a file that the loaders read beyond its form.
"""

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import damage_values_of

# What each look may take, `bounded` says; libFuzzer counts what was taken before it, too.
_LIMITS = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=1000000"]


def main() -> None:
    """Damage one file again and again, for as long as libFuzzer's options say."""
    import atheris

    with atheris.instrument_imports(include=["lightning_rlprof"]):
        from lightning_rlprof.loaders import native, nsys
        from lightning_rlprof.loaders.ascend import reader as ascend
        from lightning_rlprof.loaders.kineto import reader as kineto
        from tests.fuzz.bounds import bounded, read
    from tests.fuzz.originals import MADE, REAL

    assert all([ascend, kineto, native, nsys])  # which `load` imports late
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        place, corpus = Path(folder) / "place", Path(folder) / "corpus"
        place.mkdir()
        corpus.mkdir()
        file, path = {**MADE, **REAL}[name](place)
        (corpus / "seed").write_bytes(file.read_bytes())

        def one(data: bytes) -> Any:
            file.write_bytes(data)
            with bounded():
                read(path)

        def change(data: bytes, most: int, seed: int) -> bytes:
            changed = _changed(file, data, Random(seed)) if seed % 2 else b""
            return changed[:most] or atheris.Mutate(data, len(data))

        atheris.Setup([sys.argv[0], *_LIMITS, *options, str(corpus)], one, custom_mutator=change)
        atheris.Fuzz()


def _changed(file: Path, data: bytes, noise: Random) -> bytes:
    """Return what a file of these bytes is with other values, nothing where it has no form."""
    file.write_bytes(data)
    try:
        damage_values_of(file, noise)
    except Exception:  # any: changes before this one took its form
        return b""
    return file.read_bytes()


if __name__ == "__main__":
    main()
