"use strict";
/* The data of the page's runs: asked of the server again and again, or all in an exported page. */

const EMBEDDED = JSON.parse(document.getElementById("data").textContent);
const TOKEN_NAME = "runspec-token";
/* A revision that is never reached: asks for no rollouts. */
const NO_ROLLOUTS = 999999999;

function token() {
  const given = /#token=([\w-]+)/.exec(location.hash);
  if (given) {
    sessionStorage.setItem(TOKEN_NAME, given[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(TOKEN_NAME) ?? "";
}

async function ask(path) {
  const answer = await fetch(`api/${path}`, { headers: { "Runspec-Token": ask.token ??= token() } });
  if (answer.status === 401) throw new Error("open the address that `runspec dashboard` printed: it has a token");
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

class Run {
  constructor(name, index) {
    Object.assign(this, { name, index, live: EMBEDDED.live, trouble: "", fields: {}, rows: new Map(), counts: {}, words: new Map() });
    this.revisions = { head: 0, figures: 0, timeline: 0 };
    if (!this.live) {
      this.details = EMBEDDED.runs[index].details ?? {};
      this.merge(EMBEDDED.runs[index]);
    }
  }

  /* Takes over what changed; returns the names of the changed sections. */
  merge(answer) {
    const changed = [];
    this.trouble = answer.trouble;
    for (const name of ["head", "figures", "timeline"]) {
      if (!(name in answer)) continue;
      [this.revisions[name], this[name]] = answer[name];
      changed.push(name);
    }
    if ("rollouts" in answer) {
      const [revision, value] = answer.rollouts;
      this.revisions.rollouts = revision;
      value.fields.forEach((field, i) => (this.fields[field] = i));
      for (const row of value.rows) {
        this.rows.set(row[0], row);
        if (row[this.fields.words] !== null) this.words.set(row[this.fields.group], row[this.fields.words]);
      }
      for (const id of value.removed) this.rows.delete(id);
      this.counts = value;
      changed.push("rollouts");
    }
    return changed;
  }

  /* The first answer leaves out the rollouts, so that the overview stands at once. */
  async poll() {
    if (!this.live) return [];
    const known = this.head ? this.revisions : { ...this.revisions, rollouts: NO_ROLLOUTS };
    return this.merge(await ask(`${this.index}?${new URLSearchParams(known)}`));
  }

  /* Ids of the rollouts whose texts have all the words; null for no words. */
  async search(words) {
    if (!words.trim()) return null;
    if (this.live) return new Set(await ask(`${this.index}/search?${new URLSearchParams({ q: words })}`));
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean), found = new Set();
    for (const [id, row] of this.rows) {
      const detail = this.details[id] ?? { prompt: this.words.get(row[this.fields.group]) ?? "", pieces: [] };
      const text = `${row[this.fields.problem]}\n${detail.prompt}\n${detail.pieces.join("")}`.toLowerCase();
      if (wanted.every((word) => text.includes(word))) found.add(id);
    }
    return found;
  }

  /* Whether the tokens of a rollout can be had. */
  has(id) {
    return this.live || id in this.details;
  }

  async rollout(id) {
    return this.live ? ask(`${this.index}/rollout/${id}`) : this.details[id];
  }
}

const RUNS = EMBEDDED.names.map((name, i) => new Run(name, i));
