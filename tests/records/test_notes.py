import re
from pathlib import Path

from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import TraceWriter, note_line, read_trace
from lightning_rlprof.testing import make_header


def test_codes_are_short_and_each_says_what_it_means() -> None:
    for code in Code:
        assert re.fullmatch(r"[a-z]+(-[a-z]+){1,3}", code.value)
        assert code.meaning.endswith(".") or ": " in code.meaning
        assert code.level in ("info", "warning", "error")
    assert len({code.meaning for code in Code}) == len(Code)


def test_a_note_comes_back_with_its_code_and_facts_beside_lines_that_json_refuses(
    tmp_path: Path,
) -> None:
    facts = {"capture": "step-000003", "step": 3, "share": 0.5}
    writer = TraceWriter(tmp_path, make_header())
    writer.write(
        [
            ["span", "a", "stage", 1, 0, 1, 1, 1, None, {"tokens": object()}],
            note_line(7, Code.CAPTURE_TAKEN, "captured", facts),
            note_line(8, "warning", "of a recorder of the user's own", {}),
        ]
    )
    writer.close()
    first, second = read_trace(writer.path).notes
    assert (first.level, first.code, first.facts) == ("info", Code.CAPTURE_TAKEN, facts)
    assert (second.level, second.code, second.facts) == ("warning", "", {})
