import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.ingest.items import items
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report import perfetto
from tests.ingest.traces import write_trace, write_traces
from tests.loaders.ascend_output import capture_folder
from tests.runs import grpo_run

DATA = Path(__file__).parents[3] / "shared" / "data"


def names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in items(folder)]


def test_a_file_and_a_run_stand_for_themselves(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=1)
    trace = write_trace(tmp_path / "any.json")
    assert items(tmp_path / "run") == [tmp_path / "run"]
    assert items(trace) == [trace]


def test_below_a_folder_are_its_runs_and_traces_each_in_one_form(tmp_path: Path) -> None:
    grpo_run(tmp_path / "b" / "run", steps=1)
    write_traces(tmp_path / "a", 2)
    (tmp_path / "a" / "rank0.pt.trace.json.gz").write_bytes(b"")
    (tmp_path / "a" / "report.nsys-rep").write_bytes(b"")
    (tmp_path / "a" / "report.sqlite").write_bytes(b"")
    write_trace(tmp_path / "vllm.json")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert names(tmp_path) == [
        "vllm.json",
        "a/rank0.pt.trace.json",
        "a/rank1.pt.trace.json",
        "a/report.sqlite",
        "b/run",
    ]


def test_a_broken_trace_counts_by_its_name_or_by_those_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json")
    (tmp_path / "rank17.json").write_text("")
    (tmp_path / "other.json").write_text("")
    (tmp_path / "x.pt.trace.json.gz").write_text("")
    assert names(tmp_path) == ["rank0.json", "rank17.json", "x.pt.trace.json.gz"]


def test_a_broken_rank_is_found_whatever_its_host_and_its_form(tmp_path: Path) -> None:
    write_trace(tmp_path / "gpu-a_rank0.json")
    for name in ("gpu-b_rank1.json.gz", "gpu-c_rank2.json", "gpu-d.json.gz", "gpu-e.json.zst"):
        (tmp_path / name).write_bytes(b"no trace")
    with gzip.open(tmp_path / "tokenizer.json.gz", "wt") as file:
        file.write('{"model": "bpe"}')
    (tmp_path / "config_rank0.json").write_text("{}")
    (tmp_path / "config.json").write_text("")
    assert names(tmp_path) == [
        "gpu-a_rank0.json",
        "gpu-b_rank1.json.gz",
        "gpu-c_rank2.json",
        "gpu-d.json.gz",
        "gpu-e.json.zst",
    ]


@pytest.mark.parametrize("damage", ["empty", "garbage", "gone"])
def test_a_broken_rank_in_a_folder_of_its_own_is_found(tmp_path: Path, damage: str) -> None:
    for rank in (0, 2):
        write_trace(tmp_path / f"rank{rank}" / "step-1" / "trace.json")
        (tmp_path / f"rank{rank}" / "config.json").write_text("{}")
    broken = tmp_path / "rank1" / "step-1" / "trace.json"
    broken.parent.mkdir(parents=True)
    (tmp_path / "rank1" / "config.json").write_text("{}")
    if damage == "gone":
        broken.symlink_to(tmp_path / "nowhere.json")
    else:
        broken.write_text("" if damage == "empty" else "garbage")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trace.json").write_text("{}")
    assert names(tmp_path) == [f"rank{rank}/step-1/trace.json" for rank in range(3)]


def test_what_looks_broken_is_left_where_no_trace_is_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "server" / "vllm.json")
    (tmp_path / "server" / "config_rank3.json").write_text("{}")
    assert names(tmp_path) == ["server/vllm.json"]
    shutil.rmtree(tmp_path / "server")
    (tmp_path / "gpu-b_rank1.json.gz").write_bytes(b"no trace")
    with pytest.raises(TraceError, match="holds no run and no trace"):
        items(tmp_path)


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no run and no trace"):
        items(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        items(tmp_path / "no")


def test_caches_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / ".rlprof-cache").mkdir()
    write_trace(tmp_path / ".rlprof-cache" / "x.pt.trace.json")
    write_trace(tmp_path / "x.pt.trace.json")
    assert names(tmp_path) == ["x.pt.trace.json"]


