// Reads ./state once a second and shows it. Text is set as text, never as markup. Existing rows are updated in place, so
// that focus, selection and opened details stay.
"use strict";

const PERIOD_MS = 1000;
const RETRY_MS = 3000;
const ANSWER_MS = 5000;
const TIERS = ["device", "cpu", "shared", "computed"];
const CURVES = { width: 590, height: 100 }; // of the viewBox

const at = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

let key = null;
let paused = false;
let timer = 0;

function milliseconds(value) {
  if (value === undefined) return "-";
  if (value >= 10000) return (value / 1000).toFixed(1) + " s";
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + " ms";
}

function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) { value /= 1000; step += 1; }
  return value.toFixed(value < 10 && step ? 1 : 0) + " " + units[step];
}

function clock(seconds) {
  const date = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

function say(state, message) {
  const status = at("status");
  if (status.dataset.state !== state) status.dataset.state = state;
  text(status, message); // a live region: spoken when it changes, and it changes rarely
}

// One child of `parent` per item, found again by its key, in the items' order.
function keep(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = keyOf(item);
    let child = known.get(name);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = name;
    } else {
      known.delete(name);
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

function fromTemplate(id) {
  return at(id).content.firstElementChild.cloneNode(true);
}

function cell(label, kind) {
  const node = document.createElement("td");
  node.dataset.label = label;
  if (kind) node.className = kind;
  return node;
}

// -- engines ----------------------------------------------------------------------------------------------------------

function makeModel(model) {
  const section = fromTemplate("model-template");
  const title = section.querySelector("h2");
  title.id = "model-" + model.name;
  section.setAttribute("aria-labelledby", title.id);
  section.querySelector(".scroll").setAttribute("aria-label", "Engines of " + model.name);
  return section;
}

function updateModel(section, model) {
  const field = (name) => section.querySelector(`[data-field="${name}"]`);
  const running = model.engines.reduce((sum, engine) => sum + engine.runningRequests, 0);
  text(section.querySelector("h2"), model.name);
  text(field("running"), whole.format(running));
  text(field("waiting"), whole.format(model.waitingRequests));
  for (const rank of ["p50", "p90", "p99"]) text(field(rank), milliseconds(model.firstByte[rank + "Ms"]));
  const { expected, reported } = model.cachedTokens;
  text(field("cached"), `${short.format(expected)} / ${short.format(reported)}`);
  const pause = model.continuationPause;
  text(field("continued"), pause.samples ? `${whole.format(pause.samples)} / ${milliseconds(pause.p90Ms)}` : "none");
  text(field("index"), bytes(model.index.bytes) + " of " + bytes(model.index.bytesMax));
  const total = TIERS.reduce((sum, tier) => sum + model.promptTokens[tier], 0);
  for (const tier of TIERS) {
    const tokens = model.promptTokens[tier];
    section.querySelector(`.bar [data-tier="${tier}"]`).style.flexGrow = String(total ? tokens / total : 0);
    const share = total ? ` (${percent.format(tokens / total)})` : "";
    text(section.querySelector(`.legend [data-tier="${tier}"] dd`), short.format(tokens) + share);
  }
  updateHour(section.querySelector(".hour"), model);
  keep(section.querySelector("tbody"), model.engines, (engine) => engine.name, makeEngine, updateEngine);
}

function updateHour(figure, model) {
  const { expected, reported, missing } = model.lastHour;
  const tiers = Object.entries(missing);
  const curves = { expected, reported, missing: expected.map((_, at) => sum(tiers.map(([, tokens]) => tokens[at]))) };
  const most = Math.max(1, ...expected, ...reported);
  const all = sum(expected);
  const shares = tiers.map(([tier, tokens]) => `${tier} ${percent.format(sum(tokens) / all)}`);
  const said = {
    expected: short.format(all),
    reported: short.format(sum(reported)),
    missing: all ? shares.join(", ") : "no reply has said yet",
  };
  for (const [name, tokens] of Object.entries(curves)) {
    const points = tokens.map((value, at) => {
      const across = (at * CURVES.width) / (tokens.length - 1);
      return `${across.toFixed(0)},${(CURVES.height - (value * CURVES.height) / most).toFixed(1)}`;
    });
    figure.querySelector(`polyline[data-curve="${name}"]`).setAttribute("points", points.join(" "));
    text(figure.querySelector(`.legend [data-curve="${name}"] dd`), said[name]);
  }
  const label = `Cached tokens of ${model.name} in the last hour: expected ${said.expected}, reported ${said.reported}`;
  figure.querySelector("svg").setAttribute("aria-label", label);
}

function sum(values) {
  return values.reduce((all, value) => all + value, 0);
}

function makeEngine(engine) {
  const row = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  name.textContent = engine.name;
  row.append(
    name, cell("State"), cell("Running", "number"), cell("Queued tokens", "number"), cell("Prefill busy"),
    cell("KV in use"), cell("Prefill tokens/s", "number"), cell("First byte p50 / p99", "number"), cell("Tiers"),
  );
  for (const place of [4, 5]) {
    const box = document.createElement("span");
    const meter = document.createElement("meter");
    meter.max = 1;
    meter.setAttribute("aria-label", row.children[place].dataset.label + ", " + engine.name);
    box.append(meter, " ", document.createElement("small"));
    row.children[place].append(box);
  }
  return row;
}

function updateEngine(row, engine) {
  const [, state, running, queued, busy, kv, prefill, first, tiers] = row.children;
  state.dataset.good = String(engine.routable);
  text(state, engine.says + (engine.slowStart ? ", slow start" : "") + (engine.eventsLive ? ", KV events" : ""));
  const others = engine.foreignRequests ? ` + ${whole.format(engine.foreignRequests)} of others` : "";
  text(running, whole.format(engine.runningRequests) + others);
  text(queued, whole.format(engine.queuedTokens));
  for (const [place, value] of [[busy, engine.busyShare], [kv, engine.kvUsage]]) {
    place.querySelector("meter").value = Math.min(1, value);
    text(place.querySelector("small"), percent.format(value));
  }
  text(prefill, whole.format(engine.prefillTokensPerSecond));
  text(first, `${milliseconds(engine.firstByte.p50Ms)} / ${milliseconds(engine.firstByte.p99Ms)}`);
  const held = engine.nodeBlocks === null ? [] : [`${whole.format(engine.nodeBlocks)} blocks in the node's CPU tier`];
  for (const [tier, blocks] of Object.entries(engine.sharedBlocks)) {
    const declined = engine.declinedTiers.includes(tier) ? " (computing is faster)" : "";
    held.push(`${whole.format(blocks)} blocks in ${tier}${declined}`);
  }
  const moving = engine.tiers.map((way) =>
    `${way.tier} ${way.direction === "load" ? "in" : "out"} ${bytes(way.bytesPerSecond)}/s`);
  text(tiers, [...held, ...moving].join(", ") || "-");
}

// -- decisions --------------------------------------------------------------------------------------------------------

function makeDecision(decision) {
  const item = fromTemplate("decision-template");
  const time = item.querySelector("time");
  time.dateTime = new Date(decision.time * 1000).toISOString();
  time.textContent = clock(decision.time);
  item.querySelector(".engine").textContent = decision.engine;
  item.querySelector(".reason").textContent = decision.reason;
  item.querySelector(".why").textContent = decision.why;
  const caption = `Request ${decision.requestId}, model ${decision.model}, ${whole.format(decision.promptTokens)} tokens`;
  item.querySelector("caption").textContent = caption;
  item.querySelector(".scroll").setAttribute("aria-label", caption);
  // Filled when opened: most never are.
  item.querySelector("details").addEventListener("toggle", () => fillCandidates(item, decision), { once: true });
  return item;
}

function sharedTokens(held) {
  return whole.format(held.shared) + (held.below ? ` (${whole.format(held.below)} below)` : "");
}

function fillCandidates(item, decision) {
  const rows = decision.candidates.toSorted((one, other) => one.totalMs - other.totalMs).map((candidate) => {
    const row = document.createElement("tr");
    const chosen = candidate.engine === decision.engine;
    if (chosen) row.className = "chosen";
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = candidate.engine + (chosen ? " (chosen)" : "");
    row.append(name);
    const times = ["totalMs", "queueMs", "linkMs", "loadMs", "prefillMs", "displacedMs", "laterMs"];
    const figures = [
      ...times.map((field) => candidate[field].toFixed(1)),
      ...["device", "cpu"].map((tier) => whole.format(candidate.held[tier])),
      sharedTokens(candidate.held),
      whole.format(candidate.runningRequests),
    ];
    for (const figure of figures) {
      const value = cell("", "number");
      value.textContent = figure;
      row.append(value);
    }
    return row;
  });
  item.querySelector("tbody").replaceChildren(...rows);
}

// -- reading ----------------------------------------------------------------------------------------------------------

function show(state) {
  keep(at("models"), state.models, (model) => model.name, makeModel, updateModel);
  const place = (decision) => `${decision.time} ${decision.requestId} ${decision.engine}`;
  keep(at("decisions"), state.decisions, place, makeDecision, () => {});
  at("decisions-section").hidden = false;
  at("no-decisions").hidden = state.decisions.length > 0;
  text(at("updated"), "as of " + clock(state.time));
  say(state.draining ? "draining" : "live", state.draining ? "shutting down" : "live");
}

async function read() {
  clearTimeout(timer);
  let wait = PERIOD_MS;
  try {
    const reply = await fetch("state", {
      cache: "no-store",
      headers: key ? { authorization: "Bearer " + key } : {},
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    if (reply.status === 401 || reply.status === 403) {
      askForKey(reply.status);
      return;
    }
    if (!reply.ok) throw new Error("status " + reply.status);
    const state = await reply.json();
    if (paused) return;
    show(state);
  } catch (error) {
    wait = RETRY_MS;
    say("lost", "no answer; what is shown is old");
  }
  if (!paused && !document.hidden) timer = setTimeout(read, wait);
}

function askForKey(status) {
  const form = at("key-form");
  say("refused", key ? (status === 403 ? "this key is no operator's" : "unknown key") : "a key is needed");
  key = null;
  if (form.hidden) {
    form.hidden = false;
    at("key").focus();
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  at("key-form").hidden = true;
  read();
});

at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  text(at("pause"), paused ? "Go on" : "Pause");
  if (paused) {
    clearTimeout(timer);
    say("paused", "paused");
  } else {
    read();
  }
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused && at("key-form").hidden) read();
});

read();
