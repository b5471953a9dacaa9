import numpy as np
import pytest

from lightning_rlprof.loaders import span_lines
from lightning_rlprof.loaders.native import RankColumns, _read
from lightning_rlprof.loaders.span_lines import parse
from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.records.run_directory import TraceWriter, read_trace

_LINES = [
    '["thread",7,"Main, \\"the\\" thread"]',
    '["span","a, \u00e9 name","stage",1,20,30,7,2,1,{"tokens":5,"loss":0.5,"lost":null}]',
    '["span","step","step",1,0,123456789012345678,7,1,null,null]',
    '["span","","mark",0,9,9,18446744,3,2,{}]',
    '["note",5,"info","a \\\\ in a note","",{}]',
    '["end",99,"finished"]',
]
_WRONG = [
    '["span","step","step",01,0,9,7,1,null,null]',
    '["span","step","step",1,0,9,7,1,null]',
    '["span","step","step",1,0,9,7,1,nul,null]',
    '["span","step","step",1,0,9,7,1,null,null,5]',
    '["span","step","step", 1,0,9,7,1,null,null]',
    '["span","step","step",-1,0,9,7,1,null,null]',
    '["span","step","step",1.0,0,9,7,1,null,null]',
    '["span","step","steps",1,0,9,7,1,null,null]',
    '["span","a\\"b","step",1,0,9,7,1,null,null]',
    '["span","step","step",1,9,0,7,1,null,null]',
    '["span","step","step",1,0,1234567890123456789012,7,1,null,null]',
    '["span","step","step",1,0,9,7,1,null,{"a":"b"}]',
    '["span","step","step",1,0,9,7,1,null,{"a":1}',
    '[ "span","step","step",1,0,9,7,1,null,null]',
    '["span","step","st',
    "5",
]


def _by_line(file):
    """Return what the same file says if each line is decoded."""
    trace, columns = read_trace(file), RankColumns()
    columns.take(trace.spans)
    trace.spans.clear()
    return trace, columns


def _facts(read):
    trace, columns = read
    counters = [
        (name, each.rows.tolist(), each.values.tolist(), each.values.dtype)
        for name, each in columns.counters.items()
    ]
    return (
        trace,
        columns.cells.tolist(),
        [*columns.names],
        [*columns.idents],
        counters,
        columns.far,
        columns.backward,
    )


def _written(folder, lines):
    writer = TraceWriter(folder, Header(FORMAT, "job", 0, 1, "actor", "host", 1, "cpu", 10**18, 0))
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
    return writer.path


def test_lines_as_they_are_written_are_read_at_once():
    found = parse("\n".join(_LINES).encode())
    assert found.names == ["a, \u00e9 name", "step", ""]
    assert found.name.tolist() == [0, 1, 2]
    assert [KINDS[code] for code in found.kind] == ["stage", "step", "mark"]
    assert found.numbers[:, 1].tolist() == [1, 0, 123456789012345678, 7, 1, -1]
    counters = {name: [*zip(*each, strict=True)] for name, each in found.counters.items()}
    assert counters == {"tokens": [(0, 5)], "loss": [(0, 0.5)]}
    assert len(found.others) == 3


@pytest.mark.parametrize("wrong", _WRONG)
def test_a_line_of_another_form_is_decoded(tmp_path, wrong):
    lines = [each.encode() for each in (*_LINES[:3], wrong, *_LINES[3:])]
    assert RankColumns().take_block(b"\n".join(lines)) is None
    file = _written(tmp_path / "run", lines)
    assert _facts(_read(file)) == _facts(_by_line(file))


def test_damaged_lines_are_read_as_if_each_was_decoded(tmp_path):
    random = np.random.default_rng(0)
    whole = "\n".join(_LINES).encode()
    parts = b'0123456789,"[]{}null\\ -\n'
    for number in range(400):
        text = bytearray(whole)
        for at in random.integers(0, len(text), random.integers(1, 4)).tolist():
            new = random.integers(0, len(parts))
            text[at : at + int(random.integers(0, 3))] = parts[new : new + 1]
        file = _written(tmp_path / str(number), bytes(text).split(b"\n"))
        assert _facts(_read(file)) == _facts(_by_line(file)), bytes(text)


def test_spans_of_many_names_and_sizes_are_read_as_if_each_was_decoded(tmp_path):
    random = np.random.default_rng(1)
    lines = []
    for number in range(3_000):
        size = int(random.integers(1, 18))
        start, name = int(random.integers(10**size)), "n" * int(random.integers(0, 110))
        counters = f'{{"c{number % 3}":{number}}}' if number % 5 == 0 else "null"
        lines.append(
            f'["span","{name}{number % 50}","region",{number % 9},{start},{start + size},'
            f"{number % 4},{number},{number // 2 if number % 7 else 'null'},{counters}]".encode()
        )
    assert parse(b"\n".join(lines)) is not None
    file = _written(tmp_path / "run", lines)
    assert _facts(_read(file)) == _facts(_by_line(file))


@pytest.mark.parametrize(
    "counters",
    [
        '{"a":1,"b":22,"a, b":333}',
        '{"a":-1,"b":9223372036854775807,"c":9223372036854775808}',
        '{"a":0.5,"b":1e300,"c":-0}',
        '{"a": 1,"b":2 }',
        '{"a":01}',
        '{"a":1,"a":2}',
        '{"a":1,"b":2,"a":3}',
        '{"a":1,2}',
        '{"a":1 "b":2}',
        '{"a":[1],"b":{}}',
        '{"a":true}',
        '{"a"}',
        "{5}",
        '{"":7,"é":8}',
        '{"a\tb":7}',
        "{}",
        "[]",
    ],
)
def test_counters_of_any_form_are_read_as_if_each_line_was_decoded(tmp_path, counters):
    lines = [
        f'["span","step","step",1,0,9,7,{number},null,{own}]'.encode()
        for number, own in enumerate(("null", '{"a":4,"d":5}', counters, "{}", '{"b":0.5}'))
    ]
    file = _written(tmp_path / "run", lines)
    assert _facts(_read(file)) == _facts(_by_line(file))


def test_blocks_that_are_parsed_in_parts_are_read_as_if_each_line_was_decoded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(span_lines, "_AT_ONCE", 1_000)
    monkeypatch.setattr(span_lines, "_SLOT_BITS", 2)  # Names share slots.
    lines = [
        f'["span","name {number % 31}","region",1,{number},{number + 5},{number // 9},{number},'
        f'null,{{"c{number % 3}":{number}}}]'.encode()
        for number in range(500)
    ]
    assert parse(b"\n".join(lines)) is not None
    file = _written(tmp_path / "run", lines)
    assert _facts(_read(file)) == _facts(_by_line(file))
