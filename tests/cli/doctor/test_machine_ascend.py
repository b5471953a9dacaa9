"""What Ascend needs, on made directories; the real torch_npu is asked in tests/ascend."""

from pathlib import Path

import pytest

from lightning_rlprof.cli import doctor as machine
from lightning_rlprof.cli.doctor import Check
from tests.builders.ascend_captures import put_msprof

HOME = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


@pytest.fixture(autouse=True)
def _no_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HOME:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_SET_ENV", (tmp_path / "set_env.sh",))


@pytest.mark.parametrize("variable", HOME)
@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("x86_64-linux/ascend_toolkit_install.info", "arch=x86_64\nversion=8.3.RC1", "8.3.RC1"),
        ("version.info", "Version=8.0.RC1\n", "8.0.RC1"),
        ("compiler/version.info", "Version=[7.3.0.1]\n", "7.3.0.1"),
    ],
)
def test_cann_tells_its_version_where_it_always_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, file: str, text: str, says: str
) -> None:
    path = tmp_path / "cann" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setenv(variable, str(tmp_path / "cann"))
    assert machine.check_cann() == Check("CANN", "ok", f"{says} at {tmp_path}/cann")


def test_cann_that_does_not_tell_its_version_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.info").write_text("no version here\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    check = machine.check_cann()
    assert (check.state, check.message) == (
        "warn",
        f"cannot read the version of CANN in {tmp_path}",
    )


def test_a_path_to_nothing_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "moved"))
    check = machine.check_cann()
    assert (check.state, check.message) == (
        "broken",
        f"ASCEND_HOME_PATH={tmp_path}/moved is not a directory",
    )


def test_what_to_source_is_told_where_cann_is_installed(tmp_path: Path) -> None:
    assert machine.check_cann().fix.startswith("install CANN")
    (tmp_path / "set_env.sh").touch()
    check = machine.check_cann()
    assert (check.state, check.fix) == ("missing", f"source {tmp_path}/set_env.sh")


@pytest.mark.parametrize("name", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_the_variable_that_points_nowhere_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "x"))
    assert machine.check_cann().message == f"{name}={tmp_path}/x is not a directory"


def test_msprof_is_looked_for_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine.check_msprof().state == "missing"
    put_msprof(tmp_path / "bin", monkeypatch)
    assert machine.check_msprof() == Check("msprof", "ok", f"{tmp_path}/bin/msprof")


def test_a_torch_npu_that_is_not_installed_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "ask", None)
    check = machine.check_torch_npu()
    assert (check.state, check.message) == ("missing", "not installed")
    assert "lightning-rlprof[npu]" in check.fix


def test_a_torch_npu_that_crashes_is_broken_and_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch_npu.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    check = machine.check_torch_npu()
    assert check.state == "broken"
    assert check.message == "import failed: it ended by signal 11 without an answer"
