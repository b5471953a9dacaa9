"""The peers that read traces, from PyPI in an environment of their own, and runs of each way."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "PEERS", "Run", "alone", "environment", "versions"]

PACKAGES = ("traceinsight==0.6.1", "ijson==3.6.0", "orjson==3.13.0")
"""What is installed: HTA is called traceinsight there, and reads by ijson where it is present.

AMD's TraceLens is not on PyPI (another project has its name); it takes part where it was installed
into the environment by hand.
"""

PEERS = {
    "gzip + orjson": "orjson",
    "HTA:json": "hta",
    "HTA:ijson_batched": "hta",
    "HTA:ijson_batch_and_compress": "hta",
    "TraceLens": "TraceLens.util",
}
"""Ways of reading, and what each imports."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """What one way took, alone in its process.

    Attributes:
        seconds: By the clock.
        cpu: On all cores together.
        rows: What was read: events, or rows of tables.
        above: Peak of memory above the bare interpreter, in megabytes.
        grown: Peak above what was there after the imports.
    """

    seconds: float
    cpu: float
    rows: int
    above: float
    grown: float


def environment(folder: Path) -> Path:
    """Return the interpreter of the peers; makes their environment where there is none.

    Raises:
        SystemExit: They cannot be installed; the text is pip's.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        done = subprocess.run(install, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the peers cannot be installed: {done.stderr.strip()}")
    return python


def versions(python: Path) -> dict[str, str]:
    """Return which peers there are: ways of reading, with the version of what they import."""
    code = (
        "import importlib, importlib.metadata as meta, json, sys\n"
        "owners = {'hta': 'traceinsight', 'TraceLens.util': 'TraceLens'}\n"
        "found = {}\n"
        "for module in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        importlib.import_module(module)\n"
        "        found[module] = meta.version(owners.get(module, module))\n"
        "    except (ImportError, meta.PackageNotFoundError):\n"
        "        pass\n"
        "print(json.dumps(found))\n"
    )
    modules = json.dumps(sorted(set(PEERS.values())))
    told = subprocess.run([python, "-c", code, modules], capture_output=True, text=True, check=True)
    found = json.loads(told.stdout.splitlines()[-1])
    return {way: found[module] for way, module in PEERS.items() if module in found}


def alone(way: str, paths: list[Path], python: Path | None = None) -> Run:
    """Read files in one way, in a new process: by our interpreter, or by the peers'.

    Raises:
        SystemExit: It failed; the text is the end of what it printed.
    """
    about = dict(os.environ)
    if python is None:
        about["PYTHONPATH"] = os.pathsep.join([str(_HERE.parent), about.get("PYTHONPATH", "")])
    command = [str(python or sys.executable), str(_HERE / "_read_alone.py"), way, *map(str, paths)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=about)
    if done.returncode:
        raise SystemExit(f"{way}: failed: {done.stderr.strip()[-2000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))
