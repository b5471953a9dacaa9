// What every chart of the page shares: data, drawing, units, tooltip, legend, the selected steps.
// Names in data come from traces and are hostile: they reach the page as text nodes only.
addEventListener("error", (event) => { document.body.dataset.error = event.message; });
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const unitOf = (ns) => UNITS.find(([size]) => Math.abs(ns) >= size * 0.9995) || UNITS[3];
const two = (number) => String(number).padStart(2, "0");

// Three significant digits, as in the tables.
function duration(ns) {
  if (ns < 0) return `-${duration(-ns)}`;
  const seconds = Math.floor(ns / 1e9);
  if (seconds >= 3600) return `${Math.floor(seconds / 3600).toLocaleString("en")} h ${two(Math.floor(seconds / 60) % 60)} min`;
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  const [size, unit] = unitOf(ns);
  const value = ns / size;
  return `${value.toFixed(size === 1 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)} ${unit}`;
}

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const percent = (part) => `${(100 * part).toFixed(part >= 0.0995 ? 0 : 1)}%`;

function cut(text, room) { // between characters: half an emoji is not valid text
  const whole = [...text];
  return whole.length > room ? `${whole.slice(0, room - 1).join("")}…` : text;
}

function counter(name, value) {
  if (typeof value !== "number") return String(value);
  if (!name.endsWith("_bytes")) return value.toLocaleString("en", { maximumFractionDigits: 4 });
  const scale = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => Math.abs(value) >= size);
  return scale ? `${(value / scale[0]).toFixed(2)} ${scale[1]}` : `${value} B`;
}

// Round distances for ticks: 1, 2 or 5 times a power of ten.
function ticks(from, to, wanted) {
  const rough = Math.max(1e-9, (to - from) / Math.max(1, wanted));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((m) => m * power >= rough) || 10);
  const found = [];
  for (let at = Math.ceil(from / step); at * step <= to * (1 + 1e-9); at++) found.push(at * step);
  return { step, values: found };
}

function tickLabel(ns, step, unit) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step / unit[0]) - 1e-9)));
  return `${(ns / unit[0]).toFixed(digits)} ${unit[1]}`;
}

// Put a drawn chart on the page. Labels of its axes that would be cut at an edge move inside; one
// that then lies on the label before it is left out.
function showChart(host, root) {
  host.replaceChildren(root);
  const width = root.clientWidth || host.clientWidth, ends = new Map();
  for (const label of root.querySelectorAll(":scope > text")) {
    const { x, width: wide } = label.getBBox();
    const moved = Math.max(0, Math.min(x, width - wide)) - x;
    if (moved) label.setAttribute("x", Number(label.getAttribute("x")) + moved);
    const line = label.getAttribute("y"), before = ends.get(line);
    if (moved < 0 && before > x + moved) label.remove();
    else ends.set(line, x + moved + wide);
  }
}

const classVariable = (name) => `class-${name.replaceAll(" ", "-")}`;
const paint = (name) => data.paints[name] || [data.device_lanes.classes.includes(name) ? `var(--${classVariable(name)})` : "var(--region)", "var(--region-ink)"];

// Black or white, whichever can be read on a color of the style sheet.
function inkOn(variable) {
  const pen = inkOn.pen = inkOn.pen || document.createElement("canvas").getContext("2d");
  pen.fillStyle = getComputedStyle(document.body).getPropertyValue(variable).trim(); // it reads as #rrggbb
  const light = [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16) / 255).map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.179 ? "#000" : "#fff";
}

// On a page with stages a hue is a stage; there these two classes differ from matmul by stripes.
const isStriped = (name) => document.body.classList.contains("staged") && (name === "communication" || name === "copy");
const workFill = (name) => (isStriped(name) ? `url(#stripes-${name})` : paint(name)[0]);
const fillOf = (name) => (name === data.untraced ? "url(#hatch)" : paint(name)[0]);

