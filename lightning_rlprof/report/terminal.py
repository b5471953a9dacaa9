"""Tables on a terminal or as Markdown: readable units, shares with bars, escaped names.

`render` fits a table to the terminal: long names lose their middle first, then columns are left out
and named below the table, those that answer last. An interval is in the column of its estimate.
"""

from collections.abc import Iterator, Sequence

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

from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.table import Cell, Column, Table, figure

_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_LEAST_HOURS = 0.01
_LONGEST_NAME, _SHORT_NAME, _SHORTEST_NAME = 40, 24, 12  # Characters, fewer in a narrower terminal.
_WHOLE_TEXT = 10**6
_SHORT = "short name"  # It was made to be read whole.
# Columns that answer, the most important one first. They stay in a narrow terminal, as does the
# first column of a table.
_IMPORTANT = (
    *("verdict", "adjusted", "slowdown", "saved", "per step", "cost", "share", "slowest rank"),
    *("part", "rank", "total", "mean", "predicted", "peer time lost"),
)
_UNIMPORTANT = 1_000
# An interval belongs to one of these columns: the first that a table has.
_ESTIMATES = (
    *("adjusted", "slowdown", "predicted", "cost", "saved", "ratio", "of baseline"),
    *("added per step", "growth per step"),
)
_BOUNDS = ("CI low", "CI high")
_INTERVAL = " (CI)"
_DIM = ("untraced", "outside steps", "outside stages")
_GAP = "..."
_BAR = 8
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
    return _scaled(ns, _UNITS)


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
    return _scaled(number, _SIZES)


def _scaled(number: int, units: Sequence[tuple[int, str]]) -> str:
    """Return a number in the largest unit of which it has one, with three significant digits."""
    unit, name = next(pair for pair in units if number >= pair[0] * 0.9995 or pair[0] == 1)
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
    columns, cells = (table.columns, shown) if every else _for_people(table.columns, shown)
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
    columns, cells = _for_people(table.columns, table.rows[:rows])
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


def _for_people(
    columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]
) -> tuple[list[Column], list[tuple[Cell, ...]]]:
    """Leave out columns without any value, and put an interval behind its estimate.

    A run of one rank has no slowest rank, for example.
    """
    names = [column.name for column in columns]
    kept = [at for at in range(len(columns)) if any(row[at] is not None for row in rows)]
    estimates = [at for name in _ESTIMATES for at in kept if names[at] == name]
    bounds = [at for at in kept if names[at] in _BOUNDS]
    if not estimates or len(bounds) != len(_BOUNDS):
        return [columns[at] for at in kept], [tuple(row[at] for at in kept) for row in rows]
    mean, (low, high) = estimates[0], bounds
    kept = [at for at in kept if at not in bounds]
    one = Column(f"{names[mean]}{_INTERVAL}", "number", columns[mean].unit)
    shown = [one if at == mean else columns[at] for at in kept]
    found = []
    for row in rows:
        texts = [cell_text(row[at], columns[at]) for at in (mean, low, high)]
        text = texts[0] if row[low] is None else _interval(*texts)
        found.append(tuple(text if at == mean else row[at] for at in kept))
    return shown, found


def _interval(mean: str, low: str, high: str) -> str:
    """Return an estimate and its interval, with the unit once if it is the same.

    Example::

        >>> _interval("1.10x", "1.06x", "1.13x"), _interval("980 µs", "950 µs", "1.02 ms")
        ('1.10x (1.06–1.13)', '980 µs (950 µs–1.02 ms)')
    """
    units = {text.lstrip("-0123456789.,") for text in (mean, low, high)}
    if len(units) == 1:
        (unit,) = units
        low, high = low.removesuffix(unit), high.removesuffix(unit)
    return f"{mean} ({low}–{high})"


