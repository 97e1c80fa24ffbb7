"use strict";
// Elements are made here, and texts of a run are only ever text in them: nothing of a run is parsed as HTML or run.

const HELD = document.getElementById("content");
const STORED = HELD && JSON.parse(HELD.textContent); // in a report, all that there is to show
const PAGE = document.getElementById("page");
const POLL_MS = 2000, CHUNK_TOKENS = 200, FIRST_CHUNKS = 4, MOST_SEGMENTS = 400, FIRST_STEPS = 200;
const COLOURS = 6;
const TITLES = {
  "rollout/reward_mean": "reward", "rollout/correct_ratio": "right answers", "train/loss": "loss",
  "train/grad_norm": "gradient norm", "train/entropy": "entropy, nats", "train/mismatch_kl": "KL of engine and trainer, nats",
  "train/reference_kl": "KL to the reference, nats", "rollout/response_length_mean": "tokens a response",
  "rollout/truncated_ratio": "cut off", "rollout/staleness_mean": "staleness, versions",
  "rollout/groups_dropped": "groups dropped", "perf/tokens_per_second": "tokens a second",
};
const MODES = { mask: "mask", logprob: "log-probability", version: "policy version", advantage: "advantage" };
const ONLY = { "": "all samples", wrong: "wrong", right: "right", kept: "kept", dropped: "dropped", truncated: "cut off", failed: "failed" };
const ORDERS = { "": "in order", worst: "worst first" };
const FEW_ROWS = 200, MOST_ROWS = 10_000; // more are given by no viewer
const KEYS = [["j k ↓ ↑", "next and previous row or sample"], ["Enter", "open the row"], ["Esc ←", "back to where it belongs"],
  ["/", "search"], ["1 2 3 4", "tokens by " + Object.values(MODES).join(", ")], ["t", "dark or light"], ["?", "this list"]];
const MARKS = { yes: ["✓", "good"], no: ["✗", "bad"] };

let view = null; // what is shown: { back, refresh, body, move }
let mode = "mask";
let turn = 0; // counts routes, so that an answer that comes late is not shown
const places = new Map(); // by hash: where the page was left
let lastList = { run: "", ids: [] }; // samples in the order of the list that one was opened from

// ---- making elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const link = (parts, ...children) => make("a", { href: address(parts) }, ...children);
const address = (parts, query = {}) => {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return "#/" + parts.map(encodeURIComponent).join("/") + (words ? "?" + words : "");
};
function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(1) : value.toLocaleString("en", { maximumSignificantDigits: size >= 100 ? digits + 1 : digits });
}
const percent = (value) => (value === null || value === undefined ? "-" : (100 * value).toFixed(0) + " %");
const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const chooser = (options, value, label, onchange) => {
  const found = make("select", { "aria-label": label, onchange: () => onchange(found.value) });
  for (const [key, text] of Object.entries(options)) found.append(make("option", { value: key }, text));
  found.value = value;
  return found;
};

// ---- asking

async function ask(path, parameters = {}) {
  if (STORED) return stored(path, parameters);
  const words = Object.entries(parameters).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const reply = await fetch(`api/${path}?${new URLSearchParams(words)}`);
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  return answer;
}

function stored(path, { run, id, filter, order }) {
  if (path === "runs") return STORED.runs;
  const found = path === "run" ? STORED.overviews[run] : STORED.stored[run];
  if (!found) throw new Error(STORED.runs.find((each) => each.name === run)?.problem || `this file has no run ${run}`);
  if (path === "run") return found;
  if (path === "sample" && !found.samples[id]) throw new Error("this sample was left out of the file");
  if (path === "sample") return found.samples[id];
  const rows = found.rows.filter((row) => filter.every((text) => holds(text, row, found.samples[row.id])));
  const inOrder = (one, other) => other.step - one.step || one.group - other.group || one.member - other.member;
  return { rows: rows.sort(order ? (one, other) => (one.reward ?? Infinity) - (other.reward ?? Infinity) : inOrder), more: false };
}

// A file has no server that reads filters: it knows the words of the choice, steps, and texts of prompts and responses.
function holds(text, row, sample) {
  const unsaid = row.correct === "undefined" && row.step !== null && row.reward !== null; // then a reward of 1 is right
  const is = { "": true, wrong: row.correct === "no" || (unsaid && row.reward < 1), right: row.correct === "yes" || (unsaid && row.reward >= 1), kept: !row.drop_reason, dropped: !!row.drop_reason, truncated: row.status === text, failed: row.error || row.status === text };
  if (Object.hasOwn(is, text)) return is[text];
  if (text.startsWith("step=")) return row.step === Number(text.slice(5));
  return (row.question + "\n" + (sample.response ?? "")).toLowerCase().includes(text.toLowerCase());
}

