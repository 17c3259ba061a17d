// ---------------------------------------------------------------------------------------- passes

const diff = new VirtualList($("diff"), diffRow);
const TAGS = { "+": "plus", "-": "minus", "@": "head" };

/** Entries of a pass: those of its very name, or of its name without arguments. */
function entriesOf(name) {
  const bare = (text) => text.split(/[{(]/)[0];
  const all = [...data.passes.keys()];
  const same = all.filter((i) => data.passes[i].name === name);
  return same.length ? same : all.filter((i) => data.passes[i].name === bare(name));
}

function changeCounts(entries) {
  const counts = el("span", { class: "counts" });
  for (const [key, sign, kind] of [["added", "+", "plus"], ["removed", "−", "minus"],
    ["moved", "↕", "muted"]]) {
    const total = sum(entries.map((entry) => entry[key]));
    if (total) counts.append(counts.firstChild ? " " : "",
      el("span", { class: kind, title: key }, `${sign}${count(total)}`));
  }
  if (!counts.firstChild) counts.append(entries.length
    ? el("span", { class: "none", title: "changed nothing" }, "=")
    : el("span", { class: "none", title: "works on the plan only" }, "plan"));
  return counts;
}

function showEntries() {
  const others = data.passes.map((entry) => entry.name).filter((name) => !data.plan.passes.some(
    (planned) => entriesOf(planned).some((i) => data.passes[i].name === name)));
  for (const name of [...new Set([...data.plan.passes, ...others])]) {
    const found = entriesOf(name);
    $("entries").append(el("h3", {}, name), ...found.map((i) => {
      const entry = data.passes[i];
      return el("button", { type: "button", "data-entry": i, onclick: () => showEntry(i) },
        el("span", {}, entryPlace(entry)), changeCounts([entry]));
    }));
    if (!found.length) $("entries").append(el("div", { class: "muted",
      style: "padding: 1px 10px 1px 22px" }, "works on the plan only"));
  }
  $("passes-note").textContent = plural(data.plan.passes.length, "pass", "passes");
}

const entryPlace = (entry) => entry.program || entry.stage;

/** Shows the first change of a pass, where the shown program has one there. */
function openPass(name) {
  const found = entriesOf(name);
  const changed = found.filter((i) => data.passes[i].diff.length);
  const shown = data.programs.length ? data.programs[state.program].name : "";
  const here = changed.find((i) => data.passes[i].program === shown);
  if (found.length) showEntry(here ?? changed[0] ?? found[0]);
  $("passes").scrollIntoView({ block: "start" });
  const button = $("entries").querySelector('[aria-pressed="true"]');
  if (found.length && button) button.focus();
}

function showEntry(i) {
  const entry = data.passes[i];
  state.entry = i;
  for (const button of $("entries").querySelectorAll("button"))
    button.setAttribute("aria-pressed", Number(button.dataset.entry) === i);
  $("pass-name").textContent = entry.name;
  const place = entryPlace(entry);
  $("pass-note").textContent =
    place === entry.stage ? `${place} graph` : `${place} (${entry.stage})`;
  $("pass-counts").replaceChildren(changeCounts([entry]));
  const empty = !entry.diff.length;
  $("unchanged").hidden = !empty;
  $("unchanged").textContent = `${entry.name} changed nothing in this graph.`;
  $("diff").hidden = empty;
  $("hunk-previous").disabled = $("hunk-next").disabled = empty;
  const columns = entry.diff.reduce((most, [, text]) => Math.max(most, text.length), 0);
  diff.show(entry.diff.length, columns);
}

function diffRow(at) {
  const [tag, text] = data.passes[state.entry].diff[at];
  const row = el("div", { class: `row ${TAGS[tag] || ""}`.trim() },
    el("span", { class: "gutter" }, tag));
  const [, code, alive] = /^(.*\S)\s+\| ([\d,]+)$/.exec(oneLine(text)) || [null, oneLine(text)];
  row.append(el("span", { class: "text" }, code));
  if (alive) row.append(el("span", { class: "bytes", title: `gathered bytes alive: ${alive}` },
    bytes(Number(alive.replaceAll(",", "")))));
  return row;
}

/** Scrolls the diff to the header of the next hunk, or of the one before. */
function goToHunk(by) {
  const heads = [];
  data.passes[state.entry].diff.forEach(([tag], at) => { if (tag === "@") heads.push(at); });
  const next = by > 0 ? heads.find((at) => at > diff.top) : heads.findLast((at) => at < diff.top);
  if (next !== undefined) diff.box.scrollTop = next * ROW;
}
