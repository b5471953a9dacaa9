import csv
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import typer

from lightning_rlprof.cli import app
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header
from tests.builders.runs import grpo_run

Run = Callable[..., tuple[int, str, str]]


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lightning_rlprof", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_error_has_a_hint_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    done = _run("summary", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"rlprof: error: no such run or trace: '{tmp_path}/nowhere'\n"
        "  hint: See rlprof help inputs.\n"
    )


def test_a_missing_run_lists_the_newest_ones(rlprof: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        TraceWriter(tmp_path / name, make_header()).close()
    err = rlprof("summary", tmp_path / "nope")[2]
    assert err.endswith(f"hint: Newest runs there: {tmp_path}/b, {tmp_path}/a\n") or err.endswith(
        f"hint: Newest runs there: {tmp_path}/a, {tmp_path}/b\n"
    )


def test_with_json_an_error_is_json(rlprof: Run, tmp_path: Path) -> None:
    for words in (["--json"], ["--format", "json"], ["--format=json"]):
        status, out, err = rlprof("summary", tmp_path / "nope", *words)
        assert (status, out) == (2, "")
        assert json.loads(err)["error"] == {
            "code": "not_found",
            "message": f"no such run or trace: '{tmp_path}/nope'",
            "hint": "See rlprof help inputs.",
        }
    assert json.loads(rlprof("sql", ".", "x", "y", "--json")[2])["error"]["code"] == "usage"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_name_outside_the_encoding_of_the_terminal_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    stage = ["span", "\u751f\u6210", "stage", 1, 0, 5, 1, 1, None, None]
    step = ["span", "step", "step", 1, 0, 9, 1, 2, None, None]
    TraceWriter(tmp_path / "run", make_header()).write([stage, step])
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = _run("summary", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u751f\u6210" in done.stdout


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["config", "check"], "missing argument 'FILE'", "See rlprof config check --help"),
        (["summary", "--limt", "3"], "no such option: --limt (Possible options: --limit", "See rl"),
        (["summary", "x", "--bogus"], "no such option: --bogus", "See rlprof summary --help"),
        (["--bogus"], "no such option: --bogus", "See rlprof --help"),
        (["config", "bogus"], "no such command 'bogus'", "See rlprof config --help"),
        (["help", "exit-code"], "unknown topic 'exit-code'", "did you mean 'exit-codes'? Topics"),
        (["help", "summry"], "unknown topic 'summry'", "did you mean 'summary'? Topics"),
        (["compare", "a", "b", "--fail-if-slower", "x"], "--fail-if-slower x is not ", "For exa"),
    ],
)
def test_usage_errors_have_a_hint(rlprof: Run, words: list[str], error: str, hint: str) -> None:
    status, out, err = rlprof(*words)
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert err.startswith(f"rlprof: error: {error}")
    assert f"\n  hint: {hint}" in err


PANELS = {
    "Most used": ["run", "report", "findings", "watch"],
    "More": [
        *("summary", "compare", "hang", "show", "stragglers", "whatif", "sql", "ls", "open"),
        *("serve", "export", "ingest", "capture", "mcp", "nsys", "ascend", "config"),
        *("size", "demo", "doctor", "help"),
    ],
}


def test_the_help_groups_the_verbs(rlprof: Run) -> None:
    lines = rlprof("--help")[1].splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.endswith(":") and line[0] != " ":
            panel = line[:-1]
        elif re.match("  [a-z]", line) and panel in PANELS:
            found.setdefault(panel, []).append(line.split()[0])
    assert found == PANELS
    assert len([*chain(*PANELS.values())]) == 25  # 24 for people, and `mcp` for agents.
    assert rlprof()[:2] == (2, "\n".join([*lines, ""]))


@pytest.mark.parametrize("verb", sorted({*chain(*PANELS.values())} - {"init"}))
def test_each_verb_has_one_line_and_help_in_three_ways(rlprof: Run, verb: str) -> None:
    (text,) = re.findall(rf"^  {verb}  +(.+)$", rlprof("--help")[1], re.MULTILINE)
    assert text.endswith(".")
    assert rlprof(verb, "-h") == rlprof("help", verb) == rlprof(verb, "--help")


def test_help_of_a_verb_of_two_words(rlprof: Run) -> None:
    assert rlprof("help", "config", "check") == rlprof("config", "check", "--help")
    assert rlprof("help")[1] == rlprof("-h")[1]
    assert "inputs, exit-codes" in rlprof("help", "--help")[1]


