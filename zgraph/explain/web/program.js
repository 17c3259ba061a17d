// ------------------------------------------------------------------------- what a program becomes

const LANES = [
  ["compute", new Set(["compute", "pack", "wait"])], ["all-gather", new Set(["gather"])],
  ["reduce-scatter", new Set(["scatter"])], ["all-reduce", new Set(["reduce"])],
];
const prepared = new Map();

/** What the views of the shown program need, worked out once a program. */
function shownProgram() {
  const program = data.programs[state.program];
  if (!prepared.has(program)) prepared.set(program, prepare(program.lines));
  return prepared.get(program);
}

function prepare(lines) {
  const lanes = LANES.map(([name, kinds]) => {
    const bars = [];
    lines.forEach((line, i) => {
      if (kinds.has(line[KIND]) && line[END] > line[START]) bars.push(i);
    });
    bars.sort((a, b) => lines[a][START] - lines[b][START]);
    return { name, bars, rows: stackBars(lines, bars, name === "compute" ? 1 : 4) };
  }).filter((lane) => lane.bars.length);
  let span = 0, peak = 0, columns = 0;
  lines.forEach((line, i) => {
    span = Math.max(span, line[END]);
    columns = Math.max(columns, line[TEXT].length);
    if (line[LIVE] > lines[peak][LIVE]) peak = i;
  });
  const bars = lanes.flatMap((lane) => lane.bars).sort((a, b) => a - b);
  return { lines, lanes, bars, peak, columns, span: span || 1, times: computeTimes(lines),
    strip: unitStrip(lines, lanes), ...listingRows(lines) };
}

/** Bars that run at once lie one below the other; where `limit` rows are full they overlap. */
function stackBars(lines, bars, limit) {
  const rows = [], ends = [];
  for (const bar of bars) {
    let row = ends.findIndex((end) => end <= lines[bar][START] + 1e-6);
    if (row < 0) row = ends.length < limit ? ends.length : ends.indexOf(Math.min(...ends));
    (rows[row] = rows[row] || []).push(bar);
    ends[row] = lines[bar][END];
  }
  return rows;
}

/** When compute reaches each line. A collective's own start may be later: it queues. */
function computeTimes(lines) {
  let now = 0;
  return Float64Array.from(lines, (line) => {
    if (!COLLECTIVES.has(line[KIND])) now = Math.max(now, line[START]);
    return now;
  });
}

/** Runs of compute bars of one unit: [unit, start, end]. */
function unitStrip(lines, lanes) {
  const strip = [];
  for (const bar of lanes.length && lanes[0].name === "compute" ? lanes[0].bars : []) {
    const line = lines[bar], last = strip[strip.length - 1];
    if (last && (last[0] === line[UNIT] || !line[UNIT])) last[2] = line[END];
    else if (line[UNIT]) strip.push([line[UNIT], line[START], line[END]]);
  }
  return strip;
}

/** Rows of the listing: a line's index, or -1 - index for the header above that line. */
function listingRows(lines) {
  const rows = [], rowOf = new Int32Array(lines.length);
  lines.forEach((line, i) => {
    if (!i || line[MODULE] !== lines[i - 1][MODULE]) rows.push(-1 - i);
    rowOf[i] = rows.push(i) - 1;
  });
  return { rows, rowOf };
}

function showProgram(at) {
  if (at === state.program) return;
  state.program = at;
  state.selected = -1;
  [...$("programs").children].forEach((b, i) => b.setAttribute("aria-pressed", i === at));
  const program = shownProgram(), name = data.programs[at].name;
  $("timeline-h").textContent = `Timeline: ${name}`;
  $("program-h").textContent = `Program: ${name}`;
  $("program-note").textContent = plural(program.lines.length, "statement");
  listing.show(program.rows.length, program.columns);
  layOutTimeline();
  findMatches();
  fit();
  showDetail();
}

// --------------------------------------------------------------------------------------- listing

const listing = new VirtualList($("listing"), listingRow);
listing.rendered = () => {
  const row = data.programs.length ? shownProgram().rows[listing.top] : undefined;
  const line = row === undefined ? null : shownProgram().lines[row < 0 ? -1 - row : row];
  $("module").textContent = line ? line[MODULE] || "(root)" : "";
};

function listingRow(at) {
  const { lines, rows } = shownProgram();
  const i = rows[at];
  if (i < 0)
    return el("div", { class: "row head" }, el("span", { class: "gutter" }),
      el("span", { class: "text" }, oneLine(lines[-1 - i][MODULE]) || "(root)"));
  const line = lines[i];
  const same = i > 0 && lines[i - 1][GATHERED] === line[GATHERED];
  const gutter = el("span", { class: "gutter" }, String(i + 1));
  gutter.style.borderRightColor = BARS[line[KIND]] ? `var(--${line[KIND]})` : "";
  const classes = ["row", state.hits[i] ? "hit" : "", state.selected === i ? "selected" : ""];
  return el("div", { class: classes.join(" ").trim(), "data-line": i,
    onclick: () => select(i, { pan: true }) }, gutter,
    el("span", { class: "text" }, ...statement(line)),
    el("span", { class: same ? "bytes same" : "bytes", title: `${count(line[GATHERED])} B` },
      line[GATHERED] ? bytes(line[GATHERED]) : "0"));
}

const oneLine = (text) => text.replace(/[\r\n\u2028\u2029]+/g, " ");

/** A statement's text: name, type, code, note. */
function statement(line) {
  const text = oneLine(line[TEXT]);
  const at = text.indexOf("  # ");
  const code = at < 0 ? text : text.slice(0, at);
  const parts = /^([\w.$]+)(: [^=]*?)( = .*)$/.exec(code);
  const kind = { class: `k-${line[KIND]}` };
  const spans = parts
    ? [parts[1], el("span", { class: "type" }, parts[2]), el("span", kind, parts[3])]
    : [el("span", kind, code)];
  if (at >= 0) spans.push(el("span", { class: "note" }, text.slice(at)));
  return spans;
}
