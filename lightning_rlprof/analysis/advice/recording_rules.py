"""Rules on the recording: captures that cost too much, and time without a name."""

from lightning_rlprof.analysis.advice.rule import Rule, Setting, above
from lightning_rlprof.analysis.advice.time_shares import PROFILER, UNTRACED

RECORDING_RULES = (
    Rule(
        "smaller-captures",
        "Make captures smaller: they take time from training",
        (above(PROFILER, 0.02),),
        (
            Setting("rlprof", "steps", "fewer steps"),
            Setting("rlprof", "integrated.stage", "one stage", "all"),
            Setting("rlprof", "integrated.profile_level", "level_none or level0", "level0"),
            Setting("verl", "global_profiler.steps", "fewer steps", "null"),
            Setting(
                "MindSpeed-RL", "generate_config.sampling_config.max_tokens", "128 or less", "128"
            ),
            Setting("MindSpeed-RL", "megatron_training.global_batch_size", "8 or less"),
        ),
        "Files get smaller, and captured steps stay close to the others.",
        "Fewer events: what is not captured is not seen.",
        "share",
    ),
    Rule(
        "untraced-time",
        "Name the time that no stage has",
        (above(UNTRACED, 0.2),),
        (
            Setting("rlprof", "wrap", "the methods that take it"),
            Setting("rlprof", "auto_stages", "true", "true"),
        ),
        "The other advice sees this time. Nothing gets faster.",
        "None.",
    ),
)
