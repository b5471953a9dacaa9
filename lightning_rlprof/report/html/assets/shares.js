// Exclusive time of every stage over the steps, as stacked bars: mean of all ranks.
const shares = (() => {
  const { stages, bars, values, states } = data.shares;
  const host = byId("shares");
  const HEIGHT = 236, LEFT = 58, RIGHT = 6, TOP = 8, BOTTOM = 28;
  let relative = false;
  let width = 0;

  const totals = bars.map((_, bar) => values.reduce((sum, row) => sum + row[bar], 0));
  const span = (bar) => (bars[bar][0] === bars[bar][1] ? `step ${bars[bar][0]}` : `steps ${bars[bar][0]} to ${bars[bar][1]}`);
  const slot = () => (width - LEFT - RIGHT) / bars.length;

  function draw() {
    width = host.clientWidth;
    const top = relative ? 1 : Math.max(...totals, 1);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    const root = svg("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": describe() });
    root.append(...scale(top, y), ...steps(y(0)));
    const gap = slot() > 5 ? Math.min(3, slot() * 0.16) : 0;
    const floor = new Array(bars.length).fill(0);
    stages.forEach((name, stage) => {
      let path = "";
      bars.forEach((_, bar) => {
        const value = relative ? values[stage][bar] / (totals[bar] || 1) : values[stage][bar];
        if (!value) return;
        const x = LEFT + bar * slot();
        path += `M${x.toFixed(2)} ${y(floor[bar]).toFixed(2)}h${(slot() - gap).toFixed(2)}V${y(floor[bar] + value).toFixed(2)}h${(gap - slot()).toFixed(2)}z`;
        floor[bar] += value;
      });
      root.append(svg("path", { d: path, fill: fillOf(name), class: isFaded(name) ? "faded" : "" }));
    });
    const here = bars.findIndex(([from, to]) => from <= timeline.number() && timeline.number() <= to);
    if (here >= 0) root.append(svg("rect", { class: "cursor", x: LEFT + here * slot() - gap / 2, y: TOP, width: slot(), height: HEIGHT - TOP - BOTTOM + 1 }));
    host.replaceChildren(root);
    drawLegend(byId("shares-legend"), stages);
  }

  function scale(top, y) {
    const { step, values: found } = ticks(0, top, 4);
    const unit = unitOf(top);
    return found.flatMap((at) => [
      svg("line", { class: at ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, relative ? `${Math.round(100 * at)} %` : tickLabel(at, step, unit)),
    ]);
  }

  // Step numbers under the bars; a dot where the timeline below can open the step.
  function steps(base) {
    const every = Math.max(1, ticks(0, bars.length, width / 60).step);
    const found = [];
    bars.forEach(([from, to], bar) => {
      const x = LEFT + (bar + 0.5) * slot();
      if (bar % every === 0) found.push(svg("text", { x, y: HEIGHT - 8, "text-anchor": "middle" }, String(from)));
      if (timeline.has(from, to)) found.push(svg("circle", { class: "opens", cx: x, cy: base + 5, r: Math.min(1.6, Math.max(0.7, slot() / 3)) }));
    });
    return found;
  }

  function describe() {
    const whole = totals.reduce((sum, value) => sum + value, 0) || 1;
    const parts = stages.map((name, stage) => [values[stage].reduce((a, b) => a + b, 0) / whole, name]);
    parts.sort((a, b) => b[0] - a[0]);
    return `Time per step and stage, ${bars.length} bars. ` + parts.map(([part, name]) => `${name} ${percent(part)}`).join(", ");
  }

  function barAt(event) {
    const bar = Math.floor((event.clientX - host.getBoundingClientRect().left - LEFT) / slot());
    return bar >= 0 && bar < bars.length ? bar : -1;
  }

  function hover(event) {
    const bar = barAt(event);
    if (bar < 0) return hideTip();
    const rows = stages.map((name, stage) => [{ chip: name }, duration(values[stage][bar]), percent(values[stage][bar] / (totals[bar] || 1))]);
    const open = timeline.has(...bars[bar]) ? "click to open it in the timeline" : "its timeline is not in this file";
    const state = states[bar] ? `${states[bar]} · ` : "";
    showTip(event, `${span(bar)[0].toUpperCase()}${span(bar).slice(1)}: ${duration(totals[bar])}`, state + open, rows.filter((_, at) => values[at][bar] > 0).reverse());
  }

  function start() {
    host.addEventListener("pointermove", hover);
    host.addEventListener("pointerleave", hideTip);
    host.addEventListener("click", (event) => {
      const bar = barAt(event);
      if (bar >= 0) timeline.open(...bars[bar]);
    });
    const button = byId("shares-relative");
    button.addEventListener("click", () => {
      relative = !relative;
      button.setAttribute("aria-pressed", String(relative));
      draw();
    });
    byId("shares-table").addEventListener("toggle", (event) => {
      if (!event.target.open || event.target.querySelector("table")) return;
      const heads = [["steps", false], ...stages.map((name) => [name, true]), ["step", true]];
      const rows = bars.map(([from, to], bar) => [from === to ? `${from}` : `${from}-${to}`, ...values.map((row) => duration(row[bar])), duration(totals[bar])]);
      const box = element("div", undefined, "scroll wide");
      box.append(tableOf(heads, rows));
      event.target.append(box);
    });
  }

  return { start, draw, isEmpty: !bars.length };
})();
