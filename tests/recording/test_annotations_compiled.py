"""Marks in code that torch.compile traces, and marks by configuration on compiled modules."""

from typing import Any

import pytest
import torch

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording.annotations import Marker, Timed, annotate, count, mark, stage
from lightning_rlprof.recording.method_wrapping import Wraps
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import spans
from tests.builders.wrapped import Trained, X, rule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def with_a_counter(x: torch.Tensor) -> torch.Tensor:
    with stage("compiled_counted", tokens=3):
        return x.sin()


def with_a_new_name(x: torch.Tensor) -> torch.Tensor:
    with stage("compiled_new"):
        return x.sin()


def with_a_region(x: torch.Tensor) -> torch.Tensor:
    with annotate("compiled_region"):
        count(tokens=1)
        mark("compiled_mark")
        return x.sin()


@pytest.mark.parametrize("function", [with_a_counter, with_a_new_name, with_a_region])
def test_marks_in_traced_code_work_whether_or_not_anybody_records(
    function: Any, start: Any
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())
    session = start()
    compiled(torch.ones(3))
    session.flush()
    names = ("compiled_counted", "compiled_new", "compiled_region")
    assert sum(len(spans(session, name)) for name in names) == 1
    session.close()
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())


@pytest.mark.parametrize("recorders", [(), (FakeRecorder(),)])
@pytest.mark.parametrize("into", [None, {}])
def test_a_marker_that_was_made_before_counts_every_call(
    into: Any, recorders: Any, start: Any
) -> None:
    marker: Any = stage("compiled_before", into=into)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with marker:
            return x.sin()

    torch._dynamo.reset()
    compiled = torch.compile(inside, backend="eager")
    session = start(recorders, profile=True)
    session.begin_step(1)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())
    session.flush()
    assert len(spans(session, "compiled_before")) == 3
    traced = (Marker.__enter__, Marker.__exit__, Timed.__enter__, Timed.__exit__)
    assert all(each._torchdynamo_disable for each in traced)  # type: ignore[attr-defined]


def test_the_mark_of_a_compiled_module_s_method_is_taken_off_again(start: Any) -> None:
    model = Trained()
    inside = model.policy
    model.policy = torch.compile(inside, backend="eager")  # type: ignore[assignment]
    for _ in range(2):
        wraps = Wraps(model, [rule("policy.generate", "actor_generate")])
        wraps.remove()
    assert "generate" not in vars(inside)
    session = start()
    Wraps(model, [rule("policy.generate", "actor_generate")])
    model.policy.generate(X)
    session.flush()
    assert len(spans(session, "actor_generate")) == 1


class Kept:
    """Puts what it is given somewhere else."""

    def __init__(self) -> None:
        vars(self)["held"] = {"generate": len}

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self)["held"]:
            raise AttributeError(name)
        return vars(self)["held"][name]

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)["held"][name] = value


def test_a_method_that_is_kept_elsewhere_is_refused_and_stays() -> None:
    model: Any = Trained()
    kept = vars(model)["kept"] = Kept()
    with pytest.raises(
        ConfigError, match="Kept does not allow it: name the object that has the method"
    ):
        Wraps(model, [rule("kept.generate", "actor_generate")])
    assert kept.generate is len


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("policy.__call__", "is looked up in the class; name a method of an object"),
        ("kind.generate", "is a method of a class; name a method of an object"),
    ],
)
def test_what_only_a_class_has_is_refused(target: str, why: str) -> None:
    model: Any = Trained()
    vars(model)["kind"] = type(model.policy)
    with pytest.raises(ConfigError, match=why):
        Wraps(model, [rule(target, "actor_generate")])
