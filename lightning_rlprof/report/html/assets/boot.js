// Everything is drawn; <body> says which charts, for tests that open the page.
const drawn = [];
const charts = { rate, steps: stepBars, timeline };
for (const key in charts) if (!charts[key].isEmpty) { redraws.push(charts[key].draw); drawn.push(key); }
if (!rate.isEmpty) { rate.listen(); selection.follow.push(rate.draw); }
if (!stepBars.isEmpty) { stepBars.listen(); selection.follow.push(stepBars.draw); }
if (!timeline.isEmpty) { timeline.start(); exportable("timeline", () => timeline.rows()); }
if (!stageTable.isEmpty) stageTable.start();
for (const [key, plot] of [["heat", heat], ["memory", memoryPlot], ["samples", samples], ["whatif", whatifPlot], ["device", deviceTimeline], ["icicle", icicle]]) {
  if (plot.isEmpty) byId(key === "whatif" ? "whatif-plot" : "")?.closest("figure").remove();
  else { plot.start(); redraws.push(plot.draw); drawn.push(key); }
}
tables.start();
for (const item of document.querySelectorAll(".legend [data-name]")) pickButton(item, [...item.childNodes], item.dataset.name);
for (const row of document.querySelectorAll("tr[data-kernel]")) pickButton(row.cells[0], [...row.cells[0].childNodes], row.dataset.kernel, row.dataset.pick);
redraw();
selection.read();

// The address of a finding opens it, also when the page is opened with it.
function unfold() {
  const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
  const fold = target && target.querySelector(":scope > details");
  if (fold) fold.open = true;
}
addEventListener("hashchange", unfold);
unfold();

// In a frame of a notebook, a link of the page would open the notebook.
if (location.protocol === "about:") addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  if (link) { event.preventDefault(); location.hash = link.hash; }
});

const links = [...document.querySelectorAll("nav a")];
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) links.forEach((link) => link.classList.toggle("here", link.hash === `#${entry.target.id}`));
}, { rootMargin: "-20% 0px -70% 0px" });
document.querySelectorAll("main > section").forEach((section) => watch.observe(section));
new ResizeObserver(redraw).observe(document.querySelector("main"));
addEventListener("beforeprint", () => { document.querySelectorAll(".cards details").forEach((fold) => { fold.open = true; }); redraw(); });
document.body.dataset.drawn = drawn.join(" ");
document.body.dataset.ready = Math.round(performance.now()); // ms after the page began to open
