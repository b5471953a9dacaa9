// Every chart can be saved as SVG or PNG and as CSV, every table can be sorted, filtered and copied.
const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font", "text-anchor"];

function save(text, type, file) {
  const link = element("a");
  link.href = URL.createObjectURL(text instanceof Blob ? text : new Blob([text], { type }));
  link.download = file;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A copy with the page's colours in it, since the file has no stylesheet.
function svgText(source) {
  const copy = source.cloneNode(true);
  const patterns = byId("hatch").closest("defs");
  copy.prepend(patterns.cloneNode(true));
  const from = [source, ...patterns.parentNode.querySelectorAll("*"), ...source.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((node, at) => {
    const style = getComputedStyle(node);
    for (const key of DRAWN) to[at].style.setProperty(key, style.getPropertyValue(key));
  });
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", source.clientWidth || source.getAttribute("width"));
  return new XMLSerializer().serializeToString(copy);
}

// A sheet runs what begins like a formula: such cells get an apostrophe.
const csvCell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csvText = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";

function copyText(text, button) {
  const done = () => { const was = button.textContent; button.textContent = "Copied"; setTimeout(() => { button.textContent = was; }, 1200); };
  if (navigator.clipboard && isSecureContext) { navigator.clipboard.writeText(text).then(done, () => {}); return; }
  const area = element("textarea", text);
  document.body.append(area);
  area.select();
  if (document.execCommand("copy")) done();
  area.remove();
}

// rows: a function that returns what the chart shows, heads first.
function exportable(chart, rows) {
  const figure = document.querySelector(`[data-chart="${chart}"]`);
  if (!figure) return;
  const box = element("span", undefined, "save");
  const add = (label, title, action) => {
    const button = element("button", label);
    button.type = "button";
    button.title = title;
    button.addEventListener("click", action);
    box.append(button);
  };
  const canvas = () => figure.querySelector("canvas");
  if (canvas()) add("PNG", "Save this chart as an image", () => canvas().toBlob((blob) => save(blob, "", `${chart}.png`)));
  else add("SVG", "Save this chart as a drawing", () => save(svgText(figure.querySelector(".plot:not(.ruler) svg")), "image/svg+xml", `${chart}.svg`));
  add("CSV", "Save the numbers of this chart", () => save(csvText(rows()), "text/csv", `${chart}.csv`));
  const caption = figure.querySelector("figcaption");
  if (caption) caption.before(box); else figure.append(box);
}
