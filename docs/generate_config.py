"""Write docs/config.md from the configuration itself; ``--check`` only says whether it is stale."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_rlprof.config.integrated import IntegratedConfig
from lightning_rlprof.config.nsight import NsightConfig
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.config.roles import RoleConfig
from lightning_rlprof.config.rules import ArgumentStages, GradStages, WrapRule
from lightning_rlprof.config.section import Section
from lightning_rlprof.config.spellings import ANYTHING, ROLE, ROLES, SPELLINGS, TOOLS, Spelling
from lightning_rlprof.model import STAGES

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
)

_TYPES = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "string": "text",
    "$ref": "block",
}

HEAD = """\
<!-- Written by docs/generate_config.py; change the model or the generator, not this page. -->

# Every key of the configuration

One configuration says what is recorded and what is captured. **Spans** of all stages are cheap
and always recorded (`spans: true`). A **capture** is the window in which a device tool is on; it
is dear, and `stage`, `steps`, `ranks` and the rest steer only it. Nothing of it needs a change in
the training code.

```python
from lightning_rlprof import ProfilerCallback

ProfilerCallback()                                        # spans only
ProfilerCallback(stage="actor_update", profile_step_start=3, profile_step_end=5)
ProfilerCallback("profiler.yaml")                         # a file of ours, MindSpeed-RL's or verl's
ProfilerCallback({"integrated": {"profile": True}}, steps=[1, 10])
```

## Where values come from

Later ones win, key by key:

1. a mapping, an OmegaConf `DictConfig`, or the path of a YAML file. MindSpeed-RL's block is taken
   unchanged, with `profiler_config:` on top or without, and so are verl's keys (below). Either may
   sit in the file of a whole training; what else that file holds is not looked at;
2. variables: `RLPROF__INTEGRATED__STAGE=actor_update`, `RLPROF__STEPS=[1,3]`. Two underscores go
   one level down, values are YAML;
3. keywords: top-level keys, and keys of `integrated` given flat.

Every mistake raises `ConfigError` when the configuration is built, never in the training loop:

```text
integrated.stage='actor_updat' is not a stage; did you mean 'actor_update'? Allowed: …
```

`-` in a key is read as `_`. References (`${…}`) are resolved when OmegaConf is installed.

## When captures are on

`integrated.profile` is the master switch. An explicit `false` always wins. Left unset, captures
are on as soon as a capture option is given: any other key of `integrated` but
`profile_save_path`, or `steps`, `ranks`, `all_ranks`, `discrete`, `roles`,
`profile_continuous_steps`, `tools`. An empty list of `steps` or `tools`, or `roles` of which none
is enabled, leave them off.

`mstx: true` with `profile_level: level_none` and `profile_with_cpu: false` is lightweight mode:
markers only, on every device.
"""

SPELLED = """\
## verl's keys

Old and new spellings are read as they are. `<role>` is any place in the table of roles. `null`
means "inherit" or "default" everywhere. Options of a tool that is not selected, and blocks of a
role that is off, count for nothing, as in verl; an unknown key inside a profiler block is an
error. Keys whose feature does not exist here are accepted with the values that change nothing and
refused with any other. Our own keys beside verl's win over them. verl profiles nothing without
`steps` or with `tool: null`, and so do we.
"""

EXAMPLES = """\
## Examples

Off, whatever else is written:

```yaml
integrated:
  profile: false
  stage: actor_update
```

MindSpeed-RL's block, unchanged: two steps of one stage on two ranks:

```yaml
profiler_config:
  integrated:
    profile: true
    stage: actor_update
    profile_save_path: ./profiler_data
    profile_level: level1
    profile_step_start: 2
    profile_step_end: 4
    profile_ranks: [0, 1]
```

Lightweight mode, markers only:

```yaml
integrated:
  profile: true
  mstx: true
  profile_level: level_none
  profile_with_cpu: false
```

One capture per step for steps 1, 2 and 5, on every rank; then the same with one capture per stage:

```yaml
steps: [1, 2, 5]
all_ranks: true
```

```yaml
steps: [1, 2, 5]
all_ranks: true
discrete: true
```

Roles that share a process are captured on the union of their ranks, here 0, 1 and 2:

```yaml
steps: [1]
roles:
  actor: {ranks: [0, 1]}
  reference: {ranks: [2]}
```

Stages for code that marks none:

```yaml
custom_stages: [filter_groups]
wrap:
  - target: policy.generate
    stage: actor_generate
  - target: policy.forward
    by_grad: {grad: actor_update, no_grad: actor_compute_log_prob}
  - target: log_prob_scores
    by_arg:
      arg: model_type
      stages: {Old: actor_compute_log_prob, Reference: reference_compute_log_prob}
  - target: drop_solved
    stage: filter_groups
```

verl's keys, new and old:

```yaml
global_profiler:
  tool: torch
  steps: [1, 2, 5]
  save_path: outputs/profile
actor_rollout_ref:
  actor:
    profiler:
      enable: true
      all_ranks: true
      tool_config:
        torch: {contents: [cpu, cuda], discrete: false}
```

```yaml
trainer:
  profile_steps: [1, 2]
  worker_nsight_options: {trace: "cuda,nvtx", cuda-memory-usage: "true"}
actor_rollout_ref:
  profiler: {discrete: true, ranks: [0, 1]}
```
"""


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
    return f"`{name}`", allowed, default.replace("`null`", "unset"), field.description or ""


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
        elif choice.get("type") != "null":
            yield _TYPES.get(choice.get("type", "$ref"), "mapping")


def _means(row: Spelling) -> str:
    if row.ours:
        return f"`{row.ours}`" + (f" (only when the tool is `{row.tool}`)" if row.tool else "")
    if row.accepts == ANYTHING:
        return "no meaning here, any value"
    values = ", ".join(_json(value) for value in (*row.accepts, None))
    return f"not supported yet; only {values}"


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
