"""The command that records: the demo, a small GRPO training on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_rlprof.cli.output import next_command, say
from lightning_rlprof.cli.read import describe

__all__ = ["demo"]
