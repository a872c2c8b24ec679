"use strict";
/* The browser of rollouts: a list with filters and search, and a group side by side. */

const ROW = 32;
const SHADES = ["none", "log-prob", "difference", "advantage"];
const EXPLAINED = { none: "", "log-prob": "The darker, the less likely the token was.",
  difference: "|claimed - recomputed| log-prob: the darker, the farther the worker's number is from the validator's.",
  advantage: "The rollout's reward minus its group's mean: green above, red below." };
const MOST_SPANS = 4000;
const ORDERS = {
  "newest step": (f) => (a, b) => b[f.step] - a[f.step] || a[f.id] - b[f.id],
  "oldest step": (f) => (a, b) => a[f.step] - b[f.step] || a[f.id] - b[f.id],
  "highest reward": (f) => (a, b) => (b[f.reward] ?? -1e9) - (a[f.reward] ?? -1e9),
  "lowest reward": (f) => (a, b) => (a[f.reward] ?? 1e9) - (b[f.reward] ?? 1e9),
  "longest": (f) => (a, b) => b[f.length] - a[f.length],
  "farthest from target": (f) => (a, b) => off(b, f) - off(a, f),
  "largest log-prob difference": (f) => (a, b) => (b[f.gap] ?? -1) - (a[f.gap] ?? -1),
};

function off(row, f) {
  return row[f.target] === null ? -1 : Math.abs(row[f.length] - row[f.target]);
}

/* "3", "3-9", "-9" or "3-" as a range. */
function range(text) {
  const match = /^\s*(\d*)\s*(-?)\s*(\d*)\s*$/.exec(text);
  if (!match || !text.trim()) return [0, Infinity];
  const [, low, dash, high] = match;
  return [Number(low || 0), dash ? (high ? Number(high) : Infinity) : Number(low)];
}

/* How many characters all texts begin with, up to the end of a word. */
function commonStart(texts) {
  const sorted = [...new Set(texts)].sort(), low = sorted[0], high = sorted.at(-1);
  if (sorted.length < 2) return 0;
  let same = 0;
  while (same < low.length && low[same] === high[same]) same++;
  return low.slice(0, same).lastIndexOf(" ") + 1;
}

class RolloutsView {
  constructor(node) {
    Object.assign(this, { node, shown: [], chosen: null, shade: 0, found: null });
    const changed = () => this.filter();
    const select = (label) => el("select", { "aria-label": label, onchange: changed });
    this.words = el("input", { type: "search", id: "search", placeholder: "Search prompts and outputs",
      "aria-label": "Search", oninput: () => this.search() });
    this.step = el("input", { className: "step", placeholder: "steps", title: "3, 3-9 or 3-", "aria-label": "Steps", oninput: changed });
    this.outcome = select("Outcome");
    this.check = select("Failed check");
    this.worker = select("Worker");
    this.order = select("Order");
    this.order.append(...Object.keys(ORDERS).map((name) => el("option", {}, name)));
    this.count = el("span", { className: "soft note", id: "count", role: "status" });
    this.list = el("div", { className: "list", tabIndex: 0, id: "list", role: "listbox", "aria-label": "Rollouts",
      onscroll: () => this.paint(), onkeydown: (e) => this.arrow(e) });
    const length = el("span", { title: "length/target, tokens" }, "length", el("span", { className: "wide-only" }, "/target"));
    const heads = ["step", "outcome", "prompt", length, "reward"].map((name) => el("span", {}, name));
    const listing = el("div", { className: "listing" }, el("div", { className: "row heads" }, ...heads), this.list);
    this.list.append((this.tall = el("div")));
    this.detail = el("div", { id: "detail" });
    node.append(
      el("div", { className: "filters" }, this.words, this.step, this.outcome, this.check, this.worker, this.order, this.count),
      el("div", { className: "browser" }, listing, this.detail));
  }

  show(run) {
    if (this.run !== run) {
      Object.assign(this, { run, chosen: null, found: null, seen: 0, wanted: "" });
      this.detail.replaceChildren();
      this.words.value = "";
    }
    const f = run.fields;
    this.same = commonStart(run.words.values());
    for (const [field, node, all] of [["outcome", this.outcome, "all outcomes"], ["check", this.check, "all checks"], ["worker", this.worker, "all workers"]]) {
      const values = [...new Set([...run.rows.values()].map((row) => row[f[field]]))].filter(Boolean).sort();
      if (node.dataset.values === values.join()) continue;
      const before = node.value;
      node.dataset.values = values.join();
      node.replaceChildren(el("option", { value: "" }, all), ...values.map((value) => el("option", { value }, value)));
      node.value = values.includes(before) ? before : "";
    }
    this.filter();
  }

