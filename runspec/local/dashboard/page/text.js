"use strict";
/* Elements from plain data. Texts of a run are hostile: they only ever become text nodes, and
   characters that would hide or reorder others are shown by their code. */

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const MOST_SHOWN = 20000;

/* A text as it may be shown. */
function clean(text) {
  return String(text).replace(HIDDEN, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/* An element. `options` are properties; `on...` are listeners; children are elements or texts. */
function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : clean(child ?? ""))));
  return made;
}

/* A long text, cut until somebody asks for the rest. */
function longText(text, className) {
  const shown = clean(text), pre = el("pre", { className });
  pre.textContent = shown.slice(0, MOST_SHOWN);
  if (shown.length <= MOST_SHOWN) return pre;
  const rest = shown.length - MOST_SHOWN;
  pre.append(el("button", { onclick: () => (pre.textContent = shown) }, `${rest.toLocaleString()} more characters`));
  return pre;
}

function number(value, digits = 3) {
  if (typeof value !== "number") return "-";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return (Math.round(value) + 0).toLocaleString("en"); // + 0: no "-0"
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (typeof seconds !== "number") return "-";
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

function size(bytes) {
  if (typeof bytes !== "number") return "-";
  const units = ["B", "kB", "MB", "GB", "TB"], i = Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${number(bytes / 1000 ** i)} ${units[i]}`;
}

function many(count, unit) {
  return `${number(count)} ${unit}${count === 1 ? "" : "s"}`;
}

function percent(share) {
  return typeof share === "number" ? `${Math.round(100 * share)} %` : "-";
}

/* A table; numbers stand to the right, and so do the columns of these numbers. */
function table(heads, rows, right = []) {
  const cell = (tag) => (value, i) => {
    const className = typeof value === "number" || right.includes(i) ? "n" : "";
    return el(tag, { className }, typeof value === "number" ? number(value) : value);
  };
  const head = heads.some(Boolean) ? [el("thead", {}, el("tr", {}, ...heads.map(cell("th"))))] : [];
  return el("div", { className: "scroll" }, el("table", {}, ...head,
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td")))))));
}

function panel(title, ...children) {
  return el("div", { className: "panel" }, el("h2", {}, title), ...children);
}

function dot(state) {
  return el("span", { className: `dot ${state}` });
}

/* A small curve without axes, as wide as its place. */
function spark(values) {
  const make = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    return made;
  };
  const low = Math.min(...values), high = Math.max(...values), scale = high > low ? 24 / (high - low) : 0;
  const points = values.map((v, i) => `${(100 * i) / (values.length - 1)},${27 - (v - low) * scale}`).join(" ");
  const svg = make("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(
    make("polygon", { points: `0,28 ${points} 100,28`, fill: "currentColor", opacity: 0.13 }),
    make("polyline", { points, fill: "none", stroke: "currentColor", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }));
  return svg;
}

/* A colour of the style sheet as a canvas takes it. */
function colour(name) {
  const probe = (colour.probe ??= document.body.appendChild(el("i", { hidden: true })));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
