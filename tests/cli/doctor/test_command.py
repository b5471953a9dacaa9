import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli import doctor as machine
from lightning_rlprof.cli import doctor as selftest
from lightning_rlprof.cli.doctor import Check, Diagnosis

Run = Callable[..., tuple[int, str, str]]
CHECKS = (
    Check("torch", "ok", "2.13.0"),
    Check("nvtx", "ok", "0.2.17"),
    Check("nsys", "missing", "not on PATH", "install it"),
    Check("disk", "broken", "only 1 GiB free", "remove old runs"),
)


FRAMEWORKS = [
    machine.Framework("TRL", "trl", "1.16.0", "1.16"),
    machine.Framework("verl", "verl", None, "0.9.1"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Findings as above, without looking at this machine; returns what was asked about."""
    seen: list[Any] = []

    def diagnose(save_path: Path) -> Diagnosis:
        seen.append(save_path)
        return Diagnosis("cpu", {check.name: check for check in CHECKS})

    monkeypatch.setattr(machine, "diagnose", diagnose)
    monkeypatch.setattr(machine, "doors", lambda: FRAMEWORKS)
    return seen


def test_a_line_per_finding_and_below_it_the_cure(rlprof: Run, asked: list[Any]) -> None:
    assert rlprof("doctor") == (
        0,
        "ok       torch  2.13.0\n"
        "ok       nvtx   0.2.17\n"
        "missing  nsys   not on PATH\n"
        "                install it\n"
        "broken   disk   only 1 GiB free\n"
        "                remove old runs\n"
        "Frameworks that rlprof run records:\n"
        "  TRL   1.16.0, tested with 1.16\n"
        "  not installed here: verl\n"
        "This machine can record: spans, memory, torch_profiler\n",
        "",
    )
    assert asked == [Path("profiler_data")]


def test_as_json_it_is_the_findings(rlprof: Run, asked: list[Any]) -> None:
    status, out, err = rlprof("doctor", "--json")
    data = json.loads(out)
    assert (status, err) == (0, "")
    assert (data["device"], data["needs"]) == ("cpu", [])
    assert data["records"] == ["spans", "memory", "torch_profiler"]
    assert data["frameworks"][1] == {
        "name": "verl",
        "package": "verl",
        "installed": None,
        "tested": "0.9.1",
    }
    assert data["checks"][2] == {
        "name": "nsys",
        "state": "missing",
        "message": "not on PATH",
        "fix": "install it",
    }


def test_a_configuration_that_lacks_something_is_exit_status_1_with_its_keys(
    rlprof: Run, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [Check("integrated.mstx", "missing", "no markers"), Check("device_time", "ok", "x")]
    monkeypatch.setattr(machine, "check_needs", lambda config, found: lacking)
    file = tmp_path / "rlprof.yaml"
    file.write_text("integrated: {mstx: true, profile_save_path: elsewhere}\n")
    status, out, err = rlprof("doctor", "--config", file)
    assert status == 1
    assert f"\n{file} needs:\nmissing  integrated.mstx  no markers\n" in out
    assert err == f"rlprof: error: this machine lacks what {file} needs: integrated.mstx\n"
    assert asked == [Path("elsewhere")]
    status, out, _ = rlprof("doctor", "--config", file, "--json")
    assert (status, json.loads(out)["needs"][0]["name"]) == (1, "integrated.mstx")


def test_a_configuration_that_has_all_it_needs_is_exit_status_0(
    rlprof: Run, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsure = [Check("tools", "warn", "never tried"), Check("device_time", "ok", "x")]
    monkeypatch.setattr(machine, "check_needs", lambda config, found: unsure)
    (tmp_path / "rlprof.yaml").write_text("integrated: {stage: actor_update}\n")
    assert rlprof("doctor", "--config", tmp_path / "rlprof.yaml")[::2] == (0, "")


def test_a_configuration_with_a_mistake_is_refused_at_once(
    rlprof: Run, asked: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "rlprof.yaml").write_text("integrated: {stag: actor_update}\n")
    status, out, err = rlprof("doctor", "--config", tmp_path / "rlprof.yaml")
    assert (status, out, asked) == (2, "", [])
    assert "integrated.stag is not a key here; did you mean 'stage'?" in err


def test_a_selftest_says_what_it_looked_at(rlprof: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_selftest", lambda: [Check("spans", "ok", "as recorded")])
    status, out, err = rlprof("doctor", "--selftest")
    assert (status, err) == (0, "")
    assert out == ("ok       spans  as recorded\nSelf-test passed. Temporary files were removed.\n")


def test_a_selftest_that_fails_is_exit_status_1(
    rlprof: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Check("spans", "ok", "as recorded"), Check("MSTX", "broken", "no stage heard")]
    monkeypatch.setattr(selftest, "run_selftest", lambda: found)
    status, out, err = rlprof("doctor", "--selftest")
    assert (status, err) == (1, "rlprof: error: self-test failed: MSTX\n")
    assert "passed" not in out
    status, out, _ = rlprof("doctor", "--selftest", "--json")
    assert (status, json.loads(out)["selftest"][1]["message"]) == (1, "no stage heard")


def test_a_selftest_takes_no_configuration(rlprof: Run, tmp_path: Path) -> None:
    (tmp_path / "rlprof.yaml").write_text("integrated: {stage: actor_update}\n")
    status, _, err = rlprof("doctor", "--selftest", "--config", tmp_path / "rlprof.yaml")
    assert status == 2
    assert "leave out --config" in err
