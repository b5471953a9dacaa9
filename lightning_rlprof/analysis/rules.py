"""Rules of findings, a row each: which label counts from which share on, and what to try then."""

from typing import NamedTuple

from lightning_rlprof.analysis.labels import Label

__all__ = ["RULES", "Rule"]


class Rule(NamedTuple):
    """A label that should not take more than a share of the job.

    Attributes:
        label: What the time went into.
        above: Share of the job from which on it is a finding.
        claim: What is then held.
        experiment: What to try next.
        refuted: What would show that the claim is wrong.
    """

    label: Label
    above: float
    claim: str
    experiment: str
    refuted: str


RULES = (
    Rule(
        Label.ROLLOUT,
        0.5,
        "most GPU-seconds generate responses",
        "measure one step with a longer batch per engine, a KV cache that fits, or speculative "
        "decoding; compare tokens per second with rlprof compare",
        "tokens per second of the rollout do not rise, or the rest of the step grows by as much",
    ),
    Rule(
        Label.TAIL,
        0.1,
        "GPUs wait for the last responses of a rollout",
        "cap the length, cut the tail with partial rollouts, or sample more prompts than needed",
        "the tail is as long with capped lengths: then requests start late or an engine is slow",
    ),
    Rule(
        Label.STARVATION,
        0.05,
        "GPUs wait for samples",
        "prefetch the next batch, use more DataLoader workers, or start the rollout earlier",
        "the wait stays with a batch that is in memory already",
    ),
    Rule(
        Label.PRESSURE,
        0.05,
        "those who generate wait for those who train",
        "allow more staleness, or move GPUs from rollout to training",
        "the buffer is not full while they wait",
    ),
    Rule(
        Label.WAITING,
        0.05,
        "ranks wait in collectives for a late one",
        "rlprof stragglers names the late rank; balance the tokens of the ranks",
        "the wait stays when every rank gets the same batch",
    ),
    Rule(
        Label.TRANSFER,
        0.1,
        "collectives move data while nothing computes",
        "overlap them: larger buckets, gradients reduced in the backward pass, fewer gathers",
        "rlprof show RUN overlap tells that they overlap already, and the links are at their limit",
    ),
    Rule(
        Label.HOST,
        0.1,
        "the device waits for the host to launch",
        "rlprof show RUN idle and launches; compile, use CUDA graphs, or raise the micro-batch",
        "the same share stays with a micro-batch of twice the size",
    ),
    Rule(
        Label.COPY,
        0.05,
        "copies between host and device are exposed",
        "pin the memory, copy without blocking, and keep the data on the device between stages",
        "the copies take as long from pinned memory",
    ),
    Rule(
        Label.SYNC,
        0.05,
        "moving weights to the rollout engine takes its time",
        "larger buckets, no copy through the host, or update while the engine drains",
        "the time stays as it is for a model of half the size: then it is a fixed pause",
    ),
    Rule(
        Label.REWARD,
        0.15,
        "GPUs wait for rewards, tools or environments",
        "score samples as they arrive, in parallel, and not a batch at its end",
        "the rewards take as long for one sample as for the batch",
    ),
    Rule(
        Label.SLEEP,
        0.05,
        "memory changes hands between training and generation",
        "keep more of it on the device, offload only the optimizer, or separate the two",
        "the phases do not fit into memory together",
    ),
    Rule(
        Label.EVALUATION,
        0.1,
        "checkpoints and validation take their time",
        "do them less often, write checkpoints asynchronously",
        "their number, not their length, is what the schedule asks for",
    ),
    Rule(
        Label.GARBAGE,
        0.02,
        "Python's garbage collection stops the ranks",
        "gc.freeze() after set-up, and collect at the same step on all ranks",
        "the pauses stay with gc.disable()",
    ),
    Rule(
        Label.RLPROF,
        0.02,
        "capturing itself takes its time",
        "capture fewer steps, one stage, or a lower level",
        "the share stays with integrated.profile: false",
    ),
    Rule(
        Label.UNTRACED,
        0.2,
        "nobody knows what the GPUs did for much of the time",
        "mark what is between the stages with stage(…) or wrap:, see rlprof show RUN gaps",
        "the untraced time is that of ranks that died: see the integrity sheet",
    ),
)
"""All of them; a label stands in one."""
