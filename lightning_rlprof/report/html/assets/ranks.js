// Ranks by steps, one colour per value: who is late where, and for how long.
const heat = (() => {
  const { ranks, values } = data.heat;
  const host = byId("heat");
  const LEFT = 52, FOOT = 16;
  const columns = data.steps.first.length;
  const decode = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const shades = values.map((each) => decode(each.bytes));
  const time = (shade) => (shade ? (2 ** ((shade - 1) / 12) - 1) * 1e3 : 0);
  let at = 0, width = 0;
  const height = () => Math.max(3, Math.min(18, Math.floor(420 / ranks.length)));
  const limit = () => { const sorted = [...shades[at]].sort((a, b) => a - b); return Math.max(1, time(sorted[Math.floor(0.97 * (sorted.length - 1))])); };

  function draw() {
    width = host.clientWidth;
    if (!width) return;
    const tall = height(), scale = Math.max(1, devicePixelRatio || 1);
    const canvas = element("canvas");
    canvas.width = width * scale;
    canvas.height = (tall * ranks.length + FOOT) * scale;
    canvas.style.height = `${tall * ranks.length + FOOT}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const [red, green, blue] = style.getPropertyValue("--heat").trim().split(" ");
    const most = limit(), wide = (width - LEFT) / columns;
    ranks.forEach((rank, row) => {
      for (let column = 0; column < columns; column++) {
        const part = Math.min(1, time(shades[at][row * columns + column]) / most);
        pen.fillStyle = `rgb(${red} ${green} ${blue} / ${(0.04 + 0.96 * part).toFixed(3)})`;
        pen.fillRect(LEFT + column * wide, row * tall, Math.ceil(wide * scale) / scale, tall - (tall > 6 ? 1 : 0));
      }
    });
    pen.fillStyle = style.getPropertyValue("--soft");
    pen.font = "11px system-ui, sans-serif";
    const every = Math.ceil(12 / tall);
    ranks.forEach((rank, row) => { if (row % every === 0) pen.fillText(`rank ${rank}`, 0, row * tall + Math.min(tall, 12) - 1); });
    pen.fillText(`step ${data.steps.first[0]}`, LEFT, tall * ranks.length + 12);
    pen.textAlign = "right";
    pen.fillText(String(data.steps.last[columns - 1]), width, tall * ranks.length + 12);
    if (selection.range) {
      pen.strokeStyle = style.getPropertyValue("--ink");
      pen.lineWidth = 1.5;
      pen.strokeRect(LEFT + selection.range[0] * wide, 0.75, (selection.range[1] - selection.range[0] + 1) * wide, tall * ranks.length - 1.5);
    }
    host.replaceChildren(canvas);
    const left = data.heat.total > ranks.length ? ` ${ranks.length} of ${data.heat.total.toLocaleString("en")} ranks, spread over all.` : "";
    byId("heat-scale").textContent = `Full color: ${duration(most)} or more.${left}`;
  }

  function start() {
    const picker = byId("heat-value");
    values.forEach((each, index) => {
      const option = element("option", each.name);
      option.value = String(index);
      picker.append(option);
    });
    picker.addEventListener("change", () => { at = Number(picker.value); draw(); });
    host.addEventListener("pointermove", (event) => {
      const box = host.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top) / height()), column = Math.floor((event.clientX - box.left - LEFT) / (width - LEFT) * columns);
      if (row < 0 || row >= ranks.length || column < 0 || column >= columns) return hideTip();
      showTip(event, `Rank ${ranks[row]}, ${name(column).toLowerCase()}`, "to 6%", values.map((each, index) => [each.name, duration(time(shades[index][row * columns + column]))]));
    });
    host.addEventListener("pointerleave", hideTip);
    selection.follow.push(draw);
    draw();
    exportable("heat", () => [["rank", "first step", "last step", ...values.map((each) => `${each.name} (us)`)], ...ranks.flatMap((rank, row) => data.steps.first.map((number, column) => [rank, number, data.steps.last[column], ...shades.map((own) => Math.round(time(own[row * columns + column]) / 1e3))]))]);
  }
  return { start, draw, isEmpty: !host || !ranks.length };
})();
