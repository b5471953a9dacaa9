"""Run every call of a function inside a context manager, whatever kind of function it is."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from lightning_rlprof.recording import compiled_code

Around = AbstractContextManager[Any]
F = TypeVar("F", bound=Callable[..., Any])


def within(around: Around, function: F) -> F:
    """Return the function with each call inside ``around``, which must be usable again and again.

    A coroutine function is awaited inside it. Generators of both kinds are resumed inside it, once
    per item: between two items they hold nothing open. What torch.compile traces runs as it is.

    Example::

        >>> from contextlib import nullcontext
        >>> within(nullcontext(), abs)(-3)
        3
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(within(around, function.__func__))
    if isinstance(function, property):
        raise TypeError(
            "a property cannot be marked; put the decorator below @property, on the function"
        )
    if isinstance(function, type):
        raise TypeError(f"the class {function.__name__} cannot be marked; mark its methods instead")
    if inspect.isasyncgenfunction(function):
        wrapper: Callable[..., Any] = _async_generator(around, function)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(around, function)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(around, function)
    else:
        wrapper = _function(around, function)
    # Compiled code belongs to a code object, and torch.compile limits how often one is compiled.
    wrapper.__code__ = wrapper.__code__.replace()
    return functools.wraps(function)(wrapper)  # type: ignore[return-value]


def _function(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    name = name_of(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiled_code.is_compiling() and compiled_code.leave_out(name):
            return function(*args, **kwargs)
        with around:
            return function(*args, **kwargs)

    return call


def name_of(function: Any) -> str:
    """Return the qualified name of a function, or that of its class, as of a partial."""
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name


def _coroutine(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with around:
            return await function(*args, **kwargs)

    return call


def _generator(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    name = name_of(function)

    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if compiled_code.is_compiling() and compiled_code.leave_out(name):
            return (yield from function(*args, **kwargs))
        inner = function(*args, **kwargs)
        resume: Callable[[], Any] = functools.partial(next, inner)
        while True:
            try:
                with around:
                    item = resume()
            except StopIteration as stop:
                return stop.value
            try:
                resume = functools.partial(inner.send, (yield item))
            except GeneratorExit:
                inner.close()
                raise
            except BaseException as error:
                resume = functools.partial(inner.throw, error)

    return call


def _async_generator(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        resume: Callable[[], Any] = inner.__anext__
        while True:
            try:
                with around:
                    item = await resume()
            except StopAsyncIteration:
                return
            try:
                resume = functools.partial(inner.asend, (yield item))
            except GeneratorExit:
                await inner.aclose()
                raise
            except BaseException as error:
                resume = functools.partial(inner.athrow, error)

    return call
