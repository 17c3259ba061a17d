// ---------------------------------------------------------------------------------------- search

const unitIndex = new Map();
for (const unit of data.plan.units) unitIndex.set(unit.name, unitIndex.size);
for (const item of data.collectives)
  if (!unitIndex.has(item.unit)) unitIndex.set(item.unit, unitIndex.size);

const isWanted = (unit) => !state.units || state.units.has(unit);

function searchFor(text) {
  $("query").value = text;
  search();
}

function search() {
  state.query = $("query").value.trim().toLowerCase();
  const names = [...unitIndex.keys()].filter((name) => name.toLowerCase().includes(state.query));
  const exact = names.filter((name) => name.toLowerCase() === state.query);
  state.units = state.query ? new Set(exact.length ? exact : names) : null;
  filterUnits();
  filterCollectives();
  findMatches();
}

/** Lines of the shown program that belong to the units found, or contain the text sought. */
function findMatches() {
  state.found = [];
  if (!data.programs.length) return;
  const { lines } = shownProgram();
  const byUnit = state.units && state.units.size > 0;
  const contains = (text) => text.toLowerCase().includes(state.query);
  state.hits = Uint8Array.from(lines, (line) => state.query && (byUnit
    ? state.units.has(line[UNIT]) : contains(line[TEXT]) || contains(line[MODULE])) ? 1 : 0);
  state.hits.forEach((hit, i) => { if (hit) state.found.push(i); });
  showMatches();
  listing.refresh();
  draw();
}

function showMatches() {
  const at = state.found.indexOf(state.selected);
  const total = plural(state.found.length, "line");
  $("matches").textContent = !state.query ? ""
    : at < 0 ? total : `${count(at + 1)} of ${count(state.found.length)}`;
  $("previous").disabled = $("next").disabled = !state.found.length;
}

/** Goes to the next match after the selection, or the one before it; round at the ends. */
function goToMatch(by) {
  const { found, selected } = state;
  if (!found.length) return;
  const before = lastAtMost(found, by > 0 ? selected : selected - 1);
  const at = by > 0 ? before + 1 : selected < 0 ? -1 : before;
  select(found[(at + found.length) % found.length], { jump: true });
  showMatches();
}

function watchKeys() {
  $("query").addEventListener("input", search);
  $("query").addEventListener("keydown", (event) => {
    if (event.key === "Enter") goToMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") { searchFor(""); $("query").blur(); }
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target === $("query") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { event.preventDefault(); $("query").focus(); $("query").select(); }
    else if (event.key === "n") goToMatch(1);
    else if (event.key === "N") goToMatch(-1);
  });
}
