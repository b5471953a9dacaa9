"""What was asked for and did not happen is said at the end of a run, each in one line."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import CHILD_MARKS, annotate, stage
from lightning_rlprof.recording.end_remarks import misspelled, never_reached, without_effect
from lightning_rlprof.records.notes import Code
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import read, run_steps


def warnings(session):
    return [note.text for note in read(session).notes if note.level == "warning"]


def test_a_stage_that_no_code_marked_is_said_with_those_that_were_seen(start, clock, caplog):
    session = start([FakeRecorder()], stage=["actor_update", "critic_update"], steps=[1])
    run_steps(session, clock, [1, 2])
    session.close()
    text = (
        "stage critic_update was never marked; stages seen: actor_update. "
        'Mark it with stage("critic_update"), or add a rule: wrap: {METHOD: critic_update}'
    )
    assert warnings(session) == [text]
    assert text in caplog.text


def test_a_stage_outside_of_the_captured_steps_was_marked(start, clock):
    session = start([FakeRecorder()], stage=["actor_update", "critic_update"], steps=[1])
    run_steps(session, clock, [1])
    session.begin_step(2)
    with stage("critic_update"):
        pass
    session.end_step()
    session.close()
    assert warnings(session) == []


def test_steps_that_never_came_are_said_beside_those_that_did(start, clock):
    session = start([FakeRecorder()], steps=[2, 1000])
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert warnings(session) == ["steps never reached: 1000; last complete step: 3"]


def test_many_steps_are_cut():
    config = ProfilerConfig.build(steps=[1, *range(10, 20)])
    (remark,) = never_reached(config, 4)
    assert remark.text == "steps never reached: 10, 11, 12, 13, 14, …; last complete step: 4"
    assert (remark.code, remark.facts["first_step"]) == (Code.STEPS_NOT_REACHED, 10)


@pytest.mark.parametrize("options", [{}, {"steps": "all"}, {"steps": [1]}, {"profile": True}])
def test_nothing_is_said_of_steps_that_came(options):
    assert never_reached(ProfilerConfig.build(**options), 4) == []


@pytest.mark.parametrize(
    ("options", "device", "keys"),
    [
        ({"profile_level": "level2"}, "cpu", "integrated.profile_level; it is"),
        ({"profile_analysis": True}, "cuda", "integrated.profile_analysis; it is"),
        (
            {"profile_export_type": "db", "npu": {"experimental": {"l2_cache": True}}},
            "cuda",
            "integrated.profile_export_type, npu.experimental; they are",
        ),
    ],
)
def test_options_of_ascend_have_no_effect_elsewhere(options, device, keys):
    config = ProfilerConfig.build(**options)
    (remark,) = without_effect(config, device)
    assert remark.text == f"no effect on {device}: {keys} for Ascend"
    assert without_effect(config, "npu") == []


def test_options_of_torchs_profiler_have_no_effect_on_ascend():
    config = ProfilerConfig.build(torch_profiler={"schedule": {"active": 1}})
    (remark,) = without_effect(config, "npu")
    assert remark.text == "no effect on npu: torch_profiler.schedule; it is for torch.profiler"
    assert without_effect(config, "cuda") == []


@pytest.mark.parametrize(
    "options",
    [
        {"profile": False, "profile_level": "level2"},
        {"profile": True, "profile_level": "level0"},
        {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False},
    ],
)
def test_nothing_is_said_of_options_that_are_off_or_serve(options):
    assert without_effect(ProfilerConfig.build(**options), "cuda") == []


def in_child(function) -> None:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_mark_in_a_forked_child_is_said(start, clock):
    session = start()

    def work() -> None:
        for name in ("actor_generate", "compute_reward"):
            with stage(name), annotate("inside"):
                pass

    in_child(work)
    in_child(work)
    run_steps(session, clock, [1])
    session.close()
    assert warnings(session) == [
        "marks in child processes were not recorded, the first one was actor_generate in a "
        "forked child process. Mark in the training process, or use num_workers=0"
    ]


def test_a_mark_in_a_child_that_is_not_forked_is_said(start, clock):
    session = start()
    code = "from lightning_rlprof import stage\nwith stage('compute_reward'): pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    run_steps(session, clock, [1])
    session.close()
    assert warnings(session) == [
        "marks in child processes were not recorded, the first one was compute_reward in a "
        "child process. Mark in the training process, or use num_workers=0"
    ]
    subprocess.run([sys.executable, "-c", code], check=True)  # with nobody to tell


@pytest.mark.parametrize("end", ["close", "discard"])
def test_nothing_is_left_of_the_file_that_children_write(start, end):
    session = start()
    path = os.environ[CHILD_MARKS]
    assert not os.path.exists(path)  # A run that is killed leaves none.
    in_child(lambda: stage("actor_generate").__enter__())
    assert os.path.exists(path)
    getattr(session, end)()
    assert CHILD_MARKS not in os.environ
    assert not os.path.exists(path)


def test_without_a_place_for_that_file_the_run_goes_on(start, clock, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    session = start()
    in_child(lambda: stage("actor_generate").__enter__())
    run_steps(session, clock, [1])
    session.close()
    assert warnings(session) == []


def test_a_child_that_marks_nothing_is_not_worth_a_word(start, clock):
    session = start()
    in_child(os.getpid)
    run_steps(session, clock, [1])
    session.close()
    assert warnings(session) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("actor_genrate", "actor_generate"),
        ("actor_generatte", "actor_generate"),
        ("actor_generatf", "actor_generate"),
        ("actor_genertae", "actor_generate"),
        ("my_stagee", "my_stage"),
        ("actor_generate", None),
        ("actor_generate2", None),
        ("update_actor", None),
        ("Actor_Update", None),
        ("actor_gnrate", "actor_generate"),
        ("tool", None),
        ("", None),
    ],
)
def test_a_name_is_misspelled_if_it_is_nearly_a_known_one(name, meant):
    found = misspelled([name, "my_stage"], ["my_stage", "tools"])
    assert [remark.facts["known"] for remark in found] == ([meant] if meant else [])


def test_a_typo_in_a_mark_is_noted_once_at_the_end(start, clock):
    session = start()
    for step in (1, 2):
        session.begin_step(step)
        with stage("actor_genrate"):
            clock.advance(5)
        session.end_step()
    session.close()
    (note,) = read(session).notes
    assert (note.code, note.level) == (Code.STAGE_MISSPELLED, "warning")
    assert note.facts == {"stage": "actor_genrate", "known": "actor_generate"}
