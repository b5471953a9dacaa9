// Every table: sorted by a click on its heading, filtered, copied as Markdown, saved as CSV.
const tables = (() => {
  const SCALES = { ns: 1, "µs": 1e3, ms: 1e6, s: 1e9, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

  // "1 min 05 s", "12.5 ms", "3,210", "45.1%": what a person sees is what is sorted.
  function number(text) {
    const long = /^(-?)(?:([\d,]+) h )?(\d+) min(?: (\d+) s)?$/.exec(text);
    if (long) return (long[1] ? -1 : 1) * ((Number((long[2] || "0").replaceAll(",", "")) * 60 + Number(long[3])) * 60 + Number(long[4] || 0)) * 1e9;
    const found = /^(?:rank )?([-−]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*([^\s\d]*)/.exec(text);
    return found ? Number(found[1].replaceAll(",", "").replace("−", "-")) * (SCALES[found[2]] || 1) : null;
  }
  const textOf = (cell) => [...cell.querySelectorAll("svg")].length ? "" : cell.textContent.trim();

  function sort(table, column, descending) {
    const rows = [...table.tBodies[0].rows];
    const key = new Map(rows.map((row) => [row, textOf(row.cells[column])]));
    const numeric = rows.every((row) => key.get(row) === "–" || key.get(row) === "" || key.get(row) === "alike" || number(key.get(row)) !== null);
    const compare = (a, b) => {
      const [left, right] = [key.get(a), key.get(b)];
      if (!numeric) return left.localeCompare(right, "en", { numeric: true });
      return (number(left) ?? -Infinity) - (number(right) ?? -Infinity);
    };
    rows.sort((a, b) => (descending ? compare(b, a) : compare(a, b)));
    table.tBodies[0].append(...rows);
  }

  const shown = (table) => {
    const plain = [...table.tHead.rows[0].cells].map((cell, at) => (cell.hasAttribute("data-plain") ? -1 : at)).filter((at) => at >= 0);
    const rows = [table.tHead.rows[0], ...[...table.tBodies[0].rows].filter((row) => !row.hidden)];
    return rows.map((row) => plain.map((at) => textOf(row.cells[at])));
  };
  const markdown = (rows) => [rows[0], rows[0].map(() => "---"), ...rows.slice(1)].map((row) => `| ${row.map((cell) => cell.replaceAll("|", "\\|").replaceAll("\n", " ")).join(" | ")} |`).join("\n") + "\n";

  function tools(table) {
    const box = element("div", undefined, "table-tools");
    if (table.tBodies[0].rows.length > 12) {
      const filter = element("input");
      filter.type = "search";
      filter.placeholder = "Filter rows";
      filter.setAttribute("aria-label", `Filter ${table.dataset.name}`);
      filter.addEventListener("input", () => {
        const wanted = filter.value.toLowerCase();
        if (wanted) showAll(table);
        for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      });
      box.append(filter);
    }
    for (const [label, title, action] of [
      ["Copy", "Copy as Markdown, in this order", (button) => copyText(markdown(shown(table)), button)],
      ["CSV", "Save as CSV", () => save(csvText(shown(table)), "text/csv", `${table.id.replace("table-", "")}.csv`)],
    ]) {
      const button = element("button", label);
      button.type = "button";
      button.title = title;
      button.addEventListener("click", () => action(button));
      box.append(button);
    }
    table.closest(".scroll").before(box);
  }

  // A long table begins with its first rows; without script all are shown.
  function fold(table) {
    const rows = table.tBodies[0].rows.length;
    if (!table.dataset.first || rows <= Number(table.dataset.first)) return;
    table.classList.add("short");
    const button = element("button", `Show all ${rows.toLocaleString("en")}`, "show-all");
    button.type = "button";
    button.addEventListener("click", () => showAll(table));
    table.closest(".scroll").after(button);
  }
  function showAll(table) {
    table.classList.remove("short");
    table.closest(".scroll").parentElement.querySelector(".show-all")?.remove();
  }

  function start() {
    for (const table of document.querySelectorAll("table.grid")) {
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        if (head.hasAttribute("data-plain")) return;
        const button = element("button");
        button.type = "button";
        button.append(...head.childNodes);
        head.append(button);
        button.addEventListener("click", () => {
          const first = head.className.includes("num") || head.className.includes("share") ? "descending" : "ascending";
          const order = head.getAttribute("aria-sort") === first ? (first === "descending" ? "ascending" : "descending") : first;
          for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", order);
          sort(table, column, order === "descending");
        });
      });
      tools(table);
      fold(table);
    }
    for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copyText(button.dataset.copy || button.previousElementSibling.textContent, button));
  }
  return { start };
})();