const tip = byId("tip");
function showTip(event, title, soft, rows) {
  tip.replaceChildren(element("b", title), element("div", soft, "soft"));
  if (rows.length) {
    const body = element("table");
    for (const [key, ...values] of rows) {
      const row = body.insertRow();
      const head = row.insertCell();
      if (key.part) head.append(partChip(key.part));
      head.append(key.part ? key.part.name : key);
      for (const value of values) {
        const cell = row.insertCell();
        cell.className = "num";
        cell.textContent = value;
      }
    }
    tip.append(body);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
}
const hideTip = () => { tip.hidden = true; };

function chip(name) {
  const node = element("i", "", name === data.untraced ? "chip untraced" : "chip");
  if (name !== data.untraced) node.style.setProperty("--fill", paint(name)[0]);
  if (data.device_lanes.classes.includes(name)) node.dataset.kind = name;
  return node;
}

// One stage, class of work, cause of idle time or kernel can be picked out in all charts. Where
// kernels are summed up, a kernel's class stands for it.
let picked = null, summed = null;
const redraws = [];
const isFaded = (name) => picked !== null && summed !== name;
const isOther = (kernel, kind) => picked !== null && picked !== kernel && picked !== kind;
function redraw() {
  for (const node of document.querySelectorAll("[data-pick]")) node.classList.toggle("faded", node.dataset.kernel ? isOther(node.dataset.kernel, node.dataset.pick) : isFaded(node.dataset.pick));
  for (const button of document.querySelectorAll("button.pick")) button.setAttribute("aria-pressed", String(button.value === picked));
  redraws.forEach((draw) => draw());
}

// A press on `nodes`, which are in `host`, picks a name out; a second press takes that back.
function pickButton(host, nodes, name, kind = name) {
  const button = element("button", undefined, "pick");
  button.type = "button";
  button.value = name;
  button.setAttribute("aria-pressed", String(picked === name));
  button.append(...nodes);
  button.addEventListener("click", () => {
    const around = host.closest("ul, tbody");
    [picked, summed] = picked === name ? [null, null] : [name, kind];
    redraw();
    [...around.querySelectorAll("button.pick")].find((other) => other.value === name)?.focus({ preventScroll: true });
  });
  host.append(button);
  return button;
}

function drawLegend(list, names) {
  list.replaceChildren(...names.map(() => element("li")));
  names.forEach((name, at) => { pickButton(list.children[at], [chip(name), element("bdi", name)], name).title = name; });
}

function tableOf(heads, rows) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const [text, isNumber] of heads) {
    const cell = element("th", text, isNumber ? "num" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const values of rows) {
    const row = body.insertRow();
    values.forEach((value, at) => {
      const cell = at ? row.insertCell() : row.appendChild(element("th"));
      if (!at) cell.scope = "row";
      cell.className = heads[at][1] ? "num" : "";
      cell.append(element("bdi", value));
    });
  }
  return table;
}

// The only state of the page: a range of steps. It is in the address, so that a link is a finding.
const selection = (() => {
  const { first, last } = data.steps;
  const bar = byId("selection");
  let range = null; // columns, both included
  const follow = [];
  const text = () => (range[0] === range[1] && first[range[0]] === last[range[1]] ? `Step ${first[range[0]]}` : `Steps ${first[range[0]]}–${last[range[1]]}`);
  function set(from, to) {
    range = from === null ? null : [Math.max(0, Math.min(from, to)), Math.min(first.length - 1, Math.max(from, to))];
    const address = range ? `#steps=${first[range[0]]}-${last[range[1]]}` : "#";
    // A frame's relative addresses are those of the page around it, and may not be set.
    if (range || location.hash.startsWith("#steps=")) history.replaceState(null, "", location.href.split("#")[0] + address);
    show();
  }
  function show() {
    bar.hidden = range === null;
    if (range) {
      const clear = element("button", "Clear");
      clear.type = "button";
      clear.addEventListener("click", () => set(null));
      bar.replaceChildren(element("span", `${text()} selected`), clear);
    }
    follow.forEach((draw) => draw());
  }
  function read() {
    const found = /^#steps=(\d+)(?:-(\d+))?$/.exec(location.hash);
    if (!found) return;
    const low = Number(found[1]), high = Number(found[2] || found[1]);
    const from = last.findIndex((number) => number >= low);
    const to = first.findLastIndex((number) => number <= high);
    if (from >= 0 && to >= from) { range = [from, to]; show(); }
  }
  addEventListener("hashchange", read);
  return { set, read, follow, get range() { return range; }, text, has: (column) => range !== null && column >= range[0] && column <= range[1] };
})();

const us = (value) => duration(value * 1e3);
const name = (column) => (data.steps.first[column] === data.steps.last[column] ? `Step ${data.steps.first[column]}` : `Steps ${data.steps.first[column]}–${data.steps.last[column]}`);
const included = () => data.steps.first.map((_, column) => column).filter((column) => data.steps.included[column]);
const quantile = (sorted, part) => {
  const at = part * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
};

// Stages have their colour everywhere; waiting in a stage is the same, hatched.
function partFill(part) {
  if (part.kind === "untraced") return "url(#hatch)";
  const fill = data.paints[part.stage] ? data.paints[part.stage][0] : "var(--region)";
  return part.kind === "waiting" ? `color-mix(in srgb, ${fill} 42%, var(--card))` : fill;
}
const partChip = (part) => {
  const node = element("i", "", `chip ${part.kind}`);
  if (data.paints[part.stage]) node.style.setProperty("--fill", data.paints[part.stage][0]);
  return node;
};