def test_links_in_a_circle_and_what_we_exported_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    trace = write_trace(tmp_path / "rank0.json")
    perfetto.write_trace(load(trace), tmp_path / "rank0-trace.json.gz")
    assert names(tmp_path) == ["rank0.json"]
    assert load(tmp_path).path == trace


def test_captures_hide_nothing_that_lies_beside_or_above_them(tmp_path: Path) -> None:
    for run in (tmp_path / "data" / "run-1", tmp_path / "data" / "run-2"):
        grpo_run(run, steps=1)
        capture_folder(run / "rank-00000" / "step-000003-actor_update")
    assert names(tmp_path) == ["data/run-1", "data/run-2"]
    capture_folder(tmp_path / "a" / "step-1" / "actor")
    capture_folder(tmp_path / "a" / "step-2" / "actor")
    write_trace(tmp_path / "b" / "rank0.json")
    assert names(tmp_path) == ["a", "b/rank0.json", "data/run-1", "data/run-2"]


def test_captures_alone_are_one_trace_as_far_down_as_they_are_read(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    capture = capture_folder(deep).parent
    assert names(tmp_path) == ["."]
    assert items(capture) == [capture]
    capture_folder(deep.parent / "x" / "y")
    assert names(tmp_path) == ["a"]


def test_the_files_of_a_capture_are_one_trace_under_any_name_of_their_folder(
    tmp_path: Path,
) -> None:
    write_trace(tmp_path / "out" / "trace_view.json")
    (tmp_path / "out" / "ascend_pytorch_profiler_0.db").touch()
    write_trace(tmp_path / "rank0.json")
    assert names(tmp_path) == ["rank0.json", "out"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces in shared/data are not here")
def test_every_real_trace_is_found() -> None:
    found = names(DATA)
    assert (found[0], len(found)) == ("ascend", 20)
    assert names(DATA / "ascend") == ["."]


def test_a_link_to_a_trace_that_is_gone_is_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "rank0.pt.trace.json").symlink_to(tmp_path / "gone")
    write_trace(tmp_path / "rank1.pt.trace.json")
    assert names(tmp_path) == ["rank0.pt.trace.json", "rank1.pt.trace.json"]


def test_what_must_not_be_looked_at_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    write_trace(tmp_path / "a" / "rank0.pt.trace.json")
    write_trace(tmp_path / "closed" / "rank1.json")
    write_trace(tmp_path / "listed" / "rank2.pt.trace.json")
    (tmp_path / "closed").chmod(0)
    (tmp_path / "listed").chmod(0o444)
    paths = [str(tmp_path), str(tmp_path / "closed" / "rank1.json")]
    code = "import sys; from lightning_rlprof.ingest.ingest import ingest\n"
    code += "for row in ingest(sys.argv[1:], jobs=1).rows: print(*row[:4], sep='|')"
    command = [*_as_a_user(), sys.executable, "-c", code, *paths]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    a, closed, listed = (f"{tmp_path}/{name}" for name in ("a", "closed", "listed"))
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            f"{a}/rank0.pt.trace.json|0|made|None",
            f"{closed}|None|failed|{closed}: cannot be read (Permission denied)",
            f"{listed}/rank2.pt.trace.json|2|failed|"
            f"{listed}/rank2.pt.trace.json: cannot be read (Permission denied)",
            f"{paths[1]}|1|failed|{paths[1]}: cannot be read (Permission denied)",
        ],
    )


def _as_a_user() -> list[str]:
    """Return what to put before a command so that permissions hold for it, which root ignores."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("permissions do not hold for root, and there is no setpriv")
    less = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={less}", f"--inh-caps={less}"]
