(function () {
  "use strict";
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const source = read("document");
  const theme = read("theme");
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [];
  let mode = "light";

  // The same three steps as theme.py takes: configuration, legend, width.
  const isObject = (one) => one !== null && typeof one === "object" && !Array.isArray(one);
  function merge(under, over) {
    const merged = { ...under };
    for (const [name, value] of Object.entries(over)) {
      merged[name] = isObject(merged[name]) && isObject(value) ? merge(merged[name], value) : value;
    }
    return merged;
  }
  function setInnerWidth(spec, width) {
    const made = { ...spec };
    if (made.spec) {
      const facet = isObject(made.facet) ? made.facet : {};
      const columns = facet.row && !facet.column ? 1 : made.columns ?? 2;
      made.spec = setInnerWidth(made.spec, width / Math.max(1, columns));
    } else if (made.vconcat) {
      made.vconcat = made.vconcat.map((view) => setInnerWidth(view, width));
    } else if (made.hconcat || made.concat) {
      const name = made.hconcat ? "hconcat" : "concat";
      const views = made[name];
      const columns = Math.min(views.length, name === "concat" ? made.columns ?? views.length : 99);
      made[name] = views.map((view) => setInnerWidth(view, width / Math.max(1, columns)));
    } else if (!("width" in made)) {
      made.width = Math.max(60, Math.round(width - theme.beside));
    }
    return made;
  }
  const isComposed = (spec) => theme.composed.some((name) => name in spec);
  function applyTheme(spec, entry, name, width) {
    const made = isComposed(spec)
      ? setInnerWidth(spec, width)
      : { ...spec, width, autosize: { type: "fit-x", contains: "padding" } };
    const legend = {
      columns: Math.max(1, Math.floor(width / entry)),
      labelLimit: Math.max(80, Math.round(width - theme.sign - 8)),
    };
    const look = theme[name];
    made.background = look.background;
    made.config = merge(merge(look.config, { legend }), spec.config ?? {});
    made.params = (spec.params ?? []).map((one) =>
      one.name === "config_edge" ? { ...one, value: look.background } : one);
    return made;
  }

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  document.body.append(tip);
  // Marks are drawn anew when the focus changes, which looks as if the pointer had left them.
  function findItem(event) {
    const found = event && document.elementFromPoint(event.clientX, event.clientY);
    return (found && found.closest(".plot") && found.__data__) || null;
  }
  // What was put away is still there, unseen.
  const isSeen = (item) => item?.opacity !== 0;
  function showTip(_, event, item, value) {
    if (value === null || value === undefined || value === "" || !isSeen(item)) {
      if (!findItem(event)?.tooltip || !isSeen(item)) {
        tip.className = "tip";
      }
      return;
    }
    const known = (text) => text !== null && text !== undefined && !["", "null", "undefined", "NaN"].includes(String(text));
    const lines = isObject(value) ? Object.entries(value) : [["", value]];
    tip.replaceChildren(...lines.filter(([name, text]) => known(text) || name !== "series").map(([name, text]) => {
      const line = document.createElement("div");
      const label = document.createElement("span");
      const number = document.createElement("b");
      label.textContent = name;
      number.textContent = known(text) ? String(text) : "–";
      line.append(label, number);
      return line;
    }));
    const { width, height } = tip.getBoundingClientRect();
    const left = event.clientX + 14 + width > window.innerWidth ? event.clientX - width - 14 : event.clientX + 14;
    const top = event.clientY + 14 + height > window.innerHeight ? event.clientY - height - 14 : event.clientY + 14;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, top)}px`;
    tip.className = "tip shown";
  }

  let focus = null;
  function setFocus(key) {
    if (key === focus) {
      return;
    }
    focus = key;
    for (const plot of plots) {
      if (plot.hasFocus) {
        plot.view.signal("focus", key).runAsync();
      }
    }
  }
  function takesFocus(view) {
    try {
      view.signal("focus");
      return true;
    } catch {
      return false;
    }
  }

  // Vega-Lite takes what is selected for what is shown, and would fade all entries of a legend but the hidden ones.
  const isHidden = "isArray(hidden.series) && indexof(hidden.series, datum.value) >= 0";
  function fadeHidden(made) {
    const hasHidden = (made.signals ?? []).some((one) => one.name === "hidden");
    for (const legend of hasHidden ? made.legends ?? [] : []) {
      for (const part of [legend.encode?.symbols, legend.encode?.labels]) {
        if (part?.update) {
          part.update.opacity = [{ test: isHidden, value: 0.3 }, { value: 1 }];
        }
      }
    }
    return made;
  }

  // What a reader has put away or zoomed into, which outlives the colours and the width it was drawn for.
  function readState(plot) {
    const has = (name) => plot.view && name in plot.view.getState().signals;
    return {
      hidden: has("hidden") ? plot.view.data("hidden_store") : [],
      shown: plot.zoom && plot.view ? plot.view.signal(plot.zoom) : null,
    };
  }
  async function restoreState(plot, view, { hidden, shown }) {
    if (hidden.length) {
      view.data("hidden_store", hidden.map(({ fields, values }) => ({ fields, values })));
    }
    if (shown) {
      view.signal(plot.zoom, shown);
    }
    if (hidden.length || shown) {
      await view.runAsync();
    }
  }

  const refuse = () => Promise.reject(new Error("a report loads nothing"));
  async function draw(plot, name = mode) {
    const width = plot.box.clientWidth;
    if (!width) {
      return;
    }
    plot.width = width;
    const number = (plot.number = (plot.number ?? 0) + 1);
    const state = readState(plot);
    try {
      let made = await embed(plot, name, width);
      const over = Math.ceil(plot.box.querySelector("svg, canvas").getBoundingClientRect().width - width);
      if (over > 1 && isComposed(plot.spec)) {
        made.finalize();
        made = await embed(plot, name, width - over);
      }
      await restoreState(plot, made.view, state);
      if (number !== plot.number) {
        made.finalize();
        return;
      }
      plot.finalize?.();
      plot.finalize = () => made.finalize();
      plot.view = made.view;
      plot.hasFocus = takesFocus(made.view);
      const point = (item) => setFocus((isSeen(item) && item?.datum?.key) || null);
      made.view.addEventListener("pointermove", (_, item) => point(item));
      made.view.addEventListener("pointerdown", (_, item) => point(item));
      made.view.addEventListener("pointerout", (event) => point(findItem(event)));
      plot.box.dataset.drawn = name;
    } catch (error) {
      const note = document.createElement("p");
      note.className = "unable";
      note.textContent = `This chart cannot be drawn (${error.message}); its numbers are in the tables and the JSON.`;
      plot.box.replaceChildren(note);
      plot.box.dataset.failed = "true";
      console.error(error);
    }
  }
  function embed(plot, name, width) {
    return vegaEmbed(plot.box, applyTheme(plot.spec, plot.entry, name, width), {
      mode: "vega-lite", actions: false, ast: true, renderer: plot.isLarge ? "canvas" : "svg", defaultStyle: false,
      tooltip: showTip, patch: fadeHidden, loader: { load: refuse, sanitize: refuse }, logLevel: 1,
    });
  }

  // The part of an axis that is shown, of a figure with the parameter `zoom`; Vega-Lite keeps it under its field's name.
  function findZoom(part) {
    if (!isObject(part)) {
      return null;
    }
    const hasZoom = (part.params ?? []).some((one) => one.name === "zoom");
    const field = part.encoding?.x?.field;
    if (hasZoom && field) {
      return `zoom_${field}`;
    }
    return (part.layer ?? []).map(findZoom).find((one) => one !== null) ?? null;
  }
  function zoom(plot, factor) {
    const [low, high] = plot.view.signal(plot.zoom) ?? plot.view.scale("x").domain();
    const middle = (low + high) / 2;
    const half = ((high - low) / 2) * factor;
    plot.view.signal(plot.zoom, factor === 0 ? null : [middle - half, middle + half]).runAsync();
  }

  const rest = () => new Promise((resolve) => setTimeout(resolve, 0));
  async function drawAll() {
    for (const plot of plots) {
      await draw(plot);
      await rest();
    }
    root.dataset.ready = "true";
  }

  function choose() {
    let kept = null;
    try {
      kept = localStorage.getItem("scalelab-theme");
    } catch { /* a page from disk may have no storage */ }
    return kept ?? (darkness.matches ? "dark" : "light");
  }
  function wear(name) {
    mode = name;
    root.dataset.theme = name;
    const button = document.getElementById("mode");
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `switch to ${name === "dark" ? "light" : "dark"} colours`);
  }
  function change(name) {
    wear(name);
    return drawAll();
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  function decode(text) {
    const binary = atob(text);
    return Uint8Array.from(binary, (character) => character.charCodeAt(0));
  }
  async function savePicture(plot, format) {
    const name = `${plot.name}.${format}`;
    if (format === "svg") {
      save(new Blob([await plot.view.toSVG()], { type: "image/svg+xml" }), name);
    } else {
      const canvas = await plot.view.toCanvas(2);
      canvas.toBlob((blob) => save(blob, name));
    }
  }

  for (const box of document.querySelectorAll(".plot")) {
    const [section, chart] = box.dataset.chart.split("-").map(Number);
    const plot = {
      box, spec: source.sections[section].charts[chart].spec, entry: Number(box.dataset.entry), name: box.dataset.name,
      isLarge: box.dataset.large === "true",
    };
    plots.push(plot);
    plot.zoom = findZoom(plot.spec);
    const actions = box.closest("figure").querySelector(".actions");
    for (const [words, factor] of plot.zoom ? [["Zoom in", 0.5], ["Zoom out", 2], ["All", 0]] : []) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = words;
      button.addEventListener("click", () => zoom(plot, factor));
      actions.append(button);
    }
    for (const button of box.closest("figure").querySelectorAll("button[data-format]")) {
      button.addEventListener("click", () => savePicture(plot, button.dataset.format));
    }
    box.addEventListener("pointerleave", () => showTip(null, null, null, null));
  }
  for (const link of document.querySelectorAll("a[data-file]")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const part = document.getElementById(link.dataset.file);
      const isText = part.type === "application/json";
      const text = isText ? `${JSON.stringify(JSON.parse(part.textContent), null, 2)}\n` : part.textContent;
      save(new Blob([isText ? text : decode(text)], { type: link.type }), link.download);
    });
  }

  document.getElementById("mode").addEventListener("click", () => {
    const next = mode === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("scalelab-theme", next);
    } catch { /* see above */ }
    change(next);
  });
  darkness.addEventListener("change", () => change(choose()));
  let wait = 0;
  window.addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(() => plots.filter((plot) => plot.box.clientWidth !== plot.width).forEach((plot) => draw(plot)), 120);
  });
  const folded = [];
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) {
      folded.push(part);
      part.open = true;
    }
    if (mode === "dark") {
      root.dataset.theme = "light";
      plots.forEach((plot) => draw(plot, "light"));
    }
  });
  window.addEventListener("afterprint", () => {
    folded.splice(0).forEach((part) => { part.open = false; });
    if (mode === "dark") {
      change(mode);
    }
  });
  window.scalelabReport = { plots, applyTheme, setFocus };
  wear(choose());
  drawAll();
})();
