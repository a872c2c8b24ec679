"use strict";
/* The first tab: what the run does now, tiles, its main curve, evaluations, roles and events. */

/* Conditions that ask for somebody's attention. */
const TROUBLES = ["LogprobAlarm", "NothingSolved", "SetAside", "GraderFaults", "Stalled", "Failed"];

function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleTimeString("en-GB") : "-";
}

class Overview {
  constructor(node) {
    this.node = node;
    const part = (className) => node.appendChild(el("div", { className }));
    this.now = part("panel now");
    this.tiles = part("tiles");
    this.lead = part("cols lead");
    this.rest = part("cols");
    const figure = { title: "", caption: "Task reward", levels: [], bottom: null, top: null, log: false };
    this.chart = new Plot(figure, () => this.curves(), 300);
    this.evaluations = el("div", { className: "panel" });
    this.lead.append(this.chart.node, this.evaluations);
  }

  /* Curves of training and of evaluations in the figure that stands for the run. */
  curves() {
    const of = (section, title, label) => curvesOf(section, title, [this.run]).slice(0, 1).map((curve) => ({ ...curve, label }));
    const kind = this.supervised ? ["Training", "Loss", ": loss"] : ["Learning", "Task reward", ": task reward"];
    const evaluated = (this.run.figures?.Evaluations ?? []).filter((each) => each.title.endsWith(kind[2]));
    return [...of(kind[0], kind[1], "training"), ...evaluated.flatMap(({ title }) => of("Evaluations", title, title.slice(0, -kind[2].length)))];
  }

  show(run) {
    this.run = run;
    const head = run.head;
    this.node.hidden = tab !== "overview";
    if (!head) return this.now.replaceChildren(el("div", {}, "The run is being read."));
    this.supervised = head.kind !== "grpo";
    const live = ["starting", "running"].includes(head.state);
    const color = { failed: "bad", interrupted: "bad", paused: "warn", starting: "warn" }[head.state] ?? "good";
    const troubles = head.conditions.filter(([type]) => TROUBLES.includes(type) && !(type === "Failed" && head.reason));
    this.now.replaceChildren(
      el("div", {}, dot(color), head.now),
      ...head.diagnosis.map((line) => el("div", { className: "warn" }, line)),
      ...troubles.map(([type, , message]) => el("div", { className: "bad" }, `${type}: ${message}`)),
      ...head.conditions.filter((each) => !troubles.includes(each) && live).map(([type, , message]) =>
        el("span", { className: "chip" }, dot("good"), `${type}: ${message}`)));
    this.tiles.replaceChildren(...head.tiles.map((each) => el("div", { className: `panel tile ${each.state}` },
      el("span", { className: "soft" }, each.name), el("b", {}, each.value), el("span", { className: "soft" }, each.note),
      ...(each.points.length > 1 ? [spark(each.points)] : []))));
    const banded = (evaluation) => evaluation.rows.some(([, , , interval]) => interval);
    const drawn = this.curves().length > 0;
    this.chart.title.textContent = this.supervised ? "Loss, nats a token" : "Task reward";
    this.chart.caption.textContent = !head.evaluations.length ? "In training."
      : `In training and in evaluations${head.evaluations.some(banded) ? ", with their 95 % interval" : ""}.`;
    this.chart.node.hidden = !drawn;
    this.evaluations.hidden = !head.evaluations.length;
    this.lead.className = `cols lead${drawn && head.evaluations.length ? "" : " one"}`;
    this.lead.hidden = !drawn && !head.evaluations.length;
    this.evaluations.replaceChildren(...head.evaluations.flatMap((each) => [
      el("h2", {}, `Evaluation ${each.name}`),
      table(["", `version ${each.first}`, `version ${each.newest}`, ...(banded(each) ? ["95 % interval"] : []), ""],
        each.rows.map(([name, first, newest, interval, values]) =>
          [name, first, newest, ...(banded(each) ? [interval] : []), values.length > 1 ? spark(values) : ""]), [1, 2, 3]),
      ...(each.faults ? [el("p", { className: "bad" }, `${number(each.faults)} answers have no grade.`)] : [])]));
    const open = this.rest.querySelector("details")?.open ?? false;
    const lines = (events) => table([], events.map(([time, role, text]) => [clock(time), role, text]));
    this.rest.replaceChildren(
      panel("Roles", this.tree(head, live)),
      ...(head.ends.length ? [panel("Figures", table(["", "first 10 steps", "last 10 steps"], head.ends.map(([name, ...ends]) => [name, ...ends.map((x) => number(x))]), [1, 2]),
        table(["", "whole run"], head.facts, [1]))] : []),
      ...(head.findings.words ? [panel("Trained again by watchers", el("p", {}, `${head.findings.words}.`),
        table(["steps", "", ""], head.findings.rows.map(([steps, outcome, ...by]) => [steps, el("span", { className: outcome === "refuted" ? "bad" : "" }, outcome), ...by])))] : []),
      ...(head.events.length + head.routine.length ? [el("div", { className: "panel events" }, el("h2", {}, "Events"),
        head.events.length ? lines(head.events) : el("p", {}, "None but starts and ends."),
        ...(head.routine.length ? [el("details", { open }, el("summary", {}, `${head.routine.length} starts and ends`), lines(head.routine))] : []))] : []));
    if (drawn) this.chart.draw();
  }

