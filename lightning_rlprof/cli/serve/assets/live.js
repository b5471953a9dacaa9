"use strict";

const figures = document.getElementById("figures");
const state = document.getElementById("state");

// The server escapes every text of the run, and the page's policy runs no other script.
function show(view) {
  const scrolled = new Map();
  for (const section of figures.querySelectorAll("section")) {
    scrolled.set(section.dataset.name, section.querySelector(".scroll").scrollLeft);
  }
  const focused = document.activeElement?.closest("section")?.dataset.name;
  figures.innerHTML = view.figures;
  for (const section of figures.querySelectorAll("section")) {
    const scroll = section.querySelector(".scroll");
    scroll.scrollLeft = scrolled.get(section.dataset.name) ?? 0;
    if (section.dataset.name === focused) scroll.focus({ preventScroll: true });
  }
  state.textContent = view.state;
  document.body.dataset.updates = String(Number(document.body.dataset.updates) + 1);
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
