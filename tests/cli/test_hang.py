"""What rlprof hang prints of a run that hangs, of one that does not, and of other files."""

import json

import pytest

from lightning_rlprof.records.hang_reports import (
    FOLDER,
    Collective,
    Frame,
    HangReport,
    OpenSpan,
    ThreadStack,
    write_report,
)
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header

REWARD = (
    Frame("/code/grpo/rewards.py", 12, "score", "while not done:"),
    Frame("/code/grpo/train.py", 40, "<module>", "rewards = score(texts)"),
)
UPDATE = (Frame("/code/grpo/train.py", 61, "update", "dist.all_reduce(grad)"),)


@pytest.fixture
def hung(tmp_path):
    """A run of two ranks: rank 1 is in its reward, and rank 0 waits for it."""
    run = tmp_path / "run"
    for rank, stack, stage, seq in [
        (0, UPDATE, "actor_update", 6),
        (1, REWARD, "reward\x1b[2J", 5),
    ]:
        TraceWriter(run, make_header(rank, 2)).close()
        (run / FOLDER).mkdir(exist_ok=True)
        write_report(
            run,
            HangReport(
                rank=rank,
                number=1,
                cause="hang",
                unix_ns=5,
                quiet_s=300,
                limit_s=300,
                step=3,
                in_step=True,
                spans=(OpenSpan(stage, "stage", 3, 9, is_training=True),),
                threads=(ThreadStack("MainThread", stack, is_training=True),),
                collectives=(Collective("0", seq, "gloo:all_reduce", is_done=rank == 1),),
            ),
        )
    return run


def test_rank_line_and_what_the_others_wait_in_are_printed_with_the_stack(rlprof, hung):
    status, out, _ = rlprof("hang", hung)
    text = " ".join(out.split())
    assert status == 0
    assert "Rank 1 has not come to gloo:all_reduce #6 of group 0" in text
    assert "at grpo/rewards.py:12 score (while not done:). Rank 0 waits in gloo:all_red" in text
    assert "Stack of rank 1, training thread: /code/grpo/rewards.py:12 score" in text
    assert "rewards = score(texts)" in text
    assert "\x1b[2J" not in out


def test_json_has_headline_causes_with_stacks_and_the_table(rlprof, hung):
    found = json.loads(rlprof("hang", hung, "--json")[1])
    (cause,) = found["causes"]
    assert (cause["rank"], cause["stack"][0]["line"]) == (1, 12)
    assert found["headline"].startswith("Rank 1 has not come to")
    assert [row[0] for row in found["tables"][0]["rows"]] == [1, 0]


def test_csv_has_the_table_alone(rlprof, hung):
    out = rlprof("hang", hung, "--format", "csv")[1]
    assert out.startswith("rank,role,state,quiet,in,waits for,at,step\n1,,hangs,")


def test_what_is_no_run_is_one_line(rlprof, tmp_path):
    status, _, err = rlprof("hang", tmp_path)
    assert status == 2
    assert "is not a run of rlprof" in err
