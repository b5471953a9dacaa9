import msgspec

from lightning_rlprof.recording.open_spans import Span, line_of
from lightning_rlprof.records.run_directory import SpanLine
from tests.builders.recorded import recorded


def test_the_line_of_a_span_is_read_back_field_by_field() -> None:
    span = recorded("actor_update", "stage", 3, 5, 9, 7, 2, 1, {"tokens": 8})
    read = msgspec.json.decode(msgspec.json.encode(line_of(span)), type=SpanLine)
    for name in SpanLine.__struct_fields__:
        assert getattr(read, name) == getattr(span, name)
    assert set(SpanLine.__struct_fields__) < set(Span.__slots__)


def test_a_span_has_no_length_while_it_is_open() -> None:
    assert recorded("a", "stage", 1, 5, None, 7, 1).duration_ns == 0
    assert recorded("a", "stage", 1, 5, 9, 7, 1).duration_ns == 4
