"""Write docs/reference/cli.md from the command line itself; ``--check`` fails if it is stale."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lightning_rlprof.cli.app import app

__all__ = ["main", "page"]

FOLDER = Path(__file__).with_name("reference")

_HEAD = """# Command line

Every command takes `-h` and `--help`. Commands that read a run need neither a GPU nor PyTorch.

`RUN` is a run directory, a directory of runs (the newest is used), a rank's file, a profiler
trace, or a [URL](../remote.md). See also [Compare](../compare.md#exit-codes) for use in CI.

| exit code | meaning |
|---|---|
| 0 | done; a table without data is also 0 |
| 1 | a check failed: `compare --fail-if-slower`, `config check`, `doctor`, `ingest`, … |
| 2 | wrong usage, unreadable input, or a missing dependency |
| 3 | inconclusive, from `compare --fail-if-slower` only |
| 70 | a bug of rlprof; it prints a traceback |
| 130 | interrupted with Ctrl-C |
| 141 | the reader of the output ended early, as `head` does |

Results go to standard output. Errors, warnings and hints go to standard error.
"""


def page() -> str:
    """Return the whole page."""
    root: Any = typer.main.get_command(app)
    panels: dict[str, list[str]] = {}
    for name in root.list_commands(None):
        command = root.commands[name]
        if not command.hidden:
            panel = panels.setdefault(command.rich_help_panel, [])
            panel.extend(_sections(f"rlprof {name}", command))
    parts = [_HEAD]
    for title, sections in panels.items():
        parts += [f"## {title}\n", *sections]
    return "\n".join(parts)


def _sections(name: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, or of each of its subcommands."""
    if hasattr(command, "commands"):
        for each, below in command.commands.items():
            yield from _sections(f"{name} {each}", below)
        return
    rows = [_row(param) for param in command.params if not param.hidden]
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join([name, *map(_usage, arguments)])
    text = f"### `{name}`\n\n{_prose(command.help or '')}\n\n```text\n{usage} [OPTIONS]\n```\n"
    if rows:
        text += "\n| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    yield text


def _usage(param: Any) -> str:
    name = _name(param)
    return name if param.required else f"[{name}]"


def _name(param: Any) -> str:
    name: str = (param.metavar or param.name).removesuffix("...").upper()
    name = name[1:-1] if name[0] + name[-1] in ("[]", "{}") else name
    return name + ("..." if param.nargs == -1 or getattr(param, "multiple", False) else "")


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = _name(param)
    else:
        name = ", ".join([*param.opts, *param.secondary_opts])
    return f"| `{name}` | {_prose(param.help or '')} | {_default(param)} |"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    value = param.default
    if value in (None, False, (), []) or callable(value):
        return ""
    value = getattr(value, "value", value)
    return "on" if value is True else f"`{value}`"


def _prose(text: str) -> str:
    """Return help text as Markdown: one line a paragraph, without Rich's markup."""
    paragraphs = [" ".join(each.split()) for each in text.replace("\b", "").split("\n\n")]
    plain = re.sub(r"\\\[", "[", "\n\n".join(paragraphs))
    return plain.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; returns the exit status."""
    path, text = FOLDER / "cli.md", page()
    if "--check" not in arguments:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path.name}")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is stale: python docs/generate_cli.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
