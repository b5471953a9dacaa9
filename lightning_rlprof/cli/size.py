"""The verb ``size``: whether a training fits its devices, before it is started."""

from typing import Annotated, get_args

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import option
from lightning_rlprof.cli.open_run import as_json
from lightning_rlprof.errors import RlprofError

_MODEL, _SPLIT, _ROLLOUT = "Job", "Training", "Rollout"

ModelPath = Annotated[
    str | None, option("PATH", "config.json of the model, or its folder", panel=_MODEL)
]
Devices = Annotated[str | None, option("NxDEVICE", "Such as 8xH100-80G", panel=_MODEL)]
Algorithm = Annotated[str, option("NAME", "grpo, ppo, dpo or sft", panel=_MODEL)]
Prompt = Annotated[int | None, option("N", "Longest prompt, in tokens", panel=_MODEL)]
Response = Annotated[int | None, option("N", "Longest response, in tokens", panel=_MODEL)]
ImageTokens = Annotated[int, option("N", "Tokens of the prompt that are images", panel=_MODEL)]
Batch = Annotated[int | None, option("N", "Prompts of a step, for step times", panel=_MODEL)]
Group = Annotated[int, option("N", "Responses per prompt; dpo: 2", panel=_MODEL)]
Shard = Annotated[
    str | None,
    option(
        "NAME",
        "fsdp, zero1, zero2, zero3 or megatron; default: fsdp, or megatron if tp, pp or ep",
        panel=_SPLIT,
    ),
]
Tokens = Annotated[
    int | None,
    option(
        "N",
        "Tokens of a micro-batch, before cp divides them; default: one longest sequence",
        panel=_SPLIT,
    ),
]
ForwardTokens = Annotated[
    int | None,
    option(
        "N", "The same without backward: log-probabilities, values; default: --tokens", panel=_SPLIT
    ),
]
Tp = Annotated[int, option("N", "Tensor parallel", panel=_SPLIT)]
Pp = Annotated[int, option("N", "Pipeline parallel", panel=_SPLIT)]
Ep = Annotated[int, option("N", "Expert parallel", panel=_SPLIT)]
Cp = Annotated[int, option("N", "Context or sequence parallel", panel=_SPLIT)]
Lora = Annotated[int, option("RANK", "Train adapters of this rank", panel=_SPLIT)]
Offload = Annotated[
    float,
    option(
        "SHARE",
        "Share of the optimizer on the host; above 0, states leave the device in rollouts",
        panel=_SPLIT,
    ),
]
Checkpointing = Annotated[
    bool, typer.Option(help="Recompute activations of layers", rich_help_panel=_SPLIT)
]
RolloutTp = Annotated[
    int | None, option("N", "Tensor parallel; default: the least that fits", panel=_ROLLOUT)
]
RolloutEp = Annotated[
    int | None,
    option(
        "N",
        "Expert parallel, over replicas if above its tensor parallel; default: the same",
        panel=_ROLLOUT,
    ),
]
RolloutMemory = Annotated[
    float | None,
    option(
        "SHARE",
        "Of a device that the engine may use: gpu_memory_utilization; default: 0.9",
        panel=_ROLLOUT,
    ),
]
RolloutDevices = Annotated[
    int,
    option("N", "Devices of the rollout alone; 0: it shares those of the training", panel=_ROLLOUT),
]


def size(
    model: ModelPath = None,
    devices: Devices = None,
    algorithm: Algorithm = "grpo",
    prompt_length: Prompt = None,
    response_length: Response = None,
    image_tokens: ImageTokens = 0,
    batch: Batch = None,
    group: Group = 8,
    shard: Shard = None,
    tokens: Tokens = None,
    forward_tokens: ForwardTokens = None,
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    cp: Cp = 1,
    lora: Lora = 0,
    offload: Offload = 0.0,
    checkpointing: Checkpointing = True,
    rollout_tp: RolloutTp = None,
    rollout_ep: RolloutEp = None,
    rollout_memory: RolloutMemory = None,
    rollout_devices: RolloutDevices = 0,
) -> None:
    """Estimate whether a training fits its devices, and its speed.

    Example: rlprof size --model config.json --devices 8xH100-80G --prompt-length 1024
    --response-length 2048
    """
    from lightning_rlprof.analysis.models.huggingface import read_model
    from lightning_rlprof.analysis.sizing import job as jobs
    from lightning_rlprof.analysis.sizing.sizing import size as sized

    needed = {
        "--model": model,
        "--devices": devices,
        "--prompt-length": prompt_length,
        "--response-length": response_length,
    }
    if missing := [flag for flag, value in needed.items() if value is None]:
        raise RlprofError(
            f"size needs {', '.join(missing)}",
            hint="Memory and time depend on lengths: give those of the longest, in tokens."
            if any("length" in flag for flag in missing)
            else "See rlprof size --help",
            code="usage",
        )
    for flag, value, choices in (
        ("--algorithm", algorithm, get_args(jobs.Algorithm)),
        ("--shard", shard, (None, *get_args(jobs.Shard))),
    ):
        if value not in choices:
            known = ", ".join(filter(None, choices))
            raise RlprofError(f"{flag} {value!r} is unknown", hint=f"Known: {known}", code="usage")
    number, device = jobs.parse_devices(str(devices))
    split = "megatron" if tp * pp * ep > 1 else "fsdp"
    found = sized(
        jobs.Job(
            read_model(str(model)),
            device,
            number,
            prompt_length or 0,
            response_length or 0,
            image_tokens=image_tokens,
            algorithm=algorithm,  # type: ignore[arg-type]
            shard=shard or split,  # type: ignore[arg-type]
            batch=batch,
            group=group,
            tokens=tokens,
            forward_tokens=forward_tokens,
            tp=tp,
            pp=pp,
            ep=ep,
            cp=cp,
            rollout_tp=rollout_tp,
            rollout_ep=rollout_ep,
            rollout_memory=rollout_memory,
            rollout_devices=rollout_devices,
            lora=lora,
            offload=offload,
            checkpointing=checkpointing,
        )
    )
    tables = [found.memory(), found.changes(), found.times()]
    if console.is_json():
        facts = {"verdict": found.verdict, "spare_bytes": [round(each) for each in found.spare]}
        console.put_json(facts | {"tables": as_json(tables)})
        return
    console.status(found.summary())
    shown = [tables[0], *(tables[1:2] if found.verdict != "fits" else []), tables[2]]
    console.print_tables(shown)
