"""What a notebook shows of a run: its summary as HTML and SVG, the report in a frame, and charts.

`Plots` is what `Run.plot` is: charts for notebooks and papers. matplotlib is imported when the
first one is drawn. Colors are those of the HTML report. Names of a run reach the notebook as text
only.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.analysis.comparison.changes import changes
from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.analysis.stages import Part
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.report.html.step_charts import Paint, StepCharts, marks, stage_paints
from lightning_rlprof.report.summary import (
    Summary,
    SummaryPart,
    device_lines,
    first_lines,
    quality_lines,
    run_line,
)
from lightning_rlprof.report.terminal import duration, shortened
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GRAY, _LINE = "#b9bec6", "#5f6672"
_HEIGHT = 26  # Pixels.
_LABELED = 0.06  # Share of the step; smaller parts have their name in the legend only.
_HATCH = {"stage": "", "waiting": "///", "untraced": "..."}
_PALE = 0.65  # Opacity of the background over steps that are not counted.
_LONGEST = 40  # Characters of a name.
_MOST_TICKS = 16
_SMALL = 0.01  # Share of the step; smaller parts are drawn, but not listed.
_CUT = 97  # Percentile of a heat map's values that has the darkest color.
_DEVICE = {
    "compute": ("#009e73", ""),
    "exposed communication": ("#0072b2", ""),
    "exposed memcpy": ("#e69f00", ""),
    "idle": (_GRAY, "..."),
    "unknown": ("#eff0f2", "///"),
}


class Plots:
    """Charts of one run. Each returns the matplotlib ``Axes`` that it drew on.

    Without ``ax`` a chart makes a figure, which a notebook shows after the cell. No chart calls
    ``show`` or changes ``rcParams``. The label of the axes, ``ax.get_label()``, says in words what
    the chart shows: use it as the alternative text of the picture. A chart without data says why.

    Args:
        spans: The run.

    Raises:
        RlprofError: matplotlib is not installed.

    Example::

        >>> ax = run.plot.steps()                                    # doctest: +SKIP
        >>> ax.figure.savefig("steps.svg", metadata={"Title": ax.get_label()})  # doctest: +SKIP
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def steps(self, *, ax: "Axes | None" = None) -> "Axes":
        """Draw where the time of each step goes, as stacked bars; means of the ranks, in seconds.

        Waiting for other ranks and untraced time are hatched. Steps that statistics exclude are
        pale. A dashed line marks a change of level with its ratio, a triangle an outlier. Of more
        than 1,000 steps, one bar is the mean of several.

        Args:
            ax: Where to draw; None for a new figure.
        """
        series, ax = StepCharts(self._spans), _axes(ax)
        data = series.data() | marks(rows_of(changes(self._spans)))
        if not data["first"]:
            return _no_data(ax, "no complete step was recorded. End each step with end_step().")
        first, last = np.array(data["first"]) - 0.5, np.array(data["last"]) + 0.5
        edges = np.union1d(first, last)  # A gap between recorded steps is a separate cell.
        at = np.searchsorted(edges, first)

        def cells(us: Sequence[int] | Float64s) -> Float64s:
            found = np.full(len(edges) - 1, np.nan)
            found[at] = np.asarray(us, np.float64) / 1e6
            return found

        below = np.zeros(len(edges) - 1)
        colors, parts, handles = stage_paints(self._spans, series), series.drawn, []
        for part, own in zip(parts, data["parts"], strict=True):
            if not any(own["us"]):
                continue
            above = below + cells(own["us"])
            handles.append(
                ax.stairs(above, edges, baseline=below, fill=True, **_style(part, colors))
            )
            below = np.nan_to_num(above)
        if not all(data["included"]):
            pale = np.where(cells(np.array(data["included"]) * 1e6) == 0, below, np.nan)
            ax.stairs(pale, edges, baseline=0, fill=True, color=ax.get_facecolor(), alpha=_PALE)
        _mark_changes(ax, data)
        names = [
            part.name for part, own in zip(parts, data["parts"], strict=True) if any(own["us"])
        ]
        _legend(ax, handles, names)
        ax.set(xlabel="step", xlim=(edges[0], edges[-1]))
        ax.set_ylim(bottom=0)
        ax.set_ylabel("time of a step, mean of ranks")
        ax.yaxis.set_major_formatter(_seconds())
        return _labeled(ax, f"Where the time of each step goes. {_shares(series)}")

    def ranks(self, value: str | None = None, *, ax: "Axes | None" = None) -> "Axes":
        """Draw a heat map of all ranks and steps, in seconds; the darkest color is the largest 3%.

        Of more than 1,000 steps, one column is the maximum of several; of more than 256 ranks,
        some are drawn that are spread over the order by their median.

        Args:
            value: ``arrives late by``, ``waits``, or one of the largest stages; None for the first
                that the run has.
            ax: Where to draw; None for a new figure.

        Raises:
            RlprofError: The run has no such value; the text lists those that it has.
        """
        series, ax = StepCharts(self._spans), _axes(ax)
        heat = series.thinned
        if not heat.values:
            return _no_data(ax, "one rank, and no other to compare it with.")
        chosen = next(iter(heat.values)) if value is None else value
        if chosen not in heat.values:
            there = ", ".join(map(repr, heat.values))
            raise RlprofError(f"unknown value {value!r}", hint=f"Values of this run: {there}")
        shown = heat.values[chosen] / 1e9
        some = shown[shown > 0]
        most = float(np.percentile(some, _CUT)) if len(some) else 1.0
        edges = np.append(series.numbers[heat.heads], series.numbers[-1] + 1) - 0.5
        image = ax.pcolormesh(
            edges, np.arange(len(heat.ranks) + 1) - 0.5, shown, cmap="Blues", vmin=0, vmax=most
        )
        bar = ax.figure.colorbar(image, ax=ax, extend="max", format=_seconds())
        bar.set_label(_name(chosen), parse_math=False)
        _rows(ax, [str(rank) for rank in heat.ranks.tolist()])
        ax.set(xlabel="step", ylabel="rank")
        medians = np.median(shown, axis=1)
        top = int(np.argmax(medians))
        text = (
            f"rank {heat.ranks[top]} has the largest median, {duration(round(medians[top] * 1e9))}"
        )
        return _labeled(ax, f"{plain(chosen)} by rank and step: {text}.")

    def compare(self, other: Spans, *, ax: "Axes | None" = None) -> "Axes":
        """Draw how much longer each stage takes in another run at equal work, with 99% intervals.

        A dot is the ratio of means, other run over this one; 1.0 is marked. The interval is that of
        the typical step. Verdicts are those of `Run.compare`.

        Args:
            other: The run to compare with this one.
            ax: Where to draw; None for a new figure.
        """
        ax, table = _axes(ax), compare(self._spans, other)
        if table.abstained is not None:
            return _no_data(ax, table.abstained)
        rows = [row for row in rows_of(table) if row["adjusted"] is not None]
        colors = stage_paints(self._spans, StepCharts(self._spans))
        for at, row in enumerate(rows):
            color = colors[row["stage"]].fill if row["stage"] in colors else _GRAY
            if row["CI low"] is not None and row["CI high"] is not None:
                ax.plot([row["CI low"], row["CI high"]], [at, at], color=_LINE, linewidth=2)
            ax.plot([row["adjusted"]], [at], "o", color=color, markeredgecolor="black")
        ax.axvline(1.0, color=_LINE, linestyle="--", linewidth=1)
        _rows(ax, [f"{_name(str(row['stage']))}: {row['verdict']}" for row in rows], longest=200)
        ax.set(xlabel="time of other run / this run, equal work, 99% CI")
        texts = [
            f"{plain(str(row['stage']))} {row['adjusted']:.2f}x, {row['verdict']}" for row in rows
        ]
        return _labeled(ax, f"Ratio of times at equal work: {'; '.join(texts)}.")

    def device(self, *, ax: "Axes | None" = None) -> "Axes":
        """Draw what the devices did in each stage: shares of its time that add up to 100%.

        Args:
            ax: Where to draw; None for a new figure.
        """
        ax, table = _axes(ax), breakdown(self._spans, per_rank=False)
        rows = [row for row in rows_of(table) if row["wall"]]
        if table.abstained is not None or not rows:
            return _no_data(ax, table.abstained or "the capture has no time of a device.")
        known = [name for name in _DEVICE if any(row[name] for row in rows)]
        places, left, handles = np.arange(len(rows)), np.zeros(len(rows)), []
        for name in known:
            color, hatch = _DEVICE[name]
            width = np.array([(row[name] or 0) / row["wall"] for row in rows])
            handles.append(
                ax.barh(places, width, left=left, color=color, hatch=hatch, edgecolor="white")
            )
            left += width
        _rows(ax, [str(row["stage"]) for row in rows])
        _legend(ax, handles, known)
        ax.set(xlabel="share of the time of devices", xlim=(0, 1))
        ax.xaxis.set_major_formatter(_ticker().PercentFormatter(1))
        whole = rows[-1]
        texts = [f"{name} {whole[name] / whole['wall']:.0%}" for name in known]
        return _labeled(ax, f"What the devices did, in all: {', '.join(texts)}.")


