"use strict";

const find = (id) => document.getElementById(id);

function element(tag, text, style) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  return made;
}

function cell(text, column) {
  let style = column.kind === "text" ? "text" : column.kind === "share" ? "share" : "";
  if (column.name === "level") style = `text ${text === "error" ? "error" : "warning"}`;
  if (column.name === "alarm") style = "text alarm";
  const made = element("td", text, style);
  const share = column.kind === "share" ? Number.parseFloat(text) : Number.NaN;
  if (Number.isFinite(share)) {
    const bar = element("i");
    bar.style.width = `${Math.min(Math.max(share, 0), 100)}px`;
    made.append(bar);
  }
  return made;
}

function section(table) {
  const made = element("section");
  made.dataset.name = table.name;
  const heading = table.name.charAt(0).toUpperCase() + table.name.slice(1);
  made.append(element("h2", heading));
  const scroll = element("div", undefined, "scroll");
  const grid = element("table");
  const head = element("tr");
  for (const column of table.columns) {
    const title = element("th", column.name, column.kind === "text" || column.kind === "share" ? "text" : "");
    title.scope = "col";
    head.append(title);
  }
  const body = element("tbody");
  for (const row of table.rows) {
    const line = element("tr");
    row.forEach((text, at) => line.append(cell(text, table.columns[at])));
    body.append(line);
  }
  const top = element("thead");
  top.append(head);
  grid.append(top, body);
  scroll.append(grid);
  made.append(scroll);
  if (table.note) made.append(element("p", table.note, "note"));
  return made;
}

function show(view) {
  document.title = `${view.run} – rlprof live`;
  find("run").textContent = view.run;
  find("title").textContent = view.title;
  find("slowest").replaceChildren(...view.slowest.map((text) => element("li", text)));
  find("tables").replaceChildren(...view.tables.map(section));
  find("state").textContent = view.ended ? "all ranks have ended" : "live";
  document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
}

const events = new EventSource("events");
events.onmessage = (event) => {
  const view = JSON.parse(event.data);
  show(view);
  if (view.ended) events.close();
};
events.onerror = () => {
  find("state").textContent = "no connection; trying again";
};
