"""Write golden files again: ``python -m tests.golden.remake [NAME]...``

A name is that of a file, of a run or of a verb: ``demo/summary.json``, ``demo``, ``summary``. All
names have to fit. Without a name, all files are written, and those of no contract are removed.
"""

import sys
import tempfile
from pathlib import Path

from tests.golden.contracts import CONTRACTS
from tests.golden.golden import EXPECTED, text_of
from tests.golden.inputs import write_inputs


def main(wanted: list[str]) -> None:
    """Write the golden files that fit all names."""
    with tempfile.TemporaryDirectory() as inputs:
        write_inputs(Path(inputs))
        for name, contract in CONTRACTS.items():
            parts = {name, *Path(name).parts, Path(name).stem}
            if parts.issuperset(wanted):
                path = EXPECTED / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text_of(contract, Path(inputs)), encoding="utf-8")
    for path in [] if wanted else [each for each in EXPECTED.rglob("*") if each.is_file()]:
        if path.relative_to(EXPECTED).as_posix() not in CONTRACTS:
            path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
