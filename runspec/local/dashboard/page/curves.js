"use strict";
/* Plots of all runs: figures of the same title lie over each other. */

const COLOURS = ["#2f7fc2", "#d9772b", "#3a9d6e", "#b05cc0", "#c2495b", "#8a8f2f"];
const SMOOTH = 10;

function smoothed(values) {
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i + 1 - SMOOTH), i + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

/* Curves of one figure over all runs, each with its label and points. */
function curvesOf(section, title) {
  const found = [];
  for (const run of RUNS) {
    const figure = run.figures?.[section]?.find((each) => each.title === title);
    for (const curve of figure?.curves ?? []) {
      const label = RUNS.length > 1 ? [run.name, curve.label].filter(Boolean).join(": ") : curve.label;
      found.push({ ...curve, label });
    }
  }
  return found;
}

/* Label and colour of each curve, and its values: at the pointer, else the last. */
function legend(node, plot, names) {
  const [xs] = plot.data, i = plot.cursor.idx ?? null;
  const at = i === null ? [] : [el("span", {}, `at ${number(xs[i])}`)];
  node.replaceChildren(...at, ...names.map(({ label, stroke, k }) => {
    const ys = plot.data[k], value = i === null ? ys.findLast((y) => y !== null) : ys[i];
    const mark = el("span", {}, "■ ");
    mark.style.color = stroke;
    return el("span", {}, mark, label ? `${label} ${number(value)}` : number(value));
  }));
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
    if (curve.averaged) {
      data.push(at(xs, curve, curve.y), at(xs, curve, smoothed(curve.y)));
      series.push({ stroke: `${stroke}66`, width: 1, spanGaps, points: { show: false } });
      series.push({ label, stroke, width: 2, spanGaps, points: { show: false } });
    } else {
      data.push(at(xs, curve, curve.y));
      series.push({ label, stroke, width: 1.5, spanGaps, points: { show: curve.x.length < 60 } });
    }
    names.push({ label, stroke, k: data.length - 1 });
    if (curve.band.length) {
      const [low, high] = [1, 2].map((k) => at(xs, { x: curve.band.map((b) => b[0]) }, curve.band.map((b) => b[k])));
      data.push(high, low);
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

class Plot {
  constructor(section, figure) {
    Object.assign(this, { section, figure, plot: null, shown: "" });
    this.holder = el("div", { className: "plot" });
    this.legend = el("div", { className: "legend" });
    const caption = el("figcaption", {}, el("b", {}, figure.title), el("br"), figure.caption);
    this.node = el("figure", {}, caption, this.holder, this.legend);
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!width) return;
    const { data, series, bands, names } = plotData(this.figure, curvesOf(this.section, this.figure.title));
    const shown = names.map((each) => `${each.label} ${each.k}`).join() + colour("ink");
    if (this.plot && this.shown === shown) {
      this.plot.setSize({ width, height: 210 });
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shown = shown;
    const { log, bottom, top } = this.figure, axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 } };
    const positive = log && data.slice(1).some((ys) => ys.some((y) => y > 0));
    const range = (_, low, high) => [bottom ?? low, Math.max(high, top ?? high)];
    const y = positive ? { distr: 3 } : bottom !== null ? { range } : {};
    const tell = (plot) => legend(this.legend, plot, names);
    this.plot = new uPlot({
      width, height: 210, series, bands, legend: { show: false }, hooks: { setCursor: [tell], setData: [tell], ready: [tell] },
      axes: [{ ...axis }, { ...axis, size: 56, values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(t))) }],
      scales: { x: { time: false }, y },
      cursor: { sync: { key: "steps" } },
    }, positive ? data.map((ys, i) => (i ? ys.map((v) => (v > 0 ? v : null)) : ys)) : data, this.holder);
    this.holder.style.height = "auto";
  }
}

class Curves {
  constructor(node) {
    Object.assign(this, { node, plots: new Map() });
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
      this.plots.clear();
      this.node.replaceChildren();
      for (const [section, figures] of sections) {
        const plots = [...figures.values()].map((figure) => new Plot(section, figure));
        plots.forEach((plot) => this.plots.set(`${section}/${plot.figure.title}`, plot));
        this.node.append(el("h2", {}, section), el("div", { className: "grid" }, ...plots.map((plot) => plot.node)));
      }
      if (!sections.size) this.node.append(el("p", {}, "No step is trained yet."));
    }
    this.plots.forEach((plot) => plot.draw());
  }
}
