// Device time by stage or annotation, module, operator and kernel: a box is as wide as its time.
const icicle = (() => {
  const host = byId("icicle");
  if (!host) return { isEmpty: true };
  const { icicle: boxes, classes } = data.device_lanes;
  const KIND = { a: "", s: "stage", r: "annotation", m: "module", o: "operator", k: "kernel", u: "" }, HIGH = 21;
  const inner = boxes.map(() => []);
  boxes.forEach(([parent], at) => { if (parent >= 0) inner[parent].push(at); });
  let top = 0, words = "";
  const title = ([, , name, , , members]) => (members > 1 ? `${name} ×${members}` : name);
  const ns = (at) => boxes[at][3], share = (at) => percent(ns(at) / ns(0));
  const hits = (at) => words !== "" && boxes[at][2].toLowerCase().includes(words);
  const holds = (at) => hits(at) || inner[at].some(holds);
  const classOf = (at) => classes[boxes[at][6]];

  function draw(focus = host.contains(document.activeElement) ? document.activeElement.dataset.box : undefined) {
    const width = host.clientWidth, placed = [];
    if (!width) return;
    const put = (at, left, depth) => {
      const wide = width * ns(at) / ns(top);
      if (wide < 0.7) return;
      placed.push([at, left, wide, depth]);
      for (const each of inner[at]) { put(each, left, depth + 1); left += width * ns(each) / ns(top); }
    };
    put(top, 0, 0);
    const high = (1 + Math.max(...placed.map(([, , , depth]) => depth))) * HIGH + 1;
    const root = svg("svg", { height: high, viewBox: `0 0 ${width} ${high}`, role: "tree", "aria-label": `Time by stack, ${duration(ns(0))} in all. Arrow keys walk, Enter zooms, Escape goes back.` });
    for (const [at, left, wide, depth] of placed) root.append(box(at, left, wide, depth));
    host.replaceChildren(root);
    if (focus !== undefined) root.querySelector(`[data-box="${focus}"]`)?.focus({ preventScroll: true });
    crumbs();
  }

  function box(at, left, wide, depth) {
    const [, kind, , , , , code] = boxes[at];
    const node = svg("g", { role: "treeitem", tabindex: at === top ? 0 : -1, "data-box": at, "aria-label": [KIND[kind], `${title(boxes[at])},`, `${duration(ns(at))},`, share(at)].join(" ").trim(), class: `box-${kind}` });
    const shape = svg("rect", { x: left, y: depth * HIGH, width: Math.max(0.6, wide - 0.6), height: HIGH - 1, rx: 2 });
    if (code >= 0) shape.style.fill = workFill(classOf(at));
    if (code >= 0 && isStriped(classOf(at))) node.classList.add("striped");
    node.append(shape);
    if ((words && !holds(at)) || (code >= 0 && isOther(boxes[at][2], classOf(at)))) node.classList.add("faded");
    const letters = Math.floor((wide - 8) / 6.5), name = title(boxes[at]);
    if (letters > 2) {
      const ink = code >= 0 ? inkOn(`--${classVariable(classOf(at))}`) : "";
      const add = (x, anchor, text) => { const label = svg("text", { x, y: depth * HIGH + 14.5, "text-anchor": anchor }, text); label.style.fill = ink; node.append(label); };
      add(left + 5, "start", cut(name, letters));
      if (letters - name.length > 8) add(left + wide - 6, "end", share(at));
    }
    return node;
  }

  function crumbs() {
    const path = [];
    for (let at = top; at >= 0; at = boxes[at][0]) path.unshift(at);
    const line = byId("icicle-path");
    line.replaceChildren();
    path.forEach((at, depth) => {
      if (depth) line.append(" › ");
      if (at === top) return line.append(element("b", title(boxes[at])));
      const button = element("button", cut(title(boxes[at]), 34));
      button.type = "button";
      button.addEventListener("click", () => zoom(at));
      line.append(button);
    });
    line.append(` ${duration(ns(top))}, ${share(top)}`);
  }

  const zoom = (at) => { hideTip(); top = at; draw(at); };
  const boxOf = (event) => { const node = event.target.closest("[data-box]"); return node ? Number(node.dataset.box) : null; };

  function find(text) {
    words = text.trim().toLowerCase();
    let sum = 0;
    const walk = (at) => { if (hits(at)) sum += ns(at); else inner[at].forEach(walk); };
    walk(0);
    byId("icicle-found").textContent = !words ? "" : sum ? `${duration(sum)}, ${percent(sum / ns(0))}` : "Nothing has this in its name.";
    draw();
  }

  function start() {
    draw();
    byId("icicle-find").addEventListener("input", (event) => find(event.target.value));
    host.addEventListener("click", (event) => {
      const at = boxOf(event);
      if (at !== null && inner[at].length) zoom(at === top && boxes[at][0] >= 0 ? boxes[at][0] : at);
    });
    host.addEventListener("pointermove", (event) => {
      const at = boxOf(event);
      if (at === null) return hideTip();
      const [, kind, , time, times, members, code] = boxes[at], device = data.device_lanes.lanes.length > 0;
      showTip(event, title(boxes[at]), [KIND[kind], code >= 0 ? classOf(at) : ""].filter(Boolean).join(" · "), [[device ? "device time" : "host time", `${duration(time)}, ${share(at)}`], [device ? "kernels and copies" : "calls", times.toLocaleString("en")], ...(members > 1 ? [["each of them", duration(time / members)]] : [])]);
    });
    host.addEventListener("pointerleave", hideTip);
    host.addEventListener("keydown", (event) => {
      const at = boxOf(event);
      if (at === null) return;
      const beside = boxes[at][0] >= 0 ? inner[boxes[at][0]] : [at], here = beside.indexOf(at);
      const walk = { ArrowUp: boxes[at][0], ArrowDown: inner[at][0], ArrowLeft: beside[here - 1], ArrowRight: beside[here + 1] };
      if (event.key === "Enter" && inner[at].length) zoom(at);
      else if (event.key === "Escape" && boxes[top][0] >= 0) { const before = top; top = boxes[top][0]; draw(before); }
      else if (walk[event.key] >= 0) host.querySelector(`[data-box="${walk[event.key]}"]`)?.focus();
      else return;
      event.preventDefault();
    });
  }
  return { start, draw: () => draw(), isEmpty: false };
})();
