// Everything is drawn; <body> says which charts, for tests that open the page.
const drawn = [];
if (!shares.isEmpty) { redraws.push(shares.draw); drawn.push("shares"); }
if (!timeline.isEmpty) { redraws.push(timeline.draw); drawn.push("timeline"); }
if (!shares.isEmpty) shares.start();
timeline.start();
redraw();
new ResizeObserver(redraw).observe(document.querySelector("main"));
addEventListener("beforeprint", redraw);
document.body.dataset.drawn = drawn.join(" ");
