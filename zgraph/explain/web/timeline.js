// -------------------------------------------------------------------------------------- timeline

const AXIS = 19, MARKS = 4, STRIP = 17, MEMORY = 116, PAD = 5;
const BARS = { compute: 1, pack: 1, wait: 1, gather: 1, scatter: 1, reduce: 1 };
const canvas = $("canvas"), pen = canvas.getContext("2d");
const view = { from: 0, to: 1, width: 1, height: 1, lanes: [], memory: 0, colours: {} };

const toX = (us) => (us - view.from) / (view.to - view.from) * view.width;
const toTime = (x) => view.from + x / view.width * (view.to - view.from);

/** Where lanes lie, and their labels. */
function layOutTimeline() {
  const { lanes, strip } = shownProgram();
  const labels = [];
  const label = (text, y, height) => {
    const node = el("div", { "data-lane": text }, text);
    Object.assign(node.style, { top: `${y}px`, height: `${height}px` });
    labels.push(node);
  };
  let y = AXIS + MARKS + PAD;
  view.strip = strip.length ? y : -1;
  if (strip.length) { label("unit", y, STRIP - 3); y += STRIP; }
  view.lanes = lanes.map((lane) => {
    const row = lane.name === "compute" ? 24 : 15;
    const placed = { ...lane, y, row };
    label(lane.name, y, row * lane.rows.length - 2);
    y += row * lane.rows.length + PAD;
    return placed;
  });
  view.memory = y + PAD;
  label("live memory", view.memory, 16);
  labels.push(...memoryTicks().map((at) => tickLabel(at)));
  view.height = y + PAD + MEMORY + 1;
  canvas.style.height = `${view.height}px`;
  $("lanes").replaceChildren(...labels);
  const kinds = { compute: "compute", wait: "stalled", live: "live bytes", gather: "gathered" };
  $("legend").replaceChildren(...Object.entries(kinds).map(([kind, text]) =>
    el("span", {}, el("i", { style: `background: var(--${kind})` }), text)));
}

/** Where byte counts on the memory plot lie: a few powers of two. */
function memoryTicks() {
  const { lines, peak } = shownProgram();
  const most = lines.length ? lines[peak][LIVE] : 0;
  const step = 2 ** Math.ceil(Math.log2(Math.max(most, 1) / 3.5));
  const ticks = [];
  for (let at = step; at <= most; at += step) ticks.push(at);
  return ticks;
}

const memoryY = (size) => {
  const { lines, peak } = shownProgram();
  return view.memory + MEMORY - size * (MEMORY - 22) / Math.max(1, lines[peak][LIVE]);
};

function tickLabel(at) {
  const node = el("div", { class: "tick" }, bytes(at));
  Object.assign(node.style, { top: `${memoryY(at) - 7}px`, height: "14px" });
  return node;
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [...Object.keys(BARS), "compute-alt", "live", "ink", "muted", "line", "soft",
    "panel", "accent", "hit-line", "on-bar"])
    view.colours[name] = style.getPropertyValue(`--${name}`).trim();
}

const draw = onFrame(() => {
  if (!data.programs.length) return;
  const ratio = window.devicePixelRatio || 1;
  view.width = canvas.clientWidth || 1;
  canvas.width = Math.round(view.width * ratio);
  canvas.height = Math.round(view.height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, view.width, view.height);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  drawAxis();
  drawMemory();
  drawStrip();
  for (const lane of view.lanes) drawLane(lane);
  drawMarks();
  drawSelection();
  $("range").textContent = period(view.from, view.to);
  $("range").title = `of ${time(shownProgram().span)}`;
});

