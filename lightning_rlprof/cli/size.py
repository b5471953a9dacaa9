"""The verb ``size``: whether a training fits its devices, before it is started."""

import inspect
from typing import Annotated, Any, get_args

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import option
from lightning_rlprof.cli.open_run import answer, as_json, open_run, run_at
from lightning_rlprof.errors import RlprofError

_Row = tuple[str, Any, Any, str, str]
_OPTIONS: dict[str, tuple[_Row, ...]] = {
    "Job": (
        ("model", str | None, None, "PATH", "config.json of the model, or its folder"),
        (
            *("devices", str | None, None, "NxDEVICE"),
            "Such as 8xH100-80G, or by its figures: 8x48GB@180TFLOPS@1.8TB/s",
        ),
        ("algorithm", str, "grpo", "NAME", "grpo, ppo, dpo or sft"),
        ("prompt_length", int | None, None, "N", "Longest prompt, in tokens"),
        ("response_length", int | None, None, "N", "Longest response, in tokens"),
        ("batch", int | None, None, "N", "Prompts of a step, for step times"),
        ("mean_length", int | None, None, "N", "Mean response, in tokens, for step times"),
        ("group", int, 8, "N", "Responses per prompt; dpo: 2"),
        (
            *("compare", str | None, None, "RUN"),
            "Compare the stages of a run with what is attainable; options go before its facts",
        ),
    ),
    "Training": (
        (
            *("shard", str | None, None, "NAME"),
            "fsdp, zero1, zero2, zero3 or megatron; default: fsdp, or megatron if tp, pp or ep",
        ),
        (
            *("tokens", int | None, None, "N"),
            "Tokens of a micro-batch, before cp divides them; default: one longest sequence",
        ),
        (
            *("forward_tokens", int | None, None, "N"),
            "The same without backward: log-probabilities, values; default: --tokens",
        ),
        ("tp", int, 1, "N", "Tensor parallel"),
        ("pp", int, 1, "N", "Pipeline parallel"),
        ("ep", int, 1, "N", "Expert parallel"),
        ("cp", int, 1, "N", "Context or sequence parallel"),
        ("lora", int, 0, "RANK", "Train adapters of this rank"),
        (
            *("offload", float, 0.0, "SHARE"),
            "Share of the optimizer on the host; above 0, states leave the device in rollouts",
        ),
        ("checkpointing", bool, True, "", "Recompute activations of layers"),
    ),
    "Rollout": (
        ("rollout_tp", int | None, None, "N", "Tensor parallel; default: the least that fits"),
        (
            *("rollout_ep", int | None, None, "N"),
            "Expert parallel, over replicas if above its tensor parallel; default: the same",
        ),
        (
            *("rollout_memory", float | None, None, "SHARE"),
            "Of a device that the engine may use: gpu_memory_utilization; default: 0.9",
        ),
        (
            *("rollout_devices", int, 0, "N"),
            "Devices of the rollout alone; 0: it shares those of the training",
        ),
        ("max_num_seqs", int | None, None, "N", "Sequences that an engine runs at a time"),
        ("eager", bool, False, "", "Engines decode without graphs"),
    ),
}
"""By help panel: each option's name, type, default, placeholder and meaning."""
_NEEDED = ("model", "devices", "prompt_length", "response_length")
_FACTS = {
    **{"prompt_length": "prompt_tokens", "mean_length": "mean", "response_length": "longest"},
    **{"tokens": "micro_tokens", "checkpointing": "recompute"},
    **{name: name for name in ("group", "tp", "pp", "cp", "ep", "lora", "offload")},
    **{name: name for name in ("max_num_seqs", "eager")},
    **{name: name for name in ("rollout_tp", "rollout_ep", "rollout_devices")},
}
"""Options that say how a run works, and the fact of `analysis.sizing.speed` that each is."""


def size(**given: Any) -> None:
    """Estimate whether a training fits its devices, and its speed.

    Example: rlprof size --model config.json --devices 8xH100-80G --prompt-length 1024
    --response-length 2048
    """
    from lightning_rlprof.analysis.models.huggingface import read_model
    from lightning_rlprof.analysis.sizing import job as jobs
    from lightning_rlprof.analysis.sizing.sizing import size as sized

    if (run := given.pop("compare")) is not None:
        _compare(run, given)
        return
    if missing := [f"--{name.replace('_', '-')}" for name in _NEEDED if given[name] is None]:
        raise RlprofError(
            f"size needs {', '.join(missing)}",
            hint="Memory and time depend on lengths: give those of the longest, in tokens."
            if any("length" in name for name in missing)
            else "See rlprof size --help",
            code="usage",
        )
    for name, choices in (("algorithm", jobs.Algorithm), ("shard", jobs.Shard)):
        if given[name] not in (None, *get_args(choices)):
            known = ", ".join(get_args(choices))
            raise RlprofError(
                f"--{name} {given[name]!r} is unknown", hint=f"Known: {known}", code="usage"
            )
    model, devices, prompt, response = (given.pop(name) for name in _NEEDED)
    given["mean"] = given.pop("mean_length")
    number, device = jobs.parse_devices(devices)
    if given["shard"] is None:
        given["shard"] = "megatron" if given["tp"] * given["pp"] * given["ep"] > 1 else "fsdp"
    found = sized(jobs.Job(read_model(model), device, number, prompt, response, **given))
    tables = [found.memory(), found.changes(), found.times()]
    if console.is_json():
        facts = {"verdict": found.verdict, "spare_bytes": [round(each) for each in found.spare]}
        console.put_json(facts | {"tables": as_json(tables)})
        return
    console.status(found.summary())
    shown = [tables[0], *(tables[1:2] if found.verdict != "fits" else []), tables[2]]
    console.print_tables(shown)


def _compare(run: str, given: dict[str, Any]) -> None:
    """Print how fast each stage of a run is, by what the options say and by what it recorded."""
    from lightning_rlprof.analysis.models.huggingface import read_model
    from lightning_rlprof.analysis.sizing.job import parse_devices
    from lightning_rlprof.analysis.sizing.speed import speed_table, speeds

    usual = {row[0]: row[2] for rows in _OPTIONS.values() for row in rows}
    known = {fact: given[name] for name, fact in _FACTS.items() if given[name] != usual[name]}
    if given["shard"] is not None:
        known["sharded"] = given["shard"] in ("fsdp", "zero3")
    if given["model"] is not None:
        known["model"] = read_model(given["model"])
    if given["devices"] is not None:
        known["devices"], known["device"] = parse_devices(given["devices"])
    spans = open_run(run_at(run))
    found = speeds(spans, known)
    facts = {"speed": [each.to_dict() for each in found]}
    answer(spans, [speed_table(found)], "measured and attainable", facts=facts)


size.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # Typer reads it.
    [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option(metavar, text, panel=panel)],
        )
        for panel, rows in _OPTIONS.items()
        for name, kind, default, metavar, text in rows
    ]
)
