"""A harness for atheris, which looks at the code that runs and searches for more of it.

``PYTHONPATH=. python -m tests.fuzz.atheris_loaders chrome -max_total_time=600`` after
``pip install atheris`` (Linux on x86-64, macOS). Names are those of `tests.fuzz.originals.MADE`;
what fails is written to a file ``crash-*``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["main"]

_LIMITS = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=200000"]


def main() -> None:
    """Damage one file again and again, for as long as libFuzzer's options say."""
    import atheris

    with atheris.instrument_imports(include=["lightning_rlprof"]):
        import lightning_rlprof.loaders.kineto
        from tests.fuzz.bounds import read
    from tests.fuzz.originals import MADE

    assert lightning_rlprof.loaders.kineto  # which `load` imports late
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        place, corpus = Path(folder) / "place", Path(folder) / "corpus"
        place.mkdir()
        corpus.mkdir()
        file, path = MADE[name](place)
        (corpus / "seed").write_bytes(file.read_bytes())

        def one(data: bytes) -> Any:
            file.write_bytes(data)
            read(path)

        atheris.Setup([sys.argv[0], *_LIMITS, *options, str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
