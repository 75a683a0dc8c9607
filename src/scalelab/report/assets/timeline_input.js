// Mouse, keys and search of the timeline.
(function listen() {
  "use strict";
  const line = window.scalelabTimeline;
  if (!line) { setTimeout(listen, 20); return; }
  const byId = (id) => document.getElementById(id);
  const canvas = byId("canvas"), tip = byId("tip"), box = byId("search"), help = byId("help");
  const { state } = line;
  let drag = null;

  function point(event) {
    const [x, y] = [event.offsetX, event.offsetY], at = line.hit(x, y);
    if (at !== state.hover) { state.hover = at; line.ask(); }
    tip.classList.toggle("shown", at >= 0);
    if (at < 0) return;
    const { name, words } = line.describe(at);
    tip.textContent = [name, ...words].join("\n");
    const place = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - place.width - 8)}px`;
    tip.style.top = `${event.clientY + 18 + place.height < window.innerHeight ? event.clientY + 18 : event.clientY - place.height - 10}px`;
  }
  function toggle(y) {
    const at = y - line.axis + state.scroll;
    const item = line.items().find((one) => at >= one.y && at < one.y + one.height);
    if (!item) return;
    const thing = item.lane ?? item.rank;
    thing.isOpen = !thing.isOpen;
    line.arrange();
    line.ask();
  }
  function scroll(by) {
    state.scroll = Math.max(0, Math.min(state.scroll + by, line.tall() - line.height() + line.axis));
    line.ask();
  }
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, y: event.offsetY, low: state.low, high: state.high, scroll: state.scroll, isMoved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { point(event); return; }
    const [x, y] = [event.offsetX - drag.x, event.offsetY - drag.y];
    if (!drag.isMoved && Math.hypot(x, y) < 4) return;
    drag.isMoved = true;
    tip.classList.remove("shown");
    const perPixel = (drag.high - drag.low) / (canvas.clientWidth - line.labels);
    state.scroll = drag.scroll;
    scroll(-y);
    line.show(drag.low - x * perPixel, drag.high - x * perPixel);
  });
  canvas.addEventListener("pointerup", (event) => {
    const was = drag;
    drag = null;
    if (!was || was.isMoved) return;
    if (event.offsetX < line.labels) toggle(event.offsetY);
    else line.choose(line.hit(event.offsetX, event.offsetY));
  });
  canvas.addEventListener("pointerleave", () => { tip.classList.remove("shown"); state.hover = -1; line.ask(); });
  canvas.addEventListener("dblclick", line.fitChosen);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const isTall = line.tall() > line.height() - line.axis;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) line.pan((event.deltaX || event.deltaY) / 1000);
    else if (event.ctrlKey || event.metaKey || !isTall) line.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) / 240), event.offsetX);
    else scroll(event.deltaY);
  }, { passive: false });

  const keys = {
    w: () => line.zoom(0.7), "+": () => line.zoom(0.7), "=": () => line.zoom(0.7), s: () => line.zoom(1 / 0.7), "-": () => line.zoom(1 / 0.7),
    a: () => line.pan(-0.2), ArrowLeft: () => line.pan(-0.2), d: () => line.pan(0.2), ArrowRight: () => line.pan(0.2),
    ArrowUp: () => scroll(-60), ArrowDown: () => scroll(60), PageUp: () => scroll(-400), PageDown: () => scroll(400),
    0: () => line.show(0, line.data.high), Home: () => line.show(0, line.data.high), f: line.fitChosen, h: () => line.setHosts(!state.hasHosts),
    n: () => line.step(1), N: () => line.step(-1), "/": () => box.focus(), "?": () => help.showModal(), Escape: () => line.choose(-1),
  };
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (document.activeElement === box) {
      if (event.key === "Enter") line.step(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") { box.value = ""; line.seek(""); canvas.focus(); }
      return;
    }
    if (!keys[event.key] || (event.target.tagName === "BUTTON" && event.key === "Enter")) return;
    event.preventDefault();
    keys[event.key]();
  });
  box.addEventListener("input", () => line.seek(box.value));
  byId("hosts").addEventListener("click", keys.h);
  byId("all").addEventListener("click", keys[0]);
  byId("keys").addEventListener("click", () => help.showModal());
})();
