"""What rlprof reads on Windows and macOS, as `tests.doubles.systems.other_system` imitates them."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.cli.app import app
from tests.builders.ingest_traces import write_traces
from tests.places import ROOT

pytestmark = pytest.mark.deep
DOUBLE = ROOT / "tests" / "doubles" / "systems" / "other_system.py"
READ = """
--help
help inputs
summary demo
summary trace --json
findings slow --all
report demo -o report.html
report trace -o trace.html
compare demo kv
stragglers slow
whatif demo --speedup actor_update=2
watch demo --once
hang demo
ls .
sql demo 'SELECT name, count(*) AS n FROM spans GROUP BY name ORDER BY name'
sql trace 'SELECT count(*) AS n FROM kernels' -o kernels.parquet
ingest demo kv trace
summary demo
show trace
export demo -o t.json.gz
export trace --kernels -o k.json
export demo --format csv -o tables
export demo --format parquet -o columns
export demo --format otlp -o s.jsonl
export demo --format insight -o i
export demo --to {url}/up
summary {url}/up/demo
serve demo --port 0
open demo --no-browser
capture demo
mcp nothing
ascend parse demo
config init
config check rlprof.yaml
config schema
size --model model --devices 8xH100-80G --prompt-length 64 --response-length 64
doctor
"""
RECORD = ["loop", "run -- python train.py", "nsys run -- python train.py", "demo"]
# These differ between two runs on one system, too.
CHANGES = re.compile(r"127\.0\.0\.1:\d+/\S*|\d+(\.\d+)? s\b|(?<=\|) *[\d.]+$", re.M)


def commands(url: str) -> list[list[str]]:
    lines = READ.format(url=url).strip().splitlines()
    found = [[word.strip("'") for word in re.findall(r"'[^']+'|\S+", line)] for line in lines]
    return found + [["show", run, name] for run in ("slow", "trace") for name in ANALYSES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    given = tmp_path / "given"
    with tarfile.open(ROOT / "examples" / "runs.tar.gz") as archive:
        archive.extractall(given, filter="data")
    write_traces(given / "trace", 2)
    (given / "model").mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config |= {"num_attention_heads": 4, "intermediate_size": 128}
    (given / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path


def answers(system: str, folder: Path, asked: list[list[str]]) -> list[list[tuple[int, str, str]]]:
    done = subprocess.run(
        [sys.executable, DOUBLE, system, folder, json.dumps(asked)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80",
            "XDG_STATE_HOME": str(folder / "work" / "state"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[tuple[int, str, str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_system_without_names_of_linux_reads_the_same(system: str, folder: Path) -> None:
    asked = commands(f"file://{folder / 'work'}")
    verbs = {command.name for command in app.registered_commands}
    verbs |= {group.name for group in app.registered_groups}
    assert {words[0] for words in asked} >= verbs - {"run", "nsys", "demo"}
    for words, (here, there) in zip(asked, answers(system, folder, asked), strict=True):
        if words[0] == "doctor":  # It shows the machine.
            assert (there[0], "Traceback" in there[2]) == (here[0], False), there
            continue
        assert here[0] in (0, 2), here
        assert [CHANGES.sub("", str(each)) for each in there] == [
            CHANGES.sub("", str(each)) for each in here
        ], words
        if words[0] in ("serve", "open"):
            assert "a page of 200" in there[1], there


def test_a_loop_is_recorded_on_macos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF_JOB", "one")
    loop, findings, summary = answers(
        "darwin", folder, [["loop"], ["findings", "loops"], ["summary", "loops", "--json"]]
    )
    assert loop[1][0] == findings[1][0] == summary[1][0] == 0, (loop, findings, summary)
    assert json.loads(summary[1][1])["summary"]["steps"] == 3
    assert "Traceback" not in str((loop, findings, summary))


def test_windows_refuses_to_record_in_one_line(folder: Path) -> None:
    asked = [line.split() for line in RECORD]
    for _, (status, out, err) in answers("win32", folder, asked):
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "needs Linux, macOS or WSL" in err
