"""`rlprof show`: the list of analyses, and one of them with its files and options."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders.memory import build
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header
from tests.analysis.models.tiny import MODELS
from tests.builders.chrome import ChromeTrace
from tests.builders.ingest_traces import write_trace
from tests.builders.runs import Row, grpo_run, header, write_rank
from tests.builders.sampled import S, metric_lines
from tests.test_run import recorded

Run = Callable[..., tuple[int, str, str]]
SHOWN = [name for name, each in ANALYSES.items() if each.place != "verb"]


def test_without_a_name_all_analyses_are_listed_by_group(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path).path
    status, out, _ = rlprof("show", run, "--all")

    assert status == 0
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "Diagnosis",
        "Steps",
        "Device",
        "Ranks",
        "Memory",
        "Samples",
    ]
    listed = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert [*listed] == sorted(SHOWN, key=list(listed).index)
    found = json.loads(rlprof("show", run, "--json")[1])["analyses"]
    assert [each["name"] for each in found] == SHOWN
    for each in found:
        assert each["data"] == (not listed[each["name"]].endswith("(no data)"))
    data = {each["name"]: each["data"] for each in found}
    assert data["stages"]
    assert not any(data[name] for name in ("kernels", "idle", "communication", "device_counters"))
    short = rlprof("show", run)[1].splitlines()
    assert [line.split()[0] for line in short if line.startswith("  ")] == [
        name for name in listed if data[name]
    ]
    hidden = len(data) - sum(data.values())
    assert short[-1] == f"{hidden} more have no data in this run. List them: rlprof show RUN --all"


@pytest.mark.parametrize("name", SHOWN)
def test_the_list_marks_exactly_what_has_no_data(name: str, rlprof: Run, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank0.pt.trace.json")
    found = json.loads(rlprof("show", trace, "--json")[1])["analyses"]
    marked = {each["name"]: each["data"] for each in found}
    (table,) = json.loads(rlprof("show", trace, name, "--json")[1])["tables"]
    if not marked[name]:
        assert table["abstained"] is not None or not table["rows"]


@pytest.mark.parametrize("name", SHOWN)
def test_each_analysis_is_shown_and_printed_as_json(name: str, rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)

    status, out, err = rlprof("show", run.path, name)
    (table,) = json.loads(rlprof("show", run.path, name, "--json")[1])["tables"]

    assert (status, err) == (0, "")
    assert out.startswith(f"{run.path}\n\n{table['name']}")
    assert table == json.loads(json.dumps(ANALYSES[name].run(run).to_dict()))


def test_rows_of_one_rank_and_a_limit(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)

    def rows(*words: str) -> list[list[object]]:
        (table,) = json.loads(rlprof("show", run.path, *words, "--json")[1])["tables"]
        return list(table["rows"])

    assert len(rows("stages")) == 2
    assert len(rows("stages", "--limit", "1")) == 1
    assert len(rows("rank_status", "--rank", "0")) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("kernel",), "unknown analysis 'kernel'\n  hint: did you mean 'kernels'? List all: rlp"),
        (("ledger", "--rank", "0"), "--rank does not apply to 'ledger': it has no rank column\n"),
        (("stages", "--rank", "7"), "rank 7 is not in this run (ranks: 0)\n"),
        (("rank_status", "--rank", "7"), "rank 7 is not in this run (ranks: 0)\n"),
        (("stages", "--params", "1e9"), "--params applies to 'throughput', not to 'stages'"),
        (("stages", "--price", "2"), "--price applies to 'ledger', not to 'stages'"),
        (("critical_path", "--by", "step"), "--by step applies to 'ledger', not to 'critical_p"),
        (("gaps", "--by", "rank"), "--by rank applies to 'ledger' and 'critical_path', not to 'g"),
        (("stragglers",), "'stragglers' is a verb of its own\n  hint: rlprof stragglers "),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    words: tuple[str, ...], text: str, rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("show", recorded(tmp_path).path, *words)

    assert (status, out) == (2, "")
    assert err.startswith(f"rlprof: error: {text}")


def gpu_run(run: Path) -> None:
    """Write two ranks with memory, and the names of files that recorders leave."""
    for rank in (0, 1):
        counters = {"device_peak_bytes": (3 + rank) << 30, "host_rss_bytes": 1 << 30}
        rows = [Row("actor_update", "stage", 3, 0, 9, counters=counters)]
        write_rank(run, header(rank, 2, device="cuda"), rows)


def test_memory_shows_peaks(rlprof: Run, tmp_path: Path) -> None:
    gpu_run(tmp_path / "run")

    status, out, err = rlprof("show", tmp_path / "run", "memory")

    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("actor_update")]
    assert [row[:6] for row in rows[:2]] == [
        ["actor_update", "0", "torch", "3", "3.00", "GiB"],
        ["actor_update", "1", "torch", "3", "4.00", "GiB"],
    ]
    assert "warning" not in out


def test_json_of_memory_is_in_bytes(rlprof: Run, tmp_path: Path) -> None:
    gpu_run(tmp_path)
    data = json.loads(rlprof("show", tmp_path, "memory", "--json")[1])
    assert (data["run"], data["warnings"]) == (str(tmp_path), [])
    (table,) = data["tables"]
    assert table["name"] == "memory"
    peak = [column["name"] for column in table["columns"]].index("peak")
    assert table["columns"][peak] == {"name": "peak", "kind": "count", "unit": "bytes"}
    assert [row[peak] for row in table["rows"]] == [3 << 30, 4 << 30] * 2 + [1 << 30] * 4


def test_a_run_without_memory_has_no_data(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path)
    status, out, _ = rlprof("show", tmp_path, "memory")
    assert status == 0
    text = " ".join(out.split())
    assert (
        "memory: no data. This run has no memory data. Capture a step with profile_with_memory:"
        in text
    )


def test_memory_finds_what_the_recorder_writes(rlprof: Run, tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile=True, memory={"level": "timeline"})
    head = make_header()
    with Session(config, tmp_path, head, build(config, head)) as session:
        session.begin_step(1)
        with stage("actor_update"):
            pass
        session.end_step()
    assert (tmp_path / "rank-00000" / "step-000001" / "memory-timeline.jsonl").is_file()
    for run in (tmp_path, tmp_path / "rank-00000.jsonl"):
        assert "\nall " in rlprof("show", run, "memory")[1]


def test_throughput_takes_parameters_and_peak(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path).path

    plain = json.loads(rlprof("show", run, "throughput", "--json")[1])["tables"][0]
    options = ("--json", "--params", "1e9", "--peak-tflops", "100")
    stated = json.loads(rlprof("show", run, "throughput", *options)[1])["tables"][0]

    names = [column["name"] for column in plain["columns"]]
    assert "MFU" in names
    assert plain["abstained"] is stated["abstained"] is None
    assert all(row[names.index("MFU")] is None for row in plain["rows"])


def test_throughput_takes_a_model(rlprof: Run, tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "config.json"
    counters = {"tokens": 80, "samples": 4}
    write_rank(run, header(0, 1), [Row("actor_update", "stage", 1, 0, 9, counters=counters)])
    model.write_text(json.dumps(MODELS["llama"]))
    out = rlprof("show", run, "throughput", "--json", "--model", model)[1]
    table = json.loads(out)["tables"][0]
    source = [column["name"] for column in table["columns"]].index("FLOPs source")
    assert "model" in {row[source] for row in table["rows"]}
    status, _, err = rlprof("show", run, "throughput", "--model", tmp_path / "none.json")
    assert (status, "cannot read the model configuration" in err) == (2, True)


@pytest.mark.parametrize("option", ["--params", "--peak-tflops"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_impossible_numbers_are_refused(
    option: str, value: str, rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("show", recorded(tmp_path).path, "throughput", option, value)
    assert (status, out) == (2, "")
    assert err.startswith(f"rlprof: error: {option} {float(value)} is not between 0 and 1e18\n")
    instance = {"--params": "7.6e9", "--peak-tflops": "989"}[option]
    assert err.endswith(f"hint: For example {option} {instance}\n")


def test_the_analysis_may_come_before_the_run(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "run")
    swapped = rlprof("show", "stages", tmp_path / "run")
    assert swapped == rlprof("show", tmp_path / "run", "stages")
    assert swapped[0] == 0


def test_a_truncated_trace_says_how_much_was_read_and_what_is_missing(
    rlprof: Run, tmp_path: Path
) -> None:
    trace = ChromeTrace({"baseTimeNanoseconds": 10**18})
    for at in range(5):
        trace.mark("actor_update", 10 * at, 10 * at + 5)
    trace.launched(1, 2)
    path = tmp_path / "t.json"
    data = trace.encode()
    path.write_bytes(data[: data.rindex(b'"kernel"')])
    text = "it is truncated: 6 events were read, the rest is missing (no kernel was read)"

    for verb in (("show", path, "stages"), ("summary", path), ("show", path, "kernels")):
        _, out, _ = rlprof(*verb)
        assert out.count(f"warning: rank 0: {text}\n") == 1
        assert json.loads(rlprof(*verb, "--json")[1])["warnings"][0]["text"] == text


@pytest.mark.parametrize("name", ["host_cpu_percent", "PCIe [rx", "link] (GB/s)", "[/red]", "{x"])
def test_background_metrics_of_any_name_are_shown_by_stage(
    rlprof: Run, tmp_path: Path, name: str
) -> None:
    rows = [Row("actor_generate", "stage", 1, 0, 10**9), Row("step", "step", 1, 0, 10**9)]
    path = write_rank(tmp_path / "run", header(), rows, status=None)
    lines = [["metrics", 10, 10**9, 0, {name: 25.5}, {}], ["end", 10**9, "finished"]]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    listed = json.loads(rlprof("show", path.parent, "--json")[1])["analyses"]
    assert {each["name"]: each["data"] for each in listed}["device_counters"]
    status, out, err = rlprof("show", path.parent, "device_counters")
    assert (status, err) == (0, "")
    assert [line.split(name)[0] for line in out.splitlines() if "actor_generate" in line] == [""]
    assert rlprof("show", path.parent, "device_counters", "--format", "markdown")[0] == 0
    status, out, _ = rlprof("sql", path.parent, "select name, value from background_metrics")
    assert (status, name in out) == (0, True)


def test_findings_on_background_metrics_are_printed_with_their_query(
    rlprof: Run, tmp_path: Path
) -> None:
    rows = [Row("step", "step", at + 1, at * S, (at + 1) * S) for at in range(100)]
    path = write_rank(tmp_path / "run", header(), rows, status=None)
    lines = metric_lines({"cpu_throttled_percent": [60.0] * 100})
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, ["end", 0, "finished"]])
    status, out, err = rlprof("findings", path.parent)
    assert (status, err) == (0, "")
    assert "[cpu-quota]" in out
    assert "60% of the time" in out
