import json
from collections.abc import Callable

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
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings as above, without looking at this machine."""
    diagnosis = Diagnosis("cpu", {check.name: check for check in CHECKS})
    monkeypatch.setattr(machine, "diagnose", lambda: diagnosis)
    monkeypatch.setattr(machine, "doors", lambda: FRAMEWORKS)


def test_a_line_per_finding_and_below_it_the_cure(rlprof: Run, found: None) -> None:
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


def test_as_json_it_is_the_findings(rlprof: Run, found: None) -> None:
    status, out, err = rlprof("doctor", "--json")
    data = json.loads(out)
    assert (status, err) == (0, "")
    assert data["device"] == "cpu"
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
