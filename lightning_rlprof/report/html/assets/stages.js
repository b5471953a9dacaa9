// The table of stages: how their times spread over the steps, and how the selected ones differ.
const stageTable = (() => {
  const table = byId("table-stages");
  const { parts, wall } = data.steps;
  const rows = () => [...table.tBodies[0].rows].map((row) => [row, parts.find((part) => part.name === row.dataset.part)]);
  const WIDTH = 90;

  function range() { // common to all rows, logarithmic, in µs
    const all = parts.flatMap((part) => included().map((column) => part.us[column])).filter((value) => value > 0).sort((a, b) => a - b);
    return all.length ? [Math.log(quantile(all, 0.01)), Math.log(all[all.length - 1])] : [0, 1];
  }

  function spread(part, [low, high]) {
    const x = (value) => 3 + (WIDTH - 6) * Math.max(0, Math.min(1, (Math.log(Math.max(value, 1e-3)) - low) / Math.max(1e-9, high - low)));
    const values = included().map((column) => part.us[column]).filter((value) => value > 0).sort((a, b) => a - b);
    const root = svg("svg", { viewBox: `0 0 ${WIDTH} 18`, role: "img", "aria-label": values.length ? `${us(values[0])} to ${us(values[values.length - 1])}` : "no time" });
    if (!values.length) return root;
    const [q1, q2, q3] = [0.25, 0.5, 0.75].map((at) => x(quantile(values, at)));
    const every = Math.max(1, Math.floor(values.length / 150));
    root.append(svg("rect", { class: "box", x: q1, y: 3, width: Math.max(1, q3 - q1), height: 12 }));
    root.append(svg("path", { class: "tick", d: values.filter((_, at) => at % every === 0).map((value) => `M${x(value).toFixed(1)} 5V13`).join("") }));
    root.append(svg("line", { class: "middle", x1: q2, x2: q2, y1: 2, y2: 16 }));
    return root;
  }

  // With a selection: its figures, and the ratio of medians to all other included steps.
  function draw() {
    const chosen = selection.range && included().filter(selection.has);
    const others = selection.range && included().filter((column) => !selection.has(column));
    const head = table.tHead.rows[0];
    if (!table.dataset.whole) {
      table.dataset.whole = "1";
      for (const [row] of rows()) row.whole = [...row.cells].map((cell) => cell.textContent);
    }
    head.querySelector(".versus")?.remove();
    if (chosen) head.append(element("th", "vs. other steps", "num versus"));
    const median = (part, columns) => quantile(columns.map((column) => part.us[column]).sort((a, b) => a - b), 0.5);
    for (const [row, part] of rows()) {
      row.querySelector(".versus")?.remove();
      const [share, mean, middle, high, longest] = [1, 2, 3, 4, 5].map((at) => row.cells[at]);
      if (!chosen || !chosen.length || !part) {
        [mean, middle, high, longest].forEach((cell, at) => { cell.textContent = row.whole[at + 2]; });
        share.firstElementChild.textContent = parseFloat(row.whole[1]).toFixed(1);
        share.style.setProperty("--part", parseFloat(row.whole[1]) / 100);
        if (chosen) row.append(element("td", "–", "num versus"));
        continue;
      }
      const own = chosen.map((column) => part.us[column]).sort((a, b) => a - b);
      const sum = own.reduce((a, b) => a + b, 0), whole = chosen.reduce((a, column) => a + wall[column], 0);
      share.firstElementChild.textContent = (100 * sum / Math.max(1, whole)).toFixed(1);
      share.style.setProperty("--part", sum / Math.max(1, whole));
      [mean, middle, high, longest].forEach((cell, at) => { cell.textContent = us([sum / own.length, quantile(own, 0.5), quantile(own, 0.95), own[own.length - 1]][at]); });
      const before = others.length ? median(part, others) : 0;
      const ratio = before ? quantile(own, 0.5) / before : null;
      row.append(element("td", ratio === null ? "–" : `${ratio.toFixed(2)}x`, `num versus${ratio > 1.25 ? " worse" : ratio !== null && ratio < 0.8 ? " better" : ""}`));
    }
    byId("stages-note").textContent = chosen ? `${selection.text()}: ${count(chosen.reduce((sum, column) => sum + data.steps.sizes[column], 0), "step")}, beside the others of the run.` : byId("stages-note").dataset.whole;
  }

  function start() {
    byId("stages-note").dataset.whole = byId("stages-note").textContent;
    const limits = range();
    for (const [row, part] of rows()) if (part) row.querySelector(".spread").append(spread(part, limits));
    selection.follow.push(draw);
  }
  return { start, isEmpty: !table };
})();
