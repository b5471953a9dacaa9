"""Finished captures on their way to where runs are kept, by fsspec; nothing is copied twice."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.run_directory import rank_directory, rank_files, read_trace
from lightning_rlprof.system.location import RemotePath, place, secrets_of
from lightning_rlprof.system.remote_files import attempt, opened


class Shipped(NamedTuple):
    """What `ship` did: files and bytes copied, files that were there, and what it left behind."""

    files: int
    size: int
    there: int
    left: tuple[str, ...]


def ship(run: Path, url: str, rank: int | None = None, *, crashed: bool = False) -> Shipped:
    """Copy a run into a folder of its name at a URL, without ranks that still record.

    What is there with the same size is not copied again. Every size is looked up afterwards.

    Args:
        run: The run directory.
        url: Where runs are kept; it may hold no credentials.
        rank: Only the files of this rank.
        crashed: Also ranks whose file just stops, which are still recording or were killed.

    Raises:
        TraceError: There is no run, or it cannot be copied.
    """
    to = place(url)
    if not isinstance(to, RemotePath):
        raise TraceError(f"{url}: is no URL such as s3://bucket/runs")
    if secrets_of(url, least=1):
        raise TraceError(
            f"{to}: holds credentials, and others see command lines and configurations; leave them "
            "to the environment, as FSSPEC_S3_KEY and FSSPEC_S3_SECRET"
        )
    files, left = _complete(run, rank, crashed)
    system, root = attempt(to, "written", partial(opened, to))
    at, sizes = f"{root.rstrip('/')}/{run.resolve().name}", []
    for file in files:
        target = f"{at}/{file.relative_to(run).as_posix()}"
        if attempt(to, "written", partial(_put, system, file, target)):
            sizes.append(file.stat().st_size)
    return Shipped(len(sizes), sum(sizes), len(files) - len(sizes), tuple(left))


def _complete(run: Path, rank: int | None, crashed: bool) -> tuple[list[Path], list[str]]:
    """Return the files of ranks that ended, and of the run itself; and what is left out."""
    traces = rank_files(run)
    if not traces:
        raise TraceError(f"{run}: holds no run, that is no rank-*.jsonl files")
    if rank is not None:
        traces = [file for file in traces if file.stem == rank_directory(run, rank).name]
        if not traces:
            raise TraceError(f"{run}: has no rank {rank}")
    ended = {file.stem for file in traces if crashed or _has_ended(file)}
    files = []
    for file in sorted(run.rglob("*")):
        inside = file.relative_to(run).parts
        owner = inside[0].removesuffix(".jsonl")
        wanted = owner in ended or (rank is None and not owner.startswith("rank-"))
        if wanted and not any(part.startswith(".") for part in inside) and _is_own(file):
            files.append(file)
    return files, [file.name for file in traces if file.stem not in ended]


def _is_own(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _has_ended(file: Path) -> bool:
    try:
        return read_trace(file).status is not None
    except TraceError:
        return False


def _put(system: Any, file: Path, target: str) -> bool:
    """Copy one file unless it is there; return whether it was copied."""
    size = file.stat().st_size
    try:
        if system.info(target)["size"] == size:
            return False
    except FileNotFoundError:
        pass
    if not system.async_impl:  # the others are stores of objects: there it would make a bucket
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
    system.put_file(str(file), target)
    system.invalidate_cache()
    if (there := system.info(target)["size"]) != size:
        raise TraceError(f"{file}: arrived with {there:,} of {size:,} bytes; try again")
    return True