class _Fitting:
    """A grid that measures the terminal when it is printed.

    What does not fit is given up in this order: long names, columns that are not in `_IMPORTANT`
    from right to left, bars, names once more, then the less important columns.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> None:
        self.columns, self.rows = columns, rows
        self.heads = [Text(plain(column.name)) for column in columns]
        self.words = [max(map(cell_len, head.plain.split()), default=1) for head in self.heads]

    def _lines(
        self, options: ConsoleOptions, kept: Sequence[int], longest: int, *, bars: bool
    ) -> tuple[list[list[Text]], list[int]]:
        """Return the cells with names of at most that many letters, and the width of columns."""
        lines = [
            [_cell(row[at], self.columns[at], options, longest, bars=bars) for at in kept]
            for row in self.rows
        ]
        cells = [max(line[at].cell_len for line in lines) for at in range(len(kept))]
        return lines, [*map(max, cells, [self.words[at] for at in kept])]

    def _fit(self, options: ConsoleOptions) -> tuple[list[int], list[list[Text]], list[int]]:
        """Return which columns are kept, their cells, and their widths."""
        for shown, longest, bars in self._attempts():
            lines, widths = self._lines(options, shown, longest, bars=bars)
            if _room(widths, options) >= 0:
                break
        if longest == _WHOLE_TEXT:
            return shown, lines, widths
        heads = [self.heads[at].cell_len for at in shown]
        wanted = self._lines(options, shown, _WHOLE_TEXT, bars=bars)[1]
        cut = sum(width < whole for width, whole in zip(widths, wanted, strict=True))
        more = _room([*map(max, widths, heads)], options) // max(cut, 1)
        if more > 0:  # Cut names share the room that is left beside whole headings.
            lines, widths = self._lines(options, shown, longest + more, bars=bars)
        return shown, lines, widths

    def _attempts(self) -> Iterator[tuple[list[int], int, bool]]:
        """Yield columns, the longest name and whether shares have bars, what shows most first."""
        kept = sorted(range(len(self.columns)), key=self._importance)
        for count in range(len(kept), 0, -1):
            sizes = [(_WHOLE_TEXT, True), (_LONGEST_NAME, True), (_SHORT_NAME, True)]
            # Before an important column is removed, bars go and names are cut further.
            if self._importance(kept[count - 1]) < _UNIMPORTANT:
                sizes += [(_SHORT_NAME, False), (_SHORTEST_NAME, False)]
            yield from ((sorted(kept[:count]), *size) for size in sizes)

    def _importance(self, at: int) -> int:
        """Return how soon a column is given up: the highest number first."""
        name = self.columns[at].name.removesuffix(_INTERVAL)
        if at == 0:
            return -1
        return _IMPORTANT.index(name) if name in _IMPORTANT else _UNIMPORTANT + at

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, lines, widths = self._fit(options)
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= options.max_width else 1
        heads = [self.heads[at].cell_len for at in shown]
        widths = _grown(widths, heads, gap, options.max_width)
        # The box adds one space between columns.
        padding = (0, gap - 1, 0, 0)
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
        for at, width in zip(shown, widths, strict=True):
            # A share is padded, and its bar follows.
            left = self.columns[at].kind in ("text", "share")
            side: JustifyMethod = "left" if left else "right"
            grid.add_column(self.heads[at], justify=side, width=width, overflow="ellipsis")
        for line in lines:
            grid.add_row(*map(_cut, line, widths))
        yield grid
        hidden = [column.name for at, column in enumerate(self.columns) if at not in shown]
        if hidden:
            columns = "1 column" if len(hidden) == 1 else f"{len(hidden)} columns"
            names = ", ".join(map(plain, hidden))
            text = f"{columns} hidden ({names}). Widen the terminal or use --json."
            yield Text(text, style="dim")


def _room(widths: Sequence[int], options: ConsoleOptions) -> int:
    """Return how many letters are left beside columns of these widths; below 0 they don't fit."""
    return options.max_width - sum(widths) - (len(widths) - 1)


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


def _cell(cell: Cell, column: Column, options: ConsoleOptions, longest: int, *, bars: bool) -> Text:
    """Return a cell with its style; a share has a bar if the terminal can show one."""
    text = cell_text(cell, column)
    if cell is None:
        return Text(text, style="dim")
    if isinstance(cell, str):
        is_whole = column.name == _SHORT and longest > _SHORTEST_NAME
        text = shortened(text, longest) if column.kind == "text" and not is_whole else text
        return Text(text, style="dim" if text in _DIM else "")
    if column.kind == "share":
        drawn = f" {bar(float(cell))}" if bars and not options.ascii_only else ""
        return Text.assemble(f"{text:>6}", (drawn, "cyan"))
    return Text(text.replace("µs", "us") if options.ascii_only else text)


def _cut(cell: Text, width: int) -> Text:
    """Return a cell that fits into a terminal too narrow for it."""
    if cell.cell_len <= width:
        return cell
    return Text(shortened(cell.plain, width), style=cell.style)


def bar(share: float, width: int = _BAR) -> str:
    """Return a bar for a share of 1, in eighths of a letter; as wide as the longest one."""
    full, part = divmod(round(max(0.0, min(share, 1.0)) * width * 8), 8)
    return (_EIGHTHS[8] * full + _EIGHTHS[part].strip()).ljust(width)


def count_of(number: int, noun: str) -> str:
    """Return a number of things: ``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
