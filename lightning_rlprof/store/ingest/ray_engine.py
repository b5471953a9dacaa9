"""The engine of a cluster: Ray gives each file to a worker, and once more where one died."""

import logging
import os
import re
import socket
from collections.abc import Generator, Sequence
from typing import Any

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.store.ingest.make_cache import Outcome, ingest_one, lost

log = logging.getLogger(__name__)

_GET = 'pip install "lightning-rlprof[ray]"'
_PATIENCE_S = 5
_RETRIES = 3
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WAITING = 1_000  # tasks handed over at once: Ray keeps each in its memory


def in_ray(
    paths: Sequence[str], jobs: int | None = None
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield what came of each path, with its number, as soon as it is known.

    Joins the cluster that ``RAY_ADDRESS`` or this machine knows, else starts Ray here and ends it
    again. A worker that dies is replaced, and its file tried three times more; one that dies each
    time is a row. Caches are written where the files lie, so all workers must see these.

    Args:
        paths: What `lightning_rlprof.store.ingest.make_cache.ingest_one` takes; absolute.
        jobs: Most tasks at once, of one CPU each; unset, as many as Ray has room for.

    Raises:
        RlprofError: Ray is not installed, cannot be reached, or has no CPU for a task.
    """
    ray = _ray()
    started = _join_cluster(ray)
    try:
        if ray.cluster_resources().get("CPU", 0) < 1:
            raise RlprofError("the Ray cluster has no CPU for tasks; add a node that has one")
        yield from _mapped(ray, paths, jobs or _WAITING)
    finally:
        if started:
            ray.shutdown()


def _mapped(
    ray: Any, paths: Sequence[str], most: int
) -> Generator[tuple[int, Outcome], None, None]:
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_seen)
    left = iter(enumerate(paths))
    running: dict[Any, int] = {}
    is_free = ray.available_resources().get("CPU", 0) >= 1
    try:
        while True:
            while len(running) < most and (following := next(left, None)) is not None:
                running[task.remote(following[1])] = following[0]
            if not running:
                return
            done, _ = ray.wait(list(running), timeout=None if is_free else _PATIENCE_S)
            if not done:
                log.warning("no CPU of the Ray cluster is free: ingest waits for one")
            is_free = True
            for each in done:
                at = running.pop(each)
                yield at, _outcome(ray, each, paths[at])
    finally:
        for each in running:
            ray.cancel(each, force=True)


def _outcome(ray: Any, done: Any, path: str) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        last = _COLOUR.sub("", str(error)).strip().rpartition("\n")[2]
        return lost(path, f"its Ray worker cannot run ingest: {last}; on every node: {_GET}")
    except ray.exceptions.RayError as error:
        first = str(error).strip().partition("\n")[0]
        return lost(path, f"its Ray worker ended: {type(error).__name__}: {first}")
    return outcome


def _seen(path: str) -> Outcome:
    """Ingest a path on the worker, where it may not be there."""
    if os.path.exists(path):
        return ingest_one(path)
    host = socket.gethostname()
    return lost(
        path, f"host {host} cannot see it: ingest needs files on storage that all hosts share"
    )


def _join_cluster(ray: Any) -> bool:
    """Connect to a cluster unless connected; tell whether that, or Ray itself, is ours to end."""
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "configure_logging": False}
    named = os.environ.get("RAY_ADDRESS")
    try:
        try:
            ray.init(address=named or "auto", **quiet)
        except ConnectionError:
            if named:
                raise
            ray.init(include_dashboard=False, **quiet)
    except Exception as error:  # of many types, none of which a user has to know
        text = str(error).strip().partition("\n")[0]
        raise RlprofError(f"Ray cannot be reached or started: {text}") from error
    return True


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        text = f"--engine ray needs Ray: {_GET}, or leave out --engine ray"
        raise RlprofError(text) from error
    return ray
