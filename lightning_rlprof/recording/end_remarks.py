"""What a run says at its end: what was asked for and did not happen."""

import os
import secrets
import tempfile
from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from string import digits

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import Section
from lightning_rlprof.recording.annotations import CHILD_MARKS
from lightning_rlprof.records.notes import Code, Remark
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.files import open_file

_ASCEND = {"profile_level", "profile_export_type", "profile_analysis"}
_MAX_BYTES_OF_A_CHILD = 256
_MIN_RATIO = 0.92  # Ratio of difflib; names of 14 letters may differ in one letter.


def chosen_stages(config: ProfilerConfig, rank: int) -> list[str]:
    """Return the stages that the configuration names to be captured on a rank; none if all are."""
    chosen = config.integrated.stage
    if not (config.captures and config.wants_rank(rank)) or chosen == "all":
        return []
    return [chosen] if isinstance(chosen, str) else list(chosen)


def never_marked(chosen: Collection[str], seen: Collection[str]) -> list[Remark]:
    """Say of each chosen stage that no code marked it, with what to do.

    Example::

        >>> never_marked(["critic_update"], ["actor_update"])[0].text[:62]
        'stage critic_update was never marked; stages seen: actor_updat'
    """
    shown = ", ".join(sorted(seen)) or "none"
    missing = [name for name in chosen if name not in seen]
    text = "stage {} was never marked; stages seen: {}. {}"
    return [
        Remark(
            Code.STAGE_NEVER_MARKED, text.format(name, shown, how_to_mark(name)), {"stage": name}
        )
        for name in missing
    ]


def how_to_mark(name: str) -> str:
    """Return the two ways to mark a stage.

    Example::

        >>> how_to_mark("critic_update")
        'Mark it with stage("critic_update"), or add a rule: wrap: {METHOD: critic_update}'
    """
    return f'Mark it with stage("{name}"), or add a rule: wrap: {{METHOD: {name}}}'


def never_reached(config: ProfilerConfig, ended: int) -> list[Remark]:
    """Say which of the listed steps never came; ``ended`` is the last complete step."""
    listed = config.steps
    missing = [step for step in listed if step > ended] if isinstance(listed, list) else []
    if not config.captures or not missing:
        return []
    shown = ", ".join(map(str, missing[:5])) + ", …" * (len(missing) > 5)
    text = f"steps never reached: {shown}; last complete step: {ended}"
    return [Remark(Code.STEPS_NOT_REACHED, text, {"first_step": missing[0], "ended": ended})]


def misspelled(seen: Collection[str], known: Collection[str]) -> list[Remark]:
    """Say of each stage whose name is nearly a known one which of them was meant.

    Args:
        seen: Names of the stages that were recorded.
        known: Names that the configuration knows, beside `STAGES`.

    Example::

        >>> misspelled(["actor_genrate", "actor_update"], [])[0].facts
        {'stage': 'actor_genrate', 'known': 'actor_generate'}
    """
    names, found = [*dict.fromkeys([*STAGES, *known])], []
    for stage in sorted({*seen} - {*known}):
        meant = get_close_matches(stage, names, n=1, cutoff=_MIN_RATIO)
        if meant and standard_stage(stage) not in STAGES and stage.strip(digits) != meant[0]:
            text = f'stage "{stage}" is recorded under this name: did you mean "{meant[0]}"?'
            found.append(Remark(Code.STAGE_MISSPELLED, text, {"stage": stage, "known": meant[0]}))
    return found


def without_effect(config: ProfilerConfig, device: str) -> list[Remark]:
    """Say which options are for another device than this one.

    Example::

        >>> without_effect(ProfilerConfig.build(profile_analysis=True), "cuda")[0].text
        'no effect on cuda: integrated.profile_analysis; it is for Ascend'
    """
    if not config.captures:
        return []
    if device == "npu":
        keys, whose = _changed(config.torch_profiler, "torch_profiler"), "torch.profiler"
    else:
        block, whose = config.integrated, "Ascend"
        keys = [key for key in _changed(block, "integrated") if key.split(".")[1] in _ASCEND]
        if block.profile_level == "level_none":  # This level records only markers, on every device.
            keys.remove("integrated.profile_level")
        keys += _changed(config.npu, "npu")
    if not keys:
        return []
    are = "they are" if len(keys) > 1 else "it is"
    text = f"no effect on {device}: {', '.join(keys)}; {are} for {whose}"
    return [Remark(Code.WITHOUT_EFFECT, text, {"device": device})]


def _changed(section: Section, name: str) -> list[str]:
    """Return the keys whose value is not the default."""
    fields = type(section).model_fields
    return [
        f"{name}.{key}"
        for key, field in fields.items()
        if getattr(section, key) != field.get_default(call_default_factory=True)
    ]


class ChildMarks:
    """Hear of the first mark in a child process, which nothing records.

    They share a file, which the first mark makes and the end of the run removes. Forked children
    know its path; others, such as spawned workers of a data loader, have it in their environment.
    """

    def __init__(self) -> None:
        self.path = ""
        with suppress(OSError):  # A machine may have no folder for temporary files.
            name = f"rlprof-child-marks-{secrets.token_hex(16)}"
            self.path = os.path.join(tempfile.gettempdir(), name)
            os.environ[CHILD_MARKS] = self.path

    def remark(self) -> list[Remark]:
        """Say it, in the parent, and forget it."""
        path, self.path, text = self.path, "", ""
        if path and os.environ.get(CHILD_MARKS) == path:
            del os.environ[CHILD_MARKS]
        with suppress(OSError):
            with open_file(Path(path)) as file:
                text = file.readline(_MAX_BYTES_OF_A_CHILD).decode("utf-8", "ignore").strip()
            os.unlink(path)
        if not text:
            return []
        whole = (
            f"marks in child processes were not recorded, the first one was {text}. "
            "Mark in the training process, or use num_workers=0"
        )
        return [Remark(Code.CHILD_PROCESS, whole)]
