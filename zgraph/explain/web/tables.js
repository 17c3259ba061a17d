// ------------------------------------------------------------------------------- plan and memory

function showPlan() {
  document.title = data.title;
  $("title").textContent = $("title").title = data.title;
  $("chips").append(...data.plan.passes.map((name) => {
    const entries = entriesOf(name).map((i) => data.passes[i]);
    const chip = el("button", { type: "button", class: "chip", onclick: () => openPass(name) },
      name, " ", changeCounts(entries));
    return el("li", {}, chip);
  }));
  const axes = data.plan.axes.map((axis) => [`axis ${axis.name}`, plural(axis.ranks, "rank")]);
  $("facts").append(...[...axes, ...data.plan.facts].map(([label, value]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, value))));
}

function showMemory() {
  const { rows, peak_bytes, peak_stage, peak_node } = data.memory;
  const place = findNode(peak_stage, peak_node);
  if (peak_bytes)
    $("peak").append(`peak ${bytes(peak_bytes)} in ${peak_stage}, at `, place
      ? el("button", { type: "button", class: "link mono", id: "peak-node", onclick: () => {
        showProgram(place.program);
        select(place.line, { jump: true });
      } }, peak_node) : el("code", {}, peak_node));
  const stacked = peakRows(rows, peak_bytes), total = sum(stacked.map((row) => row[1])) || 1;
  rows.forEach(([label, size], i) => showShare(label, size, i < stacked.length
    ? { colour: `background: var(--share-${i % 8})`, share: 100 * size / total } : null));
  $("stack").setAttribute("aria-label", stacked.map(([l, n]) => `${l} ${bytes(n)}`).join(", "));
}

/** The first rows, up to those that make up the peak: what follows is alive at other moments. */
function peakRows(rows, peak) {
  let alive = 0;
  const beyond = rows.findIndex((row) => { alive += row[1]; return peak && alive > peak; });
  return beyond < 0 ? rows : rows.slice(0, beyond);
}

function showShare(label, size, part) {
  if (part && part.share) {
    const segment = el("span", { style: part.colour, title: `${label}: ${bytes(size)}` }, label);
    segment.style.width = `${part.share}%`;
    $("stack").append(segment);
  }
  $("shares").append(el("div", {}, el("i", { style: part ? part.colour : "" }),
    el("span", {}, label), el("span", { class: "number", title: `${count(size)} B` }, bytes(size)),
    el("span", { class: "number muted" }, part ? `${part.share.toFixed(1)} %` : "")));
}

/** Where the statement that defines `node` stands: {program, line}, or null. */
function findNode(stage, node) {
  const defines = (line) => line[TEXT].startsWith(`${node}:`) || line[TEXT].startsWith(`${node} `);
  for (const [program, { stage: other, lines }] of data.programs.entries()) {
    const line = other === stage ? lines.findIndex(defines) : -1;
    if (line >= 0) return { program, line };
  }
  return null;
}

// ---------------------------------------------------------------------------------------- tables

const unitButton = (unit) => el("button", { type: "button", class: "link mono",
  title: "Search for this unit", onclick: () => searchFor(unit) }, named(unit));

function showUnits() {
  const heads = ["unit", "parameters", "elements", "bytes per rank", "gathered"];
  const table = $("units-table");
  table.append(el("thead", {}, el("tr", {},
    ...heads.map((text, i) => el("th", { class: i ? "number" : "" }, text)))));
  const body = el("tbody");
  for (const unit of data.plan.units) body.append(...unitRows(unit));
  table.append(body, el("tfoot"));
}

function unitRows(unit) {
  const inside = el("tr", { class: "inside", "data-unit": unit.name, hidden: "" });
  const toggle = el("button", { type: "button", class: "toggle", "aria-expanded": "false",
    "aria-label": `Parameters of ${named(unit.name)}`, onclick: () => {
      const open = toggle.getAttribute("aria-expanded") !== "true";
      toggle.setAttribute("aria-expanded", open);
      if (!inside.firstChild) inside.append(el("td", { colspan: 5 }, parameterTable(unit)));
      inside.hidden = !open;
    } });
  const row = el("tr", { class: "unit", "data-unit": unit.name },
    el("td", {}, toggle, unitButton(unit.name)),
    el("td", { class: "number" }, count(unit.parameters.length)),
    el("td", { class: "number" }, count(unit.numel)),
    bytesCell(unit.shard_bytes), bytesCell(unit.gathered_bytes));
  return [row, inside];
}

function parameterTable(unit) {
  const heads = ["parameter", "shape", "elements", "dtypes", ""];
  const within = (name) =>
    name.startsWith(`${unit.name}.`) ? name.slice(unit.name.length + 1) : name;
  const rows = unit.parameters.map((p) => el("tr", {},
    el("td", { class: "mono", title: p.name }, within(p.name)),
    el("td", { class: "mono" }, `[${p.shape.join(", ")}]`),
    el("td", { class: "number" }, count(p.numel)),
    el("td", { title: `master, compute, reduce: ${p.dtypes}` }, p.dtypes.replace(/float/g, "f")),
    el("td", {}, p.traits)));
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((text, i) =>
    el("th", { class: i === 2 ? "number" : "" }, text)))), el("tbody", {}, ...rows));
}

