"use strict";
/* Who worked and who waited, on lanes of time. Drag moves, the wheel or + and - zoom. */

const KINDS = { training: "good", waiting: "warn", sampling: "busy", judging: "judge", rejected: "bad",
  withheld: "lost", filling: "line", published: "ink", evaluating: "ask" };
const LANE = 26, LEFT = 150, HEAD = 22;

class TimelineView {
  constructor(node) {
    this.canvas = el("canvas", { tabIndex: 0, "aria-label": "Timeline" });
    this.tip = el("div", { id: "tip", hidden: true });
    const legend = Object.keys(KINDS).map((kind) => {
      const box = el("span", {}, "■ ");
      box.style.color = `var(--${KINDS[kind]})`;
      return el("span", { className: "soft" }, box, `${kind}  `);
    });
    const key = (zoom) => el("button", { onclick: () => this.zoom(zoom, 0.5) }, zoom < 1 ? "+" : "−");
    node.append(el("div", { className: "filters" }, key(0.5), key(2), ...legend),
      el("div", { className: "lanes" }, this.canvas), this.tip);
    this.canvas.addEventListener("wheel", (e) => {
      e.preventDefault();
      this.zoom(e.deltaY > 0 ? 1.25 : 0.8, Math.max(0, (e.offsetX - LEFT) / (this.width - LEFT)));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (e) => (this.held = e.offsetX));
    this.canvas.addEventListener("pointerup", () => (this.held = null));
    this.canvas.addEventListener("pointerleave", () => { this.held = null; this.tip.hidden = true; });
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
  }

  show(run) {
    this.data = run.timeline;
    if (!this.data?.lanes.length) return;
    const end = Math.max(...this.data.lanes.map(([, spans]) => spans.reduce((m, s) => Math.max(m, s[1]), 0)));
    if (!this.range || this.run !== run || this.range[1] >= (this.end ?? 0)) {
      const span = this.run === run && this.range ? this.range[1] - this.range[0] : Math.min(end, 60);
      this.range = [end - span, end];
    }
    Object.assign(this, { run, end });
    this.draw();
  }

  zoom(by, where) {
    if (!this.range) return;
    const [a, b] = this.range, middle = a + (b - a) * where, span = Math.min(this.end, Math.max(0.5, (b - a) * by));
    this.range = [middle - span * where, middle + span * (1 - where)];
    this.draw();
  }

  move(e) {
    if (!this.range) return;
    if (this.held !== null && this.held !== undefined) {
      const by = ((this.held - e.offsetX) / (this.width - LEFT)) * (this.range[1] - this.range[0]);
      this.range = this.range.map((t) => t + by);
      this.held = e.offsetX;
      this.draw();
      return;
    }
    const found = this.spanAt(e.offsetX, e.offsetY);
    this.tip.hidden = !found;
    if (!found) return;
    const [start, end, kind, label] = found;
    this.tip.textContent = clean(`${kind}, ${label}${end > start ? `, ${number(end - start)} s` : ""}`);
    this.tip.style.left = `${Math.min(e.clientX + 12, innerWidth - 260)}px`;
    this.tip.style.top = `${e.clientY + 14}px`;
  }

  spanAt(x, y) {
    const lane = this.data.lanes[Math.floor((y - HEAD) / LANE)];
    if (!lane || x < LEFT) return null;
    const t = this.time(x), near = (this.range[1] - this.range[0]) / (this.width - LEFT) * 3;
    return lane[1].find(([start, end]) => t >= start - near && t <= end + near) ?? null;
  }

  time(x) { return this.range[0] + ((x - LEFT) / (this.width - LEFT)) * (this.range[1] - this.range[0]); }
  x(t) { return LEFT + ((t - this.range[0]) / (this.range[1] - this.range[0])) * (this.width - LEFT); }

  draw() {
    const ratio = devicePixelRatio || 1, height = HEAD + this.data.lanes.length * LANE;
    this.width = this.canvas.parentElement.clientWidth;
    if (!this.width) return;
    Object.assign(this.canvas, { width: this.width * ratio, height: height * ratio });
    this.canvas.style.height = `${height}px`;
    const g = this.canvas.getContext("2d"), [from, to] = this.range;
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    for (let i = 0; i <= 6; i++) {
      const t = from + ((to - from) * i) / 6;
      g.fillStyle = colour("line");
      g.fillRect(this.x(t), HEAD - 4, 1, height);
      g.fillStyle = colour("soft");
      const clock = new Date((this.data.origin + t) * 1000).toLocaleTimeString();
      if (i < 6) g.fillText(clock, this.x(t) + 3, 13);
    }
    this.data.lanes.forEach(([lane, spans], i) => {
      const y = HEAD + i * LANE;
      for (const [start, end, kind] of spans) {
        if (end < from || start > to) continue;
        const x = Math.max(LEFT, this.x(start)), right = Math.min(this.width, this.x(end));
        g.fillStyle = colour(KINDS[kind]);
        g.fillRect(x, y + 4, Math.max(2, right - x - 0.5), LANE - 8);
      }
      g.fillStyle = colour("page");
      g.fillRect(0, y, LEFT - 2, LANE);
      g.fillStyle = colour("ink");
      g.fillText(clean(lane), 2, y + 17, LEFT - 8);
    });
  }
}
