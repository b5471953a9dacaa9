"""What a notebook shows of a run: the overview as static HTML and SVG, or the report in a frame.

Names of a run reach the notebook as text only.
"""

import html
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_rlprof.report.html.colors import Paint, stage_paints
from lightning_rlprof.report.overview import Segment, overview
from lightning_rlprof.report.run_summary import run_line, what_to_fix
from lightning_rlprof.report.step_series import StepSeries
from lightning_rlprof.system.plain_text import plain
from lightning_rlprof.tables.spans import Spans

_HEIGHT = 26
_LABELED = 0.06  # of the step: smaller parts have their name in the legend only
_GRAY = Paint("#b9bec6", "#000000")


def overview_html(spans: Spans) -> str:
    """Return step time, a bar of the mean step and the first finding; empty without any stage.

    Tables of profilers are left out, since reading them can take minutes.
    """
    spans = replace(spans, tables={})
    series = StepSeries(spans)
    found = overview(series)
    parts = [*found.segments, *found.small]
    if all(part.kind == "untraced" for part in parts):
        return ""
    legend = ", ".join(f"{part.name} {part.share:.1%} ({part.time})" for part in found.segments)
    lines = [run_line(series), _bar(parts, stage_paints(spans, series), legend), legend]
    lines[::2] = map(_text, lines[::2])
    if found.median is not None:
        lines += map(_text, what_to_fix(spans))
    return "".join(f"<div>{line}</div>" for line in lines)


def _text(text: str) -> str:
    return html.escape(plain(text))


def _bar(parts: list[Segment], colors: Mapping[str, Paint], legend: str) -> str:
    """Return the mean step as SVG without style sheets, which pages of notebooks take away."""
    drawn, left = [], 0.0
    for part in parts:
        paint = colors.get(part.stage, _GRAY)
        place = f'x="{left:.3%}" width="{part.share:.3%}" height="{_HEIGHT}"'
        tip = f"<title>{_text(f'{part.name} {part.share:.1%} ({part.time})')}</title>"
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
