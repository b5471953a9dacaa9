"""Look into a module's code before it runs: which stages it marks, how its methods are called."""

import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from lightning_rlprof.config.stages import WrapRule
from lightning_rlprof.recording import annotations
from lightning_rlprof.recording.annotations import Marker
from lightning_rlprof.records.stage_aliases import stage_of_method

_FOREIGN = {
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "builtins",
    "collections",
}


def names_in_code(module: torch.nn.Module) -> set[str]:
    """Return every text in the code of a module and its direct parts, and the names of its marks.

    Before the first step this tells whether a stage of a known name may be marked in the code.
    """
    found: set[str] = set()
    for function in _functions(module):
        found.update(marker.name for marker in _markers(function))
        for code in _codes(function):
            found.update(each for each in code.co_consts if isinstance(each, str))
    return found


def has_marks(module: torch.nn.Module) -> bool:
    """Return whether the code of a module or of a direct part marks a stage."""
    return any(
        any(marker.kind == "stage" for marker in _markers(each)) or _uses_stage(each)
        for each in _functions(module)
    )


def rules_by_name(module: torch.nn.Module) -> list[WrapRule]:
    """Return a rule for each method of a module and its direct parts whose name means a stage.

    Methods of torch and Lightning are left out, as are names that mean other things as well.

    Example::

        >>> class Policy(torch.nn.Module):
        ...     def generate(self) -> None: ...
        ...     def forward(self) -> None: ...
        >>> [(rule.target, rule.stage) for rule in rules_by_name(Policy())]
        [('generate', 'actor_generate')]
    """
    rules = []
    for path, owner in _owners(module):
        for name, method in sorted(_methods(owner).items()):
            stage = stage_of_method(name)
            if stage and _is_users(method):
                with suppress(Exception):  # Not every name can be in a rule.
                    rules.append(WrapRule(target=f"{path}{name}", stage=stage))
    return rules


def _owners(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Return a module and its direct parts, also those that are no modules, each object once."""
    yield "", module
    seen = {id(module)}
    for name, part in {**vars(module), **dict(module.named_children())}.items():
        kind = type(part).__module__.partition(".")[0]
        plain = kind not in _FOREIGN and hasattr(part, "__dict__")
        if isinstance(part, torch.jit.ScriptModule | type | types.ModuleType):
            continue
        if name.startswith("_") or id(part) in seen:
            continue
        if plain or isinstance(part, torch.nn.Module):
            seen.add(id(part))
            yield f"{name}.", part


def _methods(owner: object) -> dict[str, Any]:
    """Return the functions that an object has as methods or attributes, by public name."""
    found: dict[str, Any] = {}
    for kind in reversed(type(owner).__mro__):
        found |= vars(kind)
    found |= vars(owner)
    return {
        name: each
        for name, each in found.items()
        if not name.startswith("_") and inspect.isroutine(_plain(each))
    }


def _is_users(method: Any) -> bool:
    module = getattr(_plain(method), "__module__", None) or ""
    return module.partition(".")[0] not in _FOREIGN


def _plain(method: Any) -> Any:
    # Bound, class and static methods contain a function.
    return getattr(method, "__func__", method)


def _functions(module: torch.nn.Module) -> Iterator[Any]:
    for _, owner in _owners(module):
        for method in _methods(owner).values():
            function = _plain(method)
            while function is not None:
                if _is_users(function):
                    yield function
                function = getattr(function, "__wrapped__", None)


def _markers(function: Any) -> Iterator[Marker]:
    """Return the markers that a function was decorated with."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # The cell may not be filled yet.
            if isinstance(content := cell.cell_contents, Marker):
                yield content


def _uses_stage(function: Any) -> bool:
    around: Mapping[str, Any] = getattr(function, "__globals__", {})
    for code in _codes(function):
        for name in code.co_names:
            found = around.get(name)
            ours = isinstance(found, types.ModuleType) and found.__name__ == "lightning_rlprof"
            if found is annotations.stage or (ours and "stage" in code.co_names):
                return True
    return False


def _codes(function: Any) -> Iterator[types.CodeType]:
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            yield code
            codes += code.co_consts
