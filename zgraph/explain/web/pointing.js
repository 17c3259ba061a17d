// ------------------------------------------------------------------- pointing, zooming, selecting

/** The line under a point: a bar in a lane, or what runs at that time in the memory plot. */
function lineAt(x, y) {
  const { lines, times } = shownProgram();
  if (y >= view.memory - PAD) return lastAtMost(times, toTime(x));
  const lane = view.lanes.find((one) => y >= one.y && y < one.y + one.row * one.rows.length);
  if (!lane) return -1;
  const bars = lane.rows[Math.floor((y - lane.y) / lane.row)];
  const at = lastAtMost(bars, toTime(x), (i) => lines[i][START]);
  const distance = (i) => Math.max(0, toX(lines[i][START]) - x, x - toX(lines[i][END]));
  const near = bars.slice(Math.max(0, at - 1), at + 2).sort((a, b) => distance(a) - distance(b));
  return near.length && distance(near[0]) <= 4 ? near[0] : -1;
}

function zoom(factor, x = view.width / 2) {
  const { span } = shownProgram();
  const size = clamp((view.to - view.from) * factor, Math.min(span, 2), span);
  const at = toTime(x);
  lookAt(at - (at - view.from) * size / (view.to - view.from), size);
}

function lookAt(from, size) {
  view.from = clamp(from, 0, shownProgram().span - size);
  view.to = view.from + size;
  draw();
}

const pan = (pixels) => lookAt(toTime(pixels), view.to - view.from);
const fit = () => lookAt(0, shownProgram().span);

/** Marks a line in the timeline and the listing. */
function select(i, { jump = false, pan: follow = false } = {}) {
  state.selected = i;
  const line = shownProgram().lines[i], size = view.to - view.from;
  const at = BARS[line[KIND]] ? (line[START] + line[END]) / 2 : shownProgram().times[i];
  if ((jump || follow) && (at < view.from || at > view.to)) lookAt(at - size / 2, size);
  const row = shownProgram().rowOf[i];
  if (jump) {
    showWorkspace();
    listing.reveal(row);
  } else listing.refresh();
  showDetail();
  draw();
}

/** Scrolls the page so that timeline and listing stand one above the other. */
function showWorkspace() {
  const box = $("listing").getBoundingClientRect();
  if (box.top < 100 || box.top > window.innerHeight - 200)
    $("timeline").scrollIntoView({ block: "start" });
}

function details(line) {
  const pairs = [["unit", line[UNIT] || "none"], ["module", line[MODULE] || "(root)"]];
  if (line[END] > line[START])
    pairs.push(["time", `${time(line[END] - line[START])}, ${period(line[START], line[END])}`]);
  else pairs.push(["time", `takes none, at ${time(line[START])}`]);
  pairs.push(["alive", `${bytes(line[LIVE])}, gathered ${bytes(line[GATHERED])}`]);
  return pairs;
}

function showDetail() {
  const line = state.selected < 0 ? null : shownProgram().lines[state.selected];
  if (!line) {
    $("detail").textContent =
      "Click a bar to show its statement below; drag to pan, wheel to zoom.";
    return;
  }
  const parts = details(line).filter(([label]) => label !== "module")
    .map(([label, value]) => ` · ${label} ${value}`);
  $("detail").replaceChildren(el("b", { class: "mono" }, oneLine(line[TEXT]).split(" = ")[0]),
    ...parts);
}

function showTip(i, event) {
  $("tip").hidden = i < 0;
  if (i < 0) return;
  const line = shownProgram().lines[i];
  const text = oneLine(line[TEXT]);
  $("tip").replaceChildren(el("code", {}, text.length > 300 ? `${text.slice(0, 300)}…` : text),
    el("dl", {}, ...details(line).flatMap(([label, value]) =>
      [el("dt", {}, label), el("dd", {}, value)])));
  const box = $("tip").getBoundingClientRect();
  const above = event.clientY + 18 + box.height > window.innerHeight;
  $("tip").style.left = `${clamp(event.clientX + 14, 4, window.innerWidth - box.width - 8)}px`;
  $("tip").style.top = `${event.clientY + (above ? -box.height - 12 : 18)}px`;
}

function hover(event) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left;
  $("cross").hidden = false;
  $("cross").style.left = `${canvas.offsetLeft + x}px`;
  showTip(lineAt(x, event.clientY - box.top), event);
}

function watchPointer() {
  let drag = null, armed = false;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    armed = true;
    if (!drag) { hover(event); return; }
    const distance = event.clientX - drag.x;
    if (!drag.moved && Math.abs(distance) < 4) return;
    drag.moved = true;
    canvas.classList.add("panning");
    $("tip").hidden = $("cross").hidden = true;
    const size = view.to - view.from;
    lookAt(drag.from - distance / view.width * size, size);
  });
  canvas.addEventListener("pointerup", (event) => {
    const box = canvas.getBoundingClientRect();
    const i = lineAt(event.clientX - box.left, event.clientY - box.top);
    if (drag && !drag.moved && i >= 0) { $("tip").hidden = true; select(i, { jump: true }); }
    drag = null;
    canvas.classList.remove("panning");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = $("cross").hidden = true; });
  // Someone who scrolls the page past the timeline does not mean to zoom it: the wheel zooms only
  // once the pointer has moved over it since.
  window.addEventListener("scroll", () => { armed = false; $("tip").hidden = true; },
    { passive: true });
  canvas.addEventListener("wheel", (event) => wheel(event, armed), { passive: false });
}

function wheel(event, armed) {
  const whole = view.to - view.from >= shownProgram().span;
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (!armed || (whole && !sideways && event.deltaY > 0)) return;
  event.preventDefault();
  if (sideways) pan(event.deltaX || event.deltaY);
  else zoom(1.0018 ** event.deltaY, event.offsetX);
  hover(event);
}

/** Selects the bar `by` bars further in program order; the first in sight without a selection. */
function stepBar(by) {
  const { bars, lines } = shownProgram();
  if (!bars.length) return;
  const at = state.selected < 0 ? bars.findIndex((i) => lines[i][START] >= view.from) - by
    : lastAtMost(bars, by > 0 ? state.selected : state.selected - 1) - (by > 0 ? 0 : -1);
  const next = bars[clamp(at + by, 0, bars.length - 1)];
  select(next, { pan: true });
  listing.reveal(shownProgram().rowOf[next]);
}

function plotKey(event) {
  const side = event.key === "ArrowLeft" ? -1 : 1;
  const centre = state.selected < 0 ? view.width / 2
    : clamp(toX(shownProgram().lines[state.selected][START]), 0, view.width);
  const actions = {
    ArrowLeft: () => event.shiftKey ? pan(-view.width / 4) : stepBar(side),
    ArrowRight: () => event.shiftKey ? pan(view.width / 4) : stepBar(side),
    "+": () => zoom(0.5, centre), "=": () => zoom(0.5, centre), "-": () => zoom(2, centre),
    0: fit, Enter: () => state.selected >= 0 && select(state.selected, { jump: true }),
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  actions[event.key]();
}

function showPeak() {
  const { peak, span, times } = shownProgram();
  const size = Math.min(view.to - view.from, span / 20);
  lookAt(times[peak] - size / 2, size);
  select(peak, { jump: true });
}
