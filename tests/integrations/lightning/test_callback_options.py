"""Keywords of `ProfilerCallback` are the fields of the configuration, and accept what those do."""

import inspect
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter

from lightning_rlprof.config.blocks import IntegratedConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import Section
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback

FIELDS = {**IntegratedConfig.model_fields, **ProfilerConfig.model_fields}


def options() -> Any:
    (found,) = get_args(inspect.signature(ProfilerCallback).parameters["options"].annotation)
    return found


def test_each_field_is_a_keyword_that_may_be_left_out() -> None:
    assert {*options().__annotations__} == {*FIELDS}
    assert options().__required_keys__ == frozenset()


def test_keywords_accept_what_fields_do() -> None:
    types = get_type_hints(options())
    for name, kind in types.items():
        default = FIELDS[name].get_default(call_default_factory=True)
        value = default.model_dump() if isinstance(default, Section) else default
        TypeAdapter(kind).validate_python(value, strict=True)
    assert types["stage"] is Any  # a name, or a list of names
    assert types["summary"] is bool
    assert types["profile_export_type"] == Literal["text", "db"]
    assert types["device_time"] == bool | None
    assert types["torch_profiler"] == dict[str, Any]


def test_each_keyword_has_the_description_of_its_field() -> None:
    lines = options().__doc__.splitlines()
    meanings = {**IntegratedConfig.meanings(), **ProfilerConfig.meanings()}
    for name in options().__annotations__:
        assert f"    {name}: {meanings[name]}" in lines
