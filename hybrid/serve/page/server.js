// The pages' requests to the server. Every error becomes a Failure with a message for display.
import { $ } from "/page/dom.js";
import { tab } from "/page/store.js";

const UNREACHABLE = "The server cannot be reached: check that it runs, then try again.";
const BROKEN = "The connection to the server broke off: check that it runs, then try again.";
const UNREADABLE = "The server sent something that this page cannot read.";
const LOOK = 500; // milliseconds between two polls of the model's state

export class Failure extends Error {
  constructor(message, { status = 0, code = "", wait = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, wait });
  }
}

/** Bind the page's field of the API key. `act`: called with a new key. */
export function keyField(act) {
  $("key").value = tab.getItem("key") ?? "";
  $("key").addEventListener("change", () => { tab.setItem("key", $("key").value); act(); });
}

function headers() {
  const key = tab.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** The response, of any status. */
async function reach(path, options = {}) {
  try {
    return await fetch(path, { ...options, headers: headers() });
  } catch {
    throw new Failure(UNREACHABLE);
  }
}

export async function getText(path) {
  const reply = await reach(path);
  if (!reply.ok) throw await refusal(reply);
  return whole(reply);
}

export async function getJson(path) {
  return readable(await getText(path));
}

/** The model's state, such as "ready" or "loading". */
export async function readiness() {
  return readable(await whole(await reach("/ready"))).status;
}

async function whole(reply) {
  try {
    return await reply.text();
  } catch {
    throw new Failure(BROKEN);
  }
}

function readable(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Failure(UNREADABLE);
  }
}

/** The server's error message, if any: a proxy may have answered instead. */
export async function refusal(reply) {
  const body = await reply.json().catch(() => null);
  const wait = Number(reply.headers.get("retry-after")) || 5;
  return new Failure(sentence(body) ?? `The server answered with status ${reply.status}.`, { status: reply.status, code: body?.error?.code, wait });
}

function sentence(body) {
  return [body?.error?.message, body?.error, body?.message].find((text) => typeof text === "string" && text.trim());
}

/** Request a streamed answer. While the model loads, calls `waiting` and retries. */
export async function send(body, signal, waiting) {
  for (;;) {
    const reply = await reach("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    if (reply.ok) return reply;
    const why = await refusal(reply);
    if (why.code !== "not_ready") throw why;
    waiting();
    await ready(why.wait * 1000, signal);
  }
}

/** Wait until the model is loaded, or for the server's Retry-After. */
async function ready(wait, signal) {
  for (const end = performance.now() + wait; performance.now() < end; ) {
    await pause(LOOK, signal);
    const reply = await reach("/ready", { signal }).catch(() => null);
    if (reply?.ok) return;
  }
}

function pause(time, signal) {
  return new Promise((done, stopped) => {
    if (signal.aborted) stopped(signal.reason);
    const timer = setTimeout(done, time);
    signal.addEventListener("abort", () => { clearTimeout(timer); stopped(signal.reason); }, { once: true });
  });
}

/** The events of a stream; it is complete only with a final [DONE]. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch(() => { throw new Failure(BROKEN); });
    if (done) throw new Failure(BROKEN);
    held += value;
    let at;
    while ((at = held.indexOf("\n\n")) >= 0) {
      const line = held.slice(0, at);
      held = held.slice(at + 2);
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const event = readable(line.slice(6));
      if (event.error) throw new Failure(sentence(event) ?? BROKEN);
      yield event;
    }
  }
}
