// The chat page. Conversations are in this browser's storage, the API key in the tab's only. Messages are inserted as text
// and elements, never as markup: typed ones as they are, answers as Markdown.
import { $, make } from "/page/dom.js";
import { Drawing } from "/page/markdown.js";
import { Failure, events, getJson, keyField, send } from "/page/server.js";
import { lasting, list, load, look, migrate, newId, remove, save, saveSetting, settings, tab, watch } from "/page/store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const SETTINGS = ["asked", "system", "reasoning_effort", ...NUMBERS];
const FULL = "This browser's storage is full: delete conversations.";
const PARTIAL = 500; // milliseconds between two writes of a partial answer
let current = null; // the displayed conversation
let running = null; // the pending answer: { conversation, turn, former, stop, timer, seen, drawing, frame, rest }

function button(text, act, label = text) {
  const b = make("button", { type: "button", class: "quiet", "aria-label": label }, text);
  b.addEventListener("click", act);
  return b;
}

/** A button that is disabled while an answer is pending. */
function idle(made) {
  made.disabled = running !== null;
  return made;
}

function say(text, bad = false) {
  const log = $("log"), near = isNearEnd(log);
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
  if (near) log.scrollTop = log.scrollHeight; // a message of two lines shrinks the log
}

function isNearEnd(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

// ---------------------------------------------------------------------------------------------------- conversations
function show(conversation) {
  current = conversation;
  tab.setItem("current", current.id);
  openMenu(false);
  say("");
  draw();
}

function openMenu(yes) {
  $("side").classList.toggle("open", yes);
  $("menu").setAttribute("aria-expanded", String(yes));
}

function begin() {
  leave();
  show({ id: newId(), title: "New conversation", turns: [] });
  $("text").focus();
}

function open(id) {
  leave();
  const found = load(id);
  if (!found) return begin();
  for (const turn of found.turns) if (turn.open) cut(turn);
  show(found);
}

function cut(turn) {
  delete turn.open;
  turn.cut = true;
}

function keep(conversation) {
  const outcome = save(conversation);
  if (outcome === "full") say(FULL, true);
  if (outcome === "second") {
    tab.setItem("current", conversation.id);
    say("Another tab changed this conversation: this tab's is kept as a second one.");
  }
  drawList();
}

/** Handle another tab's write to the displayed conversation. */
function adopt() {
  if (running || $("log").querySelector("textarea")) return;
  const found = load(current.id);
  if (!found || found.revision === current.revision) return;
  current = found;
  redraw();
}

// --------------------------------------------------------------------------------------------------------- drawing
let drawn = "";

function drawList() {
  const heads = list();
  $("delete").hidden = !heads.some((head) => head.id === current.id);
  const drawing = JSON.stringify([current.id, heads.map(({ id, title }) => [id, title])]);
  if (drawing === drawn) return; // keep a focused button
  drawn = drawing;
  $("list").replaceChildren(...heads.map(({ id, title }) => {
    const b = make("button", { type: "button", "aria-current": String(id === current.id) }, title);
    b.addEventListener("click", () => open(id));
    return make("li", {}, b);
  }));
}

function draw() {
  drawList();
  $("title").textContent = current.title;
  document.title = current.title;
  const turns = current.turns.map(box);
  const empty = "Ask something. What is said stays between this browser and its server.";
  $("log").replaceChildren(...(turns.length ? turns : [make("p", { class: "empty" }, empty)]));
  $("log").scrollTop = $("log").scrollHeight;
}

/** Redraw the conversation, keeping the scroll position unless at the end. */
function redraw() {
  const log = $("log"), { scrollTop } = log, near = isNearEnd(log);
  draw();
  if (!near) log.scrollTop = scrollTop;
}

function box(turn, n) {
  const user = turn.role === "user", said = make("div", { class: "say" }, user && turn.content);
  if (!user) {
    const drawing = new Drawing(said, codeBox);
    drawing.draw(turn.content);
    if (turn === running?.turn) running.drawing = drawing;
  }
  const article = make("article", { class: `turn ${turn.role}` }, make("p", { class: "who" }, user ? "You" : "Model"), said);
  if (turn.reasoning_content) thought(article, turn);
  article.append(user ? userFoot(turn, n, article) : modelFoot(turn, n));
  return article;
}

function codeBox(text, language) {
  const head = make("div", { class: "head" }, make("span", {}, language), button("Copy", () => copy(text), "Copy this code"));
  return make("div", { class: "code" }, head, make("pre", {}, make("code", {}, text)));
}

/** Show what the model thought, folded above its answer. */
function thought(article, turn) {
  if (!article.querySelector("details")) {
    article.querySelector(".say").before(make("details", {}, make("summary", {}, "Thought"), make("p", { class: "thought" })));
  }
  article.querySelector(".thought").textContent = turn.reasoning_content;
}

function userFoot(turn, n, article) {
  const unanswered = !running && n === current.turns.length - 1;
  const retry = button("Retry", () => answer(), "Send this message again");
  retry.classList.add("retry");
  return make("div", { class: "foot" },
    unanswered && retry,
    idle(button("Edit", () => edit(n, article), "Edit this message")),
    copyButton(turn),
    unanswered && make("span", { class: "cut" }, "Not answered."));
}

function modelFoot(turn, n) {
  const elsewhere = !turn.cut && turn.open && turn !== running?.turn;
  return make("div", { class: "foot" },
    idle(button("Regenerate", () => again(n), "Regenerate this answer")),
    copyButton(turn),
    turn.cut && make("span", { class: "cut" }, "Cut off: regenerate or continue by asking."),
    elsewhere && make("span", { class: "told" }, "Another tab receives this answer."),
    turn.told && make("span", { class: "told" }, turn.told));
}

function edit(n, article) {
  const field = make("textarea", { rows: "3", "aria-label": "Edit your message" });
  field.value = current.turns[n].content;
  const done = button("Send", () => {
    const text = field.value.trim();
    if (!text) return;
    current.turns = current.turns.slice(0, n);
    ask(text);
  }, "Send the edited message");
  field.addEventListener("keydown", (e) => {
    if (e.key === "Escape") draw();
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); done.click(); }
  });
  article.replaceChildren(field, make("div", { class: "foot" }, done, button("Cancel", draw)));
  field.focus();
}

