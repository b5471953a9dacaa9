"""A run of Llama-3-8B on eight H100 whose seconds and counters are given."""

from collections.abc import Mapping
from dataclasses import replace

from lightning_rlprof.tables.spans import Spans
from tests.analysis.models.published import CONFIGS
from tests.builders.runs import Row, loaded

SECOND = 10**9
H100 = "NVIDIA H100 80GB HBM3"
GENERATED = {"tokens": 2048 * 795, "samples": 2048, "tokens_max": 4096}
TRAINED = {"tokens": 2048 * 995, "samples": 2048}
KNOWN = {"eager": 0, "max_num_seqs": 1024, "rollout_tp": 1, "prompt_tokens": 200, "group": 32}
"""Facts of the rollout, as a door or a program counts them."""


def speedy(
    seconds: Mapping[str, float],
    counters: Mapping[str, Mapping[str, float]] | None = None,
    *,
    steps: int = 6,
    device: str = H100,
    model: str | None = "Llama-3-8B",
) -> Spans:
    """Return a run of one rank of eight; each stage takes its seconds in every step."""
    rows, now = list[Row](), 0
    for step in range(1, steps + 1):
        begin = now
        for stage, length in seconds.items():
            end = now + int(length * SECOND)
            rows.append(Row(stage, "stage", step, now, end, counters=(counters or {}).get(stage)))
            now = end
        rows.append(Row("step", "step", step, begin, now))
    return on_h100(loaded(rows), device=device, model=model)


def on_h100(spans: Spans, *, device: str = H100, model: str | None = "Llama-3-8B") -> Spans:
    """Return a run as if eight such devices had trained this model."""
    config = {} if model is None else {"model": CONFIGS[model]}
    heads = {
        rank: replace(
            head, device="cuda", device_name=device, world_size=8, config=head.config | config
        )
        for rank, head in spans.headers.items()
    }
    return replace(spans, headers=heads)
