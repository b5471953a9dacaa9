"""`rlprof nsys` with a strict fake nsys on PATH: what it runs, what it says, how it ends."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from lightning_rlprof.cli import record as nsys
from tests.builders.nsys_machine import TRAIN, Run, file, machine_without_gpu, options
from tests.doubles.nsys.on_path import FakeNsys


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNsys:
    return machine_without_gpu(tmp_path, monkeypatch)


# ---- one run


def test_it_prints_the_command_runs_it_and_says_what_appeared_and_what_to_type(
    rlprof: Run, fake: FakeNsys, hints: None
) -> None:
    status, out, err = rlprof("nsys", "run", "-o", "my run", *TRAIN)

    line, warning, wrote = out.splitlines()
    assert (status, err) == (0, "next: rlprof summary 'my run.1.nsys-rep'\n")
    tools, *argv = shlex.split(line)
    assert tools == 'RLPROF__TOOLS=["nsight"]'
    assert argv == ["nsys", *fake.call()["argv"]]
    assert argv[-4:] == ["--output=my run", *TRAIN[1:]]
    assert warning.startswith(
        "warning: a report contains the environment variables of the training and of other "
    )
    assert wrote == "Wrote my run.1.nsys-rep"


@pytest.mark.parametrize(
    ("code", "status"), [("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_status_of_the_training_is_passed_through(
    rlprof: Run, fake: FakeNsys, code: str, status: int
) -> None:
    done, out, _ = rlprof("nsys", "run", "-o", "x", "--", sys.executable, "-c", code)
    assert done == status
    assert "Wrote x.1.nsys-rep\n" in out


def test_reports_go_under_the_save_path_with_a_name_of_their_own(
    rlprof: Run, fake: FakeNsys
) -> None:
    config = file("{steps: [2, 5], integrated: {profile_save_path: runs/%h/%p}}")
    fake.tell(ranges=2)
    names = set()
    for _ in range(2):
        _, out, _ = rlprof("nsys", "run", "--config", config, *TRAIN)
        names |= {line[6:] for line in out.splitlines() if line.startswith("Wrote ")}
    assert len(names) == 4
    assert {str(path) for path in Path("runs/%h/%p").iterdir()} == names
    assert all(name.startswith("runs/%h/%p/nsys-") for name in names)


def test_the_configuration_says_which_captures(rlprof: Run, fake: FakeNsys, hints: None) -> None:
    fake.tell(ranges=9)
    _, out, err = rlprof("nsys", "run", "-o", "x", "--config", file("steps: [2, 5, 9]"), *TRAIN)
    assert options(fake)["capture-range-end"] == "repeat:3"
    assert [line for line in out.splitlines() if line.startswith("Wrote")] == [
        f"Wrote x.{number}.nsys-rep" for number in (1, 2, 3)
    ]
    assert err == "next: rlprof summary x.1.nsys-rep\n"


def test_captures_that_are_off_are_said_and_the_whole_run_is_recorded(
    rlprof: Run, fake: FakeNsys
) -> None:
    _, out, _ = rlprof("nsys", "run", "-o", "x", "--config", file("steps: []"), *TRAIN)
    said = "note: captures are off (no steps are chosen), so nsys records the whole run\n"
    assert said in out
    assert "capture-range" not in options(fake)
    assert "Wrote x.nsys-rep\n" in out


# ---- what the training is told


def test_the_training_is_told_to_open_captures_for_nsys(rlprof: Run, fake: FakeNsys) -> None:
    rlprof("nsys", "run", "-o", "x", *TRAIN)
    given = {k: v for k, v in fake.call()["env"].items() if k.startswith("RLPROF")}
    assert given == {"RLPROF__TOOLS": '["nsight"]'}


def test_with_a_file_every_lightning_training_records_itself(rlprof: Run, fake: FakeNsys) -> None:
    config = file("{steps: [1], tools: [nsight, memory]}")
    _, out, _ = rlprof("nsys", "run", "-o", "x", "--config", config, *TRAIN)
    given = {k: v for k, v in fake.call()["env"].items() if k.startswith("RLPROF")}
    assert given == {"RLPROF": "1", "RLPROF_CONFIG": "rl.yaml"}
    assert out.startswith("RLPROF=1 RLPROF_CONFIG=rl.yaml nsys profile ")


def test_the_file_of_rlprof_1_is_read_without_being_named(
    rlprof: Run, fake: FakeNsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROF_CONFIG", file("steps: [2, 5]"))
    rlprof("nsys", "run", "--dry-run", *TRAIN)
    assert "repeat:2" not in rlprof("nsys", "run", "--dry-run", *TRAIN)[1]
    monkeypatch.setenv("RLPROF", "1")
    assert "repeat:2" in rlprof("nsys", "run", "--dry-run", *TRAIN)[1]


# ---- names of reports


def test_an_existing_report_is_refused_before_the_training(rlprof: Run, fake: FakeNsys) -> None:
    Path("x.2.nsys-rep").write_text("mine")
    for name in ("x", "x.nsys-rep"):
        assert rlprof("nsys", "run", "-o", name, *TRAIN) == (
            2,
            "",
            "rlprof: error: x.2.nsys-rep exists already\n"
            "  hint: Replace it with --force, or choose another name with -o.\n",
        )
    assert fake.calls == []
    assert rlprof("nsys", "run", "-o", "x-%p", *TRAIN)[0] == 0


def test_force_replaces_a_report(rlprof: Run, fake: FakeNsys) -> None:
    Path("x.1.nsys-rep").write_text("mine")
    _, out, _ = rlprof("nsys", "run", "-o", "x", "--force", *TRAIN)
    assert options(fake)["force-overwrite"] == "true"
    assert "Wrote x.1.nsys-rep\n" in out
    assert Path("x.1.nsys-rep").read_text() != "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/x", "no/x: directory no does not exist"),
        ("sub", "sub is a directory\n  hint: -o takes the name of a report in it."),
        ("sub/", "sub/ is a directory\n  hint: -o takes the name of a report in it."),
    ],
)
def test_a_place_where_nsys_cannot_write_is_refused(
    rlprof: Run, fake: FakeNsys, name: str, said: str
) -> None:
    Path("sub").mkdir()
    assert rlprof("nsys", "run", "-o", name, *TRAIN) == (2, "", f"rlprof: error: {said}\n")


# ---- when something is wrong


def test_an_empty_report_is_said_and_not_offered(rlprof: Run, fake: FakeNsys) -> None:
    fake.tell(report="empty")
    status, out, _ = rlprof("nsys", "run", "-o", "x", *TRAIN)
    assert status == 0
    assert out.endswith("warning: x.1.nsys-rep is empty: nsys was stopped while it wrote\n")


@pytest.mark.parametrize("opens", ["cudaProfilerApi", "nvtx", "none"])
def test_that_no_report_appeared_is_said_with_the_usual_reasons(
    rlprof: Run, fake: FakeNsys, opens: str
) -> None:
    fake.tell(report="none")
    Path("x.sqlite").touch()
    status, out, _ = rlprof("nsys", "run", "-o", "x", "--capture-range", opens, *TRAIN)
    assert status == 0
    said = out.splitlines()[-1]
    assert said == f"warning: no report was written. {nsys._NO_REPORT}"


def test_a_nsys_that_fails_says_so_itself(rlprof: Run, fake: FakeNsys) -> None:
    fake.tell(fail=3)
    status, out, _ = rlprof("nsys", "run", "-o", "x", *TRAIN)
    assert status == 3
    said = "warning: no report was written, and nsys or the training ended with status 3. Did the "
    assert out.splitlines()[-1].startswith(said)


def test_what_nsys_could_not_convert_is_said(rlprof: Run, fake: FakeNsys) -> None:
    code = "open('x.qdstrm', 'w').write('raw')"
    fake.tell(report="none")
    _, out, _ = rlprof("nsys", "run", "-o", "x", "--", sys.executable, "-c", code)
    assert out.endswith("warning: nsys could not convert x.qdstrm; its messages are above\n")


def test_a_report_that_was_there_before_is_not_new(rlprof: Run, fake: FakeNsys) -> None:
    Path("x-1.nsys-rep").write_text("old")
    status, out, _ = rlprof("nsys", "run", "-o", "x-%p", *TRAIN)
    assert (status, "Wrote x-" in out, "x-1.nsys-rep" in out) == (0, True, False)


# ---- the words


def test_help_has_an_example(rlprof: Run) -> None:
    status, shown, _ = rlprof("nsys", "run", "--help")
    out = " ".join(shown.split())
    assert status == 0
    assert "rlprof nsys run --config rlprof.yaml -- python train.py" in out
    assert "--capture-range" in out


def test_after_two_dashes_every_word_is_the_trainings(rlprof: Run, fake: FakeNsys) -> None:
    out = rlprof("nsys", "run", "--dry-run", "--", "scrub", "--force", "-o", "y")[1]
    assert shlex.split(out.splitlines()[0])[-4:] == ["scrub", "--force", "-o", "y"]
    out = rlprof("nsys", "run", "--dry-run", "python", "train.py", "--force")[1]
    assert shlex.split(out.splitlines()[0])[-3:] == ["python", "train.py", "--force"]
    assert "--force-overwrite" not in out
    assert json.loads(json.dumps(fake.calls)) == fake.calls


def test_the_status_stays_where_the_reports_are_gone_or_are_no_files(
    rlprof: Run, fake: FakeNsys
) -> None:
    fake.tell(report="none")
    Path("runs").mkdir()
    removes = "import os; os.rmdir('runs'); raise SystemExit(7)"
    status, out, _ = rlprof("nsys", "run", "-o", "runs/x", "--", sys.executable, "-c", removes)
    assert (status, "no report was written" in out) == (7, True)
    links = "import os; os.symlink('no', 'y.nsys-rep'); os.mkdir('y.1.nsys-rep')"
    status, out, _ = rlprof("nsys", "run", "-o", "y", "--", sys.executable, "-c", links)
    assert (status, "no report was written" in out, "Wrote" in out) == (0, True, False)