// ---------------------------------------------------------------------------------------------------------- copying
function copyButton(turn) {
  return button("Copy", () => copy(turn.content), "Copy this message");
}

async function copy(text) {
  // The clipboard API requires https or a loopback address.
  const done = (await navigator.clipboard?.writeText(text).then(() => true, () => false)) || copiedFromField(text);
  say(done ? "Copied." : "Could not copy: select the text by hand.", !done);
}

function copiedFromField(text) {
  const field = make("textarea", { class: "hidden", readonly: "", "aria-hidden": "true" }), focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.focus({ preventScroll: true });
  field.setSelectionRange(0, text.length);
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    focused?.focus({ preventScroll: true });
  }
}

// ---------------------------------------------------------------------------------------------------------- answers
function ask(text) {
  if (!current.turns.length) current.title = text.slice(0, 60);
  current.turns.push({ role: "user", content: text });
  answer();
}

function again(n) {
  const former = current.turns;
  current.turns = former.slice(0, n);
  answer(former);
}

function request(turns) {
  const system = $("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...alternating(turns)],
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!$("models").hidden) body.model = $("asked").value;
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("reasoning_effort").value) body.reasoning_effort = $("reasoning_effort").value;
  return body;
}

/** Merge unanswered messages with the next: most templates require alternating roles. */
function alternating(turns) {
  const messages = [];
  for (const { role, content, reasoning_content } of turns) {
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content, reasoning_content });
  }
  return messages;
}

/** `former`: turns that the answer replaces; restored if there is no answer. */
async function answer(former = null) {
  const body = request(current.turns), turn = { role: "assistant", content: "", open: true };
  const seen = { first: 0, last: 0, pieces: 0, usage: null, finish: "" };
  const work = { conversation: current, turn, former, stop: new AbortController(), timer: 0, seen, drawing: null, frame: 0, rest: 0 };
  running = work;
  current.turns.push(turn);
  current.changed = Date.now();
  draw();
  busy(true);
  if (!former) keep(current);
  const outcome = await received(body, work);
  if (running === work) finish(work, outcome); // otherwise it was abandoned
}

/** The final status message. */
async function received(body, work) {
  try {
    const reply = await send(body, work.stop.signal, () => say("The model is loading: the message is sent as soon as it is ready."));
    say("Answering…");
    for await (const event of events(reply)) take(event, work);
    if (!work.turn.content) return { text: "The model answered nothing.", bad: true };
    return { text: work.seen.finish === "length" ? "Answer cut: its length is limited." : "Answer complete." };
  } catch (error) {
    if (work.stop.signal.aborted) return { text: "Stopped." };
    if (!(error instanceof Failure)) console.error(error);
    return { text: error instanceof Failure ? error.message : "This page failed: reload it.", bad: true, isCut: true };
  }
}

function take(event, work) {
  const { turn, seen } = work, choice = event.choices?.[0];
  seen.usage = event.usage ?? seen.usage;
  seen.finish = choice?.finish_reason ?? seen.finish;
  const { content = "", reasoning_content = "" } = choice?.delta ?? {};
  if (!content && !reasoning_content) return;
  seen.last = performance.now();
  seen.first ||= seen.last;
  seen.pieces += 1;
  turn.content += content;
  if (reasoning_content) turn.reasoning_content = (turn.reasoning_content ?? "") + reasoning_content;
  drawSoon(work);
  work.timer ||= setTimeout(keepPartial, PARTIAL);
}

