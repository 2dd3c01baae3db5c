"use strict";

// Shows what /page/live tells. Names and reasons come from other machines: they are only ever text.

const MAX_ROWS = 25;
const at = (id) => document.getElementById(id);

function made(kind, text, className) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function drawn(kind, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const known = (value) => value !== null && value !== undefined;
const short = (hex) => hex.slice(0, 12);

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (bytes >= 999.5 && step < units.length - 1) { bytes /= 1000; step += 1; }
  return `${step ? Number(bytes.toPrecision(3)) : bytes} ${units[step]}`;
}

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${Math.floor(whole / 86400)} d`;
}

const figure = (value, digits = 3) => known(value) ? Number(value.toPrecision(digits)).toString() : "";

// Cells are [text, class] or elements; a table that shows the same is left alone, so that what a
// person has scrolled to or selected stays.
function table(id, heads, rows, nothing) {
  const wanted = JSON.stringify([heads, rows]);
  const place = at(id);
  if (place.dataset.shown === wanted) return;
  place.dataset.shown = wanted;
  const head = made("thead");
  const top = head.appendChild(made("tr"));
  for (const [text, className] of heads) {
    const cell = top.appendChild(made("th", text, className));
    cell.scope = "col";
  }
  const body = made("tbody");
  for (const row of rows) {
    const line = body.appendChild(made("tr"));
    for (const [text, className, of] of row) {
      const cell = line.appendChild(made("td", of ? undefined : text, className));
      if (of) {
        const bar = cell.appendChild(made("progress"));
        bar.max = of[1]; bar.value = of[0];
        cell.append(` ${text}`);
      }
    }
  }
  if (!rows.length) {
    const cell = body.appendChild(made("tr")).appendChild(made("td", nothing, "none"));
    cell.colSpan = heads.length;
  }
  place.replaceChildren(head, body);
}

const STATES = { alive: "good", suspect: "warn", dead: "bad", left: "soft" };

function nodeRows(now) {
  const members = new Map(now.members.members.map((each) => [each.node, each]));
  return now.status.participants.map((node) => {
    const member = members.get(node.node);
    const away = !node.connected && (!member || member.state === "alive");
    const state = away ? "away" : member ? member.state : "connected";
    const doing = node.steps && node.step < node.steps ? [node.step, node.steps]
      : node.total_bytes && node.bytes < node.total_bytes ? [node.bytes, node.total_bytes] : null;
    const share = doing ? `${Math.floor(100 * doing[0] / doing[1])} %` : "";
    return [
      [node.name],
      [state, STATES[state] || (away ? "warn" : "")],
      [node.activity + (node.drain ? `, ${node.drain}` : "")],
      [share, "", doing],
      [String(node.contributions), "number"],
      [figure(node.loss), "number"],
      [figure(node.epsilon), "number"],
      [known(node.rtt_ms) ? `${node.rtt_ms < 1 ? "<1" : Math.round(node.rtt_ms)} ms` : "", "number"],
      [node.last_reason, "wrap"],
    ];
  });
}

const NODE_HEADS = [["name"], ["state"], ["does"], ["progress"], ["rounds", "number"],
  ["loss", "number"], ["\u03b5", "number"], ["RTT", "number"], ["last trouble"]];

function runRows(now) {
  return now.runs.map((run) => [
    [run.model], [short(run.run), "hex"], [run.state, run.fault ? "bad" : ""],
    [run.stages.map((stage) => `${stage.name} ${stage.first}\u2013${stage.last}`).join(", "), "wrap"],
    [String(run.ctx), "number"], [`${run.requests.length} of ${run.sessions}`, "number"],
    [String(run.tokens), "number"], [figure(run.tokens_per_s), "number"],
  ]);
}

const RUN_HEADS = [["model"], ["run"], ["state"], ["layers on"], ["context", "number"],
  ["answers", "number"], ["tokens", "number"], ["tokens/s", "number"]];

function tiles(now) {
  const { status } = now;
  const alive = now.members.members.filter((each) => each.state === "alive" && !each.coordinator);
  const facts = [
    ["rounds closed", status.last_round ? status.last_round.index + 1 : 0],
    ["nodes alive", `${alive.length} of ${now.nodes}`],
    ["needed for a round", status.round.quorum || ""],
    ["received", size(now.edges.up_bytes)],
    ["sent", size(now.edges.down_bytes)],
    ["disk free", status.storage ? size(status.storage.free_bytes) : ""],
  ];
  if (status.run) facts.unshift(["rounds of the run", `${status.run.closed} of ${status.run.rounds}`]);
  return facts.filter(([, value]) => value !== "").map(([name, value]) => {
    const tile = made("div", undefined, "tile");
    tile.append(made("b", String(value)), name);
    return tile;
  });
}

function showNow(now) {
  const { status } = now;
  document.title = `${status.round.state} \u00b7 ${status.name}`;
  at("name").textContent = status.name;
  at("round").textContent = status.round.state === "closed" && !status.run
    ? `Round ${status.round.index} is closed` : `Round ${status.round.index}: ${status.round.state}`;
  at("reason").textContent = status.round.reason;
  at("tiles").replaceChildren(...tiles(now));
  at("alerts").replaceChildren(...status.alerts.map((each) => made("li", each)));
  table("nodes", NODE_HEADS, nodeRows(now), "No node has joined. lensemblectl invite makes a ticket.");
  at("models").hidden = !now.runs.length;
  table("runs", RUN_HEADS, runRows(now), "");
  const states = Object.entries(now.edges.states).map(([state, count]) => `${count} ${state}`);
  at("edges").textContent = [states.join(", ") || "none", ...now.edges.faults].join(" \u00b7 ");
  at("facts").textContent = `federation ${status.federation} \u00b7 ${status.aggregation} \u00b7 `
    + `state ${short(status.digest)} \u00b7 up ${duration(status.uptime_s)} \u00b7 `
    + `lensemble ${status.version}`;
}

function curve(title, points) {
  const values = points.map(([, value]) => value);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const first = points[0][0];
  const span = points[points.length - 1][0] - first || 1;
  const x = (index) => (100 * (index - first) / span).toFixed(2);
  const y = (value) => (high > low ? 38 - 36 * (value - low) / (high - low) : 20).toFixed(2);
  const box = made("figure");
  const caption = box.appendChild(made("figcaption"));
  caption.append(title, made("b", figure(values[values.length - 1])));
  const plot = box.appendChild(drawn("svg", {
    viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}: from ${figure(values[0])} in round ${first} to `
      + `${figure(values[values.length - 1])}, between ${figure(low)} and ${figure(high)}`,
  }));
  plot.append(
    drawn("line", { x1: 0, x2: 100, y1: 39, y2: 39 }),
    drawn("polyline", { points: points.map(([index, value]) => `${x(index)},${y(value)}`).join(" ") }),
  );
  const ends = box.appendChild(made("div", undefined, "ends soft"));
  ends.append(made("span", `round ${first}`), made("span", `${figure(low)} to ${figure(high)}`),
    made("span", String(points[points.length - 1][0])));
  return box;
}

