"""How often published times are in the attainable range: ``python benchmarks/attainable.py``.

Rows are in ``attainable_rows.tsv``: what a document says of a job, and how long a stage took. They
are split by document. The efficiencies were at first chosen on ``calibration``. ``held out`` and
``new`` were scored afterwards; two corrections followed, and ``after`` came in after these.
``fresh`` was collected whole before any of it was scored; corrections followed, and ``last`` was
collected whole after these; so were, after further corrections, ``unseen`` and ``second``. A fact
that a document does not state stays a range; engines in C++ launch like graphs. ``--misses`` prints
each row outside its range.
"""

import argparse
import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.analysis.sizing.attainable import Pass, Refit, Rollout, Work
from lightning_rlprof.analysis.sizing.job import parse_devices
from lightning_rlprof.analysis.sizing.speed import judge_speed

sys.path.insert(0, str(Path(__file__).parents[1]))
CONFIGS: Any = importlib.import_module("tests.analysis.models.published").CONFIGS

__all__ = ["SOURCES", "Row", "main", "rows", "scored"]

_GITHUB = "https://github.com/"
SOURCES = {
    "nemo-959": _GITHUB + "NVIDIA-NeMo/RL/issues/959",
    "ssamine4": "https://wandb.ai/ssamine4/verl-gaudi-vs-a100",
    "verl-dpsk": _GITHUB + "volcengine/verl/blob/main/docs/perf/dpsk.md",
    "play-verl": _GITHUB + "dingxianzhong/play-verl",
    "prime-rl-fork": _GITHUB + "shyampathak22/prime-rl, benchmarks/results/BENCHMARKS.md",
    "qwen-speed": _GITHUB + "QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst",
    "tt-143": _GITHUB + "tenstorrent/tt-inference-server/issues/143",
    "tt-125": _GITHUB + "tenstorrent/tt-inference-server/issues/125",
    "sglang-060": _GITHUB + "sgl-project/sglang, benchmark/benchmark_vllm_060/README.md",
    "rkooo567": _GITHUB + "rkooo567/llm_benchmark",
    "automodel": _GITHUB + "NVIDIA-NeMo/Automodel, docs/performance-summary.md",
    "megatron-bridge": _GITHUB + "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md",
    "torchtitan": _GITHUB + "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "prime-rl": _GITHUB + "PrimeIntellect-ai/prime-rl, benchmarks/results/BENCHMARKS.md",
    "tt-340": _GITHUB + "tenstorrent/tt-inference-server/issues/340",
    "vime-175": _GITHUB + "vllm-project/vime/issues/175",
    "vime-255": _GITHUB + "vllm-project/vime/issues/255",
    "slime-a100": _GITHUB + "THisisPX/slime, reports/*.md of Qwen3-4B",
    "qwen3-h20": _GITHUB + "terrense/qwen3-8b-grpo-dapo-lab, experiments/*/metrics",
    "rllm-32b": _GITHUB + "novitalabs/rllm, DeepSWE 32B: timing and resources",
    "rllm-30b": _GITHUB + "novitalabs/rllm, Megatron backend for MoE training",
    "infx-swe": "Qwen3-235B SWE-env, jobs 29922, 30045, 36915: pages of a fork of slime",
    "medagent-v20": "MedAgent v20: report of a training by AgentLightning",
    "coder-5090": _GITHUB + "Rogerffff/verl, coding_model_project: A1 probe",
    "lmdeploy": _GITHUB + "InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md",
    "trtllm-061": _GITHUB + "NVIDIA/TensorRT-LLM, docs/source/performance.md of v0.6.1",
    "checkpoint-engine": _GITHUB + "MoonshotAI/checkpoint-engine, README.md",
    "skyrl-161": _GITHUB + "NovaSky-AI/SkyRL/pull/161",
    "slime-67": _GITHUB + "THUDM/slime/pull/67",
    "ml-sys-169": _GITHUB + "zhaochenyang20/Awesome-ML-SYS-Tutorial/issues/169",
    "verl-a800": _GITHUB + "verl-project/verl, examples/tuning/README.md",
    "npu-lora": _GITHUB + "verl-project/verl-ascend-recipe/issues/78: report of its recipe",
    "npu-deepseek": "Training DeepSeek-R1 by verl on 128 Atlas A3: report of its authors",
    "verl-gsm8k-7b": "veRL Benchmark Report: GRPO and Qwen2.5-7B on GSM8K",
    "verl-gsm8k-1b": "veRL Benchmark Report: GRPO and LLaMA3.2-1B on GSM8K",
    "torchtitan-a100": _GITHUB + "pytorch/torchtitan, docs/performance.md of commit 0413364",
    "fms-fsdp": _GITHUB + "foundation-model-stack/fms-fsdp, README.md",
    "xtuner": _GITHUB + "InternLM/xtuner, docs/zh_cn/acceleration/benchmark.rst",
    "dgxc-llama31": _GITHUB + "NVIDIA/dgxc-benchmarking, llama3.1/README_*.md of 24.09",
    "dgxc-ft": _GITHUB + "NVIDIA/dgxc-benchmarking, ft_llama3/README_70b.md",
    "gpt-fast": _GITHUB + "pytorch-labs/gpt-fast, README.md",
    "silybench": _GITHUB + "tgarg01/silybench-data, derived/csv, run 20260924T125045Z",
    "qwen3-speed": _GITHUB + "QwenLM/Qwen3, docs/source/getting_started/speed_benchmark.md",
    "gpustack-a100": _GITHUB + "gpustack/gpustack, docs/performance-lab/qwen3-{14b,32b}/a100.md",
    "skyrl-qwen36": _GITHUB + "CharlieFRuan/SkyRL, qwen3.6-35b-optimization.md",
    "skyrl-microbatch": _GITHUB + "CharlieFRuan/SkyRL, max_tokens_per_microbatch_tuning.md",
    "npu-qwen36": _GITHUB + "InnovationTea/llm-posttrain, docs/qwen36_gsm8k_grpo_validation.md",
    "finqa-4b": "FinQA GRPO: Experiment Audit Log of rLLM and verl on 2 RTX 6000 Ada",
    "fastrl-l40s": _GITHUB + "mbwangfpdc/fastrl, notes on SkyRL-SQL",
    "fastrl-tuning": _GITHUB + "mbwangfpdc/fastrl, examples/sql/TRAIN_CONFIG_TUNING.md",
    "ttrl-b200": "Qwen3-30B-A3B TTRL on two B200: smoke record of 2026-08-05",
    "llm-foundry": _GITHUB + "mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
    "internlm": _GITHUB + "InternLM/InternLM, doc/en/train_performance.md",
    "maxtext-b200": _GITHUB + "AMD-AGI/maxtext-slurm, docs/b200-benchmark-report.md",
    "maxtext-kimi-b200": _GITHUB + "AMD-AGI/maxtext-slurm, Kimi-K2 on B200",
    "kempnerforge": _GITHUB + "KempnerInstitute/KempnerForge, validation report of 2026-04-06",
    "easycontext": _GITHUB + "jzhang38/EasyContext, README.md",
    "torchtune": _GITHUB + "pytorch/torchtune, README.md of October 2024",
    "tinyllama": _GITHUB + "jzhang38/TinyLlama, README.md",
    "nemo-rl-blog": "NVIDIA: reinforcement learning with NeMo-RL and Megatron Core, table 1",
    "slime-27b-h20": "Efficiency of an RL step of Qwen3.6-27B on four nodes of H20 (slime)",
    "ttrl-math-7b": "TTRL of Qwen2.5-Math-7B on MATH-500: progress of its tuning, 2026-07-12",
    "rl-from-sft": _GITHUB + "Harpreet221295/citesearch-rl, docs/RL_FROM_SFT_LOG.md",
    "citesearch-tuning": _GITHUB
    + "Harpreet221295/citesearch-rl, docs/ONE_STEP_TUNING_VERL_RLLM.md",
    "swesmith-35b": "SWE-smith GRPO of Qwen3.6-35B-A3B on 8 A100: analysis of 2026-08-05",
}
"""Documents of the rows, read in November 2026."""

