"""Requests for stack samples and answers, as files in a run directory."""

import os
import stat

import pytest

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.hang_reports import (
    StackAnswer,
    StackRequest,
    is_own_code,
    read_stack_answer,
    read_stack_request,
    stack_answer_file,
    stack_request_file,
    write_stack_answer,
    write_stack_request,
)
from lightning_rlprof.system.files import owners_of


def test_requests_and_answers_come_back_as_they_were_written(tmp_path):
    request = StackRequest("a", 5.0, (0, 3))
    answer = StackAnswer("a", 7, ((1, "f train.py:2"),), (("data_fetch", 0),))
    stack_request_file(tmp_path).parent.mkdir()
    write_stack_request(tmp_path, request)
    write_stack_answer(tmp_path, 3, answer)
    assert read_stack_request(tmp_path, owners_of(tmp_path)) == request
    assert read_stack_answer(tmp_path, 3) == answer
    assert read_stack_answer(tmp_path, 0) is None
    assert stat.S_IMODE(stack_answer_file(tmp_path, 3).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"id": 1}', '{"id": "a", "seconds": 1e9}', '{"id":"a","seconds":-1}']
)
def test_what_is_no_request_is_refused(text, tmp_path):
    stack_request_file(tmp_path).parent.mkdir()
    stack_request_file(tmp_path).write_text(text)
    with pytest.raises(RlprofError, match="not a valid request for stacks"):
        read_stack_request(tmp_path, owners_of(tmp_path))


def test_a_request_of_another_user_is_refused(tmp_path):
    stack_request_file(tmp_path).parent.mkdir()
    write_stack_request(tmp_path, StackRequest("a", 5.0))
    with pytest.raises(PermissionError, match="belongs to another user"):
        read_stack_request(tmp_path, {os.geteuid() + 1})


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/code/train.py", True),
        ("/env/lib/python3.12/site-packages/torch/nn/module.py", False),
        ("/usr/lib/python3/dist-packages/yaml.py", False),
        ("<frozen runpy>", False),
        ("/src/lightning_rlprof/recording/annotations.py", False),
    ],
)
def test_own_code_is_not_in_libraries(file, own):
    assert is_own_code(file) == own
