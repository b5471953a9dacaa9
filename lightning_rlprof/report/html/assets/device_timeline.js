// What devices ran: streams as lanes of kernels, launches and their queue, idle gaps, memory.
// Drawn on a canvas, so its cost is that of the pixels: marks narrower than 1.5 px are summed up per
// column, where height is how busy the stream was. Bins of a large trace look the same.
const deviceTimeline = (() => {
  const host = byId("device-lanes");
  if (!host) return { isEmpty: true };
  const shown = data.device_lanes;
  const { classes, causes, kernels, devices, lanes, hosts, memory, windows } = shown;
  const canvas = host.querySelector("canvas"), strip = byId("device-strip").querySelector("canvas");
  const pen = canvas.getContext("2d"), stripPen = strip.getContext("2d");
  const whole = [0, Math.max(1, shown.length)], STRIP = 30, NARROW = 1.5, RIGHT = 6;
  // A sum has a place for each class, and one for what is picked out.
  const PICKED = classes.length, KINDS = PICKED + 1;
  const several = devices.length > 1, FEW = 4;
  const left = () => (axis.width < 520 ? 76 : 124);
  let only = devices.length > FEW ? 0 : null; // one device at a time, if there are many
  let rows = [], height = 0, chosen = null, hot = null, ink = {}, overview = null, shownPick = null;
  const axis = timeAxis({ host, left, right: RIGHT, shortest: 20, whole: () => whole, draw: () => draw(), hover, press, touch: true, keys: {
    ",": () => stepTo(-1), ".": () => stepTo(1), ArrowUp: () => stepLane(-1), ArrowDown: () => stepLane(1), Escape: () => choose(null),
    Enter: () => { if (chosen) { const [from, to] = ends(chosen), rest = Math.max(20, to - from); axis.look(from - rest, to + rest); } },
  } });
  const { x, look } = axis;
  const sumOf = (list) => list.reduce((sum, value) => sum + value, 0);

  // Starts are differences in the file.
  const absolute = (list) => { let sum = 0; return Float64Array.from(list, (value) => (sum += value)); };
  for (const lane of lanes) {
    lane.s = absolute(lane.s);
    lane.longest = lane.d.reduce((most, value) => Math.max(most, value), 0);
    for (const bin of lane.bins || []) bin.sums = bin.slice(4);
  }
  for (const { gaps } of devices) gaps.s = absolute(gaps.s);
  for (const each of hosts) { each.s = absolute(each.s); each.qt = absolute(each.qt); }
  for (const each of memory) { each.t = absolute(each.t); each.most = each.b.reduce((most, value) => Math.max(most, value), 1); }

  // The first place in ascending times that is not before one of them.
  function place(times, wanted) {
    let low = 0, high = times.length;
    while (low < high) { const middle = (low + high) >> 1; if (times[middle] < wanted) low = middle + 1; else high = middle; }
    return low;
  }
  const ends = ({ lane, at }) => [lane.s[at], lane.s[at] + lane.d[at]];
  const isSingle = (lane, [from, to] = axis.view) => !lane.bins || windows.some(([first, last]) => from >= first && to <= last);
  const streamName = (lane) => (lane.stream === null ? "no stream" : `stream ${lane.stream}`);
  const isFaint = ([short, kind]) => isOther(short, classes[kind]);
  const slot = (kernel) => (picked === null || isFaint(kernel) ? kernel[1] : PICKED);
  const slotOf = (kind) => (picked === null || isFaded(classes[kind]) ? kind : PICKED);

  function colors() {
    const style = getComputedStyle(document.body), of = (name) => style.getPropertyValue(`--${name}`).trim();
    ink = Object.fromEntries(["card", "ink", "soft", "faint", "hair", "hatch", "hatch-ground", "region", "region-ink", "region-line", "accent"].map((name) => [name, of(name)]));
    ink.kind = classes.map((name) => of(classVariable(name)));
    ink.on = classes.map((name) => inkOn(`--${classVariable(name)}`));
    ink.cause = causes.map((_, at) => texture(LINES[at], ink["hatch-ground"], at === 2 ? ink.kind[classes.indexOf("communication")] : ink.hatch));
    // On a page with stages a hue is a stage; there these two differ from matmul by their stripes.
    if (document.body.classList.contains("staged")) for (const [name, lines] of [["communication", "M1.5 0V6M4.5 0V6"], ["copy", "M0 1.5H6M0 4.5H6"]]) {
      const kind = classes.indexOf(name);
      ink.kind[kind] = texture(lines, ink.kind[classes.indexOf("other")], ink.kind[kind]);
      ink.on[kind] = null;
    }
  }

  // The causes differ by texture alone, also in gray; the same as in the style sheet.
  const LINES = ["M-1 7L7-1M-4 4L4-4M2 10L10 2", "M1.5 0V6M4.5 0V6", "M-1 7L7-1M-4 4L4-4M2 10L10 2", "M1 2H2.7M4 5H5.7", "M0 0L6 6M6 0L0 6", ""];
  function texture(lines, ground, line) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const one = tile.getContext("2d");
    one.fillStyle = ground;
    one.fillRect(0, 0, 6, 6);
    one.strokeStyle = line;
    one.lineWidth = 1.5;
    one.stroke(new Path2D(lines));
    return pen.createPattern(tile, "repeat");
  }

  function layout() {
    rows = [];
    let y = 22;
    const add = (kind, high, gap, about) => { rows.push({ kind, y, h: high, ...about }); y += high + gap; };
    if (shown.steps.length) add("spans", 15, 3, { label: "steps", spans: shown.steps.map(([from, length, number]) => [from, length, `step ${number}`]) });
    if (shown.host_stages.length) add("spans", 15, 3, { label: "stages", spans: shown.host_stages });
    devices.forEach((device, number) => {
      if (only === null ? number >= FEW : number !== only) return;
      const about = { device, number }, calls = hosts.find((each) => each.rank === device.rank);
      if (several) add("title", 15, 2, { label: device.name, ...about });
      if (calls && (!number || devices[number - 1].rank !== device.rank || only !== null)) add("host", 34, 4, { label: "host", below: `queue ≤ ${calls.max.toLocaleString("en")}`, calls, ...about });
      const top = y, own = lanes.filter((lane) => lane.device === number);
      own.forEach((lane, at) => add("lane", at ? 18 : lanes.length > 2 ? 26 : 46, 2, { label: streamName(lane), lane, ...about }));
      if (device.more) add("title", 13, 2, { label: `and ${count(device.more, "more stream")}`, ...about });
      add("idle", 12, 5, { label: "idle, by cause", top, ...about });
      for (const series of memory) if (series.device === number) add("memory", 34, 6, { label: series.name ? `memory ${series.name}` : "memory", below: `≤ ${counter("_bytes", series.most)}`, series, ...about });
      y += several ? 4 : 0;
    });
    height = y + 2;
  }

  function resize() {
    axis.width = host.clientWidth;
    layout();
    for (const [each, high] of [[canvas, height], [strip, STRIP]]) {
      each.width = Math.round(axis.width * devicePixelRatio);
      each.height = Math.round(high * devicePixelRatio);
      each.style.height = `${high}px`;
      each.getContext("2d").setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    }
  }

  // Add an interval to columns of time, a number per class each.
  function spread(columns, [from, wide], start, end, kind, weight) {
    const last = columns.length / KINDS - 1;
    const low = Math.max(0, Math.floor((start - from) / wide)), high = Math.min(last, Math.floor((end - from) / wide));
    for (let at = low; at <= high; at++) columns[at * KINDS + kind] += weight * Math.max(0, Math.min(end, from + (at + 1) * wide) - Math.max(start, from + at * wide));
  }

  function spreadBins(columns, scale, lane, [from, to]) {
    for (const bin of lane.bins) {
      const start = bin[0] * lane.width, end = start + lane.width;
      if (end < from || start > to) continue;
      for (let at = 0; at < bin.sums.length; at += 2) spread(columns, scale, start, end, slotOf(bin.sums[at]), bin.sums[at + 1] / lane.width);
    }
  }

  // Columns of one pixel from the left edge on, as high as they are busy.
  function stack(to, columns, wide, edge, top, high) {
    for (let at = 0; at < columns.length / KINDS; at++) {
      let bottom = top + high;
      for (let kind = 0; kind < KINDS; kind++) {
        const part = columns[at * KINDS + kind];
        if (!part) continue;
        const tall = Math.min(part / wide * high, bottom - top);
        to.globalAlpha = picked === null || kind === PICKED ? 1 : 0.15;
        to.fillStyle = ink.kind[kind === PICKED ? classes.indexOf(summed) : kind];
        to.fillRect(edge + at, bottom - tall, 1, tall);
        bottom -= tall;
      }
    }
    to.globalAlpha = 1;
  }

  const room = () => Math.max(1, Math.floor(axis.width - left() - RIGHT));
  const cutLeft = (ns) => Math.max(left(), x(ns)), cutRight = (ns) => Math.min(axis.width - RIGHT, x(ns));

  function drawLane({ lane, y, h }) {
    const [from, to] = axis.view, wide = (to - from) / room(), columns = new Float64Array(room() * KINDS), names = [];
    pen.fillStyle = ink["hatch-ground"];
    pen.fillRect(left(), y, room(), h);
    if (!isSingle(lane)) spreadBins(columns, [from, wide], lane, axis.view);
    else for (let at = place(lane.s, from - lane.longest); at < lane.s.length && lane.s[at] < to; at++) {
      const [start, end] = [lane.s[at], lane.s[at] + lane.d[at]];
      if (end < from) continue;
      const kernel = kernels[lane.k[at]], kind = kernel[1], first = cutLeft(start), across = cutRight(end) - first;
      if (across < NARROW) { spread(columns, [from, wide], start, end, slot(kernel), 1); continue; }
      pen.globalAlpha = isFaint(kernel) ? 0.15 : 1;
      pen.fillStyle = ink.kind[kind];
      pen.fillRect(first, y, across - 0.5, h);
      if (across > 38 && ink.on[kind] && !isFaint(kernel)) names.push([lane.k[at], first, across]);
    }
    stack(pen, columns, wide, left(), y, h);
    for (const [name, first, across] of names) {
      pen.fillStyle = ink.on[kernels[name][1]];
      pen.fillText(cut(kernels[name][0], Math.floor((across - 8) / 5.9)), first + 4, y + h / 2 + 0.5);
    }
  }

  function drawSpans({ spans, y, h }) {
    let done = -1;
    for (const [start, length, text] of spans) {
      const first = cutLeft(start), last = cutRight(start + length);
      if (last <= first || (last - first < 1 && last < done + 0.5)) continue;
      done = last;
      const fill = data.paints[text];
      pen.fillStyle = ink.region;
      if (fill) pen.fillStyle = fill[0];
      pen.fillRect(first, y, Math.max(0.7, last - first - 1), h);
      pen.fillStyle = fill ? fill[1] : ink["region-ink"];
      if (last - first > 40) pen.fillText(cut(text, Math.floor((last - first - 8) / 5.9)), first + 4, y + h / 2 + 0.5);
    }
  }

  // Launch calls below, above them how many launches wait for their start.
  function drawHost({ calls, y, h }) {
    const [from, to] = axis.view, base = y + h - 10, level = (depth) => base - (h - 10) * Math.max(0, depth) / Math.max(1, calls.max);
    let at = Math.max(0, place(calls.qt, from) - 1), last = 0;
    pen.beginPath();
    pen.moveTo(left(), base);
    for (; at < calls.qt.length && calls.qt[at] <= to; at++) {
      const here = cutLeft(calls.qt[at]);
      pen.lineTo(here, level(last));
      pen.lineTo(here, level(last = calls.q[at]));
    }
    const end = cutRight(calls.qt.length ? Math.min(to, calls.qt[Math.min(at, calls.qt.length - 1)]) : to);
    pen.lineTo(end, level(last));
    pen.lineTo(end, base);
    pen.closePath();
    pen.globalAlpha = 0.2;
    pen.fillStyle = pen.strokeStyle = ink.accent;
    pen.fill();
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
    pen.stroke();
    pen.fillStyle = ink.soft;
    let done = -1;
    for (let call = 0; call < calls.s.length && calls.s[call] < to; call++) {
      const first = cutLeft(calls.s[call]), stop = cutRight(calls.s[call] + calls.d[call]);
      if (stop < first || (stop - first < 1 && first < done)) continue;
      pen.fillRect(first, y + h - 7, Math.max(1, stop - first - 0.5), 7);
      done = first + 1;
    }
  }

  function drawIdle({ device: { gaps }, y, h, top }) {
    let done = -1;
    for (let at = 0; at < gaps.s.length; at++) {
      const first = cutLeft(gaps.s[at]), last = cutRight(gaps.s[at] + gaps.d[at]), across = last - first;
      if (across < 0 || (across < 0.7 && first < done)) continue;
      done = first + 0.7;
      pen.globalAlpha = isFaded(causes[gaps.c[at]]) ? 0.15 : 1;
      pen.fillStyle = ink.cause[gaps.c[at]];
      pen.fillRect(first, y, Math.max(0.7, across), h);
      pen.globalAlpha = 1;
      if (across < 3 || isFaded(causes[gaps.c[at]])) continue;
      pen.globalAlpha = 0.45;
      pen.fillRect(first, top, across, y - top - 2);
      pen.globalAlpha = 1;
      pen.strokeStyle = ink["region-line"];
      pen.lineWidth = 1;
      pen.strokeRect(first + 0.5, y + 0.5, Math.max(1, across - 1), h - 1);
      const text = `${causes[gaps.c[at]]} ${duration(gaps.d[at])}`, wide = pen.measureText(text).width + 8;
      if (wide > across - 6) continue;
      pen.fillStyle = ink.card;
      pen.fillRect(first + 3, y + 1, wide, h - 2);
      pen.fillStyle = ink.soft;
      pen.fillText(text, first + 7, y + h / 2 + 0.5);
    }
  }

  function drawMemory({ series, y, h }) {
    const base = y + h, level = (bytes) => base - h * Math.max(0, bytes) / series.most;
    let at = Math.max(0, place(series.t, axis.view[0]) - 1);
    pen.beginPath();
    pen.moveTo(cutLeft(series.t[at]), base);
    for (; at < series.t.length; at++) {
      pen.lineTo(Math.min(cutLeft(series.t[at]), axis.width - RIGHT), level(series.b[Math.max(0, at - 1)]));
      pen.lineTo(Math.min(cutLeft(series.t[at]), axis.width - RIGHT), level(series.b[at]));
      if (series.t[at] > axis.view[1]) break;
    }
    pen.lineTo(cutRight(series.t[Math.min(at, series.t.length - 1)]), base);
    pen.closePath();
    pen.fillStyle = ink.accent;
    pen.globalAlpha = 0.3;
    pen.fill();
    pen.globalAlpha = 1;
  }

  function outline(mark) {
    const row = rows.find((each) => each.lane === mark.lane), calls = rows.find((each) => each.kind === "host" && each.calls.rank === devices[mark.lane.device].rank);
    if (!row || !isSingle(mark.lane)) return;
    const [start, end] = ends(mark), first = cutLeft(start), last = cutRight(end), delay = mark.lane.l ? mark.lane.l[mark.at] : -1;
    if (x(end) < left() || x(start) > axis.width) return;
    pen.strokeStyle = pen.fillStyle = ink.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(first - 0.5, row.y - 0.5, Math.max(2, last - first) + 1, row.h + 1);
    if (!calls || delay < 0) return;
    const from = cutLeft(start - delay), bottom = calls.y + calls.h;
    pen.beginPath();
    pen.moveTo(from, bottom);
    pen.bezierCurveTo(from, row.y - 4, first, bottom + 6, first, row.y);
    pen.stroke();
    pen.fillRect(from - 1, bottom - 9, 2.5, 9);
  }

  const drawRow = { lane: drawLane, spans: drawSpans, host: drawHost, idle: drawIdle, memory: drawMemory, title: () => {} };

  function draw() {
    if (!axis.width) return;
    const [from, to] = axis.view, { step, values } = ticks(from, to, (axis.width - left()) / 110), unit = unitOf(Math.max(Math.abs(to), step));
    pen.clearRect(0, 0, axis.width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const value of values) {
      const text = tickLabel(value, step, unit), wide = pen.measureText(text).width;
      pen.fillStyle = ink.hair;
      pen.fillRect(Math.round(x(value)), 18, 1, height);
      pen.fillStyle = ink.soft;
      pen.fillText(text, clamp(x(value) - wide / 2, left() - 8, axis.width - wide - 2), 9);
    }
    for (const row of rows) {
      drawRow[row.kind](row);
      pen.fillStyle = row.kind === "title" ? ink.ink : ink.soft;
      const letters = Math.floor((left() - 8) / 5.8);
      pen.fillText(row.kind === "title" ? row.label : cut(row.label, letters), 4, row.y + (row.below ? 9 : row.h / 2 + 0.5));
      pen.fillStyle = ink.faint;
      if (row.below) pen.fillText(cut(row.below, letters), 4, row.y + 23);
    }
    for (const mark of [chosen, hot]) if (mark) outline(mark);
    if (axis.brush) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = ink.accent;
      pen.fillRect(Math.min(...axis.brush), 18, Math.abs(axis.brush[1] - axis.brush[0]), height);
      pen.globalAlpha = 1;
    }
    drawStrip();
    byId("device-range").textContent = axis.isWhole() ? `All ${duration(whole[1])}` : `${duration(to - from)} of ${duration(whole[1])}, from ${duration(from)}`;
    byId("device-fit").disabled = axis.isWhole();
    host.dataset.view = axis.view.join(" ");
  }

  // All of the axis, with a window around what is shown.
  function drawStrip() {
    const wide = whole[1] / room(), edge = left(), at = (ns) => edge + room() * ns / whole[1];
    if (!overview || overview.length !== room() * KINDS || shownPick !== picked) {
      shownPick = picked;
      overview = new Float64Array(room() * KINDS);
      for (const lane of lanes) {
        if (lane.bins) spreadBins(overview, [0, wide], lane, whole);
        else lane.s.forEach((start, mark) => spread(overview, [0, wide], start, start + lane.d[mark], slot(kernels[lane.k[mark]]), 1));
      }
      // Several streams run at once: a column is at most full.
      for (let column = 0; column < overview.length; column += KINDS) {
        const part = overview.subarray(column, column + KINDS), over = sumOf(part) / (wide * devices.length);
        for (let kind = 0; kind < KINDS; kind++) part[kind] /= devices.length * Math.max(1, over);
      }
    }
    stripPen.clearRect(0, 0, axis.width, STRIP);
    stripPen.fillStyle = ink["hatch-ground"];
    stripPen.fillRect(edge, 3, room(), STRIP - 6);
    stack(stripPen, overview, wide, edge, 3, STRIP - 6);
    const [first, last] = axis.view.map(at);
    stripPen.globalAlpha = 0.62;
    stripPen.fillStyle = ink.card;
    stripPen.fillRect(edge, 3, first - edge, STRIP - 6);
    stripPen.fillRect(last, 3, edge + room() - last, STRIP - 6);
    stripPen.globalAlpha = 1;
    stripPen.strokeStyle = ink.ink;
    stripPen.strokeRect(first + 0.5, 1.5, Math.max(3, last - first) - 1, STRIP - 3);
    stripPen.fillStyle = ink.faint;
    stripPen.font = "11px system-ui, sans-serif";
    stripPen.textBaseline = "middle";
    stripPen.fillText(several ? "all devices" : "all", 4, STRIP / 2);
  }

  // What is under a place on the canvas: a mark, a bin, a gap, a call, or only its row.
  function under(event) {
    const box = canvas.getBoundingClientRect(), y = event.clientY - box.top, px = event.clientX - box.left;
    const row = rows.find((each) => y >= each.y - 1 && y <= each.y + each.h + 1);
    if (!row || px < left()) return {};
    const time = axis.ns(px), near = 2.5 * (axis.view[1] - axis.view[0]) / room();
    if (row.kind === "lane" && !isSingle(row.lane)) return { row, bin: row.lane.bins.find(([at]) => at === Math.floor(time / row.lane.width)) };
    if (row.kind === "lane") {
      const { lane } = row;
      let best = null, least = Infinity;
      for (let at = place(lane.s, time - lane.longest - near); at < lane.s.length && lane.s[at] < time + near; at++) {
        const [start, end] = [lane.s[at], lane.s[at] + lane.d[at]], off = Math.max(start - time, time - end, 0);
        if (off <= near && off < least) { best = at; least = off; }
      }
      if (best !== null) return { row, mark: { lane, at: best } };
    }
    if (row.kind === "lane" || row.kind === "idle") {
      const { gaps } = row.device, at = gaps.s.findIndex((start, gap) => start - near <= time && start + gaps.d[gap] + near >= time);
      return at < 0 ? { row } : { row, gap: at };
    }
    if (row.kind === "host") {
      const call = place(row.calls.s, time + near) - 1;
      return { row, depth: row.calls.q[Math.max(0, place(row.calls.qt, time) - 1)], call: call >= 0 && row.calls.s[call] + row.calls.d[call] + near >= time ? call : null };
    }
    if (row.kind === "memory") return { row, bytes: row.series.b[Math.max(0, place(row.series.t, time) - 1)] };
    return { row, span: row.spans && row.spans.find(([start, length]) => start <= time && start + length >= time) };
  }

  const known = (list, codes, at) => (codes && codes[at] >= 0 ? list[codes[at]] : null);
  function facts({ lane, at }) {
    const [short, kind, full = short] = kernels[lane.k[at]], delay = lane.l ? lane.l[at] : -1;
    const pairs = [
      ["duration", duration(lane.d[at])], ["begins at", duration(lane.s[at])],
      ["launched", delay < 0 ? "launch not recorded" : `${duration(delay)} before`],
      ["operator", known(shown.operators, lane.o, at)], ["module", known(shown.modules, lane.m, at)],
      ["stage", known(shown.stages, lane.t, at)], ["annotation", known(shown.ranges, lane.r, at)],
      ["graph replay", lane.x && lane.x[at] >= 0 ? `number ${lane.x[at] + 1}` : null],
    ];
    return { short, full, kind, pairs: pairs.filter(([, value]) => value !== null) };
  }

  function hover(event) {
    const { row, mark, bin, gap, depth, call, bytes, span } = under(event);
    const before = hot;
    hot = mark || null;
    if (mark) {
      const { short, full, kind, pairs } = facts(mark);
      showTip(event, short, `${classes[kind]} · ${devices[mark.lane.device].name} · ${streamName(mark.lane)}`, pairs.map(([key, value]) => [key, cut(value, 60)]));
      if (full !== short) tip.append(element("div", cut(full, 300), "full"));
    } else if (bin) {
      const parts = [];
      for (let at = 0; at < bin.sums.length; at += 2) parts.push([classes[bin.sums[at]], duration(bin.sums[at + 1])]);
      showTip(event, count(bin[1], "kernel"), `in ${duration(row.lane.width)} of ${streamName(row.lane)}`, [...parts, ...(bin[2] >= 0 ? [[`longest: ${kernels[bin[2]][0]}`, duration(bin[3])]] : [])]);
    } else if (gap !== undefined) showTip(event, causes[row.device.gaps.c[gap]], row.device.name, [["duration", duration(row.device.gaps.d[gap])], ["begins at", duration(row.device.gaps.s[gap])]]);
    else if (depth !== undefined) showTip(event, `${count(Math.max(0, depth), "launch").replace("launchs", "launches")} in the queue`, "launched, not yet started", call === null ? [] : [["launch call", duration(row.calls.d[call])], ...(known(shown.operators, row.calls.o, call) ? [["operator", known(shown.operators, row.calls.o, call)]] : [])]);
    else if (bytes !== undefined) showTip(event, counter("_bytes", bytes), `${row.label} · ${row.device.name}`, []);
    else if (span) showTip(event, span[2], row.label, [["duration", duration(span[1])], ["begins at", duration(span[0])]]);
    else hideTip();
    if (hot || before) draw();
  }

  function press(event) {
    const { mark } = under(event);
    choose(mark || null);
  }

  // The chosen kernel is said in words, with its full name; a screen reader hears it.
  function choose(mark) {
    chosen = mark;
    const box = byId("device-chosen");
    if (!mark) box.replaceChildren(element("span", "Press a kernel, or step with , and . to see its full name, launch, operator and module.", "soft"));
    else {
      const { short, full, kind, pairs } = facts(mark), name = element("p"), line = element("p", undefined, "soft");
      const bold = element("b");
      bold.append(element("bdi", short));
      name.append(chip(classes[kind]), bold, element("span", ` ${classes[kind]}, ${devices[mark.lane.device].name}, ${streamName(mark.lane)}`, "soft"));
      for (const [key, value] of pairs) {
        const pair = element("span", `${key} `, "pair"), strong = element("b");
        strong.append(element("bdi", value));
        pair.append(strong);
        line.append(pair, " ");
      }
      box.replaceChildren(name, line);
      if (full !== short) box.append(element("code", full));
      const [from, to] = ends(mark);
      if (from < axis.view[0] || to > axis.view[1] || !isSingle(mark.lane)) {
        const inside = windows.find(([first, last]) => to >= first && from <= last) || whole;
        const wide = Math.min(axis.view[1] - axis.view[0], Math.max(to - from, 20) * 40, inside[1] - inside[0]);
        return look(Math.min((from + to - wide) / 2, inside[1] - wide), Math.min((from + to + wide) / 2, inside[1]));
      }
    }
    draw();
  }

  const drawnLanes = () => rows.filter((row) => row.kind === "lane" && row.lane.s.length).map((row) => row.lane);
  function stepTo(by) {
    const [first] = drawnLanes();
    if (chosen) choose({ lane: chosen.lane, at: clamp(chosen.at + by, 0, chosen.lane.s.length - 1) });
    else if (first) choose({ lane: first, at: Math.min(first.s.length - 1, place(first.s, axis.view[0])) });
  }
  function stepLane(by) {
    const list = drawnLanes();
    if (!list.length) return;
    const lane = list[clamp((chosen ? list.indexOf(chosen.lane) : -1) + by, 0, list.length - 1)];
    choose({ lane, at: clamp(place(lane.s, chosen ? ends(chosen)[0] : axis.view[0]), 0, lane.s.length - 1) });
  }

  function show(device) {
    only = device;
    byId("device-picker").value = String(device);
    choose(null);
    redrawAll();
  }

  // A gap of the list below: it is in view, with its surroundings, and the keys work there.
  function showGap({ from, to, device }) {
    if (only !== null && Number(device) >= 0) show(Number(device));
    const rest = 0.6 * (to - from);
    look(Number(from) - rest, Number(to) + rest);
    byId("device-timeline").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    host.focus({ preventScroll: true });
  }

  // All of it, but for a long time of which nothing was recorded: then the work beside that.
  function opening() {
    const { gaps } = devices[0], blank = gaps.c.findIndex((cause, at) => causes[cause] === "not recorded" && gaps.d[at] > 0.4 * whole[1]);
    if (several || blank < 0) return [...whole];
    const [from, to] = [gaps.s[blank], gaps.s[blank] + gaps.d[blank]];
    return from < whole[1] - to ? [to, whole[1]] : [0, from];
  }

  function redrawAll() { colors(); resize(); draw(); drawLegend(byId("device-legend"), classes.filter((_, kind) => kernels.some((kernel) => kernel[1] === kind))); kernelInLegend(); }

  // A kernel that is picked out is in the legend, and a press takes that back.
  function kernelInLegend() {
    if (!kernels.some(([short]) => short === picked)) return;
    const item = element("li");
    byId("device-legend").append(item);
    pickButton(item, [chip(summed), element("bdi", cut(picked, 40))], picked);
    if (windows.length) item.append(element("span", ", in columns of many kernels its class", "soft"));
  }

  function start() {
    axis.view = opening();
    colors();
    resize();
    axis.listen();
    choose(null);
    const actions = { "device-wider": () => axis.zoom(1 / 0.6), "device-closer": () => axis.zoom(0.6), "device-fit": () => look(...whole), "device-previous": () => stepTo(-1), "device-next": () => stepTo(1) };
    for (const id in actions) byId(id).addEventListener("click", actions[id]);
    const picker = byId("device-picker");
    devices.forEach((device, number) => { const option = element("option", device.name); option.value = String(number); picker.append(option); });
    picker.addEventListener("change", () => show(Number(picker.value)));
    picker.parentElement.hidden = only === null;
    let held = false;
    const go = (event) => { const middle = whole[1] * (event.clientX - strip.getBoundingClientRect().left - left()) / room(), half = (axis.view[1] - axis.view[0]) / 2; look(middle - half, middle + half); };
    strip.addEventListener("pointerdown", (event) => { held = true; strip.setPointerCapture(event.pointerId); go(event); });
    strip.addEventListener("pointermove", (event) => { if (held) go(event); });
    strip.addEventListener("pointerup", () => { held = false; });
    host.addEventListener("pointerleave", () => { if (hot) { hot = null; draw(); } });
    for (const button of document.querySelectorAll("#idle-gaps button")) button.addEventListener("click", () => showGap(button.dataset));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  }
  return { start, draw: redrawAll, isEmpty: false };
})();
