// One step at a time: a lane per rank and thread, a row per level of nesting, time to the right.
// Under a rank whose step was captured, a lane per device: how busy it was, by class, in columns.
const timeline = (() => {
  const { steps, names, kinds, counters, work } = data.timeline;
  const host = byId("lanes");
  const ruler = byId("ruler");
  const picker = byId("step");
  const LEFT = 74, RIGHT = 8, GAP = 5;
  let at = Math.max(0, steps.findIndex((step) => step.labels.includes("median")));
  let aligned = data.timeline.aligned !== "";
  const axis = timeAxis({ host, left: () => LEFT, right: RIGHT, shortest: 10, whole: () => whole(), draw: () => draw(), hover });
  const { x, look, zoom } = axis;

  const step = () => steps[at];
  const title = (one) => (one.number ? `step ${one.number}` : "outside steps");
  // Where each rank's lane is moved so that all begin their step at zero.
  function shifts() {
    const found = new Map();
    if (!aligned || !step().number) return found;
    for (const [rank, start] of step().bounds) if (!found.has(rank)) found.set(rank, start);
    for (const [, , lane, , start] of step().spans) if (!found.has(step().lanes[lane][0])) found.set(step().lanes[lane][0], start);
    return found;
  }

  function rowHeight() {
    const rows = step().lanes.reduce((sum, lane) => sum + lane[2], 0);
    return rows <= 40 ? 19 : rows <= 100 ? 13 : 8;
  }

  function layout() {
    let y = GAP;
    const ranks = new Map(), devices = new Map();
    const height = rowHeight(), high = height + 7;
    const tops = step().lanes.map(([rank, , rows], lane, lanes) => {
      if (ranks.size && !ranks.has(rank)) y += GAP;
      const top = y;
      y += rows * height;
      ranks.set(rank, [ranks.has(rank) ? ranks.get(rank)[0] : top, y]);
      if (lanes[lane + 1]?.[0] !== rank) step().devices.forEach(([own], device) => {
        if (own !== rank) return;
        devices.set(device, y + 2);
        y += high + 2;
      });
      return top;
    });
    return { tops, ranks, devices, height, high, bottom: y + GAP };
  }

  function draw() {
    if (!steps.length) return;
    const width = axis.width = host.clientWidth;
    const place = layout();
    const moved = shifts();
    const root = svg("svg", { height: place.bottom, viewBox: `0 0 ${width} ${place.bottom}`, "aria-hidden": "true" });
    const clip = svg("g", { "clip-path": "url(#window)" });
    const frame = svg("clipPath", { id: "window" });
    frame.append(svg("rect", { x: LEFT, y: 0, width: Math.max(0, width - LEFT - RIGHT), height: place.bottom }));
    drawRuler(place.bottom, clip);
    for (const [rank, start, end] of step().bounds) drawBound(clip, place.ranks.get(rank), rank, start, end, moved.get(rank) || 0);
    drawSpans(clip, place, moved);
    step().devices.forEach(([rank], device) => drawDevice(clip, device, place.devices.get(device), place.high, moved.get(rank) || 0));
    if (axis.brush) clip.append(svg("rect", { class: "brush", x: Math.min(...axis.brush), y: 0, width: Math.abs(axis.brush[1] - axis.brush[0]), height: place.bottom }));
    root.append(frame, clip, ...labels(place));
    showChart(host, root);
    byId("fit").disabled = axis.isWhole();
    drawLegend(byId("timeline-legend"), legend());
  }

  // In the order of the chart above, so that a colour is looked up in one place.
  function legend() {
    const here = new Set(step().spans.filter((span) => kinds[span[1]] === "stage").map((span) => names[span[0]]));
    if (step().bounds.length && step().hatched) here.add(data.untraced);
    work.forEach(([, kind], part) => { if (step().devices.some((device) => device[5][part].length)) here.add(kind); });
    const known = data.steps.parts.map((part) => part.name).filter((name) => here.has(name));
    return [...known, ...[...here].filter((name) => !known.includes(name))];
  }

  function drawRuler(bottom, clip) {
    const { view, width } = axis;
    const { step: distance, values } = ticks(view[0], view[1], (width - LEFT) / 90);
    const unit = unitOf(Math.max(Math.abs(view[1]), distance));
    const top = svg("svg", { width, height: 20, viewBox: `0 0 ${width} 20`, "aria-hidden": "true" });
    for (const value of values) {
      top.append(svg("text", { x: x(value), y: 14, "text-anchor": "middle" }, tickLabel(value, distance, unit)));
      clip.append(svg("line", { class: "grid-line", x1: x(value), x2: x(value), y1: 0, y2: bottom }));
    }
    showChart(ruler, top);
  }

  function drawBound(clip, [top, bottom], rank, start, end, moved) {
    const box = (from, to, className) => svg("rect", { class: className, x: x(from - moved), y: top, width: Math.max(0.5, x(to - moved) - x(from - moved)), height: bottom - top });
    clip.append(box(start, end, "rank"));
    for (const [from, to] of untraced(rank, start, end)) {
      const hatched = box(from, to, "hatched");
      hatched.dataset.gap = `${rank} ${from} ${to}`;
      clip.append(hatched);
    }
    for (const edge of [start - moved, end - moved]) clip.append(svg("line", { class: "bound", x1: x(edge), x2: x(edge), y1: top - 2, y2: bottom + 2 }));
  }

  // Where no stage is open on the thread that trains, which is the first lane of its rank.
  function untraced(rank, start, end) {
    if (!step().hatched) return []; // a stage that was left out may have been open
    const first = step().lanes.findIndex((lane) => lane[0] === rank);
    const gaps = [];
    let done = start;
    for (const [, kind, lane, , from, length] of step().spans) {
      if (lane !== first || kinds[kind] !== "stage") continue;
      if (from > done) gaps.push([done, Math.min(from, end)]);
      done = Math.max(done, from + length);
    }
    if (end > done) gaps.push([done, end]);
    return gaps;
  }

  function drawSpans(clip, place, moved) {
    const { view } = axis;
    const painted = new Map(); // per row: how far to the right it is drawn, so that dust costs nothing
    step().spans.forEach(([name, kind, lane, row, start, length], index) => {
      const from = start - (moved.get(step().lanes[lane][0]) || 0);
      if (from + length < view[0] || from > view[1]) return;
      const left = x(from), right = Math.max(x(from + length), left + 0.75);
      const key = lane * 4096 + row;
      if (right - left < 1 && painted.get(key) > left - 0.25) return;
      painted.set(key, right);
      drawSpan(clip, names[name], kinds[kind], index, left, right, place.tops[lane] + row * place.height, place.height - 1);
    });
  }

  const columnStart = (device, column) => Math.floor(column * step().devices[device][3] / step().devices[device][4]);

  // Full height is a device that was busy all the time; where it was not recorded nothing is drawn.
  function drawDevice(clip, device, top, high, moved) {
    const [, , start, , columns, parts] = step().devices[device];
    const edge = (column) => x(start + columnStart(device, column) - moved).toFixed(2);
    const paths = [...work.map(() => ""), ""];
    for (let column = 0; column < columns; column++) {
      const wide = columnStart(device, column + 1) - columnStart(device, column);
      let done = 0;
      for (const part of parts.keys()) {
        const ns = parts[part][column];
        if (!ns) continue;
        const from = top + high * (1 - done / wide), to = top + high * (1 - (done + ns) / wide);
        paths[part] += `M${edge(column)} ${from.toFixed(2)}H${edge(column + 1)}V${to.toFixed(2)}H${edge(column)}z`;
        done += ns;
      }
    }
    paths.forEach((d, part) => {
      if (!d) return;
      const kind = work[part]?.[1], path = svg("path", { class: kind ? "work" : "rank", d, "data-work": kind || "idle" });
      if (kind) path.style.fill = workFill(kind);
      if (kind && isFaded(kind)) path.classList.add("faded");
      clip.append(path);
    });
    clip.append(svg("path", { class: "device", "data-device": device, d: `M${edge(0)} ${top}H${edge(columns)}V${top + high}H${edge(0)}z` }));
  }
  function drawSpan(clip, name, kind, index, left, right, y, height) {
    const fade = isFaded(name) ? " faded" : "";
    if (kind === "mark") {
      const half = Math.min(5, height / 2);
      const mid = y + height / 2;
      clip.append(svg("path", { class: `mark${fade}`, "data-span": index, d: `M${left - half} ${mid}l${half} ${-half}l${half} ${half}l${-half} ${half}z` }));
      return;
    }
    const box = { "data-span": index, x: left, y, width: right - left, height, class: `${kind}${fade}` };
    if (kind !== "region") box.fill = paint(name)[0];
    clip.append(svg("rect", box));
    const seen = [Math.max(left, LEFT), Math.min(right, axis.width - RIGHT)];
    const room = Math.floor((seen[1] - seen[0] - 8) / 5.7);
    if (height < 11 || room < 3) return;
    const text = cut(name, room);
    const label = svg("text", { x: seen[0] + 4, y: y + height / 2 + 3.7, class: `label ${kind}-label${fade}` }, text);
    if (kind !== "region") label.style.fill = paint(name)[1];
    clip.append(label);
  }

  function labels({ tops, ranks, devices, height, high }) {
    const found = [];
    for (const [rank, [top]] of ranks) found.push(svg("text", { x: 6, y: top + Math.min(13, height), class: "label" }, `rank ${rank}`));
    step().lanes.forEach(([rank, thread], lane) => {
      if (tops[lane] === ranks.get(rank)[0] || height < 11) return;
      found.push(svg("text", { x: 6, y: tops[lane] + 13, class: "label" }, cut(thread, 12)));
    });
    for (const [device, top] of devices) found.push(svg("text", { x: 6, y: top + high / 2 + 4, class: "label" }, deviceName(device)));
    return found;
  }

  const whole = () => {
    const moved = shifts();
    let low = 0, high = 1; // a span of a step may begin before it
    const take = (rank, start, end) => {
      low = Math.min(low, start - (moved.get(rank) || 0));
      high = Math.max(high, end - (moved.get(rank) || 0));
    };
    for (const [rank, start, end] of step().bounds) take(rank, start, end);
    for (const [, , lane, , start, length] of step().spans) take(step().lanes[lane][0], start, start + length);
    return [low, high];
  };
  function select(index) {
    at = clamp(index, 0, steps.length - 1);
    picker.value = String(at);
    byId("previous").disabled = at === 0;
    byId("next").disabled = at === steps.length - 1;
    axis.view = whole();
    describe();
    redraw();
  }

  function open(from, to) {
    const found = steps.findIndex((one) => one.number >= from && one.number <= to);
    if (found >= 0) select(found);
  }

  function describe() {
    const one = step();
    const ranks = new Set(one.lanes.map((lane) => lane[0]));
    const parts = [title(one)[0].toUpperCase() + title(one).slice(1), ...one.labels, duration(one.duration_ns), count(ranks.size, "rank"), count(one.spans.length, "span")];
    for (const [rank] of one.bounds) ranks.delete(rank);
    if (one.number && ranks.size) parts.push(`not ended by ${ranks.size > 4 ? count(ranks.size, "rank") : `rank ${[...ranks].join(", ")}`}`);
    if (one.left_out) parts.push(`${count(one.left_out, "shorter span")} left out of this file${one.hatched ? "" : ", stages too: nothing is hatched"}`);
    byId("chosen").textContent = parts.join(" · ");
    host.setAttribute("aria-label", `Timeline: ${parts.join(", ")}. Arrow keys move, plus and minus zoom, Home shows all. The same as a table below.`);
    byId("timeline-table").open = false;
    byId("timeline-table").querySelector(".scroll")?.remove();
  }

  // From the zero of the ruler above the lanes.
  const begins = (rank, start) => duration(start - (shifts().get(rank) || 0));

  const deviceName = (device) => {
    const [rank, number] = step().devices[device];
    return step().devices.filter(([own]) => own === rank).length > 1 && number !== null ? `device ${number}` : "device";
  };

  function hoverDevice(event, device) {
    const [rank, , start, , columns, parts] = step().devices[device];
    const ns = axis.ns(event.clientX - host.getBoundingClientRect().left) + (shifts().get(rank) || 0) - start;
    let column = 0;
    while (column < columns - 1 && columnStart(device, column + 1) <= ns) column++;
    const from = columnStart(device, column), wide = columnStart(device, column + 1) - from;
    const times = parts.map((part) => part[column] || 0), sum = (few) => few.reduce((all, part) => all + part, 0);
    const lane = event.target.getBoundingClientRect();
    const at = wide * (lane.bottom - event.clientY) / lane.height;
    const part = times.findIndex((_, last) => sum(times.slice(0, last + 1)) > at);
    const texts = [...work.map(([text]) => text), "idle", "not recorded"];
    const rows = [...times, wide - sum(times)].map((time, one) => [texts[one], percent(time / wide), duration(time)]).filter((_, one) => (times[one] ?? wide - sum(times)) > 0);
    showTip(event, texts[part < 0 ? times.length : part], `${deviceName(device)} · rank ${rank}`, [["busy", percent(sum(times.slice(0, -1)) / wide), ""], ...rows, ["column", "", duration(wide)], ["begins after", "", begins(rank, start + from)]]);
  }

  function hover(event) {
    const { span, gap, device } = event.target.dataset || {};
    const one = step();
    if (device !== undefined) return hoverDevice(event, Number(device));
    if (gap) {
      const [rank, from, to] = gap.split(" ").map(Number);
      return showTip(event, data.untraced, `rank ${rank} · no stage is open`, [["duration", duration(to - from)], ["of the step", percent((to - from) / (one.duration_ns || 1))], ["begins after", begins(rank, from)]]);
    }
    if (span === undefined) return hideTip();
    const [name, kind, lane, , start, length, numbers = []] = one.spans[span];
    const [rank, thread] = one.lanes[lane];
    const rows = kinds[kind] === "mark" ? [] : [["duration", duration(length)], ["of the step", percent(length / (one.duration_ns || 1))]];
    rows.push(["begins after", begins(rank, start)]);
    for (let i = 0; i < numbers.length; i += 2) rows.push([counters[numbers[i]], counter(counters[numbers[i]], numbers[i + 1])]);
    showTip(event, names[name], `${kinds[kind]} · rank ${rank} · ${thread}`, rows);
  }

  // What is drawn, times in ns: a table, and a file.
  const rows = () => {
    const moved = shifts();
    return [["name", "kind", "rank", "thread", "begins after", "duration"], ...step().spans.map(([name, kind, lane, , from, length]) => {
      const [rank, thread] = step().lanes[lane];
      return [names[name], kinds[kind], rank, thread, from - (moved.get(rank) || 0), length];
    }), ...step().devices.flatMap(([rank, , from, , , parts], device) => parts.map((part, at) => [work[at]?.[0] || "idle", "device", rank, deviceName(device), from - (moved.get(rank) || 0), part.reduce((sum, ns) => sum + ns, 0)]).filter((row) => row[5]))];
  };

  function start() {
    if (!steps.length) return;
    steps.forEach((one, index) => {
      const option = element("option", [title(one), ...one.labels, duration(one.duration_ns)].join(" · "));
      option.value = String(index);
      picker.append(option);
    });
    picker.addEventListener("change", () => select(Number(picker.value)));
    const actions = { previous: () => select(at - 1), next: () => select(at + 1), closer: () => zoom(0.6), wider: () => zoom(1 / 0.6), fit: () => look(...whole()) };
    for (const id in actions) byId(id).addEventListener("click", actions[id]);
    const align = byId("align");
    align.hidden = data.timeline.ranks < 2;
    align.setAttribute("aria-pressed", String(aligned));
    align.addEventListener("click", () => {
      aligned = !aligned;
      align.setAttribute("aria-pressed", String(aligned));
      describe();
      look(...whole());
    });
    byId("timeline-table").addEventListener("toggle", (event) => {
      if (!event.target.open || event.target.querySelector(".scroll")) return;
      const box = event.target.appendChild(element("div", undefined, "scroll"));
      box.tabIndex = 0;
      const [heads, ...spans] = rows();
      box.append(tableOf(heads.map((head, column) => [head, column === 2 || column > 3]), spans.map((row) => row.map((value, column) => (column > 3 ? duration(value) : String(value))))));
    });
    axis.listen();
    axis.width = host.clientWidth;
    select(at);
    addEventListener("hashchange", follow);
    follow();
  }

  // What a finding links to: "#step-12", whether the page was opened with it or it was clicked.
  function follow() {
    const found = /^#step-(\d+)$/.exec(location.hash);
    if (found) open(Number(found[1]), Number(found[1]));
  }

  return { start, draw, open, rows, isEmpty: !host || !steps.length };
})();
