"""`rlprof size`: its tables, and what it refuses."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.analysis.models.published import CONFIGS
from tests.builders.runs import Row, header, write_rank
from tests.builders.speedy import SECOND
from tests.places import ROOT

Run = Callable[..., tuple[int, str, str]]
PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("sizing", "guides/device-tables", "guides/large-models", "guides/memory-math")
]
_EXAMPLE = re.compile(r"^```bash\n((?:rlprof size)[^`]*)```(.*?)^```text\n(.*?)^```", re.M | re.S)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Qwen2.5-7B"]))
    return path


def words(model: Path, devices: str = "2xH800-80G") -> tuple[object, ...]:
    lengths = ("--prompt-length", 1024, "--response-length", 2048)
    return ("size", "--model", model, "--devices", devices, *lengths)


def test_a_close_job_has_its_memory_changes_and_times(rlprof: Run, model: Path) -> None:
    status, out, _ = rlprof(*words(model), "--batch", 128)
    assert status == 0
    assert out.startswith("Close: from ")
    assert all(name in out for name in ("optimizer", "KV cache", "changes", "actor_generate"))


def test_a_job_that_fits_lists_no_changes(rlprof: Run, model: Path) -> None:
    out = rlprof(*words(model, "8xH200"))[1]
    assert out.startswith("Fits: ")
    assert "changes" not in out
    assert "No batch: pass --batch N" in out


def test_json_has_the_verdict_and_all_tables(rlprof: Run, model: Path) -> None:
    facts = json.loads(rlprof(*words(model, "1xH100"), "--lora", 16, "--json")[1])
    assert facts["verdict"] == "fits"
    assert facts["spare_bytes"][0] > 30e9
    assert [table["name"] for table in facts["tables"]] == ["sizing", "changes", "step_time"]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--prompt-length", "size needs --prompt-length\n  hint: Memory and time depend on"),
        ("--response-length", "size needs --response-length\n  hint: Memory and time depend"),
        ("--model", "size needs --model\n  hint: See rlprof size --help"),
        ("--devices", "size needs --devices\n"),
    ],
)
def test_what_is_missing_is_named(rlprof: Run, model: Path, option: str, error: str) -> None:
    given = list(words(model))
    del given[given.index(option) : given.index(option) + 2]
    status, out, err = rlprof(*given)
    assert (status, out) == (2, "")
    assert err.startswith(f"rlprof: error: {error}")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (("--algorithm", "rloo"), "--algorithm 'rloo' is unknown\n  hint: Known: grpo, ppo, dpo"),
        (("--shard", "fsdp3"), "--shard 'fsdp3' is unknown\n  hint: Known: fsdp, zero1"),
        (("--tp", 3), "2 devices for training are not a multiple of tp x pp x cp = 3"),
        (("--tokens", 2048), "tokens=2048 is less than the 3072 tokens of one sequence"),
        (("--forward-tokens", 9), "forward_tokens=9 is less than the 3072 tokens of one sequence"),
    ],
)
def test_what_cannot_be_is_an_error(
    rlprof: Run, model: Path, more: tuple[object, ...], error: str
) -> None:
    status, _, err = rlprof(*words(model), *more)
    assert status == 2
    assert err.startswith(f"rlprof: error: {error}")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder per published model, with its `config.json`, in the working directory."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_is_what_size_prints(rlprof: Run, page: Path) -> None:
    examples = _EXAMPLE.findall(page.read_text())
    assert examples
    for command, _, shown in examples:
        _, *given = shlex.split(command.replace("\\\n", " "))
        status, out, _ = rlprof(*given)
        assert status == 0
        printed = {" ".join(line.split()) for line in out.splitlines()}
        lines = [" ".join(line.split()) for line in shown.splitlines()]
        assert [line for line in lines if line not in printed] == []


def test_a_run_is_compared_with_what_is_attainable(
    rlprof: Run, model: Path, tmp_path: Path
) -> None:
    rows = []
    for step in range(1, 7):
        begin, end = step * 20 * SECOND, (step * 20 + 12) * SECOND
        counts = {"tokens": 512 * 300, "samples": 512, "tokens_max": 1024}
        rows.append(Row("actor_generate", "stage", step, begin, end, counters=counts))
        rows.append(Row("step", "step", step, begin, end))
    write_rank(tmp_path / "run", header(), rows)
    given = ("--compare", tmp_path / "run", "--devices", "8x80GB@989TFLOPS@3.35TB/s")
    [speed] = json.loads(rlprof("size", *given, "--model", model, "--json")[1])["speed"]
    assert (speed["verdict"], speed["missing"]) == ("normal", "eager")
    narrower = rlprof("size", *given, "--model", model, "--max-num-seqs", 256, "--eager", "--json")
    [known] = json.loads(narrower[1])["speed"]
    assert known["high"] / known["low"] < speed["high"] / speed["low"]
    out = rlprof("size", *given)[1]
    assert "unknown" in out
    assert "needs model" in out
