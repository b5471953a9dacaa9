"""The verb hang: which rank the others wait for, and the line at which it is."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_rlprof.cli import console
from lightning_rlprof.cli.completion import SAVE_PATH
from lightning_rlprof.cli.open_run import Run, as_json, check_exists
from lightning_rlprof.system.remote_files import local

if TYPE_CHECKING:
    from lightning_rlprof.analysis.hangs import Hang, RankState

_ROWS, _MOST_FRAMES, _MOST_STACKS = 20, 12, 2


def hang(run: Run = SAVE_PATH) -> None:
    """Name the rank and the line that a hanging run waits for.

    Works while the run hangs, and after it was killed.
    """
    from lightning_rlprof.analysis.hangs import find_hang
    from lightning_rlprof.loaders.live_run import hang_evidence
    from lightning_rlprof.loaders.load import run_directory

    check_exists(run)
    with local(run) as path:
        found = run_directory(path)
        result = find_hang(hang_evidence(found), time.time_ns())
    if console.is_json():
        console.put_json(_as_json(str(found), result))
        return
    console.status(str(found), "bold")
    if console.is_table():
        console.say(result.headline, "bold")
    console.print_tables([result.table()], rows=_ROWS)
    if not console.is_table():
        return
    for cause in [each for each in result.causes if each.stack][:_MOST_STACKS]:
        console.say("")
        console.say(f"Stack of rank {cause.rank}, training thread:")
        for line in _stack(cause):
            console.say(line)
    for hint in result.hints:
        console.status(hint)


def _stack(cause: "RankState") -> list[str]:
    """Return the frames of a stack, innermost first, each with its line of code."""
    from lightning_rlprof.analysis.hangs import short_stack

    frames, lines = short_stack(cause.stack)[:_MOST_FRAMES], []
    for each in frames:
        lines.append(f"  {each.file}:{each.line} {each.function}")
        if each.text:
            lines.append(f"    {each.text}")
    if more := len(cause.stack) - len(frames):
        lines.append(f"  and {console.count(more, 'frame')} of libraries. See: --json")
    return lines


def _as_json(run: str, result: "Hang") -> dict[str, object]:
    causes = [
        {
            "rank": each.rank,
            "state": each.state,
            "reason": each.reason,
            "waits_for": each.waits_in or None,
            "stack": [asdict(frame) for frame in each.stack],
        }
        for each in result.causes
    ]
    return {
        "run": run,
        "headline": result.headline,
        "causes": causes,
        "hints": [*result.hints],
        "tables": as_json([result.table()]),
    }
