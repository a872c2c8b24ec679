"use strict";
/* The page: header, tabs and workers; what changes is drawn where it is in sight. */

const TABS = ["overview", "curves", "timeline", "rollouts", "workers"];
const POLL_MS = 2000;
const $ = (id) => document.getElementById(id);
const views = { overview: new Overview($("overview")), curves: new Curves($("curves")), timeline: new TimelineView($("timeline")), rollouts: new RolloutsView($("rollouts")) };
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
  $("progress").textContent = clean(`step ${head.step ?? 0} of ${head.steps ?? "?"}${left}`);
  $("bar").firstElementChild.style.width = `${(100 * (head.step ?? 0)) / (head.steps ?? 1)}%`;
  for (const name of ["rollouts", "workers"]) $(`tab-${name}`).hidden = Boolean(head.kind) && head.kind !== "grpo";
  $("trouble").textContent = clean(failure || run.trouble || "");
}

function drawWorkers() {
  const { workers = [], validators = [], published, crowd } = run.head ?? {};
  const live = ["starting", "running"].includes(run.head?.state);
  const alive = (each) => live && el("span", {}, dot(each.alive ? "good" : "soft"), each.alive ? "alive" : "away");
  const per = (value, unit) => (typeof value === "number" ? `${number(value, 2)} ${unit}` : "-");
  /* Columns of which nobody has a value are left out. */
  const filled = (heads, rows) => {
    const kept = heads.map((_, i) => i).filter((i) => rows.some((row) => row[i] && row[i] !== "-"));
    const right = kept.flatMap((i, k) => (rows.some((row) => /^[\d.,]/.test(row[i]) && !heads[i].startsWith("key")) ? [k] : []));
    return table(kept.map((i) => heads[i]), rows.map((row) => kept.map((i) => row[i])), right);
  };
  const sorted = [...workers].sort((a, b) => b.accepted_tokens - a.accepted_tokens);
  const more = (crowd?.registered ?? 0) > workers.length ? `, the first of ${number(crowd.registered)} by credit` : "";
  $("workers").replaceChildren(el("div", { className: "stack" },
    panel(`Workers${more}`, workers.length ? filled(
      ["key", "pool", "engine", "now", "standing", "why", "reputation", "credit", "rejected", "withheld", "recomputed", "version", "lag", "speed", "busy"],
      sorted.map(({ state = {}, ...w }) => [w.key.slice(0, 8), w.pool, [w.info?.engine, w.info?.dtype].filter(Boolean).join(" "),
        alive(w), w.standing, w.reason, percent(w.reputation), many(w.accepted_tokens, "token"),
        `${number(w.rejected_submissions)} of ${number(w.rejected_submissions + w.accepted_submissions)}`,
        many(w.withheld_leases, "lease"), percent(w.prefill_share), String(state.version ?? "-"),
        typeof state.version === "number" && typeof published === "number" ? many(Math.max(0, published - state.version), "step") : "-",
        per(w.tokens_per_s, "tokens/s"), percent(w.busy_fraction)])) : el("p", {}, "No worker has registered.")),
    panel("Validators", validators.length ? filled(
      ["key", "now", "silent for", "judged", "rejected", "until a verdict, mean", "says"],
      validators.map((v) => [v.key.slice(0, 8), alive(v), per(v.silent_s, "s"), many(v.judged, "submission"),
        v.judged ? percent(v.rejected / v.judged) : "-", v.judged ? per(v.verdict_s, "s") : "-",
        Object.entries(v.state).map(([k, x]) => `${k} ${typeof x === "number" ? number(x, 2) : x}`).join(", ")])) : el("p", {}, "No validator has judged yet."))));
}

function draw(changed) {
  drawHead();
  const has = (...names) => !changed || names.some((name) => changed.includes(name));
  if (tab === "overview" && has("head", "figures")) views.overview.show(run);
  if (tab === "workers" && has("head")) drawWorkers();
  if (tab === "curves" && has("figures")) views.curves.update();
  if (tab === "timeline" && has("timeline")) views.timeline.show(run);
  if (tab === "rollouts" && has("rollouts")) views.rollouts.show(run);
}

function open(name) {
  if ($(`tab-${name}`).hidden) return;
  tab = name;
  for (const each of TABS) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  $(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "center" });
  draw();
}

/* Arrows, Home and End go through the tabs. */
function turnTab(event) {
  const shown = TABS.filter((name) => !$(`tab-${name}`).hidden), i = shown.indexOf(tab);
  const to = { ArrowRight: i + 1, ArrowLeft: i - 1 + shown.length, Home: 0, End: shown.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  open(shown[to % shown.length]);
  $(`tab-${tab}`).focus();
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
  else if (tab === "timeline" && "+-0".includes(event.key)) views.timeline.zoom({ "+": 0.7, "-": 1.4, 0: Infinity }[event.key], 0.5);
  else if ("jk".includes(event.key) && tab === "rollouts") views.rollouts.move(event.key === "j" ? 1 : -1);
  else if (event.key === "/") {
    event.preventDefault();
    open("rollouts");
    $("search").focus();
  }
}

async function follow() {
  const first = !run.head;
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
  if (EMBEDDED.live) setTimeout(follow, first && run.head ? 0 : POLL_MS);
}

$("tabs").append(...TABS.map((name) => el("button", { id: `tab-${name}`, role: "tab", "aria-controls": name, onclick: () => open(name) },
  name[0].toUpperCase() + name.slice(1))));
$("tabs").addEventListener("keydown", turnTab);
$("theme").addEventListener("click", turnTheme);
$("runs").hidden = RUNS.length < 2;
$("runs").append(...RUNS.map((each) => el("option", {}, each.name)));
$("runs").addEventListener("change", () => { run = RUNS[$("runs").selectedIndex]; draw(); });
document.addEventListener("keydown", key);
addEventListener("resize", () => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
open(tab);
follow();
