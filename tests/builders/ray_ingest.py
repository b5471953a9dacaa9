"""Ingests a folder on a real Ray; `test_ray_engine` runs it as a process of its own.

Arguments: the folder, a path that no worker sees, and where the table goes as JSON.
"""

import json
import sys
from pathlib import Path

import ray

from lightning_rlprof.store.ingest import in_ray, ingest
from tests.builders import small_ray


def main(folder: str, missing: str, output: str) -> None:
    small_ray.start()
    try:
        table = ingest([folder], engine="ray")
        ((_, unseen),) = in_ray([missing], 1)
    finally:
        ray.shutdown()
    told = {"table": table.to_dict(), "unseen": unseen._asdict()}
    Path(output).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
