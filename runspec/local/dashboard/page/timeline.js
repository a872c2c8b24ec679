"use strict";
/* Who worked and who waited, on lanes of time: the whole run above, below it the part that is
   chosen there. Where spans are narrow a lane shows the share of time of each kind. */

const KINDS = {
  training: ["train", "the learner updates the weights"],
  waiting: ["wait", "the learner waits for somebody"],
  sampling: ["busy", "a worker samples rollouts of a lease"],
  judging: ["judge", "from a submission's arrival to its good verdict"],
  rejected: ["bad", "the same, with a bad verdict"],
  withheld: ["lost", "a lease whose worker sent nothing"],
  filling: ["fill", "the coordinator collects rollouts for a step"],
  published: ["ink", "a version of the weights comes out"],
  evaluating: ["ask", "the evaluator measures a version"],
};
const HEAD = 24, STRIP = 6, BIN = 5;
const NICE_S = [0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];

class TimelineView {
  constructor(node) {
    this.canvas = el("canvas", { tabIndex: 0, role: "img", "aria-label": "Timeline, arrows move, plus and minus zoom, 0 shows all" });
    this.strip = el("canvas", { id: "strip", "aria-hidden": "true" });
    this.tip = el("div", { id: "tip", hidden: true });
    this.shown = el("span", { className: "soft", id: "span" });
    this.kinds = el("div", { className: "kinds" });
    const key = (text, label, zoom) => el("button", { "aria-label": label, title: label, onclick: () => this.zoom(zoom, 0.5) }, text);
    this.lanes = el("div", { className: "panel lanes" }, this.strip, this.canvas);
    node.append(el("div", { className: "filters" }, key("+", "Closer", 0.5), key("−", "Farther", 2), key("Whole run", "Whole run", Infinity),
      this.shown, el("span", { className: "soft keys" }, "Drag in the strip to choose a part, drag below to move.")), this.lanes, this.kinds, this.tip);
    this.canvas.addEventListener("wheel", (e) => {
      e.preventDefault();
      this.zoom(e.deltaY > 0 ? 1.25 : 0.8, Math.max(0, (e.offsetX - this.left) / (this.width - this.left)));
    }, { passive: false });
    for (const [canvas, moved] of [[this.canvas, (e) => this.move(e)], [this.strip, (e) => this.brush(e)]]) {
      canvas.addEventListener("pointerdown", (e) => { this.held = e.offsetX; canvas.setPointerCapture(e.pointerId); });
      canvas.addEventListener("pointerup", () => (this.held = null));
      canvas.addEventListener("pointerleave", () => { this.held = null; this.tip.hidden = true; });
      canvas.addEventListener("pointermove", moved);
    }
    this.canvas.addEventListener("keydown", (e) => {
      const by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[e.key];
      if (by) this.shift(by * (this.range[1] - this.range[0]));
    });
  }

