"use strict";
/* Plots of all runs: figures of the same title lie over each other. */

const COLOURS = ["#2f7fc2", "#d9772b", "#3a9d6e", "#b05cc0", "#c2495b", "#8a8f2f"];
const SMOOTHINGS = [1, 5, 10, 25, 50, 100];
let smoothing = 10;

/* Means over the last steps. */
function smoothed(values) {
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i + 1 - smoothing), i + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

/* Curves of one figure over runs, each with its label and points. */
function curvesOf(section, title, runs = RUNS) {
  const found = [];
  for (const run of runs) {
    const figure = run.figures?.[section]?.find((each) => each.title === title);
    for (const curve of figure?.curves ?? []) {
      const label = runs.length > 1 ? [run.name, curve.label].filter(Boolean).join(": ") : curve.label || title;
      found.push({ ...curve, label });
    }
  }
  return found;
}

/* Label and colour of each curve, and its values: at the pointer, else the last. */
function legend(node, plot, names) {
  const [xs] = plot.data, i = plot.cursor.idx ?? null;
  node.replaceChildren(...names.map(({ label, stroke, k }) => {
    const ys = plot.data[k], value = i === null ? ys.findLast((y) => y !== null) : ys[i];
    return el("span", {}, swatch(stroke), `${label} `, el("b", {}, number(value)));
  }), i === null ? "" : `at step ${number(xs[i])}`);
}

function swatch(color) {
  const mark = el("span", { className: "swatch" });
  mark.style.background = color;
  return mark;
}

/* The curves as lines of comma-separated values, a step each. */
function csvOf(curves) {
  const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const columns = curves.flatMap((curve) => [[curve.label, at(xs, curve, curve.y)],
    ...(curve.band.length ? [1, 2].map((k) => [`${curve.label}, ${k === 1 ? "low" : "high"}`, bandAt(xs, curve, k)]) : [])]);
  const quoted = (text) => `"${clean(text).replaceAll('"', '""')}"`;
  const lines = xs.map((x, i) => [x, ...columns.map(([, ys]) => ys[i] ?? "")].join(","));
  return [["step", ...columns.map(([label]) => quoted(label))].join(","), ...lines, ""].join("\n");
}

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/* One end of a curve's band at the plot's common x. */
function bandAt(xs, curve, k) {
  return at(xs, { x: curve.band.map((b) => b[0]) }, curve.band.map((b) => b[k]));
}

/* Values of a curve at the plot's common x; null where it has none. */
function at(xs, curve, values) {
  const by = new Map(curve.x.map((x, i) => [x, values[i]]));
  return xs.map((x) => by.get(x) ?? null);
}

function plotData(figure, curves) {
  const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const data = [xs], series = [{}], bands = [], names = [];
  curves.forEach((curve, i) => {
    const stroke = COLOURS[i % COLOURS.length], { label } = curve, spanGaps = true;
    if (curve.averaged && smoothing > 1) {
      data.push(at(xs, curve, curve.y), at(xs, curve, smoothed(curve.y)));
      series.push({ stroke: `${stroke}66`, width: 1, spanGaps, points: { show: false } });
      series.push({ label, stroke, width: 2, spanGaps, points: { show: false } });
    } else {
      data.push(at(xs, curve, curve.y));
      series.push({ label, stroke, width: 1.5, spanGaps, points: { show: curve.x.length < 60 } });
    }
    names.push({ label, stroke, k: data.length - 1 });
    if (curve.band.length) {
      data.push(bandAt(xs, curve, 2), bandAt(xs, curve, 1));
      for (let side = 0; side < 2; side++) series.push({ stroke: `${stroke}55`, width: 0.5, spanGaps, points: { show: false } });
      bands.push({ series: [data.length - 2, data.length - 1], fill: `${stroke}33` });
    }
    if (figure.levels[i] !== undefined) {
      data.push(xs.map(() => figure.levels[i]));
      series.push({ stroke: `${stroke}aa`, width: 1, dash: [5, 4], points: { show: false } });
    }
  });
  return { data, series, bands, names };
}

/* Powers of ten, and between few of them 2 and 5 times as much. */
function logSplits(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), few = to - from < 3;
  const every = Math.max(1, Math.ceil((to - from) / 5)), found = [];
  for (let power = from; power <= to; power += every) for (const by of few ? [1, 2, 5] : [1]) found.push(by * 10 ** power);
  return found.filter((value) => value >= low && value <= high);
}

function tick(value) {
  if (value === null) return "";
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(0) : number(value);
}

/* A line where the settings of training change. */
function drawChanges(plot) {
  const { ctx, bbox } = plot;
  Object.assign(ctx, { strokeStyle: colour("warn"), lineWidth: devicePixelRatio });
  ctx.setLineDash([]);
  for (const [step] of RUNS.flatMap((each) => each.head?.changes ?? [])) {
    const x = plot.valToPos(step, "x", true);
    if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.strokeRect(x, bbox.top, 0, bbox.height);
  }
}

/* A chart of one figure; `curves` returns what it draws now. */
class Plot {
  constructor(figure, curves, height = 200) {
    Object.assign(this, { figure, curves, height, plot: null, shown: "" });
    this.holder = el("div", { className: "plot" });
    this.legend = el("div", { className: "legend" });
    this.title = el("b", {}, figure.title);
    this.caption = el("span", {}, figure.caption);
    this.larger = el("button", { onclick: () => this.turn(), "aria-pressed": "false", "aria-label": "Enlarge", title: "Enlarge" }, "⤢");
    const csv = el("button", { title: "Save the values as CSV", onclick: () => this.save() }, "CSV");
    this.node = el("figure", {}, el("figcaption", {}, el("div", {}, this.title, this.larger, csv), this.caption), this.holder, this.legend);
  }

