// All steps as stacked bars, and throughput above them on the first screen.
const stepBars = (() => {
  const { first, last, parts, wall, trained, most, tokens, levels, outliers, states, state, sizes } = data.steps;
  const host = byId("step-bars");
  const LEFT = 48, RIGHT = 4, TOP = 20, HEIGHT = 190, FOOT = 18;
  let relative = false, width = 0, cursor = -1, start = null, line = null;
  const count = first.length;
  const x = (column) => LEFT + (width - LEFT - RIGHT) * column / count;
  const columnAt = (event) => Math.max(0, Math.min(count - 1, Math.floor((event.clientX - host.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT) * count)));
  const columnOf = (step) => last.findIndex((number) => number >= step);
  // Outliers would flatten all other bars: the axis ends above them only if they are few times longer.
  const top = () => {
    if (relative) return 1;
    const sorted = [...(sizes[0] > 1 ? most : wall)].sort((a, b) => a - b);
    return Math.max(1, Math.min(sorted[sorted.length - 1] * 1.03, quantile(sorted, 0.98) * 2.2));
  };

  function draw() {
    width = host.clientWidth;
    if (!count || !width) return;
    const high = top(), y = (value) => TOP + HEIGHT * (1 - Math.min(1, value / high));
    const root = svg("svg", { height: TOP + HEIGHT + FOOT, viewBox: `0 0 ${width} ${TOP + HEIGHT + FOOT}`, "aria-hidden": "true" });
    axes(root, high, y);
    drawParts(root, y);
    if (!relative) { drawLevels(root, y); drawOutliers(root, y); }
    if (selection.range) root.append(svg("rect", { class: "picked", x: x(selection.range[0]), y: TOP, width: x(selection.range[1] + 1) - x(selection.range[0]), height: HEIGHT }));
    line = svg("rect", { class: "cursor", y: TOP - 1, height: HEIGHT + 2, visibility: "hidden" });
    root.append(line);
    showChart(host, root);
    mark();
    describe();
  }

  function axes(root, high, y) {
    const { step, values } = relative ? { step: 0.25, values: [0, 0.25, 0.5, 0.75, 1] } : ticks(0, high * 1e3, 4);
    for (const value of values) {
      const at = y(relative ? value : value / 1e3);
      root.append(svg("line", { class: value ? "grid-line" : "axis", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      root.append(svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, relative ? percent(value) : value ? tickLabel(value, step, unitOf(high * 1e3)) : "0"));
    }
    const every = Math.max(1, Math.ceil(count / Math.max(2, width / 90)));
    for (let column = 0; column < count; column += every) root.append(svg("text", { x: (x(column) + x(column + 1)) / 2, y: TOP + HEIGHT + 14, "text-anchor": column ? "middle" : "start" }, first[column].toLocaleString("en")));
  }

  // One path per part: twenty thousand rectangles would pause the page.
  function drawParts(root, y) {
    const gap = (width - LEFT - RIGHT) / count > 4 ? 1 : 0;
    const below = new Array(count).fill(0);
    for (const part of parts) {
      let shape = "", pale = "";
      for (let column = 0; column < count; column++) {
        const whole = relative ? Math.max(1, wall[column]) : 1;
        const from = below[column], to = from + part.us[column] / whole;
        below[column] = to;
        if (!part.us[column]) continue;
        const box = `M${x(column).toFixed(2)} ${y(from).toFixed(2)}V${y(to).toFixed(2)}H${(x(column + 1) - gap).toFixed(2)}V${y(from).toFixed(2)}Z`;
        if (data.steps.included[column]) shape += box; else pale += box;
      }
      const faded = isFaded(part.stage) ? " faded" : "";
      if (shape) root.append(svg("path", { d: shape, fill: partFill(part), class: `part${faded}` }));
      if (pale) root.append(svg("path", { d: pale, fill: partFill(part), class: `pale${faded}` }));
    }
    if (sizes[0] > 1 && !relative) root.append(svg("path", { class: "tick", fill: "none", d: most.map((value, column) => `M${x(column).toFixed(1)} ${y(value).toFixed(1)}H${x(column + 1).toFixed(1)}`).join("") }));
  }

  // Medians between the steps at which the time changed; red lines where it did.
  function drawLevels(root, y) {
    const edges = [0, ...levels.map(([step]) => columnOf(step)).filter((column) => column > 0).sort((a, b) => a - b), count];
    for (let at = 0; at + 1 < edges.length; at++) {
      const own = included().filter((column) => column >= edges[at] && column < edges[at + 1]).map((column) => wall[column]).sort((a, b) => a - b);
      if (own.length && levels.length) root.append(svg("line", { class: "level", x1: x(edges[at]), x2: x(edges[at + 1]), y1: y(quantile(own, 0.5)), y2: y(quantile(own, 0.5)) }));
    }
    for (const [step, ratio] of levels) {
      const at = x(columnOf(step));
      root.append(svg("line", { class: "change", x1: at, x2: at, y1: TOP, y2: TOP + HEIGHT }));
      root.append(svg("text", { class: "bad strong", x: Math.min(at, width - 130), y: 12 }, `from step ${step}: ${ratio.toFixed(2)}x`));
    }
  }

  function drawOutliers(root, y) {
    for (const step of outliers) {
      const column = columnOf(step), at = (x(column) + x(column + 1)) / 2, over = Math.max(TOP, y(sizes[0] > 1 ? most[column] : wall[column])) - 3;
      root.append(svg("path", { fill: "var(--bad)", d: `M${at - 4} ${over - 7}h8l-4 6z` }));
    }
  }

  function mark() {
    if (!line || cursor < 0) return;
    line.setAttribute("x", x(cursor));
    line.setAttribute("width", Math.max(2, x(cursor + 1) - x(cursor)));
    line.setAttribute("visibility", "visible");
  }

  function describe() {
    const note = byId("steps-note");
    note.replaceChildren();
    if (outliers.length) {
      note.append(`▼ Outlier${outliers.length > 1 ? "s" : ""}: `);
      outliers.forEach((step, at) => {
        const link = element("a", `step ${step}`);
        link.href = `#steps=${step}`;
        note.append(link, at + 1 < outliers.length ? ", " : ". ");
      });
    }
    note.append("Drag over the chart to select steps. Click a bar to look inside.");
  }

  function hover(event) {
    const column = columnAt(event);
    const rows = parts.filter((part) => part.us[column]).map((part) => [{ part }, us(part.us[column]), percent(part.us[column] / Math.max(1, wall[column]))]);
    if (tokens) rows.push(["tokens/s", Math.round(tokens[column] / Math.max(1e-9, trained[column] * sizes[column] / 1e6)).toLocaleString("en")]);
    const about = [states[state[column]] === "complete" ? "" : states[state[column]], sizes[column] > 1 ? `longest ${us(most[column])}` : ""].filter(Boolean).join(" · ");
    showTip(event, `${name(column)}: ${us(wall[column])}`, about, rows);
  }

  function choose(column, extend) {
    if (extend) {
      start = start ?? Math.max(0, cursor);
      cursor = Math.max(0, Math.min(count - 1, column));
      selection.set(start, cursor);
    } else {
      start = null;
      cursor = Math.max(0, Math.min(count - 1, column));
      mark();
    }
    if (!timeline.isEmpty) timeline.open(first[cursor], last[cursor]);
  }

  function listen() {
    let down = null;
    host.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      down = columnAt(event);
      if (event.pointerType !== "touch") host.setPointerCapture(event.pointerId);
    });
    host.addEventListener("pointermove", (event) => {
      if (down === null || event.pointerType === "touch") return hover(event);
      if (columnAt(event) !== down) { hideTip(); selection.set(down, columnAt(event)); }
    });
    host.addEventListener("pointerup", (event) => {
      if (down !== null && columnAt(event) === down) choose(down, event.shiftKey);
      down = null;
    });
    host.addEventListener("pointercancel", () => { down = null; });
    host.addEventListener("pointerleave", hideTip);
    host.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -count, End: count }[event.key];
      if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(Math.max(0, cursor) + (cursor < 0 && move === 1 ? 0 : move), event.shiftKey);
    });
    addEventListener("keydown", (event) => { if (event.key === "Escape") { start = null; selection.set(null); } });
    for (const [id, to] of [["as-time", false], ["as-share", true]]) {
      byId(id).addEventListener("click", () => {
        relative = to;
        byId("as-time").setAttribute("aria-pressed", String(!to));
        byId("as-share").setAttribute("aria-pressed", String(to));
        draw();
      });
    }
    exportable("steps", () => [["first step", "last step", "state", ...parts.map((part) => `${part.name} (us)`), "step (us)"], ...first.map((number, column) => [number, last[column], states[state[column]], ...parts.map((part) => part.us[column]), wall[column]])]);
  }

  return { draw, listen, isEmpty: !host || !count };
})();