  show(run) {
    this.data = run.timeline;
    if (!this.data?.lanes.length) return;
    const end = Math.max(...this.data.lanes.map(([, spans]) => spans.reduce((m, s) => Math.max(m, s[1]), 0)));
    const whole = !this.range || this.run !== run || (this.range[0] <= 0 && this.range[1] >= this.end);
    if (whole) this.range = [0, end];
    else if (this.range[1] >= this.end) this.range = this.range.map((t) => t + end - this.end);
    Object.assign(this, { run, end });
    const kinds = new Set(this.data.lanes.flatMap(([, spans]) => spans.map((span) => span[2])));
    this.kinds.replaceChildren(...Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([kind, [color, words]]) =>
      el("span", {}, swatch(`var(--${color})`), kind, el("span", { className: "soft" }, `: ${words}`))));
    this.draw();
  }

  zoom(by, where) {
    if (!this.range) return;
    const [a, b] = this.range, span = Math.min(this.end, Math.max(0.5, (b - a) * by)), from = a + (b - a - span) * where;
    this.range = [from, from + span];
    this.shift(0);
  }

  /* Moves the part in sight, within the run. */
  shift(by) {
    const [a, b] = this.range, from = Math.min(Math.max(0, a + by), this.end - (b - a));
    this.range = [from, from + b - a];
    this.draw();
  }

  brush(e) {
    if (this.held == null) return;
    const [a, b] = [this.held, e.offsetX].sort((x, y) => x - y).map((x) => this.time(x, [0, this.end]));
    if (b - a < this.end / 200) return;
    this.range = [Math.max(0, a), Math.min(this.end, b)];
    this.draw();
  }

  move(e) {
    if (!this.range) return;
    if (this.held != null) {
      this.shift(((this.held - e.offsetX) / (this.width - this.left)) * (this.range[1] - this.range[0]));
      this.held = e.offsetX;
      return;
    }
    const found = this.spanAt(e.offsetX, e.offsetY);
    this.tip.hidden = !found;
    if (!found) return;
    const [start, end, kind, label] = found;
    this.tip.textContent = clean(`${kind}, ${label}${end > start ? `, ${number(end - start)} s` : ""}`);
    this.tip.style.left = `${Math.max(4, Math.min(e.clientX + 12, innerWidth - 260))}px`;
    this.tip.style.top = `${e.clientY + 14}px`;
  }

  spanAt(x, y) {
    const lane = this.data.lanes[Math.floor((y - HEAD) / this.tall)];
    if (!lane || x < this.left) return null;
    const t = this.time(x), near = ((this.range[1] - this.range[0]) / (this.width - this.left)) * 3;
    return lane[1].find(([start, end]) => t >= start - near && t <= end + near) ?? null;
  }

  /* The main kind of a lane, and its share of the time in sight; empty for moments. */
  share(spans) {
    const [from, to] = this.range, seconds = new Map();
    for (const [start, end, kind] of spans)
      seconds.set(kind, (seconds.get(kind) ?? 0) + Math.max(0, Math.min(end, to) - Math.max(start, from)));
    const [kind, most] = [...seconds].sort((a, b) => b[1] - a[1])[0];
    return most ? `${kind} ${percent(Math.min(1, most / (to - from)))}` : "";
  }

  time(x, range = this.range) { return range[0] + ((x - this.left) / (this.width - this.left)) * (range[1] - range[0]); }
  x(t, range = this.range) { return this.left + ((t - range[0]) / (range[1] - range[0])) * (this.width - this.left); }

  /* Draws the spans of a lane that are in a range of time, between heights. */
  lane(g, spans, range, top, height) {
    const inside = spans.filter(([start, end]) => end >= range[0] && start <= range[1]);
    const held = inside.filter(([start, end]) => end > start), place = this.width - this.left, seconds = (range[1] - range[0]) / place;
    const widths = held.reduce((sum, [start, end]) => sum + end - start, 0) / seconds;
    if (!held.length || widths / held.length > 2 * BIN) {
      for (const [start, end, kind] of inside) {
        const x = Math.max(this.left, this.x(start, range)), right = Math.min(this.width, this.x(end, range));
        g.fillStyle = this.colours[kind];
        g.fillRect(x, top, Math.max(1, right - x - (right - x > 3 ? 0.5 : 0)), height);
      }
      return;
    }
    const bins = Array.from({ length: Math.ceil(place / BIN) }, () => ({})), step = BIN * seconds;
    for (const [start, end, kind] of inside) {
      const last = Math.min(bins.length - 1, Math.floor((end - range[0]) / step));
      for (let i = Math.max(0, Math.floor((start - range[0]) / step)); i <= last; i++) {
        const from = range[0] + i * step, part = Math.min(end, from + step) - Math.max(start, from);
        bins[i][kind] = (bins[i][kind] ?? 0) + part / step;
      }
    }
    bins.forEach((bin, i) => {
      const all = Math.max(1, Object.values(bin).reduce((a, b) => a + b, 0));
      let bottom = top + height;
      for (const kind of Object.keys(KINDS).filter((each) => bin[each])) {
        const tall = (height * bin[kind]) / all;
        g.fillStyle = this.colours[kind];
        g.fillRect(this.left + i * BIN, (bottom -= tall), BIN, tall);
      }
    });
  }

  sized(canvas, height) {
    const ratio = devicePixelRatio || 1, g = canvas.getContext("2d");
    Object.assign(canvas, { width: this.width * ratio, height: height * ratio });
    canvas.style.height = `${height}px`;
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    return g;
  }

  draw() {
    this.width = this.lanes.clientWidth;
    if (!this.width) return;
    this.left = this.width < 600 ? 104 : 160;
    this.colours = Object.fromEntries(Object.entries(KINDS).map(([kind, [name]]) => [kind, colour(name)]));
    const { lanes, origin } = this.data, [from, to] = this.range, whole = [0, this.end], ink = colour("ink"), soft = colour("soft");
    const clockAt = (t) => clock(origin + t);
    this.shown.textContent = `${clockAt(from)} to ${clockAt(to)}, ${duration(to - from)} of ${duration(this.end)}`;
    const strip = this.sized(this.strip, lanes.length * STRIP + 14);
    lanes.forEach(([, spans], i) => this.lane(strip, spans, whole, 6 + i * STRIP, STRIP - 1));
    strip.fillStyle = soft;
    strip.fillText("whole run", 8, 6 + (lanes.length * STRIP) / 2 + 4, this.left - 12);
    const [a, b] = [this.x(from, whole), this.x(to, whole)];
    strip.globalAlpha = 0.6;
    strip.fillStyle = colour("card");
    strip.fillRect(this.left, 0, a - this.left, 99999);
    strip.fillRect(b, 0, this.width - b, 99999);
    strip.globalAlpha = 1;
    strip.strokeStyle = ink;
    strip.strokeRect(a + 0.5, 2.5, Math.max(2, b - a - 1), lanes.length * STRIP + 7);
    this.tall = Math.round(Math.min(64, Math.max(30, (innerHeight - 420) / lanes.length)));
    const height = HEAD + lanes.length * this.tall + 2, g = this.sized(this.canvas, height);
    const wide = (every) => (every * (this.width - this.left)) / (to - from), room = (every) => (every < 60 ? 70 : 48);
    const every = NICE_S.find((s) => wide(s) >= room(s)) ?? NICE_S.at(-1);
    const begin = new Date(origin * 1000), offset = (origin - begin.getTimezoneOffset() * 60) % every;
    for (let t = Math.ceil((from + offset) / every) * every - offset; t <= to; t += every) {
      g.fillStyle = colour("line");
      g.fillRect(this.x(t), HEAD - 4, 1, height);
      g.fillStyle = soft;
      if (this.x(t) + room(every) - 10 < this.width) g.fillText(clockAt(t + 0.001).slice(0, every < 60 ? 8 : 5), this.x(t) + 3, 14);
    }
    lanes.forEach(([lane, spans], i) => {
      const y = HEAD + i * this.tall, middle = y + this.tall / 2, main = this.share(spans);
      this.lane(g, spans, this.range, y + 4, this.tall - 8);
      g.fillStyle = ink;
      g.fillText(clean(this.width < 600 ? lane.replace(/ (\w{4})\w+$/, " $1") : lane), 12, middle + (main ? -3 : 4), this.left - 18);
      g.fillStyle = soft;
      g.fillText(main, 12, middle + 12, this.left - 18);
    });
  }
}