# Each takes part of the 150 ms that a person does not notice.
HEAVY = ("importlib.metadata", "numpy", "pydantic", "rich", "duckdb", "jinja2")
COMPLETE = {"_RLPROF_COMPLETE": "complete_bash", "COMP_WORDS": "rlprof su", "COMP_CWORD": "1"}


@pytest.mark.skipif(typer.__version__.startswith("0.19."), reason="its options import Rich")
@pytest.mark.parametrize(
    ("words", "variables", "shown"),
    [
        (["--version"], {}, "rlprof "),
        (["--help"], {}, "Usage: rlprof [OPTIONS] COMMAND"),
        (["summary", "--help"], {}, "Usage: rlprof summary"),
        (["config", "check", "--help"], {}, "Usage: rlprof config check"),
        ([], COMPLETE, "summary"),
        ([], COMPLETE | {"COMP_WORDS": "rlprof show . ker", "COMP_CWORD": "3"}, "kernels"),
    ],
)
def test_version_help_and_completion_import_little(
    words: list[str], variables: dict[str, str], shown: str
) -> None:
    code = f"""
import atexit, sys
sys.path[:0] = {sys.path}
from lightning_rlprof.cli.app import main
atexit.register(lambda: print(*[name for name in {HEAVY} if name in sys.modules], len(sys.modules)))
sys.argv[0] = "rlprof"
main()
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *words],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(shown), done.stderr
    *heavy, modules = done.stdout.splitlines()[-1].split()
    assert not heavy
    assert int(modules) < 250


@pytest.mark.parametrize("verb", [*chain(*PANELS.values()), "nsys run"])
def test_the_help_of_a_verb_shows_no_python_types(rlprof: Run, verb: str) -> None:
    status, out, _ = rlprof(*verb.split(), "--help")
    assert status == 0
    assert not re.search(r"<\w+>|OPTIONS\] \{", out)


@pytest.mark.parametrize("topic", ["inputs", "exit-codes", "environment"])
def test_help_explains_a_topic(rlprof: Run, topic: str) -> None:
    assert topic in rlprof("help")[1]
    status, out, _ = rlprof("help", topic)
    assert (status, len(out.splitlines()) > 4) == (0, True)


def test_formats_of_a_table(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, steps=3)
    out = rlprof("show", tmp_path, "stages", "--format", "csv")[1]
    rows = list(csv.reader(out.splitlines()))
    assert rows[0][:2] == ["stage", "share"]
    assert all(len(row) == len(rows[0]) for row in rows)
    (table,) = json.loads(rlprof("show", tmp_path, "stages", "--json")[1])["tables"]
    assert [[cell or None for cell in row] for row in rows[1:]] == [
        [None if cell is None else str(cell) for cell in row] for row in table["rows"]
    ]
    out = rlprof("show", tmp_path, "stages", "--format", "markdown", "-n", 1)[1]
    assert out.startswith("**stages**\n\n| stage | share |")
    assert "| actor\\_generate |" in out


def test_hints_go_to_a_terminal_only_and_can_be_switched_off(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo_run(tmp_path, steps=3)
    assert rlprof("summary", tmp_path)[2] == ""
    monkeypatch.setattr("lightning_rlprof.cli.console.on_terminal", lambda: True)
    assert rlprof("summary", tmp_path)[2] == f"next: rlprof findings {tmp_path}\n"
    for option in ("--no-hints", "--quiet", "--json"):
        assert rlprof("summary", tmp_path, option)[2] == ""


def test_quiet_prints_no_warnings(rlprof: Run, tmp_path: Path) -> None:
    TraceWriter(tmp_path / "run", make_header()).write([["span", "a", "stage"]])
    assert "warning: " in rlprof("show", tmp_path, "ledger")[1]
    assert "warning: " not in rlprof("show", tmp_path, "ledger", "-q")[1]


@pytest.mark.parametrize("words", [[], ["config"]])
def test_without_words_help_is_printed(rlprof: Run, words: list[str]) -> None:
    _, out, err = rlprof(*words)
    assert "Usage: rlprof" in out + err
    assert "rlprof: " not in out + err


def test_the_command_line_reads_without_torch_or_lightning() -> None:
    code = (
        "import sys\n"
        "from lightning_rlprof.cli import app, config, run_commands\n"
        "from lightning_rlprof.analysis import catalog\n"
        "from lightning_rlprof.loaders import load\n"
        "from lightning_rlprof.report import terminal\n"
        "from lightning_rlprof.report.html import page\n"
        "from lightning_rlprof.report import chrome_trace\n"
        "print(sorted({'torch', 'torch_npu', 'nvtx', 'pytorch_lightning', 'lightning'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_numpy_is_imported_only_by_a_command_that_needs_it() -> None:
    code = "import sys, lightning_rlprof.cli.app; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"


def test_an_error_is_one_line_that_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prog_name: str) -> None:
        raise RlprofError("bad\x1b[2J name\nand more")

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "rlprof: error: bad\\x1b[2J name and more\n")


def test_a_refusal_of_the_machine_is_an_error_without_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TraceWriter(run := tmp_path / "run", make_header()).close()
    name = "x" * 300
    done = _run("report", str(run), "-o", name)
    assert (done.returncode, done.stderr) == (2, f"rlprof: error: {name}: File name too long\n")

    def full(prog_name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(app, "app", full)
    with pytest.raises(SystemExit):
        app.main()
    assert capsys.readouterr().err == "rlprof: error: standard output: No space left on device\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "broken disk")])
def test_a_bug_of_rlprof_has_a_traceback_and_an_exit_code_of_its_own(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [1, 100_000])
@pytest.mark.parametrize("format_", ["csv", "table"])
def test_a_reader_that_ends_early_is_no_failed_check(
    rows: int, format_: str, tmp_path: Path
) -> None:
    grpo_run(tmp_path)
    query = f"select * from range({rows})"
    words = [sys.executable, "-m", "lightning_rlprof", "sql", str(tmp_path), query]
    reader, output = os.pipe()
    os.close(reader)  # before the command starts, which may be done sooner than this test goes on
    with open(output, "wb") as closed:
        done = subprocess.run(
            [*words, "--format", format_], stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "code"),
    [("", 141), ("help", 141), ("ls nowhere", 2), ("ls nowhere --json", 2), ("run -- false", 1)],
)
def test_readers_that_end_early_change_the_code_of_an_output_only(
    words: str, code: int, tmp_path: Path
) -> None:
    reader, output = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_rlprof", *words.split()]
    with open(output, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=closed, cwd=tmp_path, check=False)
    assert done.returncode == code


@pytest.mark.parametrize("words", ["help", "summary RUN", "summary RUN --json"])
def test_without_a_standard_output_a_command_is_done(words: str, tmp_path: Path) -> None:
    grpo_run(tmp_path)
    line = f"{sys.executable} -m lightning_rlprof {words.replace('RUN', str(tmp_path))} >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_is_an_exit_code_of_its_own() -> None:
    code = """
