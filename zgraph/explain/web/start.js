// ----------------------------------------------------------------------------------------- start

function watchButtons() {
  $("next").addEventListener("click", () => goToMatch(1));
  $("previous").addEventListener("click", () => goToMatch(-1));
  $("hunk-next").addEventListener("click", () => goToHunk(1));
  $("hunk-previous").addEventListener("click", () => goToHunk(-1));
  if (!data.programs.length) return;
  $("zoom-in").addEventListener("click", () => zoom(0.5));
  $("zoom-out").addEventListener("click", () => zoom(2));
  $("fit").addEventListener("click", fit);
  $("to-peak").addEventListener("click", showPeak);
  $("plot").addEventListener("keydown", plotKey);
  watchPointer();
}

function showProgramButtons() {
  $("assumptions").textContent = data.assumptions;
  $("programs").append(...data.programs.map((program, i) => el("button",
    { type: "button", onclick: () => showProgram(i) }, program.name)));
  const none = !data.programs.length;
  $("timeline").hidden = $("program").hidden = none;
}

function start() {
  showPlan();
  showMemory();
  showUnits();
  showCollectives();
  showProgramButtons();
  showEntries();
  $("explorer").hidden = !data.passes.length;
  if (data.passes.length)
    showEntry(Math.max(0, data.passes.findIndex((entry) => entry.diff.length)));
  readColours();
  if (data.programs.length) showProgram(0);
  search();
  watchKeys();
  watchButtons();
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    draw();
  });
  // Two frames on, everything has been painted once: the time is that of opening the page, in ms.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = Math.round(performance.now());
  }));
}

start();