_SINGLE = (
    *("samples", "prompt", "group", "pp", "cp", "ep", "updates", "square", "bytes", "senders"),
)
_BOTH = ("tp",)  # A pair of a rollout, and a number of a pass.


class Row(NamedTuple):
    """A published time of a stage.

    Attributes:
        split: ``calibration``, ``held out``, ``new``, ``after``, ``fresh``, ``last``, ``unseen`` or
            ``second``.
        source: Its document, a key of `SOURCES`.
        stage: ``generation``, ``log-prob``, ``training`` or ``refit``.
        seconds: How long it took.
        work: What it did.
    """

    split: str
    source: str
    stage: str
    seconds: float
    work: Work


def rows() -> Iterator[Row]:
    """Yield the published rows."""
    with Path(__file__).with_name("attainable_rows.tsv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file, delimiter="\t"):
            facts = dict(each.split("=") for each in line["facts"].split())
            work = _work(line["stage"], line["model"], f"{line['devices']}x{line['device']}", facts)
            yield Row(line["set"], line["source"], line["stage"], float(line["seconds"]), work)


def _work(stage: str, name: str, devices: str, facts: dict[str, str]) -> Work:
    number, device = parse_devices(devices)
    job = (read_model(CONFIGS[name]), device, number)
    known: dict[str, Any] = {key: _value(stage, key, text) for key, text in facts.items()}
    if stage == "refit":
        return Refit(*job, **known)
    if stage == "generation":
        return Rollout(*job, **known)
    known["lora"] = known.get("lora") == (1.0, 1.0)
    return Pass(*job, backward=stage == "training", **known)


def _value(stage: str, key: str, text: str) -> Any:
    if key == "path":
        return (text, text)
    low, _, high = text.partition(":")
    if key in _SINGLE or (key in _BOTH and stage != "generation"):
        return float(low) if key in ("prompt", "square", "bytes") else int(low)
    return float(low), float(high or low)


def scored(found: list[Row]) -> dict[str, Any]:
    """Return how many rows are inside, below and above their range, and the median width."""
    speeds = [judge_speed(row.source, row.seconds, row.work) for row in found]
    judged = [each for each in speeds if each.low is not None and each.high is not None]
    verdicts = [each.verdict for each in judged]
    widths = [(each.high or 0.0) / (each.low or 1.0) for each in judged]
    return {
        "sources": len({row.source for row in found}),
        "rows": len(judged),
        "inside": verdicts.count("normal"),
        "below": verdicts.count("fast"),
        "above": verdicts.count("slow"),
        "width": median(widths) if widths else 0.0,
        "short": len(found) - len(judged),
    }


def main() -> int:
    """Print the table of `docs/accuracy.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--misses", action="store_true", help="print each row outside its range")
    options = parser.parse_args()
    every = list(rows())
    print("| split | stage | sources | inside / rows | below | above | median width |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for split in dict.fromkeys(row.split for row in every):
        for stage in ("generation", "training", "log-prob", "refit"):
            own = [row for row in every if (row.split, row.stage) == (split, stage)]
            if own and (score := scored(own))["rows"]:
                inside = f"{score['inside']} / {score['rows']}"
                counts = (score["sources"], inside, score["below"], score["above"])
                print(
                    f"| {split} | {stage} | {' | '.join(map(str, counts))} | {score['width']:.1f} |"
                )
    for row in every if options.misses else []:
        speed = judge_speed(row.stage, row.seconds, row.work)
        if speed.verdict in ("slow", "fast"):
            print(row.split, row.source, speed.text, *speed.causes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
