// What a change would save: a dot for the prediction, a line for its interval, dashes for today.
const whatifPlot = (() => {
  const host = byId("whatif-plot");
  const rows = data.whatif;
  const ROW = 22;

  function draw() {
    const width = host.clientWidth;
    if (!width) return;
    const LEFT = Math.min(260, width * 0.42), RIGHT = 64, now = rows[0].now;
    const top = Math.max(1, now, ...rows.map((row) => row.high ?? row.then)) * 1.05;
    const x = (value) => LEFT + (width - LEFT - RIGHT) * value / top;
    const root = svg("svg", { height: rows.length * ROW + 20, viewBox: `0 0 ${width} ${rows.length * ROW + 20}`, role: "img", "aria-label": rows.map((row) => `${row.name}: ${us(row.then)}`).join(", ") });
    root.append(svg("line", { class: "axis", x1: x(0), x2: x(top), y1: rows.length * ROW, y2: rows.length * ROW }), svg("line", { class: "change", x1: x(now), x2: x(now), y1: 0, y2: rows.length * ROW }));
    root.append(svg("text", { x: x(0), y: rows.length * ROW + 14 }, "0"), svg("text", { x: x(now), y: rows.length * ROW + 14, "text-anchor": "middle" }, `now ${us(now)}`));
    rows.forEach((row, at) => {
      const y = at * ROW + ROW / 2;
      root.append(svg("text", { x: 0, y: y + 4 }, cut(row.name, Math.floor(LEFT / 6.2))));
      if (row.low !== null && row.high !== null) root.append(svg("line", { class: "whisker", x1: x(row.low), x2: x(row.high), y1: y, y2: y }));
      root.append(svg("circle", { class: "dot", cx: x(row.then), cy: y, r: 4 }), svg("text", { class: "strong", x: width, y: y + 4, "text-anchor": "end" }, `${row.then > now ? "+" : "−"}${percent(Math.abs(1 - row.then / Math.max(1, row.now)))}`));
    });
    showChart(host, root);
  }

  function start() {
    draw();
    exportable("whatif", () => [["change", "now (us)", "predicted (us)", "CI low (us)", "CI high (us)"], ...rows.map((row) => [row.name, row.now, row.then, row.low, row.high])]);
  }
  return { start, draw, isEmpty: !host || !rows.length };
})();
