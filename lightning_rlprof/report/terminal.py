"""Tables on a terminal or as Markdown: readable units, shares with bars, escaped names.

`render` fits a table to the terminal: long names lose their middle first, as much as they must.
Then the last columns are left out and named below the table.
"""

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

from lightning_rlprof.system.plain_text import plain
from lightning_rlprof.tables.table import Cell, Column, Table, figure

_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_LEAST_HOURS = 0.01
_LONGEST_NAME = 40
_WHOLE_TEXT = 10**6
_GAP = "..."
_BAR = 8
_NARROW = 60  # below this width, numbers need the room of the bars
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def percent(share: float) -> str:
    """Return a share of 1 in percent: with a decimal only below 10%.

    Example::

        >>> [percent(share) for share in (0.5, 0.0996, 0.0123)]
        ['50%', '10%', '1.2%']
    """
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def duration(ns: int) -> str:
    """Return nanoseconds in readable units, with three significant digits.

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


def hours(number: float) -> str:
    """Return hours with their unit; below a hundredth of an hour, a duration.

    Example::

        >>> [hours(number) for number in (1234.5, 0.5, 0.02, 0.0008397)]
        ['1,234 h', '0.50 h', '0.02 h', '3.02 s']
    """
    if abs(number) < _LEAST_HOURS:
        return duration(round(number * 3_600 * 10**9))
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f} h"


def size(number: int) -> str:
    """Return bytes in readable units, with three or four significant digits.

    Example::

        >>> [size(number) for number in (999, 1536, 80 * 2**30)]
        ['999 B', '1.50 KiB', '80.0 GiB']
    """
    unit, name = next(pair for pair in _SIZES if number >= pair[0] * 0.9995 or pair[0] == 1)
    value = number / unit
    digits = 0 if unit == 1 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {name}"


def shortened(text: str, longest: int) -> str:
    """Return text of at most ``longest`` letters: a longer one loses its middle.

    Names of kernels, operators and files often begin alike, so their ends tell them apart.

    Example::

        >>> shortened("void at::native::elementwise_kernel<128, 4, AddFunctor>", 24)
        'void at::na...ddFunctor>'
    """
    if len(text) <= longest:
        return text
    left = max(longest - len(_GAP), 0)
    return f"{text[: (left + 1) // 2]}{_GAP}{text[len(text) - left // 2 :]}"


def render(table: Table, *, rows: int | None = None, every: bool = False) -> RenderableType:
    """Return a table for rich to print.

    Args:
        table: What to show; a table without data is one line with the reason.
        rows: Show this many and count the rest; None for all.
        every: Also show columns without any value.
    """
    title = Text(plain(table.name), style="bold")
    if table.abstained is not None:
        return Text.assemble(title, ": no data. ", plain(_sentence(table.abstained)))
    if not table.rows:
        note = (f". {plain(table.note)}", "dim") if table.note else ""
        return Text.assemble(title, ": no rows", note)
    shown = table.rows[:rows]
    rest = len(table.rows) - len(shown)
    columns, cells = (table.columns, shown) if every else _with_values(table.columns, shown)
    parts: list[RenderableType] = [title] if table.name else []
    parts.append(_Fitting(columns, cells))
    if rest:
        parts.append(Text(f"and {rest:,} more {'row' if rest == 1 else 'rows'}", style="dim"))
    if table.note:
        parts.append(Text(plain(table.note), style="dim"))
    return Group(*parts)


def markdown(table: Table, *, rows: int | None = None) -> str:
    """Return a table as Markdown, for a pull request or an issue."""
    title = f"**{escape_markdown(table.name)}**"
    if table.abstained is not None:
        return f"{title}: no data. {escape_markdown(_sentence(table.abstained))}"
    if not table.rows:
        return f"{title}: no rows" + (f". {escape_markdown(table.note)}" if table.note else "")
    columns, cells = _with_values(table.columns, table.rows[:rows])
    sides = [":---" if column.kind == "text" else "---:" for column in columns]
    lines = [[escape_markdown(column.name) for column in columns], sides]
    lines += [
        [
            escape_markdown(cell_text(cell, column))
            for cell, column in zip(row, columns, strict=True)
        ]
        for row in cells
    ]
    note = f"\n\n{escape_markdown(table.note)}" if table.note else ""
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)]) + note


def escape_markdown(text: str) -> str:
    """Return text without meaning for Markdown or HTML."""
    text = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    for sign in "|*_`[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _sentence(text: str) -> str:
    """Return a reason as a sentence: it begins with a capital, unless with a name."""
    word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if word.isalpha() else text


def _with_values(
    columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]
) -> tuple[list[Column], list[tuple[Cell, ...]]]:
    """Leave out columns without any value, such as the slowest rank if there is one rank."""
    kept = [at for at in range(len(columns)) if any(row[at] is not None for row in rows)]
    return [columns[at] for at in kept], [tuple(row[at] for at in kept) for row in rows]


class _Fitting:
    """A grid that measures the terminal when it is printed."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> None:
        self.columns, self.rows = columns, rows

    def _lines(
        self, options: ConsoleOptions, words: Sequence[int], longest: int
    ) -> tuple[list[list[Text]], list[int]]:
        """Return the cells with names of at most that many letters, and the width of columns."""
        lines = [
            [
                _cell(cell, column, options, longest)
                for cell, column in zip(row, self.columns, strict=True)
            ]
            for row in self.rows
        ]
        cells = [max(line[at].cell_len for line in lines) for at in range(len(words))]
        return lines, [*map(max, cells, words)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = [Text(plain(column.name)) for column in self.columns]
        words = [max(map(cell_len, head.plain.split()), default=1) for head in heads]
        lines, widths = self._lines(options, words, _WHOLE_TEXT)
        long = sum(width > _LONGEST_NAME for width in widths)
        if _room(widths, options) < 0:
            lines, widths = self._lines(options, words, _LONGEST_NAME)
            whole = [max(pair[0], pair[1].cell_len) for pair in zip(widths, heads, strict=True)]
            more = _room(whole, options) // max(long, 1)
            if more > 0:  # names that are cut share what is left beside whole headings
                lines, widths = self._lines(options, words, _LONGEST_NAME + more)
        gap, count = _fit(widths, options.max_width)
        widths = _grown(widths[:count], [head.cell_len for head in heads], gap, options.max_width)
        # The box adds one space between columns.
        padding = (0, gap - 1, 0, 0)
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
        for column, head, width in zip(self.columns, heads, widths, strict=False):
            left = column.kind in ("text", "share")  # a share is padded, its bar follows
            side: JustifyMethod = "left" if left else "right"
            grid.add_column(head, justify=side, width=width, overflow="ellipsis")
        for line in lines:
            grid.add_row(*map(_cut, line, widths))
        yield grid
        if hidden := [plain(column.name) for column in self.columns[count:]]:
            columns = "1 column" if len(hidden) == 1 else f"{len(hidden)} columns"
            text = f"{columns} hidden ({', '.join(hidden)}). Widen the terminal or use --json."
            yield Text(text, style="dim")


def _room(widths: Sequence[int], options: ConsoleOptions) -> int:
    """Return how many letters are left beside columns of these widths; below 0 they don't fit."""
    return options.max_width - sum(widths) - 2 * (len(widths) - 1)


def _fit(widths: Sequence[int], room: int) -> tuple[int, int]:
    """Return the space between columns and how many fit; the first always does."""
    for count in range(len(widths), 1, -1):
        for gap in (2, 1):
            if sum(widths[:count]) + gap * (count - 1) <= room:
                return gap, count
    return 1, 1


def _grown(widths: Sequence[int], heads: Sequence[int], gap: int, room: int) -> list[int]:
    """Give spare room to headings that would be broken into lines, from left to right.

    Rich would take the room from the last column, cells included.
    """
    left = room - sum(widths) - gap * (len(widths) - 1)
    grown = []
    for width, head in zip(widths, heads, strict=False):
        more = head - width if width < head <= width + left else 0
        left -= more
        grown.append(min(width + more, room))
    return grown


def cell_text(cell: Cell, column: Column) -> str:
    """Return a cell in readable units."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return plain(cell)
    if column.kind in ("duration", "time"):
        return duration(int(cell))
    if column.kind == "share":
        return f"{cell:.1%}"
    if column.kind == "ratio":
        return f"{cell:.2f}x"
    if column.unit == "bytes":
        return size(int(cell))
    if column.unit == "h":
        return hours(cell)
    return f"{cell:,}" if isinstance(cell, int) else figure(cell)


def _cell(cell: Cell, column: Column, options: ConsoleOptions, longest: int) -> Text:
    """Return a cell with its style; a share has a bar if the terminal can show one."""
    text = cell_text(cell, column)
    if cell is None:
        return Text(text, style="dim")
    if isinstance(cell, str):
        return Text(shortened(text, longest), style="dim" if text == "untraced" else "")
    if column.kind == "share":
        no_bar = options.ascii_only or options.max_width < _NARROW
        bar = "" if no_bar else f" {_bar(float(cell))}"
        return Text.assemble(f"{text:>6}", (bar, "cyan"))
    return Text(text.replace("µs", "us") if options.ascii_only else text)


def _cut(cell: Text, width: int) -> Text:
    """Return a cell that fits into a terminal too narrow for it."""
    if cell.cell_len <= width:
        return cell
    return Text(shortened(cell.plain, width), style=cell.style)


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(share, 1.0)) * _BAR * 8)
    full, part = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[part] if part else "")).ljust(_BAR)