  /* Roles in the order in which work goes through them: weights flow down, rollouts come back. */
  tree(head, live) {
    const roles = new Map(head.roles.map((role) => [role[0], role])), servers = new Map(head.servers.map((each) => [each.name, each]));
    const last = head.servers.at(-1)?.name ?? "publisher", below = new Map();
    const above = { learner: "coordinator", publisher: "learner", origin: "publisher" };
    const pool = (name) => head.pools.find((each) => name.startsWith(`${each}-`));
    for (const name of new Set(["coordinator", "learner", "publisher", ...servers.keys(), ...roles.keys()])) {
      if (name === "coordinator") continue;
      const parent = above[name] ?? servers.get(name)?.upstream[0] ?? (pool(name) ? last : "coordinator");
      below.set(parent, [...(below.get(parent) ?? []), name]);
    }
    const item = (name) => {
      const [, state, stage, restarts, since] = roles.get(name) ?? [], server = servers.get(name);
      const busy = head.busy[name === "learner" ? "learner" : pool(name) ? "sampler" : ""];
      const waits = live && (stage || (typeof busy === "number" && busy < 0.5) || state !== "running");
      const mark = state === "failed" ? "bad" : state === undefined || (state === "finished" && live) || !live ? "soft" : waits ? "warn" : "good";
      const at = state ? clock(since) : "", ended = ["finished", "failed", "ended"].includes(state);
      const words = [stage || (state === "running" ? (waits ? "mostly waits" : "works") : ended ? `${state} at ${at}` : state), live && typeof busy === "number" ? `busy ${percent(busy)}` : "",
        server?.versions.length ? `version ${server.versions.at(-1)}` : "", server?.bytes_sent ? `${size(server.bytes_sent)} sent` : "",
        restarts ? many(restarts, "restart") : "", at && !ended && state !== "running" ? `since ${at}` : ""];
      const children = below.get(name) ?? [];
      return el("li", {}, el("div", {}, dot(mark), name, el("span", { className: "soft" }, words.filter(Boolean).join(" · "))),
        ...(children.length ? [el("ul", {}, ...children.map(item))] : []));
    };
    const versions = (head.crowd?.versions ?? []).map(([version, count]) => `${count} with version ${version}`).join(", ");
    return el("div", {}, el("ul", { className: "tree" }, item("coordinator")), el("p", {}, versions ? `Workers alive: ${versions}. ` : "", live ? "Busy is the share of the last 10 steps." : ""));
  }
}
