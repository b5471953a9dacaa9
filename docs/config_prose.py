"""What docs/config.md says around its tables: before them, about verl's keys, and examples."""

__all__ = ["EXAMPLES", "HEAD", "SPELLED"]

HEAD = """\
<!-- Written by docs/generate_config.py; change the model or the generator, not this page. -->

# Every key of the configuration

One configuration says what is recorded and what is captured. **Spans** of all stages are cheap
and always recorded. A **capture** is the window in which a device tool is on; it
is costly, and `stage`, `steps`, `ranks` and the rest steer only it. Nothing of it needs a change in
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

`-` in a key is read as `_`. References (`${…}`) are resolved when OmegaConf is installed;
`\\${…}` is the text `${…}` itself.

## When captures are on

`integrated.profile` is the master switch. An explicit `false` always wins. Left unset, captures
are on as soon as a capture option is given: any other key of `integrated` but
`profile_save_path`, or `steps`, `ranks`, `discrete`, `roles`,
`profile_continuous_steps`, `tokens`, `tools`, `with_stack`, `torch_profiler`, `npu`, `memory`.
An empty list of `steps` or `tools`, or `roles` of which none is enabled, leave them off.

`mstx: true` with `profile_level: level_none` and `profile_with_cpu: false` is lightweight mode:
markers only. A CPU has none: there the only spans are recorded.
"""

SPELLED = """\
## verl's keys

Old and new spellings are read as they are. `<role>` is any place in the table of roles. `null`
means "inherit" or "default" everywhere. Options of a tool that is not selected, and blocks of a
role that is off, count for nothing, as in verl; any other unknown key inside a profiler block is
an error. Keys whose feature does not exist here are accepted with the values that change nothing
and refused with any other. Our own keys beside verl's win over them. verl profiles nothing without
`steps` or with `tool: null`, and so do we; our own `steps`, or `integrated.profile_step_start` and
`…_end`, are steps too, beside verl's keys or as keywords. Roles may differ in ranks, and in
`discrete` in processes of their own; what else they say has to agree.

Files of verl up to 0.5 name no tool. There `trainer.device` chooses: `npu` an Ascend capture with
markers and the options of `trainer.npu_profile`, any other device Nsight Systems. Without a device
it is Ascend if `trainer.npu_profile` has options and none are for Nsight Systems, else Nsight
Systems. The keys of verl's Nsight guide, such as `profile_steps` and `discrete`, need no tool
either. A role of such a file is captured as soon as its `ranks` or `all_ranks` are set.
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
ranks: all
```

```yaml
steps: [1, 2, 5]
ranks: all
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

Nsight Systems; `examples/nvidia/` has more, one file per purpose:

```yaml
tools: [nsight]
steps: [3, 4]
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
