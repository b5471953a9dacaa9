"""A Ray of this host alone, which needs little memory; it ends with `ray.shutdown`."""

import os

import ray


def start() -> None:
    """Start Ray in the folder that the test names in ``RAY_TEMPORARY``."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["RAY_TEMPORARY"],
    )
