"use strict";
/* Asks one or two models over their endpoint. A model's words only ever become text nodes. */

const PAGE = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const link = new URLSearchParams(location.hash.slice(1)).get("token");
let key = link ?? sessionStorage.getItem("key") ?? "";
let stop = null;

function trouble(error) {
  $("trouble").textContent = clean(error);
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (answer.ok) return answer;
  if (answer.status === 401 && PAGE.accounts) enter("");
  throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 500)}`);
}

/* The events of a stream. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

function copies(label, text) {
  const copy = async ({ target }) => {
    try {
      await navigator.clipboard.writeText(text());
      target.textContent = "Copied";
    } catch { // no permission; browsers give none to plain HTTP from another machine
      prompt("Copy it by hand:", text());
    }
  };
  return el("button", { onclick: copy }, label);
}

/* One model's answer, in a card of its own. */
async function answerOf(side, question, target, card, signal) {
  const name = el("b", {}, side.model), summary = el("summary", {}, "Thinking"), thought = el("pre");
  const thinking = el("details", { hidden: true, open: true }, summary, thought);
  const said = el("pre", { className: "answer" }), foot = el("p", {}, "…");
  card.append(name, thinking, said, foot);
  let tokens = 0, thoughtTokens = 0, why = "";
  try {
    const body = { model: side.model, messages: [{ role: "user", content: question }], stream: true };
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
    if (side.run) body.target = target;
    for await (const event of events(await post("v1/chat/completions", body, signal))) {
      if (event.error) throw new Error(event.error.message);
      if (event.model?.startsWith(side.model)) name.textContent = clean(event.model);
      tokens = Math.max(tokens, event.usage?.completion_tokens ?? 0);
      for (const { delta, finish_reason: end } of event.choices ?? []) {
        if (delta.reasoning_content) {
          thinking.hidden = false;
          thoughtTokens = tokens;
          thought.append(clean(delta.reasoning_content));
        }
        if (delta.content) {
          if (!said.firstChild) thinking.open = false;
          said.append(clean(delta.content));
        }
        if (end && end !== "stop") why = `, ended by ${end}`;
      }
      summary.textContent = `Thinking, ${number(thoughtTokens)} tokens`;
      foot.textContent = `${number(tokens)} tokens`;
    }
  } catch (error) {
    why = signal.aborted ? ", stopped" : "";
    if (!signal.aborted) trouble(error.message);
  }
  const asked = side.run && target !== null ? `, ${number(target)} were asked for` : "";
  foot.replaceChildren(clean(`${number(tokens)} tokens${asked}${why} `), copies("Copy", () => said.textContent));
}

async function send() {
  const question = $("question").value.trim();
  if (!question || stop) return;
  trouble("");
  stop = new AbortController();
  $("send").disabled = !($("stop").disabled = false);
  const target = $("length").hidden ? null : Number($("target").value);
  const cards = PAGE.sides.map(() => el("article", { className: "card" }));
  const answers = el("div", { className: "answers" }, ...cards);
  $("talk").append(el("pre", { className: "question" }, question), answers);
  $("question").value = "";
  answers.scrollIntoView({ block: "end" });
  await Promise.all(PAGE.sides.map((side, i) => answerOf(side, question, target, cards[i], stop.signal)));
  stop = null;
  $("stop").disabled = !($("send").disabled = false);
}

/* Begin or end the use of an account's key. */
function enter(given) {
  key = given;
  sessionStorage.setItem("key", key);
  $("enter").hidden = Boolean(key);
  $("leave").hidden = $("account").hidden = $("ask").hidden = !key;
  $("account").replaceChildren(`${number(PAGE.day_tokens)} tokens a day. `, copies("Copy the key for the API", () => key));
}

async function logIn(path) {
  try {
    const answer = await post(path, { name: $("user").value, password: $("password").value });
    $("password").value = "";
    trouble("");
    enter((await answer.json()).key);
  } catch (error) {
    trouble(error.message);
  }
}

const targets = PAGE.sides.flatMap((side) => side.targets);
if (targets.length) {
  Object.assign($("target"), { min: Math.min(...targets), max: Math.max(...targets), value: targets[targets.length >> 1] });
  const show = () => ($("asked").textContent = $("target").value);
  $("target").addEventListener("input", show);
  $("length").hidden = false;
  show();
}
$("send").addEventListener("click", send);
$("stop").addEventListener("click", () => stop?.abort());
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
if (PAGE.accounts) {
  $("register").addEventListener("click", () => logIn("register"));
  $("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    logIn("login");
  });
  $("leave").addEventListener("click", () => enter(""));
  enter(key);
}
