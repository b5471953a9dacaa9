// Memory over the steps: a line for the highest rank, a band down to the lowest.
const memoryPlot = (() => {
  const host = byId("memory-plot");
  const series = data.memory;
  const { first, last } = data.steps;
  const LEFT = 64, HEIGHT = 110, FOOT = 16;
  const size = (bytes) => counter("_bytes", Math.round(bytes));
  let width = 0;
  const x = (column) => LEFT + (width - LEFT - 4) * (first.length > 1 ? column / (first.length - 1) : 0.5);

  function draw() {
    width = host.clientWidth;
    if (!width) return;
    const charts = series.map((each) => one(each));
    host.replaceChildren(...charts);
  }

  function one({ title, low, high }) {
    const top = Math.max(1, ...high.filter((value) => value !== null)) * 1.1, y = (value) => 18 + HEIGHT * (1 - value / top);
    const root = svg("svg", { height: HEIGHT + 18 + FOOT, viewBox: `0 0 ${width} ${HEIGHT + 18 + FOOT}`, role: "img", "aria-label": `Memory ${title}` });
    root.append(svg("text", { class: "strong", x: 0, y: 11 }, title));
    const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10].find((each) => top >= each) || 1;
    for (const value of ticks(0, top / unit, 3).values) {
      root.append(svg("line", { class: value ? "grid-line" : "axis", x1: LEFT, x2: width - 4, y1: y(value * unit), y2: y(value * unit) }));
      root.append(svg("text", { x: LEFT - 6, y: y(value * unit) + 4, "text-anchor": "end" }, value ? size(value * unit).replace(".00", "") : "0"));
    }
    const known = high.map((_, column) => column).filter((column) => high[column] !== null);
    const path = (values, columns) => columns.map((column, at) => `${at ? "L" : "M"}${x(column).toFixed(1)} ${y(values[column]).toFixed(1)}`).join("");
    if (known.length) root.append(svg("path", { class: "area", d: `${path(high, known)}${path(low, [...known].reverse()).replace("M", "L")}Z` }), svg("path", { class: "line", d: path(high, known) }));
    root.append(svg("text", { x: LEFT, y: HEIGHT + 18 + 13 }, `step ${first[0]}`), svg("text", { x: width - 4, y: HEIGHT + 18 + 13, "text-anchor": "end" }, String(last[last.length - 1])));
    return root;
  }

  // Of the first included step and the highest one: growth is for findings to judge.
  function figures() {
    for (const { name: kind, high } of series) {
      const known = included().filter((column) => high[column] !== null);
      if (!known.length) continue;
      const from = high[known[0]], top = Math.max(...known.map((column) => high[column]));
      const box = element("div");
      box.append(element("p", size(top), "big"), element("p", `${kind}: highest; ${size(from)} in ${name(known[0]).toLowerCase()}`, "soft"));
      byId("memory-figures").append(box);
    }
  }

  function start() {
    figures();
    draw();
    host.addEventListener("pointermove", (event) => {
      const column = Math.max(0, Math.min(first.length - 1, Math.round((event.clientX - host.getBoundingClientRect().left - LEFT) / (width - LEFT - 4) * (first.length - 1))));
      showTip(event, name(column), "lowest and highest rank", series.filter((each) => each.high[column] !== null).map((each) => [each.name, size(each.low[column]), size(each.high[column])]));
    });
    host.addEventListener("pointerleave", hideTip);
    exportable("memory", () => [["first step", "last step", ...series.flatMap((each) => [`${each.name}, lowest (bytes)`, `${each.name}, highest (bytes)`])], ...first.map((number, column) => [number, last[column], ...series.flatMap((each) => [each.low[column], each.high[column]])])]);
  }
  return { start, draw, isEmpty: !host };
})();
