"""Every kind of function runs inside the context manager, and behaves as it did without it."""

import asyncio
import inspect
from contextlib import contextmanager

import pytest

from lightning_rlprof.recording.call_wrapping import within


class Around:
    """A context manager that can be entered again and again, and counts what is open."""

    def __init__(self):
        self.entered, self.open, self.errors = 0, 0, []

    def __enter__(self):
        self.entered += 1
        self.open += 1

    def __exit__(self, kind, error, trace):
        self.open -= 1
        self.errors.append(kind)


@pytest.fixture
def around():
    return Around()


def test_a_function_keeps_its_name_result_and_exception(around):
    def divide(a, b=1):
        """Divide."""
        assert around.open == 1
        return a / b

    marked = within(around, divide)
    assert (marked.__name__, marked.__doc__, marked(6, b=3)) == ("divide", "Divide.", 2)
    with pytest.raises(ZeroDivisionError):
        marked(1, b=0)
    assert (around.entered, around.open, around.errors) == (2, 0, [None, ZeroDivisionError])


def test_a_coroutine_is_awaited_inside(around):
    async def work(x):
        await asyncio.sleep(0)
        assert around.open == 1
        return x

    marked = within(around, work)
    assert inspect.iscoroutinefunction(marked)
    assert asyncio.run(marked(5)) == 5
    assert (around.entered, around.open) == (1, 0)


def test_a_generator_holds_nothing_open_between_items(around):
    def count():
        got = yield 1
        assert around.open == 1
        yield got
        return "end"

    def use():
        result = yield from within(around, count)()
        assert result == "end"

    generator = use()
    assert next(generator) == 1
    assert around.open == 0
    assert generator.send(7) == 7
    with pytest.raises(StopIteration):
        next(generator)
    assert (around.entered, around.open) == (3, 0)


def test_a_generator_can_catch_and_go_on(around):
    def stubborn():
        try:
            yield 1
        except KeyError:
            yield 2

    generator = within(around, stubborn)()
    assert next(generator) == 1
    assert generator.throw(KeyError("x")) == 2
    with pytest.raises(ValueError, match="y"):
        generator.throw(ValueError("y"))
    assert around.open == 0


def test_closing_a_generator_closes_the_one_inside(around):
    closed = []

    def items():
        try:
            yield 1
        finally:
            closed.append(True)

    generator = within(around, items)()
    next(generator)
    generator.close()
    assert closed == [True]
    assert around.open == 0


def test_an_async_generator_is_resumed_inside(around):
    async def items():
        await asyncio.sleep(0)
        assert around.open == 1
        got = yield 1
        yield got

    async def use():
        generator = within(around, items)()
        assert await generator.asend(None) == 1
        assert around.open == 0
        assert await generator.asend(9) == 9
        return [item async for item in generator]

    assert asyncio.run(use()) == []
    assert (around.entered, around.open) == (3, 0)


def test_an_async_generator_sees_exceptions_and_is_closed(around):
    seen = []

    async def items():
        try:
            yield 1
        except KeyError:
            seen.append("KeyError")
            yield 2
        finally:
            seen.append("closed")

    async def use():
        generator = within(around, items)()
        assert await anext(generator) == 1
        assert await generator.athrow(KeyError("x")) == 2
        await generator.aclose()

    asyncio.run(use())
    assert seen == ["KeyError", "closed"]
    assert around.open == 0


def test_a_context_manager_made_of_a_marked_generator_still_works(around):
    @contextmanager
    def scope():
        yield 3

    assert within(around, abs)(-3) == 3
    with within(around, scope)() as value:
        assert value == 3


def test_static_and_class_methods_stay_what_they_are(around):
    class Worker:
        @staticmethod
        def add(a, b):
            return a + b, around.open

        @classmethod
        def name(cls):
            return cls.__name__, around.open

        add, name = within(around, add), within(around, name)

    assert Worker.add(1, b=2) == Worker().add(1, 2) == (3, 1)
    assert Worker.name() == Worker().name() == ("Worker", 1)


def test_a_property_cannot_be_marked(around):
    with pytest.raises(TypeError, match="put the decorator below @property"):
        within(around, property(len))


def test_a_class_cannot_be_marked(around):
    with pytest.raises(
        TypeError, match="the class Around cannot be marked; mark its methods instead"
    ):
        within(around, Around)