// ---- charts

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6 && found.length <= 2 * count; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : +at.toPrecision(12));
  return found;
}

function chart(title, lines, key = title) {
  const [width, height, left, right, top, bottom] = [360, 170, 46, 10, 8, 22];
  const values = lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])]);
  let low = Math.min(...values), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 && low - room < 0 ? Math.min(0, low) : low - room, high + room];
  const first = Math.min(...lines.map((line) => line.x[0])), last = Math.max(...lines.map((line) => line.x.at(-1)));
  const x = (at) => left + ((at - first) / (last - first || 1)) * (width - left - right);
  const y = (at) => top + (1 - (at - low) / (high - low)) * (height - top - bottom);
  const path = (xs, ys) => xs.map((at, n) => `${n ? "L" : "M"}${x(at).toFixed(1)} ${y(ys[n]).toFixed(1)}`).join("");
  const told = make("span", { class: "soft" });
  const say = (at) => {
    const near = (line) => line.x.reduce((best, each, n) => (Math.abs(each - at) < Math.abs(line.x[best] - at) ? n : best), 0);
    const shown = lines.map((line) => (at === null ? line.x.length - 1 : near(line)));
    const where = at === null ? "" : ` at ${lines[0].x[shown[0]]}`;
    told.textContent = lines.map((line, n) => number(line.y[shown[n]])).join(", ") + where;
    return lines[0].x[shown[0]];
  };
  say(null);
  const marker = draw("path", { class: "at", visibility: "hidden" });
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${told.textContent} at last` });
  for (const tick of ticks(low, high, 6)) {
    svg.append(draw("path", { class: "grid", d: `M${left} ${y(tick)}H${width - right}` }), draw("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of first === last ? [first] : ticks(first, last, 4).filter(Number.isInteger)) svg.append(draw("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, number(tick)));
  lines.forEach((line, n) => {
    const colour = `var(--c${(line.colour ?? n) % COLOURS})`;
    if (line.low) {
      const band = draw("path", { d: path(line.x, line.high) + path([...line.x].reverse(), [...line.low].reverse()).replace("M", "L") + "Z", opacity: 0.15 });
      band.style.fill = colour;
      svg.append(band);
    }
    const curve = line.x.length > 1 ? draw("path", { class: "curve", d: path(line.x, line.y) }) : draw("circle", { r: 3, cx: x(line.x[0]), cy: y(line.y[0]) });
    curve.style[line.x.length > 1 ? "stroke" : "fill"] = colour;
    svg.append(curve);
  });
  svg.append(marker);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = say(first + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (last - first));
    marker.setAttribute("d", `M${x(at)} ${top}V${height - bottom}`);
    marker.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => (say(null), marker.setAttribute("visibility", "hidden")));
  return make("figure", { title: key }, make("figcaption", {}, make("b", {}, title), told), svg);
}

const legend = (names) => names.length > 1 && make("div", { class: "legend" }, names.map((name, n) => {
  const mark = make("span", {}, "▬ ");
  mark.style.color = `var(--c${n % COLOURS})`;
  return make("span", {}, mark, name);
}));

// Curves of several runs, over each other where they have the same name; one run's sets of evaluations share a chart.
function mainCharts(runs) {
  const found = [], isAccuracy = (curve) => /^eval\/.*\/accuracy$/.test(curve.name);
  const accuracies = runs.flatMap((run, n) => run.curves.filter(isAccuracy).map((curve) => ({ ...curve, colour: runs.length > 1 ? n : undefined })));
  const sets = [...new Set(accuracies.map((curve) => curve.name.slice(5, -9)))];
  if (accuracies.length) found.push(make("div", {}, chart("held-out accuracy, with 95 % intervals", accuracies), runs.length === 1 && legend(sets)));
  for (const [name, title] of Object.entries(TITLES)) {
    const lines = runs.map((run, n) => ({ ...run.curves.find((curve) => curve.name === name), colour: n })).filter((line) => line.x);
    if (lines.some((line) => line.y.some((value) => value !== 0))) found.push(chart(title, lines, name));
  }
  return found;
}

function allCharts(runs) {
  const names = [...new Set(runs.flatMap((run) => run.curves.map((curve) => curve.name)))].sort();
  const inside = make("div", { class: "curves" });
  const search = make("input", { type: "search", placeholder: "name of a metric", "aria-label": "name of a metric", oninput: () => show() });
  const show = () => inside.replaceChildren(...names.filter((name) => name.includes(search.value)).slice(0, 60).map((name) =>
    chart(name, runs.map((run, n) => ({ ...run.curves.find((curve) => curve.name === name), colour: n })).filter((line) => line.x))));
  const found = make("details", { ontoggle: () => found.open && show() }, make("summary", {}, `all ${names.length} metrics`), make("div", { class: "bar" }, search), inside);
  return found;
}

// ---- tables whose rows are picked by keys, and stay when others come

function table(columns, label) {
  const head = columns.map(([name, kind]) => make("th", { class: kind, scope: "col" }, name));
  const body = make("tbody");
  return { element: make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, head)), body), body, columns };
}

function setRows({ body, columns }, rows) {
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  let place = body.firstChild;
  for (const { key, href, cells, isFirst } of rows) {
    const text = JSON.stringify(cells.map((cell) => (cell instanceof Node ? cell.textContent : cell)));
    let row = known.get(key);
    known.delete(key);
    if (!row || row.dataset.text !== text) {
      const fresh = make("tr", { "data-key": key, "data-text": text, onclick: (event) => event.target.closest("input, a") || (pick(fresh), (location.hash = href)) });
      cells.forEach((cell, n) => fresh.append(make("td", { class: columns[n][1] }, n === 0 && !(cell instanceof Node) ? make("a", { href }, String(cell)) : cell)));
      if (row) {
        fresh.className = row.className;
        if (place === row) place = fresh;
        row.replaceWith(fresh);
      }
      row = fresh;
    }
    row.classList.toggle("first", Boolean(isFirst));
    if (row === place) place = place.nextSibling;
    else body.insertBefore(row, place);
  }
  for (const row of known.values()) row.remove();
}

function pick(row) {
  for (const other of PAGE.querySelectorAll("tr.picked")) other.classList.remove("picked");
  if (row) row.classList.add("picked");
  if (row && row.isConnected) row.scrollIntoView({ block: "nearest" });
}

function moveRow(by) {
  const rows = [...PAGE.querySelectorAll("tbody.rows tr, table[aria-label] tbody tr")];
  const at = rows.findIndex((row) => row.classList.contains("picked"));
  if (rows.length) pick(rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by))]);
}

// ---- the list of runs

async function listView() {
  const runs = await ask("runs");
  if (runs.length === 1) return runView(runs[0].name);
  const chosen = new Set();
  const button = make("button", { disabled: "", onclick: () => (location.hash = address(["compare", ...chosen])) }, "compare two");
  const shown = table([["run", "name"], ["status", ""], ["steps", "number wide"], ["reward", "number"], ["accuracy", "number"], ["samples", "number wide"], ["", ""]], "runs");
  const boxes = new Map(), cells = (run) => {
    if (!boxes.has(run.name)) boxes.set(run.name, make("input", { type: "checkbox", "aria-label": `compare ${run.name}`, onchange: (event) => {
      chosen[event.target.checked ? "add" : "delete"](run.name);
      button.disabled = chosen.size !== 2;
    } }));
    return [run.name, make("span", { class: run.status === "failed" || run.problem ? "bad" : "" }, run.problem || (run.kind === "run" ? run.status : `${run.kind}, ${run.status}`)),
      number(run.steps), run.first_reward === undefined ? "-" : `${number(run.first_reward)} → ${number(run.reward)}`, number(run.accuracy), number(run.samples), boxes.get(run.name)];
  };
  const show = (found) => setRows(shown, found.map((run) => ({ key: run.name, href: address(["run", run.name]), cells: cells(run) })));
  show(runs);
  return { title: "runs", trail: [], body: [make("h1", {}, `${runs.length} runs`), make("div", { class: "bar" }, button), shown.element], refresh: async () => show(await ask("runs")) };
}

// ---- one run

async function runView(name) {
  let run = await ask("run", { run: name });
  const top = make("div"), curves = make("div", { class: "curves" }), more = make("div"), below = make("div");
  const shown = table([["step", "number"], ["reward", "number"], ["right", "number"], ["tokens", "number"], ["cut off", "number wide"], ["kept", "number"], ["dropped", "number"], ["why dropped", "wide name"]], "steps");
  let most = FIRST_STEPS;
  const show = () => {
    top.replaceChildren(...runHead(run));
    curves.replaceChildren(...mainCharts([run]));
    const open = more.querySelector("details[open]");
    if (!open) more.replaceChildren(run.curves.length ? allCharts([run]) : "");
    const { steps } = run, order = (steps.step || []).map((_, n) => n).reverse();
    setRows(shown, order.slice(0, most).map((n) => ({
      key: String(steps.step[n]), href: address(["samples", name, String(steps.step[n])]),
      cells: [String(steps.step[n]), number(steps.reward[n]), percent(steps.correct[n]), number(steps.length[n]), percent(steps.truncated[n]), number(steps.kept[n]),
        number(steps.dropped[n]), Object.entries(steps.reasons[n]).map(([reason, count]) => `${reason} ${count}`).join(", ")],
    })));
    below.replaceChildren(order.length > most ? make("button", { onclick: () => ((most = Infinity), show()) }, `all ${number(order.length)} steps`) : "");
  };
  show();
  const actions = make("div", { class: "bar" }, make("a", { href: address(["samples", name, "all"], { order: "worst" }) }, "worst samples"),
    make("a", { href: address(["samples", name, "all"], { only: "wrong" }) }, "wrong samples"), make("a", { href: address(["samples", name, "all"]) }, "all samples"));
  const steps = run.kind === "evaluation" ? setsTable(run) : [make("h2", {}, "steps"), shown.element, below];
  return { title: name, trail: [], body: [top, actions, curves, more, ...steps, settingsOf(run)], refresh: async () => {
    const found = await ask("run", { run: name, version: run.version });
    if (found.version !== run.version) (run = found), show();
  } };
}

function runHead(run) {
  const told = [make("h1", {}, run.name), make("p", { class: "line " + (run.status === "failed" ? "bad" : "") }, `${run.kind}, ${run.status}${run.cause ? ": " + run.cause : ""}` +
    (run.steps.step ? `; ${number(run.steps.step.length)} steps, ${number(run.samples)} samples kept, ${number(run.steps.dropped.reduce((sum, each) => sum + each, 0))} groups dropped` : `; ${number(run.samples)} answers`))];
  if (run.problem) told.push(make("p", { class: "line problem" }, run.problem));
  const shown = ["model.checkpoint", "model", "rollout.mode", "rollout.rollout_batch_size", "rollout.n_samples_per_prompt", "train.optimizer.learning_rate", "seed"].filter((key) => run.settings[key] != null);
  if (shown.length) told.push(make("p", { class: "line soft" }, shown.map((key) => `${key.split(".").pop()} ${written(run.settings[key])}`).join(", ")));
  for (const each of run.advice || []) told.push(make("p", { class: "line advice" }, each));
  for (const each of run.changes || []) told.push(make("p", { class: "line soft" }, `changed ${each}`));
  return told;
}

function setsTable(run) {
  const shown = table([["set", "name"], ["accuracy", "number"], ["95 % interval", "number wide"], ["reward", "number"], ["tokens", "number wide"], ["prompts", "number"], ["failed", "number"]], "sets");
  setRows(shown, Object.entries(run.sets).map(([name, found]) => ({ key: name, href: address(["samples", run.name, "all"], { order: "worst" }), cells: [name, number(found.accuracy),
    `${number(found.accuracy_low)} to ${number(found.accuracy_high)}`, number(found.reward_mean), number(found.response_length_mean), number(found.num_prompts), number(found.num_failed)] })));
  return [make("h2", {}, "sets"), shown.element];
}

function settingsOf(run) {
  return make("details", {}, make("summary", {}, "settings"), factsOf(run.settings));
}

async function compareView(one, other) {
  const runs = await Promise.all([one, other].map((run) => ask("run", { run })));
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const sets = [...new Set(runs.flatMap((run) => Object.keys(run.sets || {})))], accuracyOf = (run, name) => {
    const found = run.sets?.[name];
    return found ? `${number(found.accuracy)} (${number(found.accuracy_low)} to ${number(found.accuracy_high)})` : "-";
  };
  const figures = () => [["status", (run) => run.status], ["steps", (run) => number(run.steps.step?.length)], ["samples", (run) => number(run.samples)], ["reward", (run) => `${number(run.first_reward)} → ${number(run.reward)}`],
    ["accuracy", (run) => number(run.accuracy)], ...sets.map((name) => [`accuracy on ${name}`, (run) => accuracyOf(run, name)])].map(([name, of]) => make("tr", {}, make("td", {}, name), runs.map((run) => make("td", {}, of(run)))));
  const [before, after] = runs.map((run) => (key) => (run.settings[key] === undefined || run.settings[key] === null ? "-" : written(run.settings[key])));
  const shown = make("tbody", {}, keys.filter((key) => before(key) !== after(key)).map((key) => make("tr", {}, make("td", { class: "name" }, key), make("td", { class: "name" }, before(key)), make("td", { class: "name" }, after(key)))));
  const head = (name) => make("thead", {}, make("tr", {}, [name, one, other].map((each) => make("th", {}, each))));
  const numbers = make("tbody", {}, figures());
  const curves = make("div", { class: "curves" }, mainCharts(runs));
  return { title: `${one} and ${other}`, trail: [], body: [make("h1", {}, "two runs"), legend([one, other]), curves, allCharts(runs), make("table", { class: "fixed", id: "figures" }, head("figure"), numbers), make("h2", {}, "settings that differ"),
    shown.rows.length ? make("table", { class: "fixed", id: "differing" }, head("setting"), shown) : make("p", { class: "soft" }, "none")], refresh: async () => {
    const found = await Promise.all(runs.map((run) => ask("run", { run: run.name, version: run.version })));
    found.forEach((each, n) => each.version !== runs[n].version && (runs[n] = each));
    if (found.some((each) => each.curves)) curves.replaceChildren(...mainCharts(runs)), numbers.replaceChildren(...figures());
  } };
}

// ---- samples

async function samplesView(name, step, query) {
  const [only, order, text] = ["only", "order", "text"].map((key) => query.get(key) || "");
  const change = (key, value) => location.replace(address(["samples", name, step], { only, order, text, [key]: value }));
  const hint = STORED ? "text of question or response" : "text, or conditions: reward<0.2, source=sums, length>100, prompt~text";
  const search = make("input", { type: "search", value: text, placeholder: hint, "aria-label": hint, onchange: () => change("text", search.value) });
  const shown = table([["reward", "number"], ["", ""], ["tokens", "number"], ["group", "number wide"], ["source", "wide cut"], ["question", "long"], ["fate", "cut"]], "samples");
  const told = make("p", { class: "line soft" }), more = make("button", { onclick: () => tried(), hidden: "" }, "more");
  const filter = [step === "all" ? "" : `step=${step}`, only, text];
  let num = step === "all" ? FEW_ROWS / 2 : FEW_ROWS * 2;
  const hash = location.hash;
  let version;
  const load = async (times = 2) => {
    const found = await ask("samples", { run: name, filter, order, num: (num *= times) });
    setRows(shown, found.rows.map((row, n, all) => {
      const [mark, kind] = MARKS[row.correct] || ["", ""];
      const fate = row.drop_reason ? [make("span", { class: "bad" }, "dropped"), make("span", { class: "wide" }, `: ${row.drop_reason}`)] : row.error ? "failed"
        : { completed: "", truncated: "cut off" }[row.status] ?? row.status;
      const isFirst = !order && n > 0 && (row.group !== all[n - 1].group || row.source !== all[n - 1].source);
      return { key: row.id, isFirst, href: address(["sample", name, row.id]), cells: [number(row.reward), make("span", { class: kind }, mark), number(row.length),
        step === "all" && row.step !== null ? `${row.step}: ${row.group}.${row.member}` : `${row.group}.${row.member}`, row.source, row.question, make("span", {}, fate)] };
    }));
    lastList = { run: name, ids: found.rows.map((row) => row.id), hash };
    told.textContent = `${number(found.rows.length)}${found.more ? ", and there are more" : " samples"}${leftOut()}`;
    more.hidden = !found.more || num >= MOST_ROWS;
  };
  const tried = () => load().catch((error) => told.replaceChildren(make("span", { class: "bad", role: "alert" }, error.message)));
  await tried();
  const bar = make("div", { class: "bar" }, chooser(ONLY, only, "which", (value) => change("only", value)), chooser(ORDERS, order, "order", (value) => change("order", value)), search);
  const title = step === "all" ? "all samples" : `step ${step}`;
  return { title: `${name}, ${title}`, trail: [["run", name]], body: [make("h1", {}, title), bar, told, shown.element, more], refresh: step === "all" && (async () => {
    const found = await ask("run", { run: name, version });
    if (version && found.version !== version) await load(1);
    version = found.version;
  }) };
}

const leftOut = () => (STORED ? `; this file has ${number(STORED.num_shown)} of ${number(STORED.num_all)} samples` : "");

async function sampleView(name, id) {
  const sample = await ask("sample", { run: name, id });
  const list = lastList.run === name && lastList.ids.includes(id) ? lastList.ids : sample.members.map((each) => each.id);
  const open = (by) => {
    const next = list[list.indexOf(id) + by];
    if (next) location.replace(address(["sample", name, next]));
  };
  const place = `${list.indexOf(id) + 1} of ${list.length}`;
  const versions = [...new Set(sample.versions.map(([, version]) => version))].join(", ");
  const about = [["", sample.status], ["tokens", sample.response_length], ["advantage", typeof sample.advantage === "number" ? sample.advantage : null], ["penalty", sample.penalty], ["policy version", versions || null]];
  const short = make("p", { class: "line" }, about.filter(([, value]) => value !== null && value !== undefined).map(([key, value]) => `${key} ${typeof value === "number" ? number(value) : value}`.trim()).join(" · "));
  const told = factsOf({ dropped: sample.drop_reason, error: sample.error, reward: sample.rewards || sample.reward, "found answer": sample.extracted, label: sample.prompt_label ?? sample.label, detail: sample.detail });
  const more = factsOf({ source: sample.source, prompt: sample.prompt_id, precision: sample.precision, correct: sample.correct, outcome: sample.outcome, metadata: sample.metadata, tools: sample.tools });
  const members = make("div", { class: "members" }, sample.members.map((each) => make("a", { href: address(["sample", name, each.id]), class: each.id === id && "picked" }, number(each.reward),
    make("span", { class: (MARKS[each.correct] || [])[1] }, " " + ((MARKS[each.correct] || [])[0] || "")))));
  const pane = tokenPane(sample);
  const trail = [["run", name], ...(sample.step === null ? [["samples", name, "all"]] : [["samples", name, String(sample.step)]])];
  return { title: `${name}, sample ${id}`, trail, back: lastList.run === name && lastList.ids.includes(id) ? lastList.hash : null, body: [
    make("div", { class: "bar" }, make("button", { onclick: () => open(-1), "aria-label": "previous sample" }, "‹"), make("button", { onclick: () => open(1), "aria-label": "next sample" }, "›"), make("span", { class: "soft" }, place)),
    make("h1", {}, sample.step === null ? `answer to prompt ${sample.group}` : `group ${sample.group} of step ${sample.step}`), members, short, told, promptOf(sample), pane.element, make("details", {}, make("summary", {}, "source and metadata"), more)], move: open, colour: pane.colour };
}

function factsOf(facts) {
  const found = make("dl", { class: "facts" });
  for (const [key, value] of Object.entries(facts)) if (value !== null && value !== undefined && value !== "") found.append(make("dt", {}, key), make("dd", { class: key === "dropped" || key === "error" ? "bad" : "" }, written(value)));
  return found;
}

function promptOf(sample) {
  const shown = (sample.messages || []).map((each) => [make("div", { class: "role" }, written(each.role)), make("div", { class: "text short" }, typeof each.content === "string" ? each.content : JSON.stringify(each.content ?? each, null, 1))]);
  const raw = make("div", { class: "text short prompt" }, sample.prompt || "");
  const count = sample.num_prompt ? `, ${number(sample.num_prompt)} tokens` : "";
  const pictures = (sample.pictures || []).map((each) => make("figure", {}, each.shown && make("img", { src: each.shown, alt: each.source }), make("figcaption", {}, `${each.source || each.content_hash.slice(0, 12)}, ${each.width} x ${each.height}`)));
  const last = shown.pop(), whole = make("details", {}, make("summary", {}, `as the model reads it${count}`), raw);
  const before = shown.length > 0 && make("details", {}, make("summary", {}, `${shown.length} turns before`), shown);
  return last ? [make("h2", {}, "prompt"), before, last, pictures, whole] : [make("h2", {}, `prompt${count}`), raw, pictures];
}

// The response, coloured by one of its numbers. Chunks that are far from what is seen are plain text until they are near.
function tokenPane(sample) {
  const tokens = sample.tokens.slice(sample.num_prompt), count = tokens.length;
  const expanded = (pairs) => pairs.flatMap(([times, value]) => Array(times).fill(value));
  const mask = expanded(sample.mask), versions = expanded(sample.versions), { logprobs, advantage } = sample;
  const advantages = Array.isArray(advantage) ? advantage : mask.map((weight) => (weight ? advantage : 0));
  const largest = Math.max(1e-9, advantages.reduce((most, each) => Math.max(most, Math.abs(each || 0)), 0));
  const paint = {
    mask: (n) => (mask[n] ? `rgba(var(--cool), ${0.15 * Math.min(mask[n], 2)})` : "rgba(var(--grey), .3)"),
    logprob: (n) => (mask[n] || logprobs[n] ? `rgba(var(--warm), ${Math.min(0.75, -logprobs[n] / 6)})` : "rgba(var(--grey), .3)"),
    version: (n) => `hsl(${(versions[n] * 67) % 360} 65% 50% / .3)`,
    advantage: (n) => `rgba(var(--${advantages[n] < 0 ? "warm" : "cool"}), ${(0.6 * Math.abs(advantages[n] || 0)) / largest})`,
  };
  const element = make("div", { class: "text", id: "response" }), chunks = [];
  const paintChunk = (chunk) => {
    if (mask.length && chunk.painted !== mode) for (const span of chunk.childNodes) span.style.background = paint[mode](span.place);
    chunk.painted = mode;
  };
  const open = (chunk) => {
    if (!chunk.isOpen && mask.length) {
      chunk.isOpen = true;
      const spans = [];
      for (let n = chunk.start; n < chunk.end; n += 1) {
        const span = document.createElement("span");
        (span.className = "token"), (span.textContent = tokens[n]), (span.place = n);
        spans.push(span);
      }
      chunk.replaceChildren(...spans);
    }
    paintChunk(chunk);
  };
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => ((entry.target.isNear = entry.isIntersecting), entry.isIntersecting && open(entry.target))), { rootMargin: "500px" });
  for (const [start, end, who] of segmentsOf(mask, versions, count)) {
    const inside = who ? element.appendChild(make("span", { class: "segment", "data-who": who })) : element;
    for (let at = start; at < end; at += CHUNK_TOKENS) {
      const chunk = document.createElement("span");
      (chunk.start = at), (chunk.end = Math.min(end, at + CHUNK_TOKENS));
      chunk.textContent = tokens.slice(chunk.start, chunk.end).join("");
      inside.append(chunk);
      chunks.push(chunk);
      watch.observe(chunk);
    }
  }
  chunks.slice(0, FIRST_CHUNKS).forEach(open);
  if (!count) element.append(make("span", { class: "soft" }, sample.error ? "no response" : "empty response"));
  const tell = (event) => {
    const n = event.target.place;
    if (n === undefined || !mask.length) return hideTip();
    showTip(event, [JSON.stringify(tokens[n]), `${mask[n] ? "trained" : "not trained"}, weight ${number(mask[n])}`, mask[n] || logprobs[n] ? `log-probability ${number(logprobs[n])}, probability ${number(Math.exp(logprobs[n]))}` : "not sampled",
      `policy version ${versions[n]}`, `advantage ${number(advantages[n])}`].join("\n"));
  };
  for (const kind of ["pointermove", "click"]) element.addEventListener(kind, tell);
  element.addEventListener("pointerleave", hideTip);
  const buttons = mask.length ? Object.entries(MODES).map(([key, text]) => make("button", { "data-mode": key, onclick: () => colour(key) }, text)) : [];
  const colour = (key) => {
    mode = key;
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.mode === mode);
    chunks.forEach((chunk) => chunk.isOpen && (chunk.isNear || chunk.start === 0) && paintChunk(chunk));
    chunks.forEach((chunk) => chunk.isOpen && setTimeout(() => paintChunk(chunk)));
  };
  colour(mode);
  const how = count && sample.has_texts === false ? make("p", { class: "line problem" }, "tokens are shown by number: the tokenizer of this run is not here; as text: " + sample.response) : "";
  return { element: make("div", {}, make("h2", {}, `response${mask.length ? `, ${number(count)} tokens` : ""}`), make("div", { class: "bar" }, buttons), how, element), colour };
}

// Parts of a response that were sampled, and those between that were given, such as answers of tools.
function segmentsOf(mask, versions, count) {
  const found = [];
  for (let start = 0, n = 1; n <= count; n += 1) {
    if (n < count && mask.length && !mask[n] === !mask[start]) continue;
    if (n < count && !mask.length) continue;
    found.push([start, n, mask[start] ? `policy, version ${versions[start]}, ${n - start} tokens` : `not trained, ${n - start} tokens`]);
    start = n;
  }
  return found.length > 1 && found.length <= MOST_SEGMENTS ? found : [[0, count, ""]];
}

function showTip(event, text) {
  const tip = document.getElementById("tip") || document.body.appendChild(make("div", { id: "tip" }));
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : event.clientY + 18}px`;
}
const hideTip = () => document.getElementById("tip")?.remove();

