"""Mark stages by method name, from configuration, where the training code marks none itself."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_rlprof.config.stages import WrapRule, texts_of
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording import compiled_code
from lightning_rlprof.recording.accelerator import torch
from lightning_rlprof.recording.annotations import Marker, OwnMarker, annotate, in_stage, stage
from lightning_rlprof.records.notes import Code, Remark
from lightning_rlprof.system.post_import import when_imported

ValueOf = Callable[[tuple[Any, ...], dict[str, Any]], object]
_ABSENT = object()
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MAX_NAMED = 5


class _Calls:
    """What became of the calls of one rule's method.

    Attributes:
        rule: The rule.
        by_name: Whether rlprof made the rule.
        called: Whether the method was called at all.
        as_stage: Whether a call was a stage.
        as_region: Whether a call was a region, because another stage was open around it.
        values: Texts of the argument, until a call matched.
    """

    def __init__(self, rule: WrapRule, *, by_name: bool = False) -> None:
        self.rule, self.by_name = rule, by_name
        self.called = self.as_stage = self.as_region = False
        self.values: set[str] = set()

    def add(self, value: object) -> None:
        """Remember a value without a stage, as far as `remark` lists them."""
        if not (self.as_stage or self.as_region) and len(self.values) <= _MAX_NAMED:
            self.values.add(texts_of(value)[0])

    def remark(self) -> str | None:
        """Return what the user must know: no call was a stage, and why."""
        rule, by_arg = self.rule, self.rule.by_arg
        if self.as_stage:
            return None
        if compiled_code.is_left_out(f"{compiled_code.RULE}{rule.target}"):
            return compiled_code.NOT_MARKED.format(rule.target)
        if self.by_name:
            return None
        if not self.called:
            return f"wrap: {rule.target!r} was never called"
        if self.as_region:
            return (
                f"wrap: every call of {rule.target!r} was inside another stage, which includes it. "
                "To make it a stage, add nested: true to the rule"
            )
        if by_arg is None:
            return f"wrap: no call of {rule.target!r} matched a stage of its by_grad"
        values = ", ".join([f"{each[:40]!r}" for each in sorted(self.values)][:_MAX_NAMED])
        return (
            f"wrap: no call of {rule.target!r} matched a stage: {by_arg.arg} was {values}"
            f"{', …' * (len(self.values) > _MAX_NAMED)}; "
            f"by_arg.stages has {', '.join(by_arg.stages)}"
        )


class Replaced:
    """Functions and methods that are replaced until `remove`."""

    def __init__(self) -> None:
        # Owner, name, marked function, and the attribute that was there before.
        self._installed: list[tuple[Any, str, object, object]] = []

    def put(self, owner: Any, name: str, mine: object) -> None:
        """Replace what an owner has by a name."""
        self._installed.append((owner, name, mine, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, mine)

    def remove(self) -> None:
        """Remove the marks, last first, except where other code replaced the function since."""
        for owner, name, mine, before in reversed(self._installed):
            if vars(owner).get(name) is mine:
                if before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
        self._installed.clear()


class Wraps(Replaced):
    """Methods of one module that are marked until `remove`.

    Bound methods are put on the instance, so that classes stay untouched and ``copy.deepcopy`` of a
    marked module calls the copy, never the original.

    Args:
        root: The LightningModule that targets start from.
        rules: What to mark.
        by_name: Whether rlprof made the rules, of what methods are called. Such marks count as none
            of the user's.

    Raises:
        ConfigError: A target does not exist or cannot be marked; nothing stays marked.
    """

    def __init__(self, root: object, rules: Sequence[WrapRule], *, by_name: bool = False) -> None:
        super().__init__()
        self._calls: list[_Calls] = []
        try:
            for rule in rules:
                if not rule.is_imported:
                    self._install(root, rule, by_name)
        except BaseException:
            self.remove()
            raise

    def remarks(self) -> list[Remark]:
        """Say which rules gave no call a stage, and why."""
        return _remarks(self._calls)

    def _install(self, root: object, rule: WrapRule, by_name: bool) -> None:
        owner, name = _find(root, rule.target)
        method = getattr(owner, name)
        calls = _Calls(rule, by_name=by_name)
        self._calls.append(calls)
        mine = _method(method, calls)
        holders = [each for each in (owner, getattr(owner, "_orig_mod", None)) if each is not None]
        try:
            had = [vars(each).get(name, _ABSENT) for each in holders]
            setattr(owner, name, mine)
        except (AttributeError, TypeError) as error:  # It has slots, or no setter.
            raise ConfigError(f"wrap: {rule.target!r} cannot be replaced ({error})") from error
        # A compiled module sets most attributes on the module inside it.
        found = [at for at, each in enumerate(holders) if vars(each).get(name) is mine]
        if not found:
            setattr(owner, name, method)
            text = f"{type(owner).__name__} does not allow it: name the object that has the method"
            raise ConfigError(f"wrap: {rule.target!r} cannot be replaced ({text})")
        owner, before = holders[found[0]], had[found[0]]
        self._installed.append((owner, name, mine, before))
        if before is _ABSENT and mine.__self__ is owner:
            mine.__func__.__name__ = name  # Unpickling looks for it by this name.


class ImportedWraps(Replaced):
    """Functions and methods of classes that are marked by import path until `remove`.

    Those of modules that are imported later are marked then. Code that has taken a function by
    name before (``from module import function``) keeps what it has; methods are found by all.
    """

    def __init__(self, rules: Sequence[WrapRule]) -> None:
        super().__init__()
        self._calls: dict[str, _Calls] = {}
        self._missing: list[Remark] = []
        for rule in rules:
            if rule.is_imported:
                self._calls[rule.target] = _Calls(rule)
                module = rule.target.partition(":")[0]
                when_imported(module, functools.partial(self._install, rule))

    def remarks(self) -> list[Remark]:
        """Say which rules gave no call a stage, and why."""
        return self._missing + _remarks(self._calls.values())

    def _install(self, rule: WrapRule, module: object) -> None:
        *path, name = rule.target.partition(":")[2].split(".")
        owner: Any = module
        try:
            for part in path:
                owner = getattr(owner, part)
            method = inspect.getattr_static(owner, name)
        except AttributeError as error:
            self._lacks(rule, f"wrap: {rule.target!r} does not exist ({error})")
            return
        kind = type(method) if isinstance(method, staticmethod | classmethod) else None
        function = method.__func__ if kind else method
        if not inspect.isroutine(function):
            self._lacks(rule, f"wrap: {rule.target!r} is not a function or method")
            return
        marked: Any = _marked(function, self._calls[rule.target])
        self.put(owner, name, kind(marked) if kind else marked)

    def _lacks(self, rule: WrapRule, text: str) -> None:
        self._missing.append(Remark(Code.WRAP_WITHOUT_CALL, text, {"target": rule.target}))


def _remarks(calls: Iterable["_Calls"]) -> list[Remark]:
    return [
        Remark(Code.WRAP_WITHOUT_CALL, text, {"target": each.rule.target})
        for each in calls
        if (text := each.remark())
    ]


def _find(root: object, target: str) -> tuple[object, str]:
    *path, name = target.split(".")
    owner = root
    for part in path:
        owner = _get(owner, part, target)
    method = _get(owner, name, target)
    if torch is not None and isinstance(method, torch.nn.Module):
        raise ConfigError(
            f"wrap: {target!r} is a module; name its method, as in '{target}.forward'"
        )
    if not callable(method):
        raise ConfigError(f"wrap: {target!r} is {type(method).__name__}, which cannot be called")
    # A function in the place of any other object would hide that object's attributes.
    if not (inspect.isroutine(method) or isinstance(method, functools.partial)):
        raise ConfigError(
            f"wrap: {target!r} is an object of {type(method).__name__}; name a method that it calls"
        )
    if name.startswith("__") or isinstance(owner, type):
        kind = "a method of a class" if isinstance(owner, type) else "looked up in the class"
        raise ConfigError(
            f"wrap: {target!r} is {kind}; name a method of an object, as in 'x.forward'"
        )
    return owner, name


def _get(owner: object, name: str, target: str) -> Any:
    """Return an item of a list or dictionary, or an attribute."""
    if isinstance(owner, Mapping) and name in owner:
        return owner[name]
    if isinstance(owner, list | tuple) and name.isdecimal() and int(name) < len(owner):
        return owner[int(name)]
    try:
        return getattr(owner, name)
    except AttributeError:
        hint = _hint(name, list(map(str, owner)) if isinstance(owner, Mapping) else dir(owner))
        text = f"wrap: {target!r}: {type(owner).__name__} has no {name!r}{hint}"
        raise ConfigError(text) from None


def _method(method: Callable[..., Any], calls: _Calls) -> types.MethodType:
    """Mark a method or function as a bound method, which copies and pickles correctly.

    Copied, it is bound to the copy. Pickled, it is looked up by name, here also for a function,
    which a closure could not be.
    """
    if isinstance(method, types.MethodType):
        return types.MethodType(_marked(method.__func__, calls), method.__self__)
    marked = _marked(method, calls)

    def call(bound_to: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A copied partial has its own arguments, which the marked one does not have.
        return (marked if bound_to is method else bound_to)(*args, **kwargs)

    async def call_awaited(bound_to: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await call(bound_to, *args, **kwargs)

    outer = call_awaited if inspect.iscoroutinefunction(marked) else call
    # The code is copied as in `within`.
    outer.__name__, outer.__code__ = "__call__", outer.__code__.replace()
    return types.MethodType(outer, method)


def _marked(function: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    """Mark each call as a stage, or as a region of the stage that is open around it."""
    rule = calls.rule
    # It is marked once per stage here, so that a call only chooses.
    # A call without a stage is not marked.
    mark: Callable[[str], Marker] = OwnMarker if calls.by_name else stage
    marked = {name: mark(name)(function) for name in rule.names().values()}
    region, value_of = annotate(rule.target)(function), _argument(function, rule)
    key = f"{compiled_code.RULE}{rule.target}"
    has_gradients: Callable[[], bool] = bool if torch is None else torch.is_grad_enabled

    def chosen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if compiled_code.is_compiling() and compiled_code.leave_out(key):
            return function
        value = value_of(args, kwargs)
        name = rule.stage_for(grad=has_gradients(), value=value)
        inside = name is not None and not rule.nested and in_stage()
        calls.called = True
        calls.as_region |= inside
        calls.as_stage |= name is not None and not inside
        if name is None and rule.by_arg:
            calls.add(value)
        return region if inside else marked[name] if name else function

    def call(*args: Any, **kwargs: Any) -> Any:
        return chosen(args, kwargs)(*args, **kwargs)

    async def call_awaited(*args: Any, **kwargs: Any) -> Any:
        return await chosen(args, kwargs)(*args, **kwargs)

    def call_iterated(*args: Any, **kwargs: Any) -> Any:
        return (yield from chosen(args, kwargs)(*args, **kwargs))

    kind: Any = call_iterated if inspect.isgeneratorfunction(function) else call
    if inspect.iscoroutinefunction(function):
        kind = call_awaited
    kind.__code__ = kind.__code__.replace()  # The code is copied as in `within`.
    return functools.wraps(function)(kind)


def _argument(function: Callable[..., Any], rule: WrapRule) -> ValueOf:
    if rule.by_arg is None:
        return lambda args, kwargs: None
    name = rule.by_arg.arg
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"wrap: the arguments of {rule.target!r} are unknown ({error})"
        ) from error
    kinds = {each.kind for each in parameters.values()}
    if name not in parameters and inspect.Parameter.VAR_KEYWORD in kinds:
        return lambda args, kwargs: kwargs.get(name)
    if name not in parameters or parameters[name].kind in _MANY:
        hint = _hint(name, [own for own, each in parameters.items() if each.kind not in _MANY])
        raise ConfigError(f"wrap: {rule.target!r} has no argument {name!r}{hint}")
    place, default = list(parameters).index(name), parameters[name].default
    by_place = parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY

    def value_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return kwargs.get(name, args[place] if by_place and place < len(args) else default)

    return value_of


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