def _axes(ax: "Axes | None") -> Any:
    """Return where to draw: ``ax``, or the axes of a new figure of pyplot.

    Raises:
        RlprofError: matplotlib is not installed.
    """
    _library("matplotlib")
    if ax is not None:
        return ax
    return _library("matplotlib.pyplot").subplots(figsize=(8, 4), layout="constrained")[1]


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        cure = 'pip install "lightning-rlprof[plot]"'
        raise RlprofError(f"charts need matplotlib, which is not installed; {cure}") from error


def _ticker() -> Any:
    return _library("matplotlib.ticker")


def _seconds() -> Any:
    return _ticker().EngFormatter("s")


def _name(text: str) -> str:
    return shortened(plain(text), _LONGEST)


def _style(part: Part, colors: Any) -> dict[str, Any]:
    """Return the look of a part: waiting has the color of its stage, and hatching."""
    fill = colors[part.stage].fill if part.stage in colors else _GRAY
    return {"facecolor": fill, "hatch": _HATCH[part.kind], "edgecolor": "white", "linewidth": 0}


def _legend(ax: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Name the parts beside the chart, the topmost first; no name is read as a formula."""
    labels = [str(at) for at in range(len(names))]  # Matplotlib leaves out labels such as "_a".
    found = ax.legend(handles[::-1], labels, loc="upper left", bbox_to_anchor=(1, 1))
    for text, name in zip(found.get_texts(), reversed(names), strict=True):
        text.set(text=_name(name), parse_math=False)


def _rows(ax: Any, names: Sequence[str], longest: int = _LONGEST) -> None:
    """Name the rows of a chart, the first on top; of very many, some."""
    every = -(-len(names) // _MOST_TICKS) if len(names) > 2 * _MOST_TICKS else 1
    texts = [shortened(plain(name), longest) for name in names[::every]]
    ax.set_yticks(range(0, len(names), every), texts, parse_math=False)
    ax.set_ylim(len(names) - 0.5, -0.5)


def _mark_changes(ax: Any, data: Any) -> None:
    """Mark changes of level, and outlier steps."""
    for step, ratio in data["levels"]:
        ax.axvline(step - 0.5, color=_LINE, linestyle="--", linewidth=1)
        ax.annotate(
            f"{ratio:.2f}x", (step - 0.5, 1), (2, -2), xycoords=ax.get_xaxis_transform(),
            textcoords="offset points", va="top", fontsize="small",
        )  # fmt: skip
    if data["outliers"]:
        steps = np.array(data["outliers"])
        ax.plot(steps, np.full(len(steps), 0.98), "v", color="black", markersize=5,
                transform=ax.get_xaxis_transform(), label="outlier")  # fmt: skip


def _shares(series: StepCharts) -> str:
    if not series.included.any():
        return ""
    shares = [(part.name, series.statistics(part).share or 0.0) for part in series.drawn]
    texts = [f"{plain(name)} {share:.0%}" for name, share in shares if share >= _SMALL]
    return f"Of the mean step: {', '.join(texts)}." if texts else ""


def _labeled(ax: "Axes", text: str) -> "Axes":
    ax.set_label(text.strip())
    return ax


def _no_data(ax: "Axes", reason: str) -> "Axes":
    """Say on the axes why the chart is missing."""
    text = f"No data: {plain(reason)}"
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", wrap=True, parse_math=False,
            transform=ax.transAxes)  # fmt: skip
    return _labeled(ax, text)


# ---- HTML of a notebook


def summary_html(spans: Spans, found: Summary) -> str:
    """Return step time, a bar of the mean step, what comes first, and doubts."""
    lines = [_text(run_line(found)), *map(_text, device_lines(found))]
    if any(part.kind != "untraced" for part in found.parts):
        legend = ", ".join(_told(part) for part in found.parts if part.share >= _SMALL)
        lines += [_bar(found.parts, stage_paints(spans, StepCharts(spans)), legend), _text(legend)]
    if found.median_ns is not None:
        lines += map(_text, first_lines(found))
    lines += map(_text, quality_lines(found))
    return "".join(f"<div>{line}</div>" for line in lines)


def _told(part: SummaryPart) -> str:
    return f"{part.name} {part.share:.1%} ({duration(part.mean_ns)})"


def _text(text: str) -> str:
    return html.escape(plain(text))


def _bar(parts: Sequence[SummaryPart], colors: Mapping[str, Paint], legend: str) -> str:
    """Return the mean step as SVG without style sheets, which pages of notebooks take away."""
    drawn, left = [], 0.0
    for part in parts:
        paint = colors.get(part.stage, Paint(_GRAY, "#000000"))
        place = f'x="{left:.3%}" width="{part.share:.3%}" height="{_HEIGHT}"'
        tip = f"<title>{_text(_told(part))}</title>"
        inside = f'<rect width="100%" height="100%" fill="{paint.fill}"/>'
        if part.kind != "stage":
            inside += '<rect width="100%" height="100%" fill="url(#rlprof-hatch)"/>'
        elif part.share >= _LABELED:
            style = f'font-size="13" font-family="sans-serif" fill="{paint.ink}"'
            inside += f'<text x="5" y="18" {style}>{_text(part.name)}</text>'
        # An inner svg cuts off text that is wider than it.
        drawn.append(f'<svg class="{part.kind}" {place}>{tip}{inside}</svg>')
        left += part.share
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{_HEIGHT}" role="img" '
        f'aria-label="{_text(legend)}"><defs><pattern id="rlprof-hatch" width="6" height="6" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="3" height="6" fill="#ffffff" fill-opacity="0.7"/></pattern></defs>'
        f"{''.join(drawn)}</svg>"
    )


@dataclass(frozen=True)
class ReportFrame:
    """The HTML report as a notebook shows it: in a frame of its own, cut off from the notebook.

    Attributes:
        page: The report, the text of one HTML file.
    """

    page: str

    def _repr_html_(self) -> str:
        """Return a frame with the page inside; its script cannot reach the notebook."""
        return (
            '<iframe title="rlprof report" sandbox="allow-scripts allow-downloads" '
            'style="width: 100%; height: 720px; border: 0" '
            f'srcdoc="{html.escape(self.page)}"></iframe>'
        )
