"""Tables on a terminal: durations for people, shares with bars, nothing that a trace can abuse."""

from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.table import Table as Grid
from rich.text import Text

from lightning_rlprof.tables.table import Cell, Column, Table, figure

_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_LONGEST_NAME = 40
_BAR = 8
_NARROW = 60  # columns of a terminal below which numbers need the place of bars
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def plain(text: str) -> str:
    r"""Return text in which everything that could steer a terminal is spelled out.

    Example::

        >>> plain("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def duration(ns: int) -> str:
    """Return nanoseconds for people, with three significant digits.

    Example::

        >>> [duration(ns) for ns in (999, 60_206_351, 4_830_000_000_000)]
        ['999 ns', '60.2 ms', '1 h 20 min']
    """
    if ns < 0:
        return f"-{duration(-ns)}"
    seconds = ns // 10**9
    if seconds >= 3600:
        return f"{seconds // 3600:,} h {seconds // 60 % 60:02d} min"
    if seconds >= 60:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    size, unit = next(pair for pair in _UNITS if ns >= pair[0] * 0.9995 or pair[0] == 1)
    value = ns / size
    digits = 0 if size == 1 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def size(number: int) -> str:
    """Return bytes for people, with three or four significant digits.

    Example::

        >>> [size(number) for number in (999, 1536, 80 * 2**30)]
        ['999 B', '1.50 KiB', '80.0 GiB']
    """
    unit, name = next(pair for pair in _SIZES if number >= pair[0] * 0.9995 or pair[0] == 1)
    value = number / unit
    digits = 0 if unit == 1 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {name}"


def render(table: Table, *, rows: int | None = None, every: bool = False) -> RenderableType:
    """Return a table for rich to print: it fits the terminal by leaving out its last columns.

    Args:
        table: What to show; an abstained table is one line with its reason.
        rows: Show so many and count the rest; None for all.
        every: Show columns that say nothing in any row, too: somebody asked for them.
    """
    title = Text(plain(table.name), style="bold")
    if table.abstained is not None:
        return Text.assemble(title, ": not told, ", plain(table.abstained))
    if not table.rows:
        return Text.assemble(title, ": none recorded")
    shown = table.rows[:rows]
    rest = len(table.rows) - len(shown)
    told = (table.columns, shown) if every else _known(table.columns, shown)
    parts: list[RenderableType] = [title, _Fitting(*told)]
    if rest:
        parts.append(Text(f"and {rest} more rows", style="dim"))
    if table.note:
        parts.append(Text(plain(table.note), style="dim"))
    return Group(*parts)


def _known(
    columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]
) -> tuple[list[Column], list[tuple[Cell, ...]]]:
    """Leave out columns that say nothing in any row, such as the slowest of one rank."""
    kept = [at for at in range(len(columns)) if any(row[at] is not None for row in rows)]
    return [columns[at] for at in kept], [tuple(row[at] for at in kept) for row in rows]


class _Fitting:
    """A grid that measures the terminal when it is printed."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> None:
        self.columns, self.rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [
            [_cell(cell, column, options) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]
        cells = [max(line[at].cell_len for line in lines) for at in range(len(self.columns))]
        heads = [Text(plain(column.name)) for column in self.columns]
        words = [max(map(cell_len, head.plain.split()), default=1) for head in heads]
        widths = [*map(max, cells, words)]
        gap, count = _fit(widths, options.max_width)
        widths = _grown(widths[:count], [head.cell_len for head in heads], gap, options.max_width)
        # The box puts one space between columns by itself.
        padding = (0, gap - 1, 0, 0)
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
        for column, head, width in zip(self.columns, heads, widths, strict=False):
            left = column.kind in ("text", "share")  # a share is padded, its bar follows
            side: JustifyMethod = "left" if left else "right"
            grid.add_column(head, justify=side, width=width, overflow="ellipsis")
        for line in lines:
            grid.add_row(*line[:count])
        yield grid
        if count < len(self.columns):
            names = ", ".join(plain(column.name) for column in self.columns[count:])
            yield Text(f"a wider terminal, or --json, also shows: {names}", style="dim")


def _fit(widths: Sequence[int], room: int) -> tuple[int, int]:
    """Return the space between columns and how many of them fit; the first always does."""
    for count in range(len(widths), 1, -1):
        for gap in (2, 1):
            if sum(widths[:count]) + gap * (count - 1) <= room:
                return gap, count
    return 1, 1


def _grown(widths: Sequence[int], heads: Sequence[int], gap: int, room: int) -> list[int]:
    """Give what is left of the room to headings that would be broken into lines, the first first.

    Rich would take what a heading wants from the last column, cells and all.
    """
    left = room - sum(widths) - gap * (len(widths) - 1)
    grown = []
    for width, head in zip(widths, heads, strict=False):
        more = head - width if width < head <= width + left else 0
        left -= more
        grown.append(min(width + more, room))
    return grown


def _cell(cell: Cell, column: Column, options: ConsoleOptions) -> Text:
    if cell is None:
        return Text("-", style="dim")
    if isinstance(cell, str):
        return _name(cell)
    if column.kind in ("duration", "time"):
        return Text(duration(int(cell)) if not options.ascii_only else _ascii(int(cell)))
    if column.kind == "share":
        bare = options.ascii_only or options.max_width < _NARROW
        bar = "" if bare else f" {_bar(float(cell))}"
        return Text.assemble(f"{cell:6.1%}", (bar, "cyan"))
    if column.kind == "ratio":
        return Text(f"{cell:.2f}x")
    if column.unit == "bytes":
        return Text(size(int(cell)))
    return Text(f"{cell:,}" if isinstance(cell, int) else figure(cell))


def _name(text: str) -> Text:
    text = plain(text)
    short = text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 3]}..."
    return Text(short, style="dim" if text == "untraced" else "")


def _ascii(ns: int) -> str:
    return duration(ns).replace("µs", "us")


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(share, 1.0)) * _BAR * 8)
    full, part = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[part] if part else "")).ljust(_BAR)
