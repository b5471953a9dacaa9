"""Types of `ProfilerCallback`'s keywords, made of the configuration's fields, for LightningCLI.

jsonargparse reads them from the signature: it offers them in YAML, on the command line, in help and
completion, and leaves out what is not given. The configuration checks the values itself.
"""

import types
from collections.abc import Collection
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from typing_extensions import NotRequired, TypedDict, Unpack

from lightning_rlprof.config.blocks import IntegratedConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import Section

_PLAIN = (bool, int, float, str, types.NoneType)


def typed_options(others: Collection[str]) -> Any:
    """Return the annotation of ``**options``.

    Args:
        others: Keywords that are no fields, or not only.
    """
    fields = {**IntegratedConfig.model_fields, **ProfilerConfig.model_fields}
    fields = {name: field for name, field in fields.items() if name not in others}
    keys = {name: NotRequired[_type_of(field.annotation)] for name, field in fields.items()}
    options: Any = TypedDict("CallbackOptions", keys)  # type: ignore[misc]
    lines = [f"    {name}: {_description(field)}" for name, field in fields.items()]
    options.__doc__ = "\n".join(["Fields of the configuration.", "", "Args:", *lines])
    return Unpack[options]


def _type_of(annotation: Any) -> Any:
    """Return a type that accepts all that a field does, and is as narrow as a reader can check."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return dict[str, Any]
    parts = get_args(annotation) if _is_union(annotation) else (annotation,)
    is_plain = all(part in _PLAIN or get_origin(part) is Literal for part in parts)
    return annotation if is_plain else Any


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())
