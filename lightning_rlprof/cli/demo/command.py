"""The verb ``demo``: record a small GRPO training on this machine, and show where its time went."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.analysis_commands import findings
from lightning_rlprof.cli.console import option
from lightning_rlprof.cli.demo.options import DemoOptions, Fault
from lightning_rlprof.cli.live_commands import hang
from lightning_rlprof.cli.open_run import SAVE_PATH
from lightning_rlprof.cli.run_commands import describe, write_page
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path
from lightning_rlprof.system.process import check_records

_SLOW, _WRONG = "Inject a slow rank", "Inject a fault"
_ON_TWO_RANKS = ("slow-step", "hang")
# With 10 steps stragglers was wrong, with 14 inconclusive; 40 decide in nearly every demo.
_STEPS_TO_FIND_SLOW = 40
_MOST_RANKS = 64  # Each rank is a process on this machine.


def demo(
    steps: Annotated[int | None, option("N", "Number of RL steps (default: 300)", min=1)] = None,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Generate with a KV cache")] = False,
    ranks: Annotated[
        int | None, option("N", "Number of processes, trained with DDP", min=1, max=_MOST_RANKS)
    ] = None,
    output: Annotated[
        Path, option("PATH", "Directory for the run directory", "-o", "--output", parser=local_path)
    ] = SAVE_PATH,
    slow_rank: Annotated[
        int | None, option("N", "Make this rank 15% slower, to see it found", panel=_SLOW)
    ] = None,
    inject: Annotated[
        Fault | None,
        option(
            "FAULT",
            "What goes wrong, and is found: slow-step, shift, hang, oom, leak",
            panel=_WRONG,
        ),
    ] = None,
) -> None:
    """Train a small policy with GRPO here, to see what you get."""
    check_records("rlprof demo")
    ranks = ranks or 2 if inject in _ON_TWO_RANKS else ranks
    given = {"steps": steps, "ranks": ranks, "slow_rank": slow_rank, "inject": inject}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    wanted = DemoOptions(kv_cache=kv_cache, save_path=output, **chosen)
    if slow_rank is not None and wanted.total_steps < _STEPS_TO_FIND_SLOW:
        console.warn(
            f"{steps} steps are too few to find a slow rank reliably. "
            f"Use --steps {_STEPS_TO_FIND_SLOW} or more."
        )
    console.status("Training a small policy with GRPO: a minute or two on two idle cores ...")
    with console.progress_bar("warm start") as update:
        try:
            from lightning_rlprof.cli.demo.run import run_demo

            def show(step: int, total: int, reward: float) -> None:
                update(step, total, f"reward {reward:.2f}")

            result = run_demo(wanted, progress=show)
        except ModuleNotFoundError as error:
            text = f"the demo needs {error.name}, which is not installed"
            raise RlprofError(text, hint='pip install "lightning-rlprof[demo]"') from error
    run = result.run
    if run is None:
        raise RlprofError(f"the training left no run in {output}; see the messages above")
    if inject is not None:
        from lightning_rlprof.cli.demo.faults import injected

        console.say(f"Injected: {injected(wanted)}", "bold")
        (hang if inject == "hang" else findings)(run)
        return
    from lightning_rlprof.loaders.load import load

    trained = f"Trained {result.parameters:,} parameters for {len(result.rewards)} steps"
    console.say(f"{trained} in {result.seconds:.0f} s.")
    exact = f"{result.exact_before:.2f} → {result.exact_after:.2f}"
    console.say(f"Held-out exact match, before and after GRPO: {exact}", "bold")
    spans = load(run)
    describe(spans)
    console.wrote(write_page(spans))
    if slow_rank is not None:
        console.next_command("rlprof", "stragglers", run)
        return
    console.next_command("rlprof", "findings", run)
    if not kv_cache:
        options = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        options += [] if output == SAVE_PATH else ["-o", str(output)]
        console.status(
            "The rollout has no KV cache. Add one with --kv-cache, then compare the two runs."
        )
        console.next_command("rlprof", "demo", "--kv-cache", *options)
        console.next_command("rlprof", "compare", run, output)