  async search() {
    const words = (this.wanted = this.words.value);
    const found = await this.run.search(words).catch((error) => fail(error));
    if (this.wanted !== words || found === undefined) return; // a later search is on its way
    this.found = found;
    this.filter();
  }

  filter() {
    if (!this.run) return;
    const f = this.run.fields, [low, high] = range(this.step.value);
    const [outcome, check, worker] = [this.outcome.value, this.check.value, this.worker.value];
    this.shown = [...this.run.rows.values()].filter((row) =>
      row[f.step] >= low && row[f.step] <= high && (!outcome || row[f.outcome] === outcome) &&
      (!check || row[f.check] === check) && (!worker || row[f.worker] === worker) &&
      (!this.found || this.found.has(row[f.id])));
    this.shown.sort(ORDERS[this.order.value](f));
    this.tall.style.height = `${this.shown.length * ROW}px`;
    this.paint();
    const { unread = 0, unreadable = 0, left_out = 0 } = this.run.counts, all = this.run.rows.size;
    const bare = this.run.live ? 0 : all - Object.keys(this.run.details).length;
    const notes = [`${number(this.shown.length)} of ${number(all)} rollouts`];
    if (unread) notes.push(`${number(unread)} submissions are being read`);
    const less = [bare && `${number(bare)} have no text`, left_out && `${number(left_out)} more are left out`].filter(Boolean);
    if (less.length) notes.push(`${less.join(" and ")}, so that this file stays small`);
    if (unreadable) notes.push("those of older steps were deleted (storage.rollouts keeps more)");
    this.count.textContent = notes.join("; ");
    if (this.shown.some((row) => row[f.id] === this.chosen)) return;
    const first = this.shown.find((row) => this.run.has(row[f.id])) ?? this.shown[0]; // with its text if there is one
    if (first) this.choose(first);
    else this.detail.replaceChildren(el("p", {}, this.run.rows.size ? "No rollout fits the filters." : "No rollout was judged yet."));
  }

