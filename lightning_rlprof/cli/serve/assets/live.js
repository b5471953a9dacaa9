"use strict";

const figures = document.getElementById("figures");
const state = document.getElementById("state");
const nameOf = (scroll) => scroll.firstElementChild.dataset.name;

// The server escapes every text of the run, and the page's policy runs no other script.
function show(view) {
  const begin = performance.now(), places = new Map();
  for (const scroll of figures.querySelectorAll(".scroll")) places.set(nameOf(scroll), scroll.scrollLeft);
  const focused = document.activeElement?.closest(".scroll");
  const focusedName = focused && nameOf(focused);
  figures.innerHTML = view.figures;
  for (const scroll of figures.querySelectorAll(".scroll")) {
    scroll.scrollLeft = places.get(nameOf(scroll)) ?? 0;
    if (nameOf(scroll) === focusedName) scroll.focus({ preventScroll: true });
  }
  if (state.textContent !== view.state) state.textContent = view.state;
  document.body.dataset.updates = String(Number(document.body.dataset.updates) + 1);
  // The next frame is requested before the page is drawn, and the message comes after it.
  const drawn = new MessageChannel();
  drawn.port1.onmessage = () => { document.body.dataset.drew = String(Math.round(performance.now() - begin)); };
  requestAnimationFrame(() => drawn.port2.postMessage(null));
}

const events = new EventSource("events");
events.onmessage = (event) => {
  const view = JSON.parse(event.data);
  show(view);
  if (view.ended) events.close();
};
events.onerror = () => {
  state.textContent = "no connection; trying again";
};