/** Draw what has come, once in a frame, and less often where it takes long: a fifth of the time at most. */
function drawMore(work) {
  const log = $("log"), near = isNearEnd(log), began = performance.now();
  work.frame = 0;
  if (running !== work) return;
  if (began < work.rest) return drawSoon(work);
  work.drawing.draw(work.turn.content);
  if (work.turn.reasoning_content) thought(log.lastElementChild, work.turn);
  if (near) log.scrollTop = log.scrollHeight;
  work.rest = performance.now() + 4 * (performance.now() - began);
}

function drawSoon(work) {
  work.frame ||= requestAnimationFrame(() => drawMore(work));
}

/** Save a partial answer, so that a reload loses little of it. */
function keepPartial() {
  if (!running?.turn.content) return;
  clearTimeout(running.timer);
  running.timer = 0;
  keep(running.conversation);
}

function finish({ conversation, turn, former, stop, timer, seen }, { text, bad = false, isCut = false }) {
  running = null;
  stop.abort();
  clearTimeout(timer);
  delete turn.open;
  if (isCut) cut(turn);
  turn.told = told(seen);
  if (!turn.content) conversation.turns = former ?? conversation.turns.slice(0, -1);
  redraw();
  busy(false);
  say(text, bad);
  if (turn.content || !former) keep(conversation);
  $("text").focus();
}

/** Stop the pending answer and keep its partial text. */
function leave(outcome = { text: "Stopped." }) {
  if (running) finish(running, outcome);
}

function told({ first, last, pieces, usage }) {
  const tokens = usage?.completion_tokens ?? pieces, seconds = (last - first) / 1000;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  return [
    tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tok/s` : "",
    usage ? `${usage.prompt_tokens} tokens of prompt, ${cached} of them cached` : "",
  ].filter(Boolean).join(", ");
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  $("log").lastElementChild.classList.toggle("busy", yes);
  if (yes) say("Answering…");
}

// ------------------------------------------------------------------------------------------------------------ start
function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

let naming = 0;

async function name() {
  clearTimeout(naming);
  try {
    const models = (await getJson("/v1/models")).data.map(({ id }) => make("option", {}, id));
    $("models").hidden = models.length < 2;
    $("asked").replaceChildren(...models);
    fillSettings();
  } catch (error) {
    const keyless = error.status === 401;
    $("model").textContent = keyless ? "key needed" : error.status ? "not ready" : "no server";
    if (!keyless) naming = setTimeout(name, 2000);
    else {
      $("settings").open = true;
      say("This server asks for an API key: put it into the settings.", true);
    }
  }
}

function fillSettings() {
  const values = settings();
  for (const id of SETTINGS) if ($(id) !== document.activeElement) $(id).value = values[id] ?? "";
  if ($("asked").selectedIndex < 0) $("asked").selectedIndex = 0; // none was chosen, or it is not served any longer
  if ($("asked").value) $("model").textContent = $("asked").value;
}

$("form").addEventListener("submit", (e) => {
  e.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  grow();
  ask(text);
});
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", (e) => { if (e.key === "Escape") leave(); });
$("stop").addEventListener("click", () => leave());
$("new").addEventListener("click", begin);
$("delete").addEventListener("click", () => {
  leave();
  remove(current.id);
  migrate();
  begin();
  say("Conversation deleted.");
});
$("menu").addEventListener("click", () => openMenu(!$("side").classList.contains("open")));
for (const id of SETTINGS) $(id).addEventListener("change", () => { if (!saveSetting(id, $(id).value)) say(FULL, true); });
$("asked").addEventListener("change", fillSettings);
keyField(name);

window.addEventListener("pagehide", () => leave({ text: "", isCut: true }));
window.addEventListener("pageshow", (e) => {
  if (!e.persisted) return;
  look();
  drawList();
  adopt();
});
document.addEventListener("visibilitychange", () => { if (document.hidden) keepPartial(); });
watch({
  changed(id) {
    drawList();
    if (id === current.id) adopt();
  },
  deleted(id) {
    if (id !== current.id) return;
    begin();
    say("This conversation was deleted in another tab.");
  },
  set: fillSettings,
});

look();
const migrated = migrate(), before = tab.getItem("current");
if (before !== null) open(before);
else if (list().length) open(list()[0].id);
else begin();
if (!migrated) say(FULL, true);
if (!lasting) say("This browser keeps nothing for this page: conversations are lost at a reload.", true);
fillSettings();
name();
