"""Write the types of `Run`'s methods from the catalog of analyses; ``--check`` fails if stale."""

import sys
from pathlib import Path

from lightning_rlprof.analysis.catalog import CATALOG

__all__ = ["main"]

FILE = Path(__file__).parents[1] / "lightning_rlprof" / "analysis" / "methods.pyi"


def main(arguments: list[str]) -> int:
    """Write the stub, or with ``--check`` compare it; returns the exit status."""
    text = "# Written by docs/generate_methods.py from lightning_rlprof/analysis/catalog.py.\n"
    for each in CATALOG:
        name = each.name
        text += f"from lightning_rlprof.analysis.{each.module} import {name} as _{name}\n"
    text += "\nclass Methods:\n"
    text += "".join(f"    {each.name} = _{each.name}\n" for each in CATALOG)
    if "--check" not in arguments:
        FILE.write_text(text, encoding="utf-8")
        print(f"Wrote {FILE.name}")
    elif not FILE.is_file() or FILE.read_text(encoding="utf-8") != text:
        print(f"{FILE.name} is stale: python docs/generate_methods.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
