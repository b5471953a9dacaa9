// Lengths of samples: how many lie in each bin, and how they change over the steps.
const samples = (() => {
  const bars = byId("length-bars"), lines = byId("length-steps");
  const { starts = [], counts = [], p50 = [], p95 = [] } = data.lengths || {};
  const HEIGHT = 120, FOOT = 16, LEFT = 48;
  const lowest = Math.max(0, counts.findIndex((each) => each > 0));
  const total = counts.reduce((sum, each) => sum + each, 0);
  const text = (start) => Math.round(start).toLocaleString("en");

  function drawBars() {
    const width = bars.clientWidth, shown = counts.length - lowest;
    if (!width) return;
    const top = Math.max(...counts), wide = width / shown;
    const root = svg("svg", { height: HEIGHT + FOOT, viewBox: `0 0 ${width} ${HEIGHT + FOOT}`, role: "img", "aria-label": `Lengths from ${text(starts[lowest])} to ${text(starts[counts.length])}` });
    for (let bin = lowest; bin < counts.length; bin++) {
      const tall = (HEIGHT - 14) * counts[bin] / top, x = (bin - lowest) * wide;
      root.append(svg("rect", { fill: bin === counts.length - 1 ? "var(--bad)" : "var(--accent)", opacity: 0.75, x, y: HEIGHT - tall, width: Math.max(1, wide - 1), height: tall, "data-bin": bin }));
      if (wide > 34) root.append(svg("text", { x: x + wide / 2, y: HEIGHT - tall - 3, "text-anchor": "middle" }, percent(counts[bin] / total)));
    }
    const every = Math.max(1, Math.ceil(46 / wide));
    for (let bin = lowest, before = ""; bin < counts.length; bin += every) {
      const own = text(starts[bin]);  // bins of the smallest lengths begin at fractions: 1, 1.19, 1.41
      if (own !== before) root.append(svg("text", { x: (bin - lowest) * wide, y: HEIGHT + 12 }, own));
      before = own;
    }
    root.append(svg("line", { class: "axis", x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT }));
    showChart(bars, root);
  }

  function drawLines() {
    const width = lines.clientWidth, { first, last } = data.steps;
    if (!width) return;
    const known = first.map((_, column) => column).filter((column) => p95[column] !== null);
    const top = Math.max(1, ...known.map((column) => starts[p95[column] + 1])), y = (value) => 4 + (HEIGHT - 4) * (1 - value / top);
    const x = (column) => LEFT + (width - LEFT - 2) * (first.length > 1 ? column / (first.length - 1) : 0.5);
    const root = svg("svg", { height: HEIGHT + FOOT, viewBox: `0 0 ${width} ${HEIGHT + FOOT}`, role: "img", "aria-label": "Median and 95th percentile of lengths by step" });
    for (const value of ticks(0, top, 4).values) root.append(svg("line", { class: value ? "grid-line" : "axis", x1: LEFT, x2: width, y1: y(value), y2: y(value) }), svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)));
    const path = (values) => known.map((column, at) => `${at ? "L" : "M"}${x(column).toFixed(1)} ${y(starts[values[column]]).toFixed(1)}`).join("");
    root.append(svg("path", { class: "area", d: known.length ? `${path(p95)}${[...known].reverse().map((column) => `L${x(column).toFixed(1)} ${y(starts[p50[column]]).toFixed(1)}`).join("")}Z` : "" }), svg("path", { class: "line", d: path(p50) }), svg("path", { class: "line", "stroke-dasharray": "3 2", d: path(p95) }));
    root.append(svg("text", { x: LEFT, y: HEIGHT + 13 }, `step ${first[0]}`), svg("text", { x: width, y: HEIGHT + 13, "text-anchor": "end" }, String(last[last.length - 1])));
    showChart(lines, root);
  }

  const draw = () => { drawBars(); drawLines(); };

  function start() {
    draw();
    bars.addEventListener("pointermove", (event) => {
      const bin = event.target.dataset.bin;
      if (bin === undefined) return hideTip();
      showTip(event, `${text(starts[bin])} to ${text(starts[Number(bin) + 1])}`, "", [["samples", counts[bin].toLocaleString("en")], ["share", percent(counts[bin] / total)]]);
    });
    bars.addEventListener("pointerleave", hideTip);
    exportable("lengths", () => [["from", "below", "samples"], ...counts.map((each, bin) => [starts[bin], starts[bin + 1], each])]);
    exportable("lengths-by-step", () => [["first step", "last step", "p50", "p95"], ...data.steps.first.map((number, column) => [number, data.steps.last[column], p50[column] === null ? null : starts[p50[column]], p95[column] === null ? null : starts[p95[column]]])]);
  }
  return { start, draw, isEmpty: !bars };
})();
