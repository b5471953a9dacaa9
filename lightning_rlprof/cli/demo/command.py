"""The command that records: the demo, a small GRPO training on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_rlprof.cli.console import next_command, say, wrote
from lightning_rlprof.cli.run_commands import describe
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.cli.demo.run import DemoResult
    from lightning_rlprof.cli.demo.run import Progress as Listener


_SAVE_PATH = Path("profiler_data")

Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        parser=local_path,
        metavar="PATH",
        help="Directory in which the run gets its own",
    ),
]
"""Where the demo's run goes."""


def demo(
    steps: Annotated[int | None, typer.Option(help="RL steps; more learn more")] = None,
    task: Annotated[str | None, typer.Option(help="Another task; a wrong name lists them")] = None,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Generate with a KV cache")] = False,
    ranks: Annotated[int | None, typer.Option(help="Train with so many processes (DDP)")] = None,
    slow_rank: Annotated[int | None, typer.Option(help="Make this rank slow, to find it")] = None,
    slow_by: Annotated[
        float | None, typer.Option(help="By this share, in stages without waiting  [default: 0.15]")
    ] = None,
    output: Output = _SAVE_PATH,
) -> None:
    """Train a small policy with GRPO on the CPU and show where each step went."""
    if slow_by is not None and slow_rank is None:
        raise RlprofError("--slow-by makes no rank slow by itself; --slow-rank says which one")
    given: dict[str, Any] = {"steps": steps, "task": task, "ranks": ranks}
    given |= {"slow_rank": slow_rank, "slow_by": slow_by}
    chosen = {name: value for name, value in given.items() if value is not None}
    result = _train({"kv_cache": kv_cache, "save_path": output, **chosen})
    _told(result, output)
    if slow_rank is not None:
        next_command("rlprof", "stragglers", result.run or output)
    elif not kv_cache:
        _offer_cache(result, output, chosen)


def _told(result: "DemoResult", output: Path) -> None:
    if result.run is None:
        raise RlprofError(f"the training left no run in {output}; see the messages above")
    from lightning_rlprof.loaders.load import load

    spans = load(result.run)
    _learned(result)
    describe(spans)
    wrote(result.run)
    next_command("rlprof", "report", result.run)


def _offer_cache(result: "DemoResult", output: Path, chosen: dict[str, Any]) -> None:
    say("To remove the bottleneck, and to see that it is gone:")
    same = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    here = [] if output == _SAVE_PATH else ["-o", str(output)]
    next_command("rlprof", "demo", "--kv-cache", *same, *here)
    next_command("rlprof", "compare", result.run or output, output)


def _train(options: dict[str, Any]) -> "DemoResult":
    say("Training a small policy with GRPO, which takes a minute or two ...")
    with _bar() as listen:
        from lightning_rlprof.cli.demo.run import DemoOptions, run_demo

        return run_demo(DemoOptions(**options), progress=listen)


def _learned(result: "DemoResult") -> None:
    say(
        f"{result.parameters:,} parameters, {result.steps} steps, {result.seconds:.0f} s in all; "
        f"mean reward {result.rewards[0]:.2f} at first, {result.rewards[-1]:.2f} at last"
    )
    before, after = result.exact_before, result.exact_after
    say(f"Held-out exact match: {before:.2f} before GRPO, {after:.2f} after", "bold")


@contextmanager
def _bar() -> Iterator["Listener"]:
    """Show steps and reward on the terminal's standard error; the warm start has no end in it."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda step, steps, reward: None
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warm start", total=None)

        def listen(step: int, steps: int, reward: float) -> None:
            progress.update(task, completed=step, total=steps, description=f"reward {reward:.2f}")

        yield listen