  /* Whether it has a value other than zero. */
  get tells() {
    return this.curves().some((curve) => curve.y.some((y) => y !== 0));
  }

  turn() {
    const wide = this.node.classList.toggle("wide");
    this.larger.setAttribute("aria-pressed", String(wide));
    this.draw();
    this.node.scrollIntoView({ block: "nearest" });
  }

  save() {
    save(`${this.title.textContent.replace(/\W+/g, "-").toLowerCase()}.csv`, csvOf(this.curves()));
  }

  draw() {
    const width = this.holder.clientWidth, height = this.height * (this.node.classList.contains("wide") ? 2 : 1);
    if (!width) return;
    const { log, bottom, top } = this.figure;
    const { data: all, series, bands, names } = plotData(this.figure, this.curves());
    const positive = log && all.slice(1).some((ys) => ys.some((y) => y > 0));
    const data = positive ? all.map((ys, i) => (i ? ys.map((v) => (v > 0 ? v : null)) : ys)) : all;
    const shown = names.map((each) => `${each.label} ${each.k}`).join() + colour("ink") + smoothing;
    if (this.plot && this.shown === shown) {
      this.plot.setSize({ width, height });
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shown = shown;
    const font = "12px system-ui, sans-serif", side = { stroke: colour("soft"), font, labelFont: font, ticks: { show: false } };
    const axis = { ...side, grid: { stroke: colour("line"), width: 1 } };
    const range = (_, low, high) => [bottom ?? low, Math.max(high, top ?? high)];
    const y = positive ? { distr: 3 } : bottom !== null ? { range } : {};
    const room = (_, ticks) => Math.max(28, 12 + 7 * Math.max(0, ...(ticks ?? []).map((text) => text.length)));
    const splits = positive ? { splits: (_, __, low, high) => logSplits(low, high), filter: (_, found) => found } : {};
    const tell = (plot) => legend(this.legend, plot, names);
    this.plot = new uPlot({
      width, height, series, bands, legend: { show: false }, hooks: { setCursor: [tell], setData: [tell], ready: [tell], draw: [drawChanges] },
      axes: [{ ...axis, label: "step", labelSize: 18, size: 26 }, { ...axis, ...splits, size: room, values: (_, ticks) => ticks.map(tick) }],
      scales: { x: { time: false }, y },
      cursor: { sync: { key: "steps" } },
    }, data, this.holder);
  }
}

class Curves {
  /* As many charts beside each other as leave the fewest places empty. */
  arrange(grid) {
    const shown = [...grid.children].filter((each) => !each.hidden).length, most = Math.floor(this.body.clientWidth / 270);
    const empty = (columns) => (columns - (shown % columns)) % columns;
    const [best] = [most, most - 1, most - 2].filter((columns) => columns > 0).sort((a, b) => empty(a) - empty(b));
    grid.style.gridTemplateColumns = `repeat(${best ?? 1}, minmax(0, 1fr))`;
    grid.hidden = grid.previousSibling.hidden = !shown;
  }

  constructor(node) {
    Object.assign(this, { node, plots: [] });
    this.smooth = el("select", { "aria-label": "Smoothing", onchange: () => { smoothing = SMOOTHINGS[this.smooth.selectedIndex]; this.update(); } },
      ...SMOOTHINGS.map((steps) => el("option", {}, steps === 1 ? "none" : `mean of ${steps} steps`)));
    this.smooth.selectedIndex = SMOOTHINGS.indexOf(smoothing);
    this.silent = el("span", { className: "soft", id: "silent" });
    this.body = el("div");
    node.append(el("div", { className: "filters" }, el("label", {}, "Smoothing ", this.smooth), this.silent), this.body);
  }

  update() {
    const sections = new Map();
    for (const run of RUNS)
      for (const [section, figures] of Object.entries(run.figures ?? {}))
        for (const figure of figures) {
          if (!sections.has(section)) sections.set(section, new Map());
          if (!sections.get(section).has(figure.title)) sections.get(section).set(figure.title, figure);
        }
    const keys = [...sections].flatMap(([s, figures]) => [...figures.keys()].map((t) => `${s}/${t}`)).join("|");
    if (this.keys !== keys) {
      this.keys = keys;
      this.plots = [];
      this.body.replaceChildren();
      for (const [section, figures] of sections) {
        const plots = [...figures.values()].map((figure) => new Plot(figure, () => curvesOf(section, figure.title)));
        this.plots.push(...plots);
        this.body.append(el("h2", { className: "section" }, section), el("div", { className: "grid" }, ...plots.map((plot) => plot.node)));
      }
      if (!sections.size) this.body.append(el("p", {}, "No step is trained yet."));
    }
    const silent = this.plots.filter((plot) => !plot.tells);
    const changes = RUNS.flatMap((each) => each.head?.changes ?? []).map(([step, what]) => `Changed at step ${step}: ${what}.`);
    const zeros = silent.map((plot) => plot.figure.title.toLowerCase()).join(", ");
    this.silent.textContent = clean([...changes, zeros && `Zero at every step, not drawn: ${zeros}.`].filter(Boolean).join(" "));
    for (const plot of this.plots) plot.node.hidden = silent.includes(plot);
    this.body.querySelectorAll(".grid").forEach((grid) => this.arrange(grid));
    this.plots.filter((plot) => !plot.node.hidden).forEach((plot) => plot.draw());
  }
}