  arrow(event) {
    if (!["ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    this.move(event.key === "ArrowDown" ? 1 : -1);
  }

  /* Rows that are in sight. */
  paint() {
    const f = this.run.fields, first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 5);
    const rows = this.shown.slice(first, first + Math.ceil(this.list.clientHeight / ROW) + 10).map((row, i) => {
      const chosen = row[f.id] === this.chosen, words = this.run.words.get(row[f.group]) ?? row[f.problem];
      const has = this.run.has(row[f.id]);
      const node = el("div", { className: `row${chosen ? " chosen" : ""}${has ? "" : " bare"}`, role: "option", "aria-selected": String(chosen),
        onclick: () => this.choose(row, true) },
        el("span", { className: "soft" }, String(row[f.step])), el("span", { className: row[f.outcome], title: row[f.check] ?? "" }, row[f.outcome]),
        el("span", { title: clean(words) }, this.same ? `… ${words.slice(this.same)}` : words),
        el("span", {}, `${row[f.length]}/${row[f.target] ?? "-"}`), el("span", {}, row[f.reward] === null ? "-" : row[f.reward].toFixed(2)));
      node.style.top = `${(first + i) * ROW}px`;
      return node;
    });
    this.list.replaceChildren(this.tall, ...rows);
  }

  move(by) {
    const f = this.run?.fields, i = this.shown.findIndex((row) => row[f.id] === this.chosen);
    const row = this.shown[Math.min(this.shown.length - 1, Math.max(0, i + by))];
    if (!row) return;
    const top = this.shown.indexOf(row) * ROW, { scrollTop, clientHeight } = this.list;
    if (top < scrollTop || top > scrollTop + clientHeight - ROW) this.list.scrollTop = top - clientHeight / 2;
    this.choose(row, true);
  }

  /* Opens a rollout; where a person chose it, brings it into sight. */
  async choose(row, follow = false) {
    const f = this.run.fields, id = row[f.id];
    this.chosen = id;
    this.paint();
    if (!this.run.has(id))
      return this.detail.replaceChildren(el("div", { className: "panel" }, el("h2", {}, `Step ${row[f.step]}, problem ${row[f.problem]}`),
        el("p", {}, "This file has no room for the text of this rollout. `runspec dashboard` on the run's machine shows it.")));
    const group = [...this.run.rows.values()].filter((each) => each[f.group] === row[f.group] && this.run.has(each[f.id]));
    group.sort((a, b) => a[f.sample] - b[f.sample]);
    const details = await Promise.all(group.map((each) => this.run.rollout(each[f.id]))).catch((error) => fail(error));
    if (this.chosen !== id || !details) return;
    this.open = { group, details };
    this.draw();
    if (follow) this.detail.querySelector(".card.chosen")?.scrollIntoView({ block: "nearest" });
  }

  turn() {
    this.shade = (this.shade + 1) % SHADES.length;
    if (this.open) this.draw();
  }

  draw() {
    const { group, details } = this.open, f = this.run.fields, [first] = group;
    const rewards = group.map((row) => row[f.reward] ?? 0), low = Math.min(...rewards), high = Math.max(...rewards);
    const cards = group.map((row, i) => {
      const share = high > low ? (rewards[i] - low) / (high - low) : 0.5, card = this.card(row, details[i]);
      card.style.borderTopColor = `hsl(${Math.round(120 * share)} 60% 45%)`;
      return card;
    });
    const shade = el("select", { "aria-label": "Token colours", onchange: () => { this.shade = shade.selectedIndex; this.draw(); } },
      ...SHADES.map((name) => el("option", {}, name)));
    shade.selectedIndex = this.shade;
    this.detail.replaceChildren(
      el("div", { className: "panel" },
        el("div", { className: "detail-head" }, el("h2", {}, `Step ${first[f.step]}, problem ${first[f.problem]}, sampled by version ${first[f.version]}`),
          el("label", {}, "Token colours ", shade)),
        el("p", {}, EXPLAINED[SHADES[this.shade]]), longText(details[0].prompt, "prompt")),
      el("div", { className: "group" }, ...cards));
  }

  card(row, detail) {
    const f = this.run.fields, good = row[f.task] >= 0.5 ? "good" : "bad";
    const facts = el("div", {}, el("span", { className: row[f.outcome] }, row[f.outcome]), " · ",
      el("span", { className: good }, `task ${number(row[f.task])}`),
      `${row[f.target] === null ? "" : ` · length term ${number(row[f.penalty])}`} · reward ${number(row[f.reward])} · advantage ${number(row[f.advantage])}`);
    const more = el("div", { className: "soft" },
      `${row[f.length]} tokens${detail.turns > 1 ? ` in ${detail.turns} turns` : ""}${row[f.target] === null ? "" : `, ${row[f.target]} wanted`} · ends by ${detail.finish_reason} · worker ${row[f.worker]}`);
    const failed = detail.checks.filter(([, passed]) => !passed);
    const why = detail.reason ? [el("p", { className: "bad" }, `rejected: ${detail.reason}`)] : [];
    const checks = el("details", { open: failed.length > 0 }, el("summary", {}, failed.length ? `${failed.length} checks failed` : `${detail.checks.length} checks passed`),
      table(["check", "", "measured", "limit", "why"], detail.checks.map(([name, passed, value, limit, reason]) =>
        [el("span", { className: passed ? "" : "bad" }, name), passed ? "passed" : "failed", value, limit, reason])));
    return el("article", { className: `card${row[f.id] === this.chosen ? " chosen" : ""}` }, facts, more, ...why,
      this.tokens(row, detail), checks);
  }

  /* The output; each token in the colour of its number, and the number under the pointer. */
  tokens(row, detail) {
    const shade = SHADES[this.shade], { pieces, logprobs, recomputed } = detail, f = this.run.fields;
    if (shade === "none" && (detail.turns === 1 || pieces.length > MOST_SPANS)) return longText(pieces.join(""), "output");
    const node = el("div", { className: "tokens" }), advantage = row[f.advantage] ?? 0;
    if (shade === "difference" && !recomputed) node.append(el("p", {}, "These log-probs were not recomputed."));
    pieces.slice(0, MOST_SPANS).forEach((piece, i) => {
      if (detail.turns > 1 && logprobs[i] === null) return node.append(el("span", { className: "observed", title: "an observation, or the template between two turns" }, piece));
      if (shade === "none") return node.append(piece);
      const value = shade === "log-prob" ? logprobs[i] : shade === "advantage" ? advantage
        : recomputed ? Math.abs(logprobs[i] - recomputed[i]) : 0;
      const strength = shade === "log-prob" ? -value / 5 : shade === "advantage" ? Math.abs(value) : value / 0.05;
      const hue = shade === "advantage" && value > 0 ? 140 : shade === "log-prob" ? 30 : 5;
      const title = `${shade} ${number(value)}${shade === "difference" && recomputed ? `: claimed ${number(logprobs[i])}, recomputed ${number(recomputed[i])}` : ""}`;
      const span = el("span", { title }, piece);
      span.style.background = `hsl(${hue} 80% 50% / ${Math.min(0.75, Math.max(0, strength) * 0.75)})`;
      node.append(span);
    });
    const left = pieces.length - MOST_SPANS + detail.more;
    if (left > 0) node.append(el("p", {}, `${number(left)} more tokens, see them without colours`));
    return node;
  }
}