import sys
from lightning_rlprof.cli import app, run_commands
def interrupt(*given):
    raise KeyboardInterrupt
run_commands.open_runs = interrupt
sys.argv = ["rlprof", "summary", "RUN"]
app.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "VERSION", "1.2.3")
    monkeypatch.setattr(sys, "argv", ["rlprof", "--version"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == "rlprof 1.2.3\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rlprof summary 2", ["20261125-a"]),
        ("rlprof compare 2", ["20261125-a"]),
        ("rlprof show mem", ["memory", "memory_phases"]),
        ("rlprof show 20261125-a idl", ["idle"]),
        ("rlprof whatif --remove actor_up", ["actor_update"]),
        ("rlprof summary --lim", ["--limit"]),
    ],
)
def test_the_shell_completes_runs_analyses_and_stages(
    words: str,
    completed: list[str],
    rlprof: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grpo_run(tmp_path / "profiler_data" / "20261125-a")
    monkeypatch.chdir(tmp_path)
    values = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    for name, value in (COMPLETE | values).items():
        monkeypatch.setenv(name, value)
    assert rlprof()[1].split() == completed


def test_without_a_run_the_newest_one_is_taken(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo_run(tmp_path / "profiler_data" / "20261125-a")
    monkeypatch.chdir(tmp_path)
    assert rlprof("show", "stages") == rlprof("show", "profiler_data", "stages")
    query = "select count(*) from spans -- a//b"
    assert rlprof("sql", query) == rlprof("sql", "profiler_data", query)
    assert rlprof("show", "kernel")[2] == (
        "rlprof: error: unknown analysis 'kernel'\n"
        "  hint: did you mean 'kernels'? List all: rlprof show profiler_data\n"
    )
    assert rlprof("summary", "nope")[2] == (
        "rlprof: error: no such run or trace: 'nope'\n"
        "  hint: Newest runs there: profiler_data/20261125-a\n"
    )
    for words in (["summary"], ["stragglers"], ["show", "ledger"], ["whatif"]):
        tables = json.loads(rlprof(*words, "--json", "-n", 1)[1])["tables"]
        assert {len(table["rows"]) for table in tables} <= {0, 1}