// ---- the page

const status = make("span", { class: "soft", role: "status" });
const help = make("dialog", {}, make("h2", {}, "keys"), KEYS.map(([keys, text]) => make("p", { class: "line" }, make("kbd", {}, keys), text)), make("form", { method: "dialog" }, make("button", {}, "close")));
document.body.append(help);

function remembered(key, value) {
  try {
    return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value);
  } catch {
    return null; // a browser may keep nothing for files
  }
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => document.documentElement.classList.toggle("dark", (remembered("theme") || (prefersDark.matches ? "dark" : "light")) === "dark");
const switchTheme = () => {
  const isDark = document.documentElement.classList.toggle("dark");
  remembered("theme", isDark ? "dark" : "light");
};
prefersDark.addEventListener("change", setTheme);

async function route(event) {
  const own = ++turn;
  if (event) places.set(new URL(event.oldURL).hash, { scroll: scrollY, key: PAGE.querySelector("tr.picked")?.dataset.key });
  const [path, query] = location.hash.slice(2).split("?"), started = performance.now();
  const [kind, ...rest] = path.split("/").map(decodeURIComponent);
  let found;
  try {
    found = await (kind === "run" ? runView(rest[0]) : kind === "samples" ? samplesView(rest[0], rest[1], new URLSearchParams(query)) : kind === "sample" ? sampleView(rest[0], rest[1])
      : kind === "compare" ? compareView(rest[0], rest[1]) : listView());
  } catch (error) {
    found = { title: "problem", trail: [], body: [make("p", { class: "line problem", role: "alert" }, error.message)] };
  }
  if (own !== turn) return;
  view = found;
  hideTip();
  document.title = `${view.title} - rollfeed`;
  const nav = make("nav", {}, make("a", { href: "#/" }, "rollfeed"), view.trail.map((parts) => link(parts, parts[0] === "samples" ? (parts[2] === "all" ? "samples" : `step ${parts[2]}`) : parts[1])));
  const buttons = [make("button", { onclick: switchTheme, "aria-label": "dark or light", title: "dark or light" }, "◐"), make("button", { onclick: () => help.showModal(), "aria-label": "keys", title: "keys" }, "?")];
  PAGE.replaceChildren(make("header", {}, nav, status, buttons), make("main", {}, view.body.flat(Infinity)));
  const place = places.get(location.hash);
  if (place?.key) pick([...PAGE.querySelectorAll("tr")].find((row) => row.dataset.key === place.key));
  scrollTo(0, place ? place.scroll : 0);
  requestAnimationFrame(() => setTimeout(() => (document.body.dataset.ready = `${location.hash} ${Math.round(performance.now() - started)}`)));
}

async function poll() {
  const shown = view;
  if (!document.hidden && shown?.refresh && !STORED) {
    try {
      await shown.refresh();
      status.textContent = "";
    } catch (error) {
      status.textContent = error instanceof TypeError ? "the viewer does not answer" : error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input, select, textarea")) return void (event.key === "Escape" && event.target.blur());
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (by && view?.move && !event.key.startsWith("Arrow")) view.move(by);
  else if (by && !view?.move) moveRow(by), event.preventDefault();
  else if (event.key === "Enter" && !event.target.matches("a, button, summary")) PAGE.querySelector("tr.picked")?.click();
  else if (event.key === "Escape" || event.key === "ArrowLeft") location.hash = view?.back || (view?.trail.length ? address(view.trail.at(-1)) : "#/");
  else if (event.key === "/") (PAGE.querySelector("input[type=search]")?.focus(), event.preventDefault());
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") help.showModal();
  else if ("1234".includes(event.key) && view?.colour) view.colour(Object.keys(MODES)[event.key - 1]);
});

setTheme();
addEventListener("hashchange", route);
route();
poll();
