"use strict";

// ---------------------------------------------------------------------------------- small things

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
// Fields of a program's line.
const [TEXT, MODULE, UNIT, KIND, GATHERED, LIVE, START, END] = [0, 1, 2, 3, 4, 5, 6, 7];
const ROW = 18; // pixels, as in the style sheet
const COLLECTIVES = new Set(["gather", "scatter", "reduce"]);

const state = {
  program: -1, // the shown one of data.programs
  units: null, // names that the search found; null without a search
  query: "",
  hits: new Uint8Array(0), // one flag a line of the shown program
  found: [], // the lines flagged, in order
  selected: -1, // a line
  entry: 0, // shown entry of data.passes
};

/** An element; text children are never parsed as HTML. */
function el(tag, options, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const scaled = (value) => value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
const count = (n) => n.toLocaleString("en-GB");
const named = (unit) => unit || "(root)";
const sum = (values) => values.reduce((a, b) => a + b, 0);
const plural = (n, word, many = `${word}s`) => `${count(n)} ${n === 1 ? word : many}`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return at ? `${scaled(n)} ${units[at]}` : `${n} B`;
}

const timeUnit = (us) => us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];

function time(us) {
  const [size, unit] = timeUnit(us);
  return us ? `${scaled(us / size)} ${unit}` : "0";
}

/** A moment, in the unit of `most`, with the digits that tell it from one `step` later. */
function moment(us, most, step) {
  const [size, unit] = timeUnit(most);
  const digits = clamp(Math.ceil(-Math.log10(step / size) - 1e-9), 0, 6);
  return us ? `${(us / size).toFixed(digits)} ${unit}` : "0";
}

const period = (from, to) =>
  `${moment(from, to, (to - from) / 10).split(" ")[0]} – ${moment(to, to, (to - from) / 10)}`;

const bytesCell = (n) => el("td", { class: "number", title: `${count(n)} B` }, bytes(n));

/** The last index whose value is at most `value`, in ascending `values`; -1 for none. */
function lastAtMost(values, value, read = (x) => x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (read(values[middle]) <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

/** Runs `action` once before the next frame, however often it is asked for. */
function onFrame(action) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; action(); });
  };
}

const charWidth = (() => {
  const probe = el("span", { class: "mono" }, "0".repeat(100));
  probe.style.position = "absolute";
  document.body.append(probe);
  const width = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return width;
})();

/** Rows of equal height, of which only those in sight are elements. */
class VirtualList {
  constructor(box, makeRow) {
    this.box = box;
    this.makeRow = makeRow;
    this.size = 0;
    this.shown = el("div", { class: "shown" });
    this.inner = el("div", { class: "inner" }, this.shown);
    box.append(this.inner);
    this.refresh = onFrame(() => this.render());
    box.addEventListener("scroll", this.refresh, { passive: true });
    new ResizeObserver(this.refresh).observe(box);
  }

  /** Shows `size` rows from the top; the longest has `columns` characters besides the margins. */
  show(size, columns) {
    this.size = size;
    this.inner.style.height = `${size * ROW}px`;
    this.inner.style.width = `${Math.ceil(columns * charWidth) + 180}px`;
    this.box.scrollTo(0, 0);
    this.render();
  }

  get top() { return Math.floor(this.box.scrollTop / ROW); }

  render() {
    const first = Math.max(0, this.top - 5);
    const last = Math.min(this.size, this.top + Math.ceil(this.box.clientHeight / ROW) + 6);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.makeRow(i));
    this.shown.style.top = `${first * ROW}px`;
    this.shown.replaceChildren(...rows);
    if (this.rendered) this.rendered();
  }

  /** Brings a row to `part` of the box's height, unless it is well in sight already. */
  reveal(row, part = 0.4) {
    const y = row * ROW, box = this.box;
    if (y < box.scrollTop + 2 * ROW || y > box.scrollTop + box.clientHeight - 3 * ROW)
      box.scrollTop = y - box.clientHeight * part;
    this.render();
  }
}