function drawAxis() {
  const rough = (view.to - view.from) / Math.max(2, view.width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  pen.textAlign = "left";
  for (let at = Math.ceil(view.from / step); at * step <= view.to; at++) {
    const x = Math.round(toX(at * step)) + 0.5;
    pen.fillStyle = view.colours.soft;
    pen.fillRect(x - 0.5, 0, 1, view.height);
    pen.fillStyle = view.colours.muted;
    pen.fillText(moment(at * step, view.to, step), x + 3, AXIS / 2 + 1);
  }
}

/** `text` within `width` pixels, or nothing where it would not say anything. */
function fitted(text, width) {
  const needed = pen.measureText(text).width, room = width - 7;
  if (needed <= room) return text;
  const letters = Math.floor(text.length * room / needed) - 1;
  return letters < 3 ? "" : `${text.slice(0, letters)}…`;
}

function drawStrip() {
  shownProgram().strip.forEach(([unit, start, end], i) => {
    const x = toX(start), width = toX(end) - x;
    if (x > view.width || x + width < 0) return;
    const hit = state.units && state.units.has(unit);
    pen.globalAlpha = state.query && !hit ? 0.35 : 1;
    pen.fillStyle = hit ? view.colours["hit-line"] : view.colours[i % 2 ? "line" : "soft"];
    pen.fillRect(x, view.strip, Math.max(width, 0.5), STRIP - 3);
    const left = Math.max(x, 0);
    pen.fillStyle = hit ? view.colours["on-bar"] : view.colours.ink;
    pen.fillText(fitted(named(unit), Math.min(x + width, view.width) - left), left + 3,
      view.strip + STRIP / 2 - 1);
    pen.globalAlpha = 1;
  });
}

/** Bars of a lane: dimmed ones first, then stalls and matches, so that neither hides. */
function drawLane(lane) {
  const { lines } = shownProgram();
  lane.rows.forEach((bars, at) => {
    const y = lane.y + at * lane.row;
    const layers = state.query
      ? [(i) => !state.hits[i], (i) => state.hits[i]]
      : [(i) => lines[i][KIND] !== "wait", (i) => lines[i][KIND] === "wait"];
    layers.forEach((belongs, layer) => {
      pen.globalAlpha = state.query && layer === 0 ? 0.2 : 1;
      drawBars(bars, belongs, y, lane.row - 2);
    });
    pen.globalAlpha = 1;
  });
}

function drawBars(bars, belongs, y, height) {
  const { lines } = shownProgram();
  let drawn = -1; // right edge so far: a bar that ends before it would not be seen
  for (const i of bars) {
    const line = lines[i];
    if (line[END] < view.from || line[START] > view.to || !belongs(i)) continue;
    const x = toX(line[START]), end = Math.max(toX(line[END]), x + 1);
    if (end - drawn < 0.4) continue;
    drawn = end;
    const gap = end - x > 3 ? 0.6 : 0;
    pen.fillStyle = view.colours[barColour(line)];
    pen.fillRect(x, y, end - x - gap, height);
    if (end - x < 36) continue;
    const left = Math.max(x, 0);
    const text = COLLECTIVES.has(line[KIND]) ? named(line[UNIT]) : line[TEXT].split(":")[0];
    pen.fillStyle = view.colours["on-bar"];
    pen.fillText(fitted(text, Math.min(end, view.width) - left), left + 3, y + height / 2 + 0.5);
  }
}

/** Compute changes its shade from unit to unit, so that blocks can be told apart. */
function barColour(line) {
  if (line[KIND] !== "compute") return line[KIND];
  return line[UNIT] && unitIndex.get(line[UNIT]) % 2 ? "compute-alt" : "compute";
}

function drawMarks() {
  if (!state.query) return;
  const { lines } = shownProgram();
  pen.fillStyle = view.colours["hit-line"];
  let drawn = -1;
  for (const i of state.found) {
    const x = toX(lines[i][START]), end = Math.max(toX(lines[i][END]), x + 2);
    if (end <= drawn || end < 0 || x > view.width) continue;
    pen.fillRect(x, AXIS, end - x, MARKS);
    drawn = end;
  }
}

/** Most live and gathered bytes in each pixel's time. */
function memoryColumns() {
  const { lines, times } = shownProgram();
  const width = Math.ceil(view.width);
  const live = new Float64Array(width), gathered = new Float64Array(width);
  let next = lastAtMost(times, view.from) + 1;
  let current = next > 0 ? lines[next - 1] : null;
  for (let x = 0; x < width; x++) {
    live[x] = current ? current[LIVE] : 0;
    gathered[x] = current ? current[GATHERED] : 0;
    for (const until = toTime(x + 1); next < lines.length && times[next] < until; next++) {
      current = lines[next];
      live[x] = Math.max(live[x], current[LIVE]);
      gathered[x] = Math.max(gathered[x], current[GATHERED]);
    }
  }
  return { live, gathered };
}

function drawMemory() {
  const { lines, peak } = shownProgram();
  const { live, gathered } = memoryColumns();
  drawArea(live, view.colours.live, 0.5);
  drawArea(gathered, view.colours.gather, 0.75);
  pen.fillStyle = view.colours.line;
  for (const at of memoryTicks()) pen.fillRect(0, Math.round(memoryY(at)), view.width, 1);
  pen.fillRect(0, view.memory - PAD, view.width, 1);
  if (lines.length && lines[peak][LIVE]) drawPeak(memoryY(lines[peak][LIVE]));
}

function drawArea(values, colour, alpha) {
  const floor = view.memory + MEMORY;
  pen.globalAlpha = alpha;
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(0, floor);
  values.forEach((value, x) => {
    pen.lineTo(x, memoryY(value));
    pen.lineTo(x + 1, memoryY(value));
  });
  pen.lineTo(values.length, floor);
  pen.fill();
  pen.globalAlpha = 1;
}

function drawPeak(y) {
  const { lines, peak, times } = shownProgram();
  const x = toX(times[peak]);
  if (x < 0 || x > view.width) return;
  const text = `peak ${bytes(lines[peak][LIVE])}`;
  const right = x + pen.measureText(text).width + 14 < view.width;
  pen.fillStyle = view.colours.wait;
  pen.beginPath();
  pen.arc(clamp(x, 3, view.width - 3), y, 3.5, 0, 7);
  pen.fill();
  pen.fillStyle = view.colours.ink;
  pen.textAlign = right ? "left" : "right";
  pen.fillText(text, x + (right ? 8 : -8), y - 7);
  pen.textAlign = "left";
}

/** Where a line's bar lies: {x, y, width, height}, or null for a line without a bar. */
function barBox(i) {
  const line = shownProgram().lines[i];
  for (const lane of view.lanes)
    for (const [at, bars] of lane.rows.entries())
      if (bars.includes(i)) {
        const x = toX(line[START]), y = lane.y + at * lane.row;
        return { x, y, width: Math.max(toX(line[END]) - x, 1), height: lane.row - 2 };
      }
  return null;
}

function drawSelection() {
  if (state.selected < 0) return;
  const box = barBox(state.selected);
  const x = box ? box.x : toX(shownProgram().times[state.selected]);
  if (x > view.width || x + (box ? box.width : 0) < 0) return;
  pen.fillStyle = view.colours.accent;
  pen.fillRect(clamp(x, 0, view.width - 1), AXIS, 1, view.height);
  pen.strokeStyle = view.colours.ink;
  pen.lineWidth = 2;
  if (box) pen.strokeRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
}