const CURVES = [
  ["loss of the nodes", (round) => round.loss],
  ["state error on public data", (round) => round.figures && round.figures.state_error],
  ["drift, latent variances", (round) => round.figures && round.figures.drift_after],
  ["norm of the update", (round) => round.update_norm],
  ["contributors", (round) => round.contributors.length],
  ["seconds", (round) => round.seconds],
];

const ROUND_HEADS = [["round", "number"], ["closed"], ["seconds", "number"], ["contributors"],
  ["loss", "number"], ["state"], ["remarks"]];

function showRounds(rounds) {
  const committed = rounds.filter((round) => round.index >= 0);
  const drawable = CURVES.map(([title, value]) => [title, committed
    .map((round) => [round.index, value(round)]).filter(([, each]) => Number.isFinite(each))]);
  at("curves").replaceChildren(...drawable.filter(([, points]) => points.length > 1)
    .map(([title, points]) => curve(title, points)));
  const rows = committed.slice(-MAX_ROWS).reverse().map((round) => [
    [String(round.index), "number"],
    [known(round.closed_unix_s) ? new Date(1000 * round.closed_unix_s).toLocaleString() : ""],
    [figure(round.seconds), "number"],
    [round.contributors.join(", "), "wrap"],
    [figure(round.loss), "number"],
    [short(round.digest), "hex"],
    [[round.attempt ? `attempt ${round.attempt + 1}` : "", ...round.alerts].filter(Boolean).join("; "),
      "wrap"],
  ]);
  table("rounds", ROUND_HEADS, rows, "No round has closed yet. lensemblectl run --rounds N starts.");
}

let shownRound = null;

async function fetchRounds(key) {
  const answer = await fetch("page/rounds");
  if (!answer.ok) return;
  showRounds((await answer.json()).rounds);
  shownRound = key;
}

function say(text, className) {
  at("link").textContent = text;
  at("link").className = `state ${className}`;
}

const live = new EventSource("page/live");
live.addEventListener("now", (event) => {
  const now = JSON.parse(event.data);
  say("live", "good");
  showNow(now);
  const last = now.status.last_round;
  const key = `${last ? last.digest : ""}${now.status.digest}`;
  if (key !== shownRound) fetchRounds(key).catch(() => say("rounds cannot be read", "warn"));
});
live.addEventListener("error", () => say("the coordinator does not answer", "bad"));
