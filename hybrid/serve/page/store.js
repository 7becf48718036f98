// Browser storage. All tabs share the conversations. Each conversation has its own key, so that tabs do not overwrite others.
// A conversation is { id, title, changed, revision, turns }. `changed`, in milliseconds, orders the list. `revision` is new with
// every write: a tab that holds an older one keeps its turns as a second conversation. What was deleted leaves a mark, so that
// a tab which still shows it cannot bring it back.

export const MOST = 200;
const CONVERSATION = "conversation:", DELETED = "deleted:", SETTINGS = "settings";
const FORMER = "conversations"; // one list of all, newest first, as earlier pages kept it

/** Fallback if the browser refuses storage: lasts as long as the page. */
class Passing {
  #items = new Map();
  get length() { return this.#items.size; }
  key(n) { return [...this.#items.keys()][n] ?? null; }
  getItem(key) { return this.#items.get(key) ?? null; }
  setItem(key, value) { this.#items.set(key, value); }
  removeItem(key) { this.#items.delete(key); }
}

function area(name) {
  try {
    window[name].getItem("");
    return window[name];
  } catch {
    return new Passing();
  }
}

const local = area("localStorage");
/** Storage of this tab only. */
export const tab = area("sessionStorage");
export const lasting = !(local instanceof Passing);

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Whether the write succeeded. */
function write(key, value) {
  try {
    local.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function keys(prefix) {
  return Array.from({ length: local.length }, (_, n) => local.key(n)).filter((key) => key.startsWith(prefix));
}

// ---------------------------------------------------------------------------------------------------- conversations
const heads = new Map(); // id -> list entry

function isConversation(value) {
  return typeof value?.id === "string" && Array.isArray(value.turns);
}

function note(id, conversation) {
  if (isConversation(conversation)) heads.set(id, { id, title: String(conversation.title), changed: Number(conversation.changed) || 0 });
  else heads.delete(id);
}

/** Rescan all keys: at the start, and after possibly missed events. */
export function look() {
  heads.clear();
  for (const key of keys(CONVERSATION)) note(key.slice(CONVERSATION.length), parsed(local.getItem(key)));
}

/** Heads of all conversations, most recently changed first. */
export function list() {
  return [...heads.values()].sort((a, b) => b.changed - a.changed);
}

export function load(id) {
  const found = parsed(local.getItem(CONVERSATION + id));
  return isConversation(found) ? found : null;
}

function isDeleted(id) {
  return local.getItem(DELETED + id) !== null;
}

/** Turns without text are left out. "kept", "deleted" (elsewhere, so nothing is written), "full", or "second": another tab has
 * written this conversation since, and this one got an id of its own. */
export function save(conversation) {
  if (isDeleted(conversation.id)) return "deleted";
  const stored = load(conversation.id);
  const isSecond = stored !== null && stored.revision !== conversation.revision;
  const name = { id: isSecond ? newId() : conversation.id, revision: newId() };
  const written = { ...conversation, ...name, turns: conversation.turns.filter((turn) => turn.content) };
  if (!write(CONVERSATION + name.id, written)) return "full";
  Object.assign(conversation, name);
  note(name.id, conversation);
  dropOldest();
  return isSecond ? "second" : "kept";
}

function dropOldest() {
  for (const { id } of list().slice(MOST)) {
    local.removeItem(CONVERSATION + id);
    heads.delete(id);
  }
}

export function remove(id) {
  local.removeItem(CONVERSATION + id);
  heads.delete(id);
  write(DELETED + id, Date.now());
  const marks = keys(DELETED).sort((a, b) => Number(local.getItem(b)) - Number(local.getItem(a)));
  for (const key of marks.slice(MOST)) local.removeItem(key);
}

/** Migrate the former list to one key for each conversation. False if storage is full: the rest stays in the list. */
export function migrate() {
  const rest = parsed(local.getItem(FORMER));
  if (!Array.isArray(rest)) return true;
  for (let changed = Date.now(); rest.length; changed -= 1) {
    if (!moved(rest[0], changed)) {
      write(FORMER, rest.slice(1)); // frees the space of moved conversations
      if (!moved(rest[0], changed)) {
        write(FORMER, rest);
        return false;
      }
    }
    rest.shift();
  }
  local.removeItem(FORMER);
  dropOldest();
  return true;
}

/** A tab with an earlier version of the page may have continued a conversation: keep the longer one. */
function moved(former, changed) {
  if (!isConversation(former) || isDeleted(former.id)) return true;
  if ((load(former.id)?.turns.length ?? -1) >= former.turns.length) return true;
  const conversation = { ...former, changed };
  if (!write(CONVERSATION + former.id, conversation)) return false;
  note(former.id, conversation);
  return true;
}

// --------------------------------------------------------------------------------------------------------- settings
export function settings() {
  return parsed(local.getItem(SETTINGS)) ?? {};
}

export function saveSetting(name, value) {
  return write(SETTINGS, { ...settings(), [name]: value });
}

// ------------------------------------------------------------------------------------------------------- other tabs
/** Events of other tabs: changed(id), null for any conversation; deleted(id); set() for settings. */
export function watch({ changed, deleted, set }) {
  window.addEventListener("storage", ({ storageArea, key, newValue }) => {
    if (storageArea !== local) return;
    if (key === null) {
      look();
      changed(null);
    } else if (key.startsWith(CONVERSATION)) {
      const id = key.slice(CONVERSATION.length);
      note(id, parsed(newValue));
      changed(id);
    } else if (key.startsWith(DELETED) && newValue !== null) deleted(key.slice(DELETED.length));
    else if (key === SETTINGS) set();
  });
}
