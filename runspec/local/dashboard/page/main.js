"use strict";
/* The page: header, tabs, overview and workers; what changes is drawn where it is in sight. */

const TABS = ["overview", "curves", "timeline", "rollouts", "workers"];
const POLL_MS = 2000;
const $ = (id) => document.getElementById(id);
const views = { curves: new Curves($("curves")), timeline: new TimelineView($("timeline")), rollouts: new RolloutsView($("rollouts")) };
let tab = "overview", run = RUNS[0], failure = "";

function fail(error) {
  failure = String(error.message ?? error);
  drawHead();
}

function drawHead() {
  const head = run.head ?? {};
  $("name").textContent = RUNS.length > 1 ? "" : run.name;
  $("state").textContent = clean(head.state ?? "");
  $("state").className = `pill ${head.state ?? ""}`;
  const left = head.left_s && head.state === "running" ? `, ${duration(head.left_s)} left` : "";
  const waits = head.waiting_for ? `, waits for ${head.waiting_for}` : "";
  $("progress").textContent = clean(`step ${head.step ?? 0} of ${head.steps ?? "?"}${left}${waits}`);
  for (const name of ["rollouts", "workers"]) $(`tab-${name}`).hidden = Boolean(head.kind) && head.kind !== "grpo";
  $("trouble").textContent = clean(failure || run.trouble || "");
}

function drawOverview() {
  const head = run.head, parts = [];
  if (!head) return $("overview").replaceChildren(el("p", {}, "The run is being read."));
  if (head.reason) parts.push(el("p", { className: "bad" }, head.reason));
  for (const line of head.diagnosis) parts.push(el("p", { className: "warn" }, line));
  if (head.work) parts.push(el("p", {}, head.work));
  for (const line of head.evaluations) parts.push(el("p", {}, line));
  if (head.ends.length)
    parts.push(el("div", { className: "pair" }, table(["", "first 10 steps", "last 10 steps"], head.ends), table(["", ""], head.facts)));
  if (head.conditions.length) parts.push(el("h2", {}, "Conditions"), table(["condition", "reason", ""], head.conditions));
  if (head.roles.length) {
    parts.push(el("h2", {}, "Roles"));
    parts.push(table(["role", "state", "at", "restarts", "since"], head.roles.map(([name, state, stage, restarts, since]) =>
      [name, el("span", { className: state === "running" ? "good" : state === "failed" ? "bad" : "" }, state), stage, restarts, clock(since)])));
  }
  parts.push(el("h2", {}, "Broadcast tree"), tree(head));
  if (head.events.length) {
    parts.push(el("h2", {}, "Newest events"));
    parts.push(table(["time", "role", ""], head.events.map(([time, role, text]) => [clock(time), role, text])));
  }
  $("overview").replaceChildren(...parts);
}

function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleTimeString() : "-";
}

/* Servers below those that they fetch from, workers below the last. */
function tree(head) {
  const below = (name) => head.servers.filter((server) => (server.upstream[0] ?? "") === name);
  const item = (server) => {
    const newest = server.versions.length ? `version ${server.versions.at(-1)}` : "";
    const parts = [server.url, newest, server.bytes_sent === null ? "" : `${size(server.bytes_sent)} sent`].filter(Boolean);
    return el("li", {}, `${server.name} `, el("span", { className: "soft" }, parts.join(" · ")),
      el("ul", { className: "tree" }, ...below(server.name).map(item)));
  };
  const holding = head.crowd?.versions ?? [];
  const workers = holding.map(([version, count]) => `${count} with version ${version}`).join(", ");
  return el("ul", { className: "tree" }, ...below("").map(item), el("li", {}, `workers: ${workers || "none alive"}`));
}

function drawWorkers() {
  const { workers = [], validators = [], published, crowd } = run.head ?? {};
  const lag = (each) => (typeof each.state?.version === "number" && typeof published === "number" ? Math.max(0, published - each.state.version) : "-");
  const alive = (each) => el("span", { className: each.alive ? "good" : "soft" }, each.alive ? "alive" : "away");
  const sorted = [...workers].sort((a, b) => b.accepted_tokens - a.accepted_tokens);
  $("workers").replaceChildren(
    el("h2", {}, "Workers"),
    table(["key", "pool", "engine", "", "standing", "reputation", "credit, tokens", "rejected", "withheld", "recomputed", "version", "lag", "tokens/s", "busy", "why"],
      sorted.map((w) => [w.key.slice(0, 8), w.pool, [w.info?.engine, w.info?.dtype].filter(Boolean).join(" ") || "-", alive(w), w.standing, w.reputation, w.accepted_tokens, w.rejected_submissions,
        w.withheld_leases, w.prefill_share, String(w.state?.version ?? "-"), lag(w), number(w.tokens_per_s), number(w.busy_fraction, 2), w.reason])),
    el("p", { className: "soft" }, (crowd?.registered ?? 0) > workers.length ? `the first of ${crowd.registered} by credit` : ""),
    el("h2", {}, "Validators"),
    table(["key", "", "silent, s", "state"], validators.map((v) =>
      [v.key.slice(0, 8), alive(v), number(v.silent_s), Object.entries(v.state).map(([k, x]) => `${k} ${x}`).join(", ")])));
}

function draw(changed) {
  drawHead();
  const has = (...names) => !changed || names.some((name) => changed.includes(name));
  if (tab === "overview" && has("head")) drawOverview();
  if (tab === "workers" && has("head")) drawWorkers();
  if (tab === "curves" && has("figures")) views.curves.update();
  if (tab === "timeline" && has("timeline")) views.timeline.show(run);
  if (tab === "rollouts" && has("rollouts")) views.rollouts.show(run);
}

function open(name) {
  tab = name;
  for (const each of TABS) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
  }
  draw();
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
  draw();
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") document.activeElement.blur();
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const number = Number(event.key);
  if (number >= 1 && number <= TABS.length) open(TABS[number - 1]);
  else if (event.key === "t") turnTheme();
  else if (event.key === "c") views.rollouts.turn();
  else if (event.key === "+" || event.key === "-") views.timeline.zoom(event.key === "+" ? 0.8 : 1.25, 0.5);
  else if ("jk".includes(event.key) && tab === "rollouts") views.rollouts.move(event.key === "j" ? 1 : -1);
  else if (event.key === "/") {
    event.preventDefault();
    open("rollouts");
    $("search").focus();
  }
}

async function follow() {
  try {
    const changed = new Set();
    for (const each of RUNS) {
      const names = await each.poll();
      if (each === run || names.includes("figures")) names.forEach((name) => changed.add(name));
    }
    failure = "";
    draw([...changed]);
  } catch (error) {
    fail(error);
  }
  if (EMBEDDED.live) setTimeout(follow, POLL_MS);
}

$("tabs").append(...TABS.map((name) => el("button", { id: `tab-${name}`, role: "tab", onclick: () => open(name) }, name)));
$("theme").addEventListener("click", turnTheme);
$("runs").hidden = RUNS.length < 2;
$("runs").append(...RUNS.map((each) => el("option", {}, each.name)));
$("runs").addEventListener("change", () => { run = RUNS[$("runs").selectedIndex]; draw(); });
document.addEventListener("keydown", key);
addEventListener("resize", () => draw());
open(tab);
follow();
