// A time axis that is zoomed, moved and picked from by mouse, touch and keys: one for all timelines.
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// `whole` returns all there is, `left` and `right` the room beside the axis; `draw` draws what is in
// view. Optional: `hover` and `press` of an event, `keys` by name, `touch` to move by a finger.
function timeAxis({ host, left, right, shortest, whole, draw, hover, press, keys = {}, touch = false }) {
  const axis = { view: [0, 1], width: 0, brush: null };
  let last = null, moved = false;
  const room = () => axis.width - left() - right;
  axis.x = (ns) => left() + room() * (ns - axis.view[0]) / (axis.view[1] - axis.view[0]);
  axis.ns = (px) => axis.view[0] + (axis.view[1] - axis.view[0]) * (px - left()) / room();
  axis.isWhole = () => axis.view[0] <= whole()[0] && axis.view[1] >= whole()[1];
  axis.look = (from, to) => {
    const [low, high] = whole();
    const length = clamp(to - from, Math.min(shortest, high - low), high - low);
    const start = clamp(from, low, high - length);
    axis.view = [start, start + length];
    draw();
  };
  axis.zoom = (factor, centre = (axis.view[0] + axis.view[1]) / 2) => axis.look(centre - (centre - axis.view[0]) * factor, centre + (axis.view[1] - centre) * factor);
  axis.pan = (part) => axis.look(...axis.view.map((edge) => edge + part * (axis.view[1] - axis.view[0])));
  const here = (event) => clamp(event.clientX - host.getBoundingClientRect().left, left(), axis.width - right);

  axis.listen = () => {
    host.addEventListener("pointerdown", (event) => {
      const finger = event.pointerType === "touch";
      if (event.button || (finger && !touch)) return;
      moved = false;
      last = event.shiftKey || finger ? here(event) : null;
      axis.brush = last === null ? [here(event), here(event)] : null;
      host.setPointerCapture(event.pointerId);
      host.focus({ preventScroll: true });
    });
    host.addEventListener("pointermove", (event) => {
      if (last !== null) {
        const way = axis.ns(last) - axis.ns(here(event));
        moved = moved || way !== 0;
        last = here(event);
        return axis.look(axis.view[0] + way, axis.view[1] + way);
      }
      if (!axis.brush) return hover(event);
      hideTip();
      axis.brush[1] = here(event);
      draw();
    });
    host.addEventListener("pointerup", (event) => {
      const ends = axis.brush && [Math.min(...axis.brush), Math.max(...axis.brush)];
      const wide = ends && ends[1] - ends[0] > 4;
      axis.brush = last = null;
      if (wide) axis.look(...ends.map(axis.ns));
      else if (press && !moved) press(event);
    });
    host.addEventListener("pointercancel", () => { axis.brush = last = null; draw(); });
    host.addEventListener("pointerleave", hideTip);
    host.addEventListener("dblclick", () => axis.look(...whole()));
    host.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) axis.zoom(event.deltaY > 0 ? 1.25 : 0.8, axis.ns(here(event)));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) axis.pan(event.deltaX / axis.width);
      else return;
      event.preventDefault();
    }, { passive: false });
    const all = { ArrowLeft: () => axis.pan(-0.15), ArrowRight: () => axis.pan(0.15), "+": () => axis.zoom(0.6), "=": () => axis.zoom(0.6), "-": () => axis.zoom(1 / 0.6), Home: () => axis.look(...whole()), ...keys };
    host.addEventListener("keydown", (event) => {
      if (!all[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      all[event.key](event);
    });
  };
  return axis;
}
