"""Marks in code that torch.compile traces, and marks by configuration on compiled modules."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lightning_rlprof
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording import compiled_code
from lightning_rlprof.recording.annotations import (
    Marker,
    Timed,
    annotate,
    count,
    mark,
    record,
    stage,
)
from lightning_rlprof.recording.method_wrapping import Wraps
from lightning_rlprof.recording.torch_hooks import BackwardPasses, OptimizerSteps, RecordFunctions
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import read, spans
from tests.builders.wrapped import Trained, X, rule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


INTO: dict[str, float] = {}


def with_a_stage(x: torch.Tensor) -> torch.Tensor:
    with stage("compiled_stage"):
        return x.sin()


def with_a_counter(x: torch.Tensor) -> torch.Tensor:
    with stage("compiled_counted", tokens=x.shape[0]):
        count(samples=x.sum())
        return x.sin()


def with_the_package(x: torch.Tensor) -> torch.Tensor:
    with lightning_rlprof.stage(f"compiled_{x.dim()}"):
        return x.sin()


def with_a_sum(x: torch.Tensor) -> torch.Tensor:
    with stage("compiled_into", into=INTO):
        return x.sin()


def with_a_region(x: torch.Tensor) -> torch.Tensor:
    with annotate("compiled_region"):
        mark("compiled_mark", version=1)
        record("compiled_record", 1, 2)
        return x.sin()


@stage("compiled_decorated")
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def calls_decorated(x: torch.Tensor) -> torch.Tensor:
    return decorated(x)


@annotate
def by_item(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for _ in range(2):
        yield x.sin() / 2


def over_items(x: torch.Tensor) -> torch.Tensor:
    return sum(by_item(x), torch.zeros(3))


def in_torchs_own(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("actor_update"):
        return x.sin()


class Compiled:
    """Compile with fullgraph, and count graphs."""

    def __init__(self, function: Any) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.call: Any = torch.compile(function, backend="eager", fullgraph=True)

    @property
    def graphs(self) -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture(autouse=True)
def left_out(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of marks that were left out, those of this test alone."""
    found: set[str] = set()
    monkeypatch.setattr(compiled_code, "_left_out", found)
    return found


def warnings_of(session: Any) -> list[str]:
    return [note.text for note in read(session).notes if note.level == "warning"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (with_a_stage, "stage()"),
        (with_a_counter, "stage()"),
        (with_the_package, "stage()"),
        (with_a_sum, "stage()"),
        (with_a_region, "annotate()"),
        (decorated, "decorated"),
        (calls_decorated, "decorated"),
        (over_items, "by_item"),
        (in_torchs_own, ""),
    ],
)
def test_marks_in_compiled_code_leave_it_one_graph(function: Any, names: str, start: Any) -> None:
    compiled, expected = Compiled(function), torch.ones(3).sin()
    assert torch.equal(compiled.call(torch.ones(3)), expected)
    session = start([FakeRecorder()], steps=[2])
    for step in (1, 2, 3):  # of which one is captured
        session.begin_step(step)
        assert torch.equal(compiled.call(torch.ones(3)), expected)
        session.end_step()
    session.close()
    assert torch.equal(compiled.call(torch.ones(3)), expected)
    assert (compiled.graphs, INTO) == (1, {})
    assert [span.name for span in read(session).spans if "compiled" in span.name] == []
    text = f"inside torch.compile, so not marked: {names}. "
    text += "Mark the call of the compiled module or function instead"
    assert warnings_of(session) == ([text] if names else [])


def test_each_decorated_function_is_compiled_for_itself() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    many = torch._dynamo.config.recompile_limit + 2
    for number in range(many):
        plus = stage("compiled_plus")(functools.partial(torch.add, torch.tensor(float(number))))
        torch.compile(plus, backend="eager", fullgraph=True)(torch.ones(1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == many


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.relu

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x).sin()


@pytest.mark.parametrize("by_name", [False, True])
def test_rules_for_compiled_methods_are_named(by_name: bool, start: Any) -> None:
    model: Any = torch.nn.Module()
    model.policy = Policy()
    compiled = Compiled(model.policy)
    model.fast = compiled.call
    session = start()
    targets = ["policy.forward", "policy.generate", "policy.act"]
    rules = [rule(target, "actor_update") for target in targets]
    wraps = Wraps(model, rules, by_name=by_name)
    assert torch.equal(model.fast(torch.ones(3)), torch.ones(3).sin())
    wraps.remove()
    session.note_at_end(*wraps.remarks())
    session.close()
    assert compiled.graphs == 1
    assert warnings_of(session) == [compiled_code.NOT_MARKED.format(target) for target in targets]


def test_the_call_of_a_compiled_module_is_marked(start: Any) -> None:
    model: Any = torch.nn.Module()
    compiled = Compiled(Policy())
    model.fast = compiled.call
    session = start()
    wraps = Wraps(model, [rule("fast.forward", "actor_update")])
    for _ in range(2):
        model.fast(torch.ones(3))
    session.flush()
    wraps.remove()
    assert (compiled.graphs, len(spans(session, "actor_update"))) == (1, 2)
    assert wraps.remarks() == []


def test_torchs_hooks_break_no_graph(start: Any) -> None:
    def graphs_and_breaks() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layer = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def update(x: torch.Tensor) -> None:
            layer(x).sum().backward()
            optimizer.step()

        compiled = torch.compile(update, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2, 3))
        found = torch._dynamo.utils.counters
        return found["stats"]["unique_graphs"], sum(found["graph_break"].values())

    plain = graphs_and_breaks()
    session = start()
    parts = [OptimizerSteps(session), BackwardPasses(), RecordFunctions()]
    assert graphs_and_breaks() == plain
    for part in parts:
        part.remove()
    session.flush()
    assert len(spans(session, "backward")) == 3


def test_a_version_of_torch_that_refuses_the_stand_in_runs_marks_outside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not in this version")

    def marks() -> None: ...

    monkeypatch.setattr(torch.compiler, "substitute_in_graph", refuse)
    compiled_code.when_traced(marks, compiled_code.nothing)
    assert marks._torchdynamo_disable  # type: ignore[attr-defined]
    assert "torch._dynamo could not be prepared: not in this version" in caplog.text


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