function filterUnits() {
  for (const row of $("units-table").tBodies[0].rows) {
    const wanted = isWanted(row.dataset.unit);
    if (row.className === "unit") row.hidden = !wanted;
    else row.hidden = !wanted || row.previousSibling
      .querySelector(".toggle").getAttribute("aria-expanded") !== "true";
  }
  const units = data.plan.units.filter((unit) => isWanted(unit.name));
  const total = (key) => sum(units.map((unit) => unit[key]));
  $("units-table").tFoot.replaceChildren(el("tr", {}, el("td", {}, shownOf(units.length)),
    el("td", { class: "number" }, count(sum(units.map((unit) => unit.parameters.length)))),
    el("td", { class: "number" }, count(total("numel"))),
    bytesCell(total("shard_bytes")), el("td", {})));
}

const shownOf = (n) => state.units ? `${n} of ${plural(data.plan.units.length, "unit")}`
  : plural(n, "unit");

/** The table of collectives: a row a unit, a column for each stage, kind and axis. */
const traffic = { columns: [], rows: new Map() };

const columnKey = (item) => JSON.stringify([item.stage, item.kind, item.axis]);

function showCollectives() {
  const stages = ["forward", "backward", "inference"], kinds = ["all-gather", "reduce-scatter"];
  const order = (item) => 10 * stages.indexOf(item.stage) + (kinds.indexOf(item.kind) + 3) % 3;
  const columns = new Map(data.collectives.map((item) => [columnKey(item), item]));
  traffic.columns = [...columns.values()].sort((a, b) => order(a) - order(b));
  for (const item of data.collectives) {
    const row = traffic.rows.get(item.unit) || new Map();
    const cell = row.get(columnKey(item)) || { count: 0, bytes: 0 };
    row.set(columnKey(item), { count: cell.count + item.count, bytes: cell.bytes + item.bytes });
    traffic.rows.set(item.unit, row);
  }
  const table = $("collectives-table");
  const body = [...traffic.rows].map(([unit, row]) => el("tr",
    { class: "unit", "data-unit": unit }, el("td", {}, unitButton(unit)),
    ...traffic.columns.map((column, at) =>
      trafficCell(row.get(columnKey(column)), groupClass(at)))));
  table.append(collectivesHead(), el("tbody", {}, ...body), el("tfoot"));
  $("collectives-note").textContent = trafficByAxis();
}

/** The first column of a stage stands apart from the stage before. */
const groupClass = (at) =>
  !at || traffic.columns[at].stage !== traffic.columns[at - 1].stage ? "group" : "";

function trafficCell(cell, group) {
  if (!cell) return el("td", { class: `number muted ${group}` }, "–");
  return el("td", { class: `number ${group}`, title: `${count(cell.bytes)} B` },
    el("span", { class: "times" }, `${count(cell.count)} ×`), " ",
    el("span", {}, bytes(cell.bytes)));
}

function collectivesHead() {
  const stages = el("tr", { class: "stages" }, el("th"));
  for (const stage of new Set(traffic.columns.map((column) => column.stage))) {
    const width = traffic.columns.filter((column) => column.stage === stage).length;
    stages.append(el("th", { class: "group", colspan: width }, stage));
  }
  const heads = traffic.columns.map((column, at) => el("th", { class: `number ${groupClass(at)}` },
    column.kind, el("br"), column.axis || "one rank"));
  return el("thead", {}, stages, el("tr", {}, el("th", {}, "unit"), ...heads));
}

function trafficByAxis() {
  const step = data.collectives.filter((item) => item.stage !== "inference");
  const axes = [...new Set(step.map((item) => item.axis))];
  const parts = axes.map((axis) => `${axis || "one rank"} ${bytes(sum(
    step.filter((item) => item.axis === axis).map((item) => item.bytes)))}`);
  return `sent per rank and step, over ${parts.join(", over ") || "no axis, nothing"}`;
}

function filterCollectives() {
  for (const row of $("collectives-table").tBodies[0].rows)
    row.hidden = !isWanted(row.dataset.unit);
  const rows = [...traffic.rows].filter(([unit]) => isWanted(unit)).map(([, row]) => row);
  const totals = traffic.columns.map((column, at) => {
    const cells = rows.map((row) => row.get(columnKey(column))).filter(Boolean);
    return trafficCell({ count: sum(cells.map((cell) => cell.count)),
      bytes: sum(cells.map((cell) => cell.bytes)) }, groupClass(at));
  });
  $("collectives-table").tFoot.replaceChildren(el("tr", {}, el("td", {}, "total"), ...totals));
}
