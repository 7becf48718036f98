// The chat page. Conversations live in this browser's storage; the key lives in the tab alone. What anybody says is put into
// the page as text (textContent), never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const STORE = "conversations", SETTINGS = "settings";
let conversations = read(STORE, []);
let current = null, running = null;

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep() {
  try {
    localStorage.setItem(STORE, JSON.stringify(conversations.slice(0, 200)));
  } catch {
    say("This browser's storage is full: delete conversations.", true);
  }
}

function make(tag, attributes = {}, text = "") {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.textContent = text;
  return e;
}

function button(text, act, label = text) {
  const b = make("button", { type: "button", class: "quiet", "aria-label": label }, text);
  b.addEventListener("click", act);
  return b;
}

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// ---------------------------------------------------------------------------------------------------- conversations
function begin() {
  current = { id: crypto.randomUUID(), title: "New conversation", turns: [] };
  draw();
  $("text").focus();
}

function open(id) {
  if (running) running.abort();
  current = conversations.find((c) => c.id === id) ?? null;
  if (!current) return begin();
  $("side").classList.remove("open");
  $("menu").setAttribute("aria-expanded", "false");
  draw();
}

function draw() {
  $("list").replaceChildren(...conversations.map((c) => {
    const li = make("li"), b = make("button", { type: "button", "aria-current": String(c === current) }, c.title);
    b.addEventListener("click", () => open(c.id));
    li.append(b);
    return li;
  }));
  $("title").textContent = current.title;
  document.title = current.title;
  $("delete").hidden = !conversations.includes(current);
  const turns = current.turns.map(drawn);
  $("log").replaceChildren(...(turns.length ? turns : [make("p", { class: "empty" }, "Ask something. Everything stays on this machine.")]));
  $("log").scrollTop = $("log").scrollHeight;
}

function drawn(turn, n) {
  const user = turn.role === "user";
  const box = make("article", { class: `turn ${turn.role}` });
  box.append(make("p", { class: "who" }, user ? "You" : "Model"), make("p", { class: "say" }, turn.content));
  const foot = make("div", { class: "foot" });
  if (user) foot.append(button("Edit", () => edit(n, box), "Edit this message"));
  else foot.append(button("Regenerate", () => again(n), "Regenerate this answer"));
  foot.append(button("Copy", () => navigator.clipboard?.writeText(turn.content), "Copy this message"));
  if (turn.told) foot.append(make("span", { class: "told" }, turn.told));
  box.append(foot);
  return box;
}

function edit(n, box) {
  if (running) return;
  const field = make("textarea", { rows: "3", "aria-label": "Edit your message" });
  field.value = current.turns[n].content;
  const done = button("Send", () => {
    const text = field.value.trim();
    if (!text) return;
    current.turns = current.turns.slice(0, n);
    ask(text);
  }, "Send the edited message");
  const foot = make("div", { class: "foot" });
  foot.append(done, button("Cancel", draw));
  field.addEventListener("keydown", (e) => {
    if (e.key === "Escape") draw();
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); done.click(); }
  });
  box.replaceChildren(field, foot);
  field.focus();
}

function again(n) {
  if (running) return;
  current.turns = current.turns.slice(0, n);
  answer();
}

function ask(text) {
  if (!current.turns.length) current.title = text.slice(0, 60);
  current.turns.push({ role: "user", content: text });
  if (!conversations.includes(current)) conversations.unshift(current);
  answer();
}

// ---------------------------------------------------------------------------------------------------------- answers
function request() {
  const system = $("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...current.turns.map(({ role, content }) => ({ role, content }))],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  return body;
}

async function answer() {
  const conversation = current, turn = { role: "assistant", content: "", told: "" }, body = request();
  conversation.turns.push(turn);
  keep();
  draw();
  const box = $("log").lastElementChild, text = box.querySelector(".say");
  box.classList.add("busy");
  running = new AbortController();
  busy(true);
  let first = 0, last = 0, pieces = 0, usage = null, finish = "";
  try {
    const reply = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!reply.ok) throw new Error((await reply.json().catch(() => null))?.error?.message ?? `the server answered ${reply.status}`);
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      finish = choice?.finish_reason ?? finish;
      if (!choice?.delta?.content) continue;
      last = performance.now();
      first ||= last;
      pieces += 1;
      const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
      turn.content += choice.delta.content;
      text.textContent = turn.content;
      if (near) $("log").scrollTop = $("log").scrollHeight;
    }
    say(finish === "length" ? "Answer cut: its length is limited." : "Answer complete.");
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(`${error.message}`, true);
  } finally {
    running = null;
    busy(false);
    const tokens = usage?.completion_tokens ?? pieces, seconds = (last - first) / 1000;
    turn.told = [
      tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tok/s` : "",
      usage ? `${usage.prompt_tokens} tokens of prompt, ${usage.prompt_tokens_details.cached_tokens} of them cached` : "",
    ].filter(Boolean).join(", ");
    if (!turn.content) conversation.turns.pop();
    keep();
    if (conversation === current) draw();
    $("text").focus();
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let at;
    while ((at = held.indexOf("\n\n")) >= 0) {
      const line = held.slice(0, at);
      held = held.slice(at + 2);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  if (yes) say("Answering…");
}

// ------------------------------------------------------------------------------------------------------------ start
function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

async function name() {
  const reply = await fetch("/v1/models", { headers: headers() }).catch(() => null);
  const found = reply?.ok ? (await reply.json()).data[0] : null;
  $("model").textContent = found?.id ?? (reply?.status === 401 ? "key needed" : "not ready");
  if (reply?.status === 401) { $("settings").open = true; say("This server asks for an API key: put it into the settings.", true); }
  else if (!found) setTimeout(name, 2000);
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
document.addEventListener("keydown", (e) => { if (e.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => { if (running) running.abort(); begin(); });
$("delete").addEventListener("click", () => {
  if (running) running.abort();
  conversations = conversations.filter((c) => c !== current);
  keep();
  begin();
  say("Conversation deleted.");
});
$("menu").addEventListener("click", () => $("menu").setAttribute("aria-expanded", String($("side").classList.toggle("open"))));
const settings = read(SETTINGS, {});
for (const id of ["system", ...NUMBERS]) {
  $(id).value = settings[id] ?? "";
  $(id).addEventListener("change", () => {
    settings[id] = $(id).value;
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  });
}
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); name(); });
if (conversations.length) open(conversations[0].id);
else begin();
name();
