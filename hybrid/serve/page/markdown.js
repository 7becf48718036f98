// Markdown as elements of the page, made from the parser's tokens and never from markup. Formulas stay text, images are
// links, and only links to the web and to addresses of mail are links.
import { make } from "/page/dom.js";
import MarkdownIt from "/page/markdown-it.mjs";

const FORMULAS = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" }; // their marks
const LONGEST = 2000; // characters of a formula in a line

const md = new MarkdownIt({ html: false });
md.validateLink = (url) => /^(https?|mailto):/i.test(url);

md.inline.ruler.before("escape", "formula", (state, silent) => {
  const begin = Object.keys(FORMULAS).find((mark) => state.src.startsWith(mark, state.pos));
  if (!begin) return false;
  const end = FORMULAS[begin], text = state.src.slice(state.pos, state.pos + LONGEST), at = text.indexOf(end, begin.length);
  if (at <= begin.length) return false;
  if (begin === "$" && !/^\$\S(.*\S)?\$(?!\d)/s.test(text.slice(0, at + 2))) return false; // sums of money are none
  if (!silent) state.push("formula", "", 0).content = text.slice(0, at + end.length);
  state.pos += at + end.length;
  return true;
});

// Ends at an empty line, too, so that it is one block while it grows.
md.block.ruler.before("fence", "formula", (state, first, last, silent) => {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]).trimEnd();
  const mark = line(first).slice(0, 2), end = mark === "$$" || mark === "\\[" ? FORMULAS[mark] : "";
  if (!end) return false;
  if (silent) return true;
  let n = first;
  const isEnd = () => line(n).endsWith(end) && (n > first || line(n).length > 3);
  while (!isEnd() && n + 1 < last && line(n + 1) && state.sCount[n + 1] >= state.blkIndent) n += 1;
  const token = state.push("formula_block", "", 0);
  token.content = state.getLines(first, n + 1, state.blkIndent, false);
  token.map = [first, n + 1];
  state.line = n + 1;
  return true;
}, { alt: ["paragraph", "reference", "blockquote", "list"] });

/** A growing text in an element. Blocks that later text cannot change are drawn once. `code`: makes the element of a code
    block from its text and its language. */
export class Drawing {
  #into;
  #code;
  #known = {}; // the parser's: targets of links by their names
  #drawn = 0; // blocks that stay
  #at = 0; // where the text goes on behind them

  constructor(into, code) {
    this.#into = into;
    this.#code = code;
  }

  draw(text) {
    const rest = text.replace(/\r\n?/g, "\n").slice(this.#at), tokens = md.parse(rest, this.#known);
    while (this.#into.childNodes.length > this.#drawn) this.#into.lastChild.remove();
    append(this.#into, tokens, this.#code);
    this.#keep(rest, tokens);
  }

  /** Keep the blocks before the last one that begins with a whole line: that one may go on. */
  #keep(rest, tokens) {
    const lines = rest.split("\n");
    const begins = tokens.filter((t) => t.level === 0 && t.nesting >= 0).map((t) => t.map[0]);
    const last = begins.findLastIndex((line) => line < lines.length - 1);
    if (last < 1) return;
    this.#drawn += last;
    this.#at += lines.slice(0, begins[last]).reduce((sum, line) => sum + line.length + 1, 0);
  }
}

/** Each block is one child of `into`. */
function append(into, tokens, code) {
  const open = [into];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.type === "inline") append(parent, token.children, code);
    else if (token.nesting > 0) open.push(token.hidden ? parent : opened(parent, token));
    else if (token.nesting < 0) open.pop();
    else parent.append(leaf(token, code));
  }
}

function opened(parent, token) {
  const tag = token.tag.replace(/^h([1-5])$/, (_, n) => `h${Number(n) + 1}`); // the page has an h1
  const made = token.type === "link_open" ? link(token.attrGet("href")) : make(tag);
  if (token.attrGet("start")) made.setAttribute("start", token.attrGet("start"));
  const side = /(center|right)$/.exec(token.attrGet("style") ?? "");
  if (side) made.classList.add(side[1]);
  parent.append(token.tag === "table" ? make("div", { class: "wide" }, made) : made); // a table scrolls by itself
  return made;
}

function link(href, text = "") {
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, text);
}

function leaf(token, code) {
  const { type, content, info } = token;
  if (type === "image") return link(token.attrGet("src"), content || token.attrGet("src"));
  if (type === "fence" || type === "code_block") return code(content.replace(/\n$/, ""), info.trim().split(/\s/)[0]);
  const tag = { code_inline: "code", formula: "code", formula_block: "pre", hr: "hr", hardbreak: "br" }[type];
  if (!tag) return document.createTextNode(type === "softbreak" ? "\n" : content);
  return make(tag, type.startsWith("formula") ? { class: "formula" } : {}, content);
}
