"""Write docs/config.md from the configuration itself; ``--check`` only says whether it is stale."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from config_prose import EXAMPLES, HEAD, SPELLED

from lightning_rlprof.config.blocks import (
    IntegratedConfig,
    MemoryConfig,
    NpuConfig,
    NsightConfig,
    ParallelConfig,
    RoleConfig,
    ScheduleConfig,
    TorchProfilerConfig,
)
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.stages import ArgumentStages, GradStages, WrapRule
from lightning_rlprof.config.validation import Section
from lightning_rlprof.config.verl import ANYTHING, ROLE, ROLES, SPELLINGS, TOOLS, Spelling
from lightning_rlprof.records.records import STAGES

__all__ = ["main", "page"]

PAGE = Path(__file__).with_name("config.md")

SECTIONS: tuple[tuple[str, str, type[Section]], ...] = (
    ("Top level", "", ProfilerConfig),
    ("`integrated`", "integrated.", IntegratedConfig),
    ("`roles`: one block per role", "roles.<role>.", RoleConfig),
    ("`wrap`: a list of rules", "wrap[].", WrapRule),
    ("`wrap[].by_grad`", "by_grad.", GradStages),
    ("`wrap[].by_arg`", "by_arg.", ArgumentStages),
    ("`nsight`", "nsight.", NsightConfig),
    ("`torch_profiler`", "torch_profiler.", TorchProfilerConfig),
    ("`torch_profiler.schedule`", "schedule.", ScheduleConfig),
    ("`npu`", "npu.", NpuConfig),
    ("`memory`", "memory.", MemoryConfig),
    ("`parallel`", "parallel.", ParallelConfig),
)

_TYPES = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "$ref": "block",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Keys\n"]
    for title, prefix, section in SECTIONS:
        rows = [_row(name, section) for name in section.model_fields]
        said = " ".join((section.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
        head = f"### {title}\n\n{said}\n" if prefix else f"### {title}\n"
        parts += [head, _table(("key", "allowed", "default", "meaning"), rows)]
    parts += [SPELLED, _table(("verl", "ours"), [(f"`{r.theirs}`", _means(r)) for r in SPELLINGS])]
    tools = [(f"`{name}`", _json(keys)) for name, keys in TOOLS.items()]
    parts += [_table(("`tool`", "ours"), tools)]
    places = [(f"`{_place(place)}`", ", ".join(names)) for place, names in ROLES.items()]
    parts += [_table((f"`{ROLE}.profiler` is at", "roles"), places), EXAMPLES]
    return "\n".join(parts)


def _row(name: str, section: type[Section]) -> tuple[str, ...]:
    schema = section.model_json_schema()["properties"][name]
    field = section.model_fields[name]
    allowed = " or ".join(dict.fromkeys(_allowed(schema)))
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "its own" if isinstance(value, Section) else _json(value)
    return (
        f"`{name}`",
        allowed,
        default.replace("`null`", "unset"),
        section.meanings()[name],
    )


def _allowed(schema: dict[str, Any]) -> Iterator[str]:
    for choice in schema.get("anyOf", [schema]):
        values = choice.get("enum", [choice["const"]] if "const" in choice else [])
        if {*STAGES} <= {*values}:
            yield "`all` or a stage or a list of stages"
            return
        if values:
            yield ", ".join(f"`{value}`" for value in values)
        elif choice.get("type") == "array":
            yield f"list: {' or '.join(_allowed(choice['items']))}"
        elif "pattern" in choice:
            yield "range"
        elif choice.get("type") != "null":
            yield _TYPES.get(choice.get("type", "$ref"), "mapping")


def _means(row: Spelling) -> str:
    if row.accepts == ANYTHING:
        return "no meaning here, any value"
    values = ", ".join(map(_json, row.accepts))
    if not row.ours:
        return f"not supported yet; only {f'{values}, ' if values else ''}`null`"
    said = ", ".join(f"`{ours}`" for ours in row.ours.split(", "))
    said += f" (only when the tool is `{row.tool}`)" if row.tool else ""
    return said + (f"; {values} changes nothing" if values else "")


def _place(place: str) -> str:
    return f"{place}.profiler" if place else "profiler"


def _json(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; returns the exit status."""
    new = page()
    if "--check" not in arguments:
        PAGE.write_text(new, encoding="utf-8")
        print(f"Wrote {PAGE.name}")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == new:
        return 0
    print(f"{PAGE.name} is stale: python docs/generate_config.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
