// What was recorded, from the packed columns (trace/timeline.py), and what drawing needs besides: rows, unions, matches.
window.scalelabTimelineData = (function () {
  "use strict";
  const TYPES = { i4: Int32Array, u4: Uint32Array, u1: Uint8Array, f8: Float64Array };
  const LARGEST = 2 ** 31 - 1;

  async function inflate(text) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function split(bytes, columns) {
    const found = {};
    let place = 0;
    for (const { name, type, length } of columns) {
      const Kind = TYPES[type];
      const size = length * Kind.BYTES_PER_ELEMENT;
      if (type === "i4" || type === "u4") {
        const column = new Kind(length);
        const [a, b, c, d] = [0, 1, 2, 3].map((byte) => bytes.subarray(place + byte * length, place + (byte + 1) * length));
        for (let i = 0; i < length; i++) column[i] = a[i] | (b[i] << 8) | (c[i] << 16) | (d[i] << 24);
        found[name] = column;
      } else {
        found[name] = new Kind(bytes.slice(place, place + size).buffer);
      }
      place += size;
    }
    return found;
  }

  // The first place from `low` on whose value is above (or, if `inclusive`, not below) the limit.
  function search(values, low, high, limit, inclusive) {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (inclusive ? values[middle] >= limit : values[middle] > limit) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function makeRows(columns, data) {
    const count = columns.gap.length;
    data.start = new Float64Array(count);
    data.end = new Float64Array(count);
    data.busy = new Float64Array(count + 1);
    data.name = columns.name;
    data.kind = columns.kind;
    let place = 0, longGap = 0, longDuration = 0;
    data.rows = Array.from(columns.row_count, (rowCount, number) => {
      const row = { lane: columns.row_lane[number], depth: columns.row_depth[number], from: place, to: place + rowCount };
      let time = 0;
      for (; place < row.to; place++) {
        const gap = columns.gap[place] === LARGEST ? columns.long_gap[longGap++] : columns.gap[place];
        const length = columns.duration[place] === LARGEST ? columns.long_duration[longDuration++] : columns.duration[place];
        data.start[place] = time + gap;
        data.end[place] = time = time + gap + length;
        data.busy[place + 1] = data.busy[place] + length;
        if (time > data.high) data.high = time;
      }
      return row;
    });
    data.lanes.forEach((lane) => { lane.rows = []; });
    for (const row of data.rows) data.lanes[row.lane].rows.push(row);
  }

  // Two lists of spans in order, each without overlap, as one.
  function unite(left, right) {
    if (!left.start.length) return right;
    if (!right.start.length) return left;
    const most = left.start.length + right.start.length;
    const start = new Float64Array(most), end = new Float64Array(most);
    let i = 0, j = 0, count = 0;
    while (i < left.start.length || j < right.start.length) {
      const isLeft = j >= right.start.length || (i < left.start.length && left.start[i] <= right.start[j]);
      const from = isLeft ? left.start[i] : right.start[j];
      const to = isLeft ? left.end[i++] : right.end[j++];
      if (count && from <= end[count - 1]) {
        if (to > end[count - 1]) end[count - 1] = to;
      } else { start[count] = from; end[count++] = to; }
    }
    return { start: start.slice(0, count), end: end.slice(0, count) };
  }

  function pick(data, row, isWanted) {
    let count = 0;
    const start = new Float64Array(row.to - row.from), end = new Float64Array(row.to - row.from);
    for (let i = row.from; i < row.to; i++) {
      if (isWanted[data.kind[i]]) { start[count] = data.start[i]; end[count++] = data.end[i]; }
    }
    return { start: start.slice(0, count), end: end.slice(0, count) };
  }

  // When a rank computes and when it communicates, whatever the stream.
  function summarise(data) {
    const communication = data.kinds.indexOf("communication");
    for (const rank of data.ranks) {
      const lanes = data.lanes.slice(...rank.lanes);
      rank.hasDevice = lanes.some((lane) => lane.isDevice && lane.rows.length);
      const parts = { work: new Uint8Array(256), communication: new Uint8Array(256) };
      for (const name of rank.hasDevice ? ["compute", "copies"] : ["operator"]) parts.work[data.kinds.indexOf(name)] = 1;
      parts.communication[communication] = 1;
      for (const [part, isWanted] of Object.entries(parts)) {
        let found = { start: new Float64Array(0), end: new Float64Array(0) };
        for (const lane of lanes) {
          if (lane.isDevice !== rank.hasDevice && part === "work") continue;
          for (const row of lane.rows) found = unite(found, pick(data, row, isWanted));
        }
        found.busy = new Float64Array(found.start.length + 1);
        for (let i = 0; i < found.start.length; i++) found.busy[i + 1] = found.busy[i] + found.end[i] - found.start[i];
        rank[part] = found;
      }
    }
  }

  function joinCollectives(columns, data) {
    const names = ["lane", "start", "duration", "kind", "bytes", "group", "match", "waiting", "transfer"];
    const found = data.collectives = {};
    for (const name of names) found[name] = columns[`collective_${name}`];
    data.collectiveOf = new Int32Array(data.start.length).fill(-1);
    found.event = new Int32Array(found.lane.length).fill(-1);
    found.row = new Int32Array(found.lane.length).fill(0);
    data.matches = [];
    for (let one = 0; one < found.lane.length; one++) {
      for (const row of data.lanes[found.lane[one]].rows) {
        const place = search(data.start, row.from, row.to, found.start[one], true);
        if (place < row.to && data.start[place] === found.start[one] && data.kinds[data.kind[place]] === "communication") {
          data.collectiveOf[place] = one;
          found.event[one] = place;
          found.row[one] = row.depth;
          break;
        }
      }
      const match = found.match[one];
      if (match < 0 || found.event[one] < 0) continue;
      const known = data.matches[match] ??= { members: [], low: Infinity, high: -Infinity, last: one };
      known.members.push(one);
      known.low = Math.min(known.low, found.start[one]);
      known.high = Math.max(known.high, found.start[one] + found.duration[one]);
      if (found.start[one] > found.start[known.last]) known.last = one;
    }
  }

  async function load(about, text) {
    const data = { ...about, high: 1 };
    const columns = split(await inflate(text), about.columns);
    makeRows(columns, data);
    summarise(data);
    joinCollectives(columns, data);
    return data;
  }
  return { load, search };
})();