// Throughput over the steps, from zero; the duration of steps where nothing counts tokens.
const rate = (() => {
  const { first, last, wall, trained, tokens, sizes } = data.steps;
  const host = byId("rate");
  const values = tokens ? tokens.map((sum, column) => sum / Math.max(1e-9, trained[column] * sizes[column] / 1e6)) : wall;
  const text = (value) => (tokens ? `${Math.round(value).toLocaleString("en")} tokens/s` : us(value));
  const HEIGHT = 62, FOOT = 15;
  let width = 0;
  const x = (column) => (values.length > 1 ? column / (values.length - 1) : 0.5) * width;

  function draw() {
    width = host.clientWidth;
    if (!values.length || !width) return;
    const sorted = [...values].sort((a, b) => a - b);
    const high = Math.max(1e-9, Math.min(sorted[sorted.length - 1], quantile(sorted, 0.98) * 2)), y = (value) => 2 + (HEIGHT - 2) * (1 - Math.min(1, value / high));
    const root = svg("svg", { height: HEIGHT + FOOT, viewBox: `0 0 ${width} ${HEIGHT + FOOT}`, role: "img", "aria-label": `${text(sorted[0])} to ${text(sorted[sorted.length - 1])} over ${count(values.length, "column")}` });
    const path = values.map((value, column) => `${column ? "L" : "M"}${x(column).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    if (selection.range) root.append(svg("rect", { class: "picked", x: x(selection.range[0]) - 1, y: 0, width: Math.max(3, x(selection.range[1]) - x(selection.range[0])), height: HEIGHT }));
    root.append(svg("path", { class: "area", d: `${path}L${x(values.length - 1)} ${HEIGHT}L${x(0)} ${HEIGHT}Z` }), svg("path", { class: "line", d: path }), svg("line", { class: "axis", x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT }));
    root.append(svg("text", { x: 0, y: HEIGHT + 12 }, `step ${first[0]}`), svg("text", { x: width / 2, y: HEIGHT + 12, "text-anchor": "middle" }, tokens ? `${Math.round(sorted[0]).toLocaleString("en")} to ${text(sorted[sorted.length - 1])}` : `${text(sorted[0])} to ${text(sorted[sorted.length - 1])}`), svg("text", { x: width, y: HEIGHT + 12, "text-anchor": "end" }, String(last[last.length - 1])));
    showChart(host, root);
  }

  function listen() {
    host.addEventListener("pointermove", (event) => {
      const column = Math.max(0, Math.min(values.length - 1, Math.round((event.clientX - host.getBoundingClientRect().left) / width * (values.length - 1))));
      showTip(event, `${name(column)}: ${text(values[column])}`, tokens ? `step time ${us(wall[column])}` : "", []);
    });
    host.addEventListener("pointerleave", hideTip);
    exportable("rate", () => [["first step", "last step", tokens ? "tokens/s" : "step (us)"], ...first.map((number, column) => [number, last[column], values[column]])]);
  }
  return { draw, listen, isEmpty: !host || !values.length };
})();
