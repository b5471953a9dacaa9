"""Contracts of the package: keys of the configuration and their errors, public names, imports."""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning_rlprof
from lightning_rlprof import testing
from tests.golden.golden import Contract, answer, rlprof
from tests.places import ROOT

_BAD_CONFIGURATIONS = """\
steps: [0]
stepz: [1]
steps: 3
steps: [2-1]
ranks: [0, 0]
ranks: every
all_ranks: true
integrated: {profile_step_start: 5, profile_step_end: 3}
integrated: {stage: actor_updat}
integrated: {stages: all}
integrated: {profile_save_path: s3://b/c}
integrated: {profile_level: level3}
integrated: {profile: yes please}
tools: [nvtxx]
tools: [nsight, torch_profiler]
roles: {actor: {rank: [0]}}
roles: {actor: true}
wrap: [{target: nothing}]
wrap: [{target: "a.b:C.d", stage: x, by_grad: {grad: x}}]
wrap: {target: a}
on_finish: {command: "a && b"}
on_finish: {timeout_s: 0}
max_file_bytes: 10
budget: {total_bytes: 10}
memory: {level: full}
memory: {interval_ms: -1}
torch_profiler: {schedule: {active: -1}}
torch_profiler: {schedule: {wait: 1}}
npu: {aic_metrics: Nope}
npu: {export_types: [csv]}
npu: {mstx_domain_include: [a], mstx_domain_exclude: [b]}
nsight: {controller: {trace: 1}}
parallel: {tp: 0}
parallel: {dp: 2}
hang_timeout: -1
hang_timeout: soon
clock_sync_interval_minutes: -1
ignore_advice: [no-such-id]
custom_stages: ["a b"]
custom_stages: actor
optimizer_stages: [x]
tokens: [5, 5]
tokens: [5, 9]
token_start: 5
spans: false
torch_profiler: {with_stack: true}
device_time: maybe
[1, 2]
global_profiler: {tool: vtune}
global_profiler: {tool: torch, stepz: [1]}
"""


def _configuration_errors() -> dict[str, Any]:
    found = {}
    for text in _BAD_CONFIGURATIONS.splitlines():
        Path("config.yaml").write_text(text.replace(" | ", "\n") + "\n")
        found[text] = answer("config check config.yaml")
    return found


def _configuration_keys() -> dict[str, Any]:
    """Return all defaults, and for each block its keys and the values that the schema lists."""
    schema = json.loads(rlprof("config", "schema")[1])
    blocks = {"top level": schema, **schema["$defs"]}
    defaults = lightning_rlprof.ProfilerConfig.build(None).dump()
    return {"defaults": defaults} | {
        name: {key: _key(facts) for key, facts in block["properties"].items()}
        | ({"required": block["required"]} if "required" in block else {})
        for name, block in blocks.items()
    }


def _key(facts: dict[str, Any]) -> Any:
    listed = [value for each in _choices(facts) for value in each.get("enum", [])]
    names = [each["$ref"].rpartition("/")[2] for each in _choices(facts) if "$ref" in each]
    default = facts.get("default", " or ".join(names) or None)
    return {"default": default, "values": listed} if listed else default


def _choices(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield facts
    for each in (*facts.get("anyOf", ()), *filter(None, [facts.get("items")])):
        yield from _choices(each)


def _signature(value: Callable[..., Any]) -> str:
    """Return parameters and defaults, without annotations, which Python's versions show apart."""
    own = inspect.signature(value)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in own.parameters.values()]
    text = str(own.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _public(value: Any) -> Any:
    """Return a function's signature, or those of a class and of its own public methods."""
    if not inspect.isclass(value):
        return _signature(value) if callable(value) else sorted(value)
    ours = [each for each in value.__mro__ if each.__module__.startswith("lightning_rlprof")]
    names = {name for each in ours for name in vars(each) if not name.startswith("_")}
    methods = {name: getattr(value, name) for name in sorted(names)}
    is_model = hasattr(value, "model_fields")  # whose fields are the keys of the configuration
    return {
        "is": [each.__name__ for each in ours[1:]],
        "call": "keys" if is_model else _signature(value),
        "has": [
            f"{name}{_signature(each)}" if inspect.isroutine(each) else name
            for name, each in methods.items()
        ],
    }


def _python_names() -> dict[str, Any]:
    root = {name: getattr(lightning_rlprof, name) for name in lightning_rlprof.__all__}
    own = {
        name: value
        for name, value in vars(testing).items()
        if getattr(value, "__module__", "") == testing.__name__ and not name.startswith("_")
    }
    return {
        module: {name: _public(value) for name, value in names.items()}
        for module, names in (("lightning_rlprof", root), ("lightning_rlprof.testing", own))
    }


def _imports() -> Any:
    """Return the import contracts as they are written."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.split(r"\n\[\[tool\.importlinter\.contracts\]\]\n", text)[1:]
    keys = (
        "layers",
        "modules",
        "source_modules",
        "forbidden_modules",
        "ancestors",
        "ignore_imports",
    )
    return {
        _values(each, "name")[0]: {key: _values(each, key) for key in keys if f"\n{key} = " in each}
        for each in found
    }


def _values(text: str, key: str) -> list[str]:
    """Return the texts of a key of TOML, which Python reads from 3.11 on only."""
    (value,) = re.findall(rf"^{key} = (\[.*?\]|\".*?\")$", text, re.M | re.S)
    return re.findall(r'"(.*?)"', value)


CONTRACTS: dict[str, Contract] = {
    "package/configuration-keys.json": _configuration_keys,
    "package/configuration-errors.json": _configuration_errors,
    "package/names.json": _python_names,
    "package/imports.json": _imports,
}
