"""The verb ``demo``: record a small GRPO training on this machine, and show where its time went."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_rlprof.cli.console import next_command, progress_bar, say, status, warn, wrote
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.hang import hang
from lightning_rlprof.cli.run_commands import describe
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

_SAVE_PATH = Path("profiler_data")
_SLOW, _WRONG = "Inject a slow rank", "Inject a fault"
_ON_TWO_RANKS = ("slow-step", "hang")
# With 10 steps stragglers was wrong, with 14 inconclusive; 40 decide in nearly every demo.
_STEPS_TO_FIND_SLOW = 40


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="small (default), or smollm2: SmolLM2-135M from PyPI"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of RL steps (default: 300; smollm2: 16)"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="reasoning-gym task (default: spell_backward; smollm2: chain_sum)",
        ),
    ] = None,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Generate with a KV cache")] = False,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Number of processes, trained with DDP")
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            parser=local_path,
            metavar="PATH",
            help="Directory for the run directory",
        ),
    ] = _SAVE_PATH,
    slow_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Slow this rank down", rich_help_panel=_SLOW)
    ] = None,
    slow_by: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="How much slower, as a fraction (default: 0.15)",
            rich_help_panel=_SLOW,
        ),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="What goes wrong, and is caught: slow-step, shift, hang, oom, leak, throttle",
            rich_help_panel=_WRONG,
        ),
    ] = None,
    asynchronous: Annotated[
        bool,
        typer.Option("--async", help="Train on Ray, with rollout actors that run ahead"),
    ] = False,
    kill_rollout: Annotated[
        bool, typer.Option("--kill-rollout", help="With --async: kill a rollout actor halfway")
    ] = False,
) -> None:
    """Train a small policy with GRPO here, to see what you get."""
    if slow_by is not None and slow_rank is None:
        raise RlprofError("--slow-by needs --slow-rank", hint="For example --slow-rank 1")
    if kill_rollout and not asynchronous:
        raise RlprofError("--kill-rollout needs --async")
    others = {"model": model, "ranks": ranks, "slow-rank": slow_rank, "kv-cache": kv_cache or None}
    others["inject"] = inject
    for name, value in others.items():
        if asynchronous and value is not None:
            raise RlprofError(f"--{name} doesn't apply to --async")
    given: dict[str, Any] = {"model": model, "steps": steps, "task": task, "ranks": ranks}
    given |= {"slow_rank": slow_rank, "slow_by": slow_by, "inject": inject}
    if inject in _ON_TWO_RANKS:
        given["ranks"] = ranks or 2
    chosen = {name: value for name, value in given.items() if value is not None}
    wanted = DemoOptions(kv_cache=kv_cache, save_path=output, **chosen)
    if asynchronous:
        _asynchronous(wanted, kill=kill_rollout)
        return
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

    status(f"Training {wanted.recipe.title} with GRPO. This takes a minute or two ...")
    # Before torch starts its threads: with a busy neighbour, threads that spin while they wait made
    # a step of SmolLM2 six times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with progress_bar("warm start") as update:
        with _installed("demo"):
            from lightning_rlprof.cli.demo.run import run_demo

        result = run_demo(wanted, progress=_shown(update))
    run = result.run
    if run is None:
        raise RlprofError(f"the training left no run in {output}; see the messages above")
    trained = f"Trained {result.parameters:,} parameters for {len(result.rewards)} steps"
    say(f"{trained} in {result.seconds:.0f} s.")
    _say_exact(result.exact_before, result.exact_after)
    describe(load(run))
    wrote(run)
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
        with _installed("demo"):
            from lightning_rlprof.cli.demo.injected import run_injected_demo

        result = run_injected_demo(wanted, progress=_shown(update))
    run = result.run
    if run is None:
        text = f"the training left no run in {wanted.save_path}; see the messages above"
        raise RlprofError(text)
    from lightning_rlprof.cli.demo.caught import caught, injected

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


def _asynchronous(wanted: DemoOptions, *, kill: bool) -> None:
    from lightning_rlprof.loaders.load import load

    status("Training asynchronously on Ray. This takes half a minute ...")
    with progress_bar("warm start") as update:
        with _installed("demo,ray"):
            from lightning_rlprof.cli.demo.asynchronous import run_async_demo

        result = run_async_demo(wanted, kill=kill, progress=_shown(update))
    killed = " One rollout actor was killed halfway." if kill else ""
    say(f"Trained in {result.seconds:.0f} s.{killed}")
    _say_exact(result.exact_before, result.exact_after)
    describe(load(result.run))
    wrote(result.run)
    next_command("rlprof", "show", result.run, "samples")
    next_command("rlprof", "report", result.run, "--open")


@contextmanager
def _installed(extra: str) -> Iterator[None]:
    """Say which extra has a package that an import lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"the demo needs {error.name}, which is not installed"
        raise RlprofError(text, hint=f'pip install "lightning-rlprof[{extra}]"') from error


def _shown(update: Callable[[int, int, str], None]) -> Callable[[int, int, float], None]:
    """Return what shows the progress of a training."""
    return lambda step, steps, reward: update(step, steps, f"reward {reward:.2f}")


def _say_exact(before: float, after: float) -> None:
    say(f"Held-out exact match, before and after GRPO: {before:.2f} → {after:.2f}", "bold")
