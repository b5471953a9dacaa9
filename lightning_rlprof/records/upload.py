"""Upload a finished run with fsspec; files that were uploaded before are skipped."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.run_directory import rank_directory, rank_files, read_trace
from lightning_rlprof.system.location import RemotePath, place
from lightning_rlprof.system.remote_files import attempt, opened


class Uploaded(NamedTuple):
    """Files and bytes uploaded, files that were there already, and rank files that were skipped."""

    files: int
    size: int
    there: int
    left: tuple[str, ...]


def upload(run: Path, url: str, rank: int | None = None, *, crashed: bool = False) -> Uploaded:
    """Upload a run into a folder of its name at a URL, without ranks that are still recording.

    A file that exists there with the same size is skipped. Every upload is checked by its size.

    Args:
        run: The run directory.
        url: Parent folder of the run; without credentials.
        rank: Upload only the files of this rank.
        crashed: Also upload ranks with a truncated file: still recording, or killed.

    Raises:
        TraceError: The run is missing, or cannot be uploaded.
    """
    to = place(url)
    if not isinstance(to, RemotePath):
        raise TraceError(f"{url} is not a URL such as s3://bucket/runs")
    if "?" in url:
        raise TraceError(f"{to}: remove the query; set credentials in the environment")
    files, left = _complete(run, rank, crashed)
    system, root = attempt(to, "written", partial(opened, to))
    at, sizes = f"{root.rstrip('/')}/{run.resolve().name}", []
    for file in files:
        target = f"{at}/{file.relative_to(run).as_posix()}"
        if attempt(to, "written", partial(_put, system, file, target)):
            sizes.append(file.stat().st_size)
    return Uploaded(len(sizes), sum(sizes), len(files) - len(sizes), tuple(left))


def _complete(run: Path, rank: int | None, crashed: bool) -> tuple[list[Path], list[str]]:
    """Return the files to upload (complete ranks, and the run itself) and skipped rank files."""
    traces = rank_files(run)
    if not traces:
        raise TraceError(f"no run in {run} (expected rank-*.jsonl)")
    if rank is not None:
        traces = [file for file in traces if file.stem == rank_directory(run, rank).name]
        if not traces:
            raise TraceError(f"no rank {rank} in {run}")
    ended = {file.stem for file in traces if crashed or _has_ended(file)}
    files = []
    for file in sorted(run.rglob("*")):
        inside = file.relative_to(run).parts
        owner = inside[0].removesuffix(".jsonl")
        wanted = owner in ended or (rank is None and not owner.startswith("rank-"))
        is_regular = file.is_file() and not file.is_symlink()
        if wanted and is_regular and not any(part.startswith(".") for part in inside):
            files.append(file)
    return files, [file.name for file in traces if file.stem not in ended]


def _has_ended(file: Path) -> bool:
    try:
        return read_trace(file).status is not None
    except TraceError:
        return False


def _put(system: Any, file: Path, target: str) -> bool:
    """Upload one file unless it exists with the same size; return whether it was uploaded."""
    size = file.stat().st_size
    try:
        if system.info(target)["size"] == size:
            return False
    except FileNotFoundError:
        pass
    # Asynchronous file systems are object stores, where makedirs would make a bucket.
    if not system.async_impl:
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
    system.put_file(str(file), target)
    system.invalidate_cache()
    if (there := system.info(target)["size"]) != size:
        raise TraceError(f"{file}: upload is incomplete, {there:,} of {size:,} bytes; try again")
    return True
