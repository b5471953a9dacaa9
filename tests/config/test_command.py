from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lightning_rlprof.config.command import Command
from lightning_rlprof.config.section import explain

COMMAND: TypeAdapter[list[str] | None] = TypeAdapter(Command)


def said(value: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        COMMAND.validate_python(value, strict=True)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, None),
        (["upload.sh", "a b", "*.json"], ["upload.sh", "a b", "*.json"]),
        (("upload.sh", "a"), ["upload.sh", "a"]),
        ("upload.sh --to s3://b/c@1,d=%e", ["upload.sh", "--to", "s3://b/c@1,d=%e"]),
        ("upload.sh 'a | b' \"c; d\" e\\&f", ["upload.sh", "a | b", "c; d", "e&f"]),
        ("upload.sh '*.json' a#b x~y", ["upload.sh", "*.json", "a#b", "x~y"]),
        ("  upload.sh a\n", ["upload.sh", "a"]),
        ("sh -c 'cp \"$RLPROF_RUN\"/* out'", ["sh", "-c", 'cp "$RLPROF_RUN"/* out']),
        (["bash", "-lc", "cp $RLPROF_RUN out"], ["bash", "-lc", "cp $RLPROF_RUN out"]),
        (["upload.sh", "costs $5"], ["upload.sh", "costs $5"]),
    ],
)
def test_a_command_is_a_list_of_words_or_one_line(value: Any, words: list[str] | None) -> None:
    assert COMMAND.validate_python(value, strict=True) == words


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("gzip a | tee b", "|"),
        ("gzip a && upload b", "&&"),
        ("gzip a || upload b", "||"),
        ("upload b &", "&"),
        ("gzip a; upload b", ";"),
        ("gzip a\nupload b", "\n"),
        ("ls > files", ">"),
        ("ls >> files", ">>"),
        ("upload < files", "<"),
        ("(upload a)", "("),
        ("upload *.json", "*"),
        ("upload trace-?.json", "?"),
        ("upload [ab].json", "["),
        ("upload ~/traces", "~"),
        ("upload a # the traces", "#"),
        ("upload `date`", "`"),
        ("upload $(date)", "$"),
        ("upload $RLPROF_RUN", "$RLPROF_RUN"),
        ("upload ${RLPROF_RUN}/a", "${RLPROF_RUN}"),
        ("BUCKET=a upload b", "BUCKET="),
        ('upload "$VERL_PROFILE_SAVE_PATH"', "$VERL_PROFILE_SAVE_PATH"),
        ("upload '$RLPROF_RUN'", "$RLPROF_RUN"),
        ("upload 'a' \"`date`\"", "`"),
        ("sh -c $WHAT", "$WHAT"),
        (["upload", "$RLPROF_RUN/a"], "$RLPROF_RUN"),
        (["upload", "$(date)"], "$("),
    ],
)
def test_what_only_a_shell_understands_is_refused(value: Any, part: str) -> None:
    text = said(value)
    assert f" holds {part!r}, which only a shell understands, and none is started: " in text
    assert text.endswith("or name the shell in a list, [sh, -c, 'the whole line']")


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("", "='' is empty: give the program and its arguments, or null"),
        ("  ", " is empty: give the program"),
        ([], "=[] is empty: give the program"),
        (["", "a"], "=['', 'a'] is empty: give the program"),
        ("echo 'a", " cannot be split into words (No closing quotation)"),
        (["echo", "a\0b"], " holds a zero byte, which no argument can"),
        (3, "=3 is no command: give a list of words, or one line"),
        ({"run": "a"}, " is no command: give a list of words, or one line"),
        (["sleep", 5], "[1]=5 should be a valid string"),
    ],
)
def test_what_is_no_command_is_refused(value: Any, part: str) -> None:
    assert part.removeprefix("=") in said(value)


def test_editors_are_told_of_both_ways_and_of_none() -> None:
    kinds = [choice["type"] for choice in COMMAND.json_schema()["anyOf"]]
    assert kinds == ["string", "array", "null"]
