"""The verb ``demo``: record a small GRPO training on this machine, and show where its time went."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_rlprof.cli.console import (
    next_command,
    option,
    progress_bar,
    say,
    status,
    warn,
    wrote,
)
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.live_commands import hang
from lightning_rlprof.cli.run_commands import describe, write_page
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

_SAVE_PATH = Path("profiler_data")
_SLOW, _WRONG = "Inject a slow rank", "Inject a fault"
_ON_TWO_RANKS = ("slow-step", "hang")
# With 10 steps stragglers was wrong, with 14 inconclusive; 40 decide in nearly every demo.
_STEPS_TO_FIND_SLOW = 40


def demo(
    steps: Annotated[int | None, option("N", "Number of RL steps (default: 300)")] = None,
    task: Annotated[
        str | None, option("TASK", "reasoning-gym task (default: spell_backward)")
    ] = None,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Generate with a KV cache")] = False,
    ranks: Annotated[int | None, option("N", "Number of processes, trained with DDP")] = None,
    output: Annotated[
        Path, option("PATH", "Directory for the run directory", "-o", "--output", parser=local_path)
    ] = _SAVE_PATH,
    slow_rank: Annotated[int | None, option("N", "Slow this rank down", panel=_SLOW)] = None,
    slow_by: Annotated[
        float | None, option("SHARE", "How much slower, as a fraction (default: 0.15)", panel=_SLOW)
    ] = None,
    inject: Annotated[
        str | None,
        option(
            "FAULT",
            "What goes wrong, and is caught: slow-step, shift, hang, oom, leak, throttle",
            panel=_WRONG,
        ),
    ] = None,
) -> None:
    """Train a small policy with GRPO here, to see what you get."""
    if slow_by is not None and slow_rank is None:
        raise RlprofError("--slow-by needs --slow-rank", hint="For example --slow-rank 1")
    given: dict[str, Any] = {"steps": steps, "task": task, "ranks": ranks}
    given |= {"slow_rank": slow_rank, "slow_by": slow_by, "inject": inject}
    if inject in _ON_TWO_RANKS:
        given["ranks"] = ranks or 2
    chosen = {name: value for name, value in given.items() if value is not None}
    wanted = DemoOptions(kv_cache=kv_cache, save_path=output, **chosen)
    if inject is not None:
        _injected(wanted)
        return
    number = wanted.steps or wanted.recipe.steps
    if slow_rank is not None and number < _STEPS_TO_FIND_SLOW:
        warn(
            f"{number} steps are too few to find a slow rank reliably. "
            f"Use --steps {_STEPS_TO_FIND_SLOW} or more."
        )
    from lightning_rlprof.loaders.load import load

    status("Training a small policy with GRPO: a minute or two on two idle cores ...")
    with progress_bar("warm start") as update:
        with _installed():
            from lightning_rlprof.cli.demo.run import run_demo

        result = run_demo(wanted, progress=_shown(update))
    run = result.run
    if run is None:
        raise RlprofError(f"the training left no run in {output}; see the messages above")
    trained = f"Trained {result.parameters:,} parameters for {len(result.rewards)} steps"
    say(f"{trained} in {result.seconds:.0f} s.")
    exact = f"{result.exact_before:.2f} → {result.exact_after:.2f}"
    say(f"Held-out exact match, before and after GRPO: {exact}", "bold")
    spans = load(run)
    describe(spans)
    wrote(write_page(spans))
    if slow_rank is not None:
        next_command("rlprof", "stragglers", run)
        return
    next_command("rlprof", "findings", run)
    if not kv_cache:
        options = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        options += [] if output == _SAVE_PATH else ["-o", str(output)]
        status("The rollout has no KV cache. Add one with --kv-cache, then compare the two runs.")
        next_command("rlprof", "demo", "--kv-cache", *options)
        next_command("rlprof", "compare", run, output)


def _injected(wanted: DemoOptions) -> None:
    from lightning_rlprof.loaders.load import load

    status(f"Training with a fault ({wanted.inject}). This takes up to a minute ...")
    with progress_bar("training") as update:
        with _installed():
            from lightning_rlprof.cli.demo.run import run_injected_demo

        result = run_injected_demo(wanted, progress=_shown(update))
    run = result.run
    if run is None:
        text = f"the training left no run in {wanted.save_path}; see the messages above"
        raise RlprofError(text)
    from lightning_rlprof.cli.demo.faults import caught, injected

    say(f"Injected: {injected(wanted)}")
    if wanted.inject == "hang":
        hang(run)
        wrote(run)
        next_command("rlprof", "hang", run)
        next_command("rlprof", "report", run, "--open")
        return
    if result.error is not None:
        say(f"The Trainer raised, unchanged: {type(result.error).__name__}: {result.error}")
    found = caught(load(run), wanted)
    for line in found.lines:
        say(line, "bold")
    wrote(run)
    for words in found.commands:
        next_command("rlprof", *(run if word == "RUN" else word for word in words))


@contextmanager
def _installed() -> Iterator[None]:
    """Say that the extra has a package that an import lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"the demo needs {error.name}, which is not installed"
        raise RlprofError(text, hint='pip install "lightning-rlprof[demo]"') from error


def _shown(update: Callable[[int, int, str], None]) -> Callable[[int, int, float], None]:
    """Return what shows the progress of a training."""
    return lambda step, steps, reward: update(step, steps, f"reward {reward:.2f}")
