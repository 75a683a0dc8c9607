// Draws the rows of a job on a canvas: what is narrower than a pixel is merged, so a frame costs by pixels, not by events.
(async function () {
  "use strict";
  const { load, search } = window.scalelabTimelineData;
  const byId = (id) => document.getElementById(id);
  const stage = byId("stage"), canvas = byId("canvas"), tip = byId("tip"), details = byId("details"), box = byId("search");
  const palettes = JSON.parse(byId("palettes").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const LABELS = 190, AXIS = 46, SUMMARY = 22, ROW = 15, GAP = 5, NARROW = 1.5, MOST_BANDS = 400, SHORTEST_NS = 20;
  let data;
  try {
    data = await load(JSON.parse(byId("about").textContent), byId("data").textContent.trim());
  } catch (error) {
    details.textContent = `This browser cannot unpack the page (${error}): use one with DecompressionStream, such as Chrome 80, Firefox 113 or Safari 16.4.`;
    return;
  }
  const pen = canvas.getContext("2d", { alpha: false });
  const isMatching = new Uint8Array(data.names.length);
  const state = { low: 0, high: data.high, scroll: 0, hover: -1, chosen: -1, isSearching: false, hasHosts: false };
  const found = { events: [], hits: new Uint32Array(1) };
  let items = [], height = 0, width = 0, tall = 0, palette, inks, isAsked = false, lastDraw = 0;

  const communication = data.kinds.indexOf("communication"), compute = data.kinds.indexOf("compute");
  data.ranks.forEach((rank) => {
    rank.isOpen = data.ranks.length <= 8;
    rank.used = data.lanes.slice(...rank.lanes).filter((lane) => lane.rows.length);
    rank.used.sort((a, b) => b.isDevice - a.isDevice || busyOf(b) - busyOf(a));
    rank.used.forEach((lane) => { lane.isOpen = lane.isDevice || !rank.hasDevice; });
  });
  function busyOf(lane) { return lane.rows.reduce((sum, row) => sum + data.busy[row.to] - data.busy[row.from], 0); }

  // ---- where things are
  function arrange() {
    items = [];
    let y = 0;
    for (const rank of data.ranks) {
      items.push({ rank, y, height: SUMMARY });
      rank.y = y;
      y += SUMMARY + 2;
      for (const lane of rank.used) {
        lane.y = -1;
        if (!rank.isOpen || (!lane.isDevice && rank.hasDevice && !state.hasHosts)) continue;
        lane.y = y;
        const rows = lane.isOpen ? lane.rows : lane.rows.slice(0, 1);
        items.push({ lane, rank, rows, y, height: rows.length * ROW });
        y += rows.length * ROW + 3;
      }
      y += GAP;
    }
    tall = y;
    state.scroll = Math.max(0, Math.min(state.scroll, tall - (height - AXIS)));
  }
  const scale = () => (width - LABELS) / (state.high - state.low);
  const toX = (time) => LABELS + (time - state.low) * scale();
  const toTime = (x) => state.low + (x - LABELS) / scale();
  const placeOf = (one) => {
    const lane = data.lanes[data.collectives.lane[one]];
    const rank = data.ranks.find((each) => each.rank === lane.rank);
    if (lane.y < 0 || lane.y === undefined || !rank.isOpen) return [rank.y + SUMMARY / 2, rank.y + SUMMARY - 2];
    const top = lane.y + (lane.isOpen ? data.collectives.row[one] : 0) * ROW;
    return [top, top + ROW - 1];
  };

  // ---- words
  function setTime(ns) {
    const size = Math.abs(ns);
    if (size >= 1e9) return `${(ns / 1e9).toPrecision(4)} s`;
    if (size >= 1e6) return `${(ns / 1e6).toPrecision(4)} ms`;
    if (size >= 1e3) return `${(ns / 1e3).toPrecision(4)} µs`;
    return `${Math.round(ns)} ns`;
  }
  function setBytes(bytes) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (bytes >= 1000 && unit < 4) { bytes /= 1000; unit++; }
    return `${unit ? bytes.toPrecision(3) : bytes} ${units[unit]}`;
  }
  function laneOf(event) {
    let low = 0, high = data.rows.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (data.rows[middle].from <= event) low = middle; else high = middle - 1; }
    return data.lanes[data.rows[low].lane];
  }
  function describe(event) {
    const lane = laneOf(event), kind = data.kinds[data.kind[event]];
    const rank = data.ranks.find((one) => one.rank === lane.rank);
    const step = rank.steps.find(([, from, to]) => data.start[event] >= from && data.start[event] < to);
    const words = [
      `${setTime(data.end[event] - data.start[event])} · ${kind} · rank ${lane.rank} · ${lane.name}${step && lane.isDevice ? ` · step ${step[0]}` : ""}`,
      `starts at ${setTime(data.start[event])}`,
    ];
    const one = data.collectiveOf[event], all = data.collectives;
    if (one >= 0) {
      const size = Number.isNaN(all.bytes[one]) ? "size not recorded" : setBytes(all.bytes[one]);
      const group = data.names[all.group[one]];
      words.push(`${data.names[all.kind[one]]} · ${size}${group ? ` · group ${group}` : ""}`);
      const match = data.matches[all.match[one]];
      if (match) {
        const last = data.lanes[all.lane[match.last]].rank;
        words.push(`waits ${setTime(all.waiting[one])}, then transfers ${setTime(all.transfer[one])} · ${match.members.length} ranks${match.members.length > 1 ? `, rank ${last} starts last` : ""}`);
      } else if (data.ranks.length > 1) words.push("not matched with other ranks: its waiting is unknown");
    }
    return { name: data.names[data.name[event]], words };
  }

  // ---- drawing
  function readTheme() {
    palette = palettes[darkness.matches ? "dark" : "light"];
    inks = palette.kinds.map((colour) => {
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
      return 0.299 * r + 0.587 * g + 0.114 * b > 0.5 ? "#10151c" : "#ffffff";
    });
    byId("legend").replaceChildren(...data.kinds.filter((_, kind) => data.kind.includes(kind)).map((name) => {
      const entry = document.createElement("span"), sign = document.createElement("i");
      sign.style.background = palette.kinds[data.kinds.indexOf(name)];
      entry.append(sign, name);
      return entry;
    }), Object.assign(document.createElement("span"), { textContent: "hatched: waiting for other ranks · pale: partly busy" }));
  }
  function drawSpans(spans, colour, y, high) {
    const k = scale(), { start, end, busy } = spans;
    pen.fillStyle = colour;
    let i = search(end, 0, end.length, state.low, false);
    while (i < start.length && start[i] < state.high) {
      const x = toX(start[i]), wide = (end[i] - start[i]) * k;
      if (wide >= NARROW) {
        const from = Math.max(x, LABELS);
        pen.fillRect(from, y, Math.min(x + wide, width) - from, high);
        i++;
        continue;
      }
      const pixel = Math.floor(Math.max(x, LABELS));
      let j = search(start, i + 1, start.length, toTime(pixel + 1), true);
      if (j - 1 > i && (end[j - 1] - start[j - 1]) * k >= NARROW) j--;
      pen.globalAlpha = Math.min(1, 0.2 + 0.8 * (busy[j] - busy[i]) * k);
      pen.fillRect(pixel, y, 1, high);
      pen.globalAlpha = 1;
      i = j;
    }
  }
  function drawRow(row, y) {
    const k = scale(), { start, end, kind, busy } = data, high = ROW - 1;
    let i = search(end, row.from, row.to, state.low, false);
    let run = null;
    const flush = () => {
      if (!run) return;
      pen.fillStyle = palette.kinds[run.kind];
      pen.globalAlpha = run.alpha;
      pen.fillRect(run.x, y, run.wide, high);
      pen.globalAlpha = 1;
      run = null;
    };
    while (i < row.to && start[i] < state.high) {
      const x = toX(start[i]), wide = (end[i] - start[i]) * k;
      if (wide >= NARROW) { flush(); drawEvent(i, x, wide, y, high); i++; continue; }
      const pixel = Math.floor(Math.max(x, LABELS));
      let j = search(start, i + 1, row.to, toTime(pixel + 1), true);
      if (j - 1 > i && (end[j - 1] - start[j - 1]) * k >= NARROW) j--;
      let most = i;
      for (let one = i, stride = Math.max(1, (j - i) >> 3); one < j; one += stride) if (end[one] - start[one] > end[most] - start[most]) most = one;
      let alpha = Math.ceil(8 * Math.min(1, 0.2 + 0.8 * (busy[j] - busy[i]) * k)) / 8;
      if (state.isSearching && found.hits[j] === found.hits[i]) alpha = 0.12;
      if (run && run.x + run.wide === pixel && run.kind === kind[most] && run.alpha === alpha) run.wide++;
      else { flush(); run = { x: pixel, wide: 1, kind: kind[most], alpha }; }
      i = j;
    }
    flush();
  }
  function drawEvent(event, x, wide, y, high) {
    const kind = data.kind[event];
    const from = Math.max(x, LABELS), to = Math.min(x + wide, width), shown = to - from;
    pen.globalAlpha = state.isSearching && !isMatching[data.name[event]] ? 0.15 : 1;
    pen.fillStyle = palette.kinds[kind];
    pen.fillRect(from, y, Math.max(1, shown - (wide > 4 ? 1 : 0)), high);
    const one = data.collectiveOf[event];
    if (one >= 0 && data.collectives.waiting[one] > 0) hatch(from, Math.min(to, x + data.collectives.waiting[one] * scale()), y, high);
    if (shown > 34) {
      pen.fillStyle = one >= 0 && data.collectives.waiting[one] * scale() > 12 ? palette.text : inks[kind];
      const name = one >= 0 ? data.names[data.collectives.kind[one]] : data.names[data.name[event]].replace(/^void /, "");
      pen.fillText(name.slice(0, Math.floor((shown - 6) / 6)), from + 3, y + high - 3.5);
    }
    pen.globalAlpha = 1;
    if (event === state.chosen) { pen.strokeStyle = palette.text; pen.lineWidth = 2; pen.strokeRect(from, y, shown, high); }
  }
  function hatch(from, to, y, high) {
    if (to - from < 1) return;
    pen.fillStyle = palette.background;
    pen.globalAlpha *= 0.62;
    pen.fillRect(from, y, to - from, high);
    pen.globalAlpha = 1;
    if (to - from < 6) return;
    pen.save();
    pen.beginPath();
    pen.rect(from, y, to - from, high);
    pen.clip();
    pen.strokeStyle = palette.kinds[communication];
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = from - high; x < to; x += 6) { pen.moveTo(x, y + high); pen.lineTo(x + high, y); }
    pen.stroke();
    pen.restore();
  }
  function drawBands() {
    const k = scale(), all = data.collectives;
    const focus = [state.hover, state.chosen].map((event) => (event >= 0 && data.collectiveOf[event] >= 0 ? all.match[data.collectiveOf[event]] : -1));
    let drawn = 0;
    data.matches.forEach((match, number) => {
      if (!match || match.members.length < 2 || match.high < state.low || match.low > state.high) return;
      const isFocus = focus.includes(number);
      if (!isFocus && ((match.high - match.low) * k < 4 || ++drawn > MOST_BANDS)) return;
      const ends = match.members.map((one) => [...placeOf(one), Math.max(LABELS, toX(all.start[one])), Math.max(LABELS, toX(all.start[one] + all.duration[one]))]);
      ends.sort((a, b) => a[0] - b[0]);
      pen.fillStyle = pen.strokeStyle = palette.kinds[communication];
      pen.lineWidth = isFocus ? 1.5 : 1;
      for (let i = 1; i < ends.length; i++) {
        const [, above, a, b] = ends[i - 1], [below, , c, d] = ends[i];
        pen.globalAlpha = isFocus ? 0.3 : 0.1;
        pen.beginPath();
        pen.moveTo(a, above); pen.lineTo(b, above); pen.lineTo(d, below); pen.lineTo(c, below);
        pen.fill();
        pen.globalAlpha = isFocus ? 1 : 0.35;
        pen.beginPath();
        pen.moveTo(a, above); pen.lineTo(c, below);
        pen.stroke();
      }
      pen.globalAlpha = 1;
      if (isFocus) drawArrows(match);
    });
    state.bands = drawn;
  }
  function drawArrows(match) {
    // From the last rank to begin, to those that wait for it.
    const all = data.collectives, x = toX(all.start[match.last]);
    if (x < LABELS || x > width) return;
    const [top, bottom] = placeOf(match.last), middle = (top + bottom) / 2;
    pen.strokeStyle = pen.fillStyle = palette.text;
    pen.lineWidth = 1.5;
    for (const one of match.members) {
      if (one === match.last || all.waiting[one] <= 0) continue;
      const [above, below] = placeOf(one), y = middle < above ? above : below, tilt = middle < above ? -6 : 6;
      pen.beginPath(); pen.moveTo(x, middle); pen.lineTo(x, y); pen.stroke();
      pen.beginPath(); pen.moveTo(x, y); pen.lineTo(x - 4, y + tilt); pen.lineTo(x + 4, y + tilt); pen.fill();
    }
  }
  function drawAxis() {
    pen.fillStyle = palette.background;
    pen.fillRect(0, 0, width, AXIS);
    const span = state.high - state.low;
    let tick = 10 ** Math.floor(Math.log10(span / Math.max(2, (width - LABELS) / 130)));
    while (((width - LABELS) * tick) / span < 95) tick *= String(tick)[0] === "2" ? 2.5 : 2;
    pen.fillStyle = palette.quiet;
    pen.strokeStyle = palette.grid;
    pen.lineWidth = 1;
    for (let time = Math.ceil(state.low / tick) * tick; time <= state.high; time += tick) {
      const x = Math.round(toX(time)) + 0.5;
      pen.beginPath(); pen.moveTo(x, AXIS - 18); pen.lineTo(x, height); pen.stroke();
      pen.fillText(setTime(time), x + 3, AXIS - 22);
    }
    for (const [number, from, to] of data.ranks[0].steps) {
      const left = Math.max(LABELS, toX(from)), right = Math.min(width, toX(to));
      if (right - left < 3) continue;
      pen.fillStyle = palette.edge;
      pen.fillRect(left, AXIS - 17, right - left - 1, 14);
      pen.fillStyle = palette.text;
      if (right - left > 50) pen.fillText(`step ${number}`, left + 4, AXIS - 6);
    }
    const left = LABELS + (state.low / data.high) * (width - LABELS), wide = Math.max(3, (span / data.high) * (width - LABELS));
    pen.fillStyle = palette.edge;
    pen.fillRect(LABELS, 2, width - LABELS, 5);
    pen.fillStyle = palette.kinds[compute < 0 ? 0 : compute];
    pen.fillRect(left, 2, wide, 5);
    pen.fillStyle = palette.quiet;
    pen.fillText(data.ranks[0].steps.length ? `steps of rank ${data.ranks[0].rank}` : "time", 12, AXIS - 6);
  }
  function drawLabel(item) {
    pen.fillStyle = palette.background;
    pen.fillRect(0, item.y, LABELS - 1, item.height + 2);
    pen.fillStyle = item.lane ? palette.quiet : palette.text;
    const isOpen = item.lane ? item.lane.isOpen : item.rank.isOpen, hasMore = item.lane ? item.lane.rows.length > 1 : true;
    const words = item.lane ? item.lane.name : `rank ${item.rank.rank}${item.rank.host ? ` · ${item.rank.host}` : ""}`;
    pen.fillText(`${hasMore ? (isOpen ? "▾ " : "▸ ") : "   "}${words}`.slice(0, 30), item.lane ? 22 : 6, item.y + 12);
  }
  function draw() {
    isAsked = false;
    const begun = performance.now();
    const ratio = window.devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = palette.background;
    pen.fillRect(0, 0, width, height);
    drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    pen.translate(0, AXIS - state.scroll);
    const top = state.scroll, bottom = state.scroll + height - AXIS;
    for (const item of items) {
      if (item.y + item.height < top || item.y > bottom) continue;
      if (item.lane) item.rows.forEach((row, depth) => drawRow(row, item.y + depth * ROW));
      else {
        const work = palette.kinds[item.rank.hasDevice ? compute : data.kinds.indexOf("operator")];
        drawSpans(item.rank.work, work, item.y + 1, SUMMARY / 2 - 2);
        drawSpans(item.rank.communication, palette.kinds[communication], item.y + SUMMARY / 2, SUMMARY / 2 - 2);
      }
    }
    drawBands();
    for (const item of items) if (item.y + item.height >= top && item.y <= bottom) drawLabel(item);
    pen.restore();
    lastDraw = performance.now() - begun;
  }
  function ask() { if (!isAsked) { isAsked = true; requestAnimationFrame(draw); } }
  function resize() {
    width = stage.clientWidth; height = stage.clientHeight;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    arrange();
    ask();
  }

  // ---- moving
  function show(low, high) {
    const span = Math.max(SHORTEST_NS, Math.min(high - low, data.high * 1.02));
    const middle = (low + high) / 2;
    state.low = Math.max(-0.01 * data.high, Math.min(middle - span / 2, data.high * 1.01 - span));
    state.high = state.low + span;
    ask();
  }
  function zoom(factor, x) {
    const at = toTime(x ?? (LABELS + width) / 2);
    show(at - (at - state.low) * factor, at + (state.high - at) * factor);
  }
  const pan = (share) => show(state.low + share * (state.high - state.low), state.high + share * (state.high - state.low));
  function reveal(event) {
    const lane = laneOf(event), rank = data.ranks.find((one) => one.rank === lane.rank);
    rank.isOpen = true;
    lane.isOpen = true;
    if (!lane.isDevice && rank.hasDevice) setHosts(true);
    arrange();
    const row = lane.rows.findIndex((one) => event >= one.from && event < one.to), y = lane.y + row * ROW;
    if (y < state.scroll || y > state.scroll + height - AXIS - ROW) state.scroll = Math.max(0, Math.min(y - height / 3, tall - height + AXIS));
    const length = data.end[event] - data.start[event];
    if (data.end[event] < state.low || data.start[event] > state.high || length * scale() < 3) show(data.start[event] - 10 * length, data.end[event] + 10 * length);
    choose(event);
  }
  function choose(event) {
    state.chosen = event;
    details.replaceChildren();
    if (event < 0) details.textContent = "Point at an event, or click it to keep it here. ? lists the keys.";
    else {
      const { name, words } = describe(event);
      details.append(Object.assign(document.createElement("strong"), { textContent: name }), ...words.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    }
    ask();
  }
  function hit(x, y) {
    if (x < LABELS || y < AXIS) return -1;
    const at = y - AXIS + state.scroll, time = toTime(x), slack = 2 / scale();
    const item = items.find((one) => one.lane && at >= one.y && at < one.y + one.height);
    const row = item && item.rows[Math.floor((at - item.y) / ROW)];
    if (!row) return -1;
    const i = search(data.end, row.from, row.to, time - slack, false);
    return i < row.to && data.start[i] <= time + slack ? i : -1;
  }
  function setHosts(isOn) {
    state.hasHosts = isOn;
    byId("hosts").setAttribute("aria-pressed", String(isOn));
    arrange();
    ask();
  }
  function seek(text) {
    state.isSearching = text !== "";
    const wanted = text.toLowerCase();
    data.names.forEach((name, number) => { isMatching[number] = text !== "" && name.toLowerCase().includes(wanted) ? 1 : 0; });
    found.hits = new Uint32Array(data.start.length + 1);
    found.events = [];
    let total = 0;
    for (let i = 0; i < data.start.length; i++) {
      const isHit = isMatching[data.name[i]];
      found.hits[i + 1] = found.hits[i] + isHit;
      if (isHit) { found.events.push(i); total += data.end[i] - data.start[i]; }
    }
    found.events.sort((a, b) => data.start[a] - data.start[b]);
    const words = found.events.length === 1 ? "1 event" : `${found.events.length} events`;
    byId("count").textContent = text ? `${words}, ${setTime(total)}` : "";
    ask();
  }
  function step(by) {
    if (!found.events.length) return;
    const here = found.events.indexOf(state.chosen);
    const next = here < 0 ? found.events.findIndex((event) => data.start[event] >= state.low) : here + by;
    reveal(found.events[(Math.max(0, next) + found.events.length) % found.events.length]);
  }
  function fitChosen() {
    if (state.chosen < 0) return;
    const one = data.collectiveOf[state.chosen], match = one >= 0 ? data.matches[data.collectives.match[one]] : null;
    const [low, high] = match ? [match.low, match.high] : [data.start[state.chosen], data.end[state.chosen]];
    show(low - 0.1 * (high - low), high + 0.1 * (high - low));
  }
  window.scalelabTimeline = {
    data, state, show, zoom, seek, hit, choose, describe, reveal, toX, draw, fitChosen, setHosts, step, pan, ask, arrange, resize,
    axis: AXIS, labels: LABELS, placeOf, items: () => items, lastDraw: () => lastDraw, readTheme, tall: () => tall, height: () => height,
  };
  readTheme();
  resize();
  if (isAsked) draw();
  choose(-1);
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.painted = String(Math.round(performance.now())); }));
  document.documentElement.dataset.drawn = "true";
  darkness.addEventListener("change", () => { readTheme(); ask(); });
  new ResizeObserver(resize).observe(stage);
})();
