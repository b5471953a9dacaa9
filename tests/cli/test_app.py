import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.cli import app
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header

Run = Callable[..., tuple[int, str, str]]


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lightning_rlprof", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_error_is_one_line_on_stderr_and_exit_status_1(tmp_path: Path) -> None:
    done = _run("summary", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"rlprof: {tmp_path}/nowhere: no such file or directory\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_name_that_the_encoding_of_the_terminal_lacks_is_spelled_out(
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
    ("words", "says"),
    [
        (["summary"], "Missing argument 'RUN'. (see rlprof summary --help)"),
        (["summary", "x", "--bogus"], "No such option: --bogus (see rlprof summary --help)"),
        (["--bogus"], "No such option: --bogus (see rlprof --help)"),
        (["config", "bogus"], "No such command 'bogus'. (see rlprof config --help)"),
        (["compare", "a", "b", "--fail-over", "x"], "--fail-over x: takes "),
    ],
)
def test_wrong_words_are_one_line(rlprof: Run, words: list[str], says: str) -> None:
    status, out, err = rlprof(*words)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"rlprof: {says}")


@pytest.mark.parametrize("words", [[], ["config"]])
def test_no_words_are_a_question_for_help(rlprof: Run, words: list[str]) -> None:
    _, out, err = rlprof(*words)
    assert "Commands" in out + err
    assert "rlprof: " not in out + err


def test_the_command_line_reads_without_torch_or_lightning() -> None:
    code = (
        "import sys\n"
        "from lightning_rlprof.cli import app, config, run_commands\n"
        "from lightning_rlprof.analysis import catalog\n"
        "from lightning_rlprof.loaders import load\n"
        "from lightning_rlprof.report import terminal\n"
        "from lightning_rlprof.report.html import page\n"
        "from lightning_rlprof.report.chrome_trace import writer\n"
        "print(sorted({'torch', 'torch_npu', 'nvtx', 'pytorch_lightning', 'lightning'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_numpy_is_imported_only_by_a_command_that_needs_it() -> None:
    code = "import sys, lightning_rlprof.cli.app; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"


def test_an_error_cannot_steer_the_terminal_nor_take_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prog_name: str) -> None:
        raise RlprofError("bad\x1b[2J name\nand more")

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", "rlprof: bad\\x1b[2J name and more\n")


def test_what_the_machine_refuses_is_one_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TraceWriter(run := tmp_path / "run", make_header()).close()
    name = "x" * 300
    done = _run("report", str(run), "-o", name)
    assert (done.returncode, done.stderr) == (1, f"rlprof: {name}: File name too long\n")

    def full(prog_name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(app, "app", full)
    with pytest.raises(SystemExit):
        app.main()
    assert capsys.readouterr().err == "rlprof: standard output: No space left on device\n"


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(prog_name: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(ZeroDivisionError):
        app.main()


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "version", lambda name: {"lightning-rlprof": "1.2.3"}[name])
    monkeypatch.setattr(sys, "argv", ["rlprof", "--version"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == "rlprof 1.2.3\n"


def test_without_an_installation_the_version_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise app.PackageNotFoundError(name)

    monkeypatch.setattr(app, "version", absent)
    monkeypatch.setattr(sys, "argv", ["rlprof", "--version"])
    with pytest.raises(SystemExit):
        app.main()
    assert capsys.readouterr().out == "rlprof, not installed\n"
