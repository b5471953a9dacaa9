"""Ingests a folder on a real Ray; `test_ray_engine` runs it as a process of its own.

Arguments: the folder, a path that no worker sees, and where the table goes as JSON.
"""

import json
import os
import sys
from pathlib import Path

import ray

from lightning_rlprof.store.ingest.ingest import ingest
from lightning_rlprof.store.ingest.ray_engine import in_ray


def main(folder: str, missing: str, output: str) -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["RAY_TEMPORARY"],
    )
    try:
        table = ingest([folder], engine="ray")
        ((_, unseen),) = in_ray([missing], 1)
    finally:
        ray.shutdown()
    told = {"table": table.to_dict(), "unseen": unseen._asdict()}
    Path(output).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
