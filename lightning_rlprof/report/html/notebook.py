"""What a notebook shows of a run: its summary as static HTML and SVG, or the report in a frame.

Names of a run reach the notebook as text only.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_rlprof.report.html.colors import Paint, stage_paints
from lightning_rlprof.report.html.step_charts import StepCharts
from lightning_rlprof.report.summary import (
    Summary,
    SummaryPart,
    device_lines,
    first_lines,
    quality_lines,
    run_line,
)
from lightning_rlprof.report.terminal import duration
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.spans import Spans

_HEIGHT = 26
_SMALL = 0.01  # of the step: smaller parts are drawn, and not listed
_LABELED = 0.06  # of the step: smaller parts have their name in the legend only
_GRAY = Paint("#b9bec6", "#000000")


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
        paint = colors.get(part.stage, _GRAY)
        place = f'x="{left:.3%}" width="{part.share:.3%}" height="{_HEIGHT}"'
        tip = f"<title>{_text(_told(part))}</title>"
        inside = f'<rect width="100%" height="100%" fill="{paint.fill}"/>'
        if part.kind != "stage":
            inside += '<rect width="100%" height="100%" fill="url(#rlprof-hatch)"/>'
        elif part.share >= _LABELED:
            style = f'font-size="13" font-family="sans-serif" fill="{paint.ink}"'
            inside += f'<text x="5" y="18" {style}>{_text(part.name)}</text>'
        # An inner svg cuts off what is wider than it.
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
