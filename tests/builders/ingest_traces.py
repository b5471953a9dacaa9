"""Folders of traces of torch.profiler, one per rank, small and each different."""

from pathlib import Path

from tests.builders.chrome import ChromeTrace


def write_traces(folder: Path, ranks: int) -> list[Path]:
    return [write_trace(folder / f"rank{rank}.pt.trace.json", rank, ranks) for rank in range(ranks)]


def write_trace(path: Path, rank: int = 0, ranks: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"rank": rank, "world_size": ranks}
    trace = ChromeTrace(before={"schemaVersion": 1, "distributedInfo": told})
    trace.mark("ProfilerStep#1", 0, 900)
    trace.mark("actor_update", 10, 800)
    for number in range(1, 6 + rank):
        trace.launched(number, 20 * number, name=f"gemm_{number % 2}")
    return trace.write(path)


def cached_files(folder: Path) -> dict[str, bytes]:
    """Return the Parquet files below a folder by name, keys of caches left out."""
    return {
        f"{path.parent.name.rpartition('-')[0]}/{path.name}": path.read_bytes()
        for path in sorted(folder.rglob(".rlprof-cache/*/*.parquet"))
    }
