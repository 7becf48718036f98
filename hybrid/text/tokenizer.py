"""SentencePiece BPE with byte fallback, for tokenizer.model, tokenizer.json and GGUF's tokenizer.ggml.*.

Encoding splits off user-defined pieces (and control tokens, if requested), longest match first. Spaces become U+2581.
Then the best adjacent pair is merged, leftmost at a tie, until none is left. Remaining characters become byte pieces.
The best pair forms the piece with the highest score, or is the first in the list of merges. Ids equal sentencepiece's
for the same vocabulary.
"""

from __future__ import annotations

import codecs
import heapq
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybrid.text.pieces import Pieces

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # numbers shared by SentencePiece and GGUF
SPACE = "\u2581"
TURN_ENDS = ("<end_of_turn>", "<turn|>")
END_TEXTS = ("<eos>", *TURN_ENDS, "<|tool_response>", "<start_function_response>")
"""The last two: Gemma 4 and FunctionGemma generate them to wait for a tool's result."""
MARKERS = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<|turn>",
    "<turn|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
)
"""Gemma's control tokens by text, since some files have another type for them. The marks of thoughts and tool calls are
excluded: they are printed."""
THOUGHT = ("<|channel>", "<channel|>")
"""Marks around a thought, by which templates remove the thoughts of earlier turns."""
PRINTED_MARKS = (
    *THOUGHT,
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<start_function_declaration>",
    "<end_function_declaration>",
    "<start_function_call>",
    "<end_function_call>",
    "<start_function_response>",
    "<end_function_response>",
    "<escape>",
)
"""Those marks, Gemma 4's and FunctionGemma's: user-defined or control tokens, by file. They are printed as either, so
that a thought or a call is never taken for text, and escaped in messages (`quote`)."""
_IDS = ("bos_id", "eos_id", "unk_id", "pad_id", "after_id")
_CACHED_WORDS = 1 << 16
_LONG_WORD = 4096
"""Characters; longer words are not cached."""
_PART = 4096
"""Ids or merges between two yields of `encode_parts`."""


class TokenizerError(ValueError):
    """Invalid vocabulary, or an id outside it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id, in SentencePiece's form: U+2581 for a space (bytes that are not UTF-8 as surrogate escapes).

    Any sequences are taken; they are kept as Pieces, array of doubles, and bytes.
    A user-defined piece with real spaces can be decoded but never encoded, as in SentencePiece.
    `merges` ("left right", by priority) replace the scores if present.
    `add_bos`: whether texts begin with the begin-of-text token. `after_id`: the token that follows every text.
    `named`: (name, text) of special tokens as templates see them, if not those of the ids.
    `reach`: (id, lstrip, rstrip, single_word) of added tokens that take the whitespace beside them, or match only as
    whole words.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None = None
    pad_id: int | None = None
    add_space_prefix: bool = False
    merges: Sequence[str] | None = None
    add_bos: bool = True
    after_id: int | None = None
    named: tuple[tuple[str, str], ...] | None = None
    reach: tuple[tuple[int, bool, bool, bool], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.pieces)
        if not n or not n == len(self.scores) == len(self.types):
            raise TokenizerError(f"{n} tokens with {len(self.scores)} scores and {len(self.types)} types")
        if not all(map(math.isfinite, self.scores)):
            index = next(i for i, score in enumerate(self.scores) if not math.isfinite(score))
            raise TokenizerError(f"score {self.scores[index]} at id {index}: it must be a finite number")
        if unknown := set(self.types) - set(range(1, 7)):
            wrong = next(t for t in self.types if t in unknown)
            raise TokenizerError(f"token type {wrong} at id {self.types.index(wrong)}; known: 1 to 6")
        for name in _IDS:
            value = getattr(self, name)
            if value is not None and not 0 <= value < n:
                raise TokenizerError(f"{name} {value} is outside the {n} tokens")
        object.__setattr__(self, "pieces", Pieces.of(self.pieces))
        object.__setattr__(self, "scores", array("d", self.scores))
        object.__setattr__(self, "types", bytes(self.types))
        object.__setattr__(self, "merges", None if self.merges is None else Pieces.of(self.merges))

    def first(self, n: int) -> Vocabulary:
        """The first `n` pieces: files may list tokens without an embedding."""
        if n >= len(self.pieces):
            return self
        kept = set(self.pieces[:n])
        merges = None if self.merges is None else tuple(m for m in self.merges if m.replace(" ", "", 1) in kept)
        reach = tuple(r for r in self.reach if r[0] < n)
        ids: dict[str, Any] = {
            name: i if i is not None and i < n else None for name in _IDS for i in (getattr(self, name),)
        }
        return replace(
            self,
            pieces=self.pieces[:n],
            scores=self.scores[:n],
            types=self.types[:n],
            merges=merges,
            reach=reach,
            **ids,
        )


class Tokenizer:
    """Encodes text and decodes ids. `eos_ids`: end-of-text tokens, the file's and the pieces of END_TEXTS.

    rows: rows of the embedding, if more than the pieces; the additional ids decode to nothing.
    markers: texts of pieces that are control tokens regardless of their type, like bos, eos and pad.
    """

    def __init__(
        self, vocabulary: Vocabulary, eos_ids: Iterable[int] = (), rows: int | None = None, markers: Iterable[str] = ()
    ) -> None:
        v = self.vocabulary = vocabulary
        self._texts: dict[int, str | None] = {}
        self.n_tokens = len(v.pieces)
        self.n_rows = max(self.n_tokens, rows or 0)
        self.bos_id = v.bos_id if v.add_bos else None
        ends = {i for i in (v.eos_id, *eos_ids) if i is not None and 0 <= i < self.n_tokens}
        self._pieces, self._merges = Pieces.of(v.pieces), None if v.merges is None else Pieces.of(v.merges)
        self.eos_ids = frozenset(ends | {i for i in map(self.token_id, END_TEXTS) if i is not None})
        self.types = self._effective_types(markers)
        """Effective types of the pieces."""
        # Nearly all pieces are normal: each of the others is looked at.
        odd = [(i, v.pieces[i], t) for i, t in enumerate(self.types) if t != NORMAL]
        odd = [(i, p, t) for i, p, t in odd if self.token_id(p) == i]
        never = {p: i for i, p, t in odd if t in (CONTROL, UNKNOWN)}
        self._printed = frozenset(i for p in PRINTED_MARKS if (i := self.token_id(p)) is not None)
        self._mergeable = bytearray(b"\1") * self.n_tokens
        for i in (*never.values(), *self._printed, *self._pieces.holding(" ")):
            self._mergeable[i] = 0
        # Key of a pair: its concatenation, or both halves with a space between.
        self._joint = "" if v.merges is None else " "
        self._formed, self._order = _Found(self._find), _Found(self._find_order)
        self._unused = {p for _, p, t in odd if t == UNUSED and v.merges is None}
        self._check_merges()
        self._bytes = _byte_ids(v)
        user = {p: i for i, p, t in odd if t == USER_DEFINED and " " not in p and p}
        control = {p.replace(" ", SPACE): i for p, i in never.items() if p}
        marked = control | {p: i for p, i in user.items() if p in PRINTED_MARKS}
        spoken = {p: i for p, i in marked.items() if p not in THOUGHT}
        unmarked = {p: i for p, i in user.items() if p not in PRINTED_MARKS}
        cutters = (_Cutter(p, v.reach) for p in (user, control | user, marked, spoken, unmarked))
        self._user, self._special, self._quoted, self._spoken, self._unmarked = cutters
        # If no piece has a space after another character, merges never cross word boundaries: words are encoded
        # separately and cached.
        spaced = (i for i in self._pieces.holding(SPACE, inside=True) if self._mergeable[i] and v.types[i] != BYTE)
        self._by_word = not any(SPACE in v.pieces[i].lstrip(SPACE) for i in spaced)
        self._words: dict[str, tuple[int, ...]] = {}

    def _effective_types(self, markers: Iterable[str]) -> bytes:
        """The file's types, corrected for control tokens known by text or role."""
        v, types = self.vocabulary, bytearray(self.vocabulary.types)
        markers = tuple(markers)
        roles = (v.bos_id, v.eos_id, v.pad_id) if markers else ()
        for i in (*map(self.token_id, markers), *roles):
            if i is not None and types[i] in (NORMAL, USER_DEFINED):
                types[i] = CONTROL
        return bytes(types)

    def _check_merges(self) -> None:
        """TokenizerError for a merge that forms no piece."""
        known = set() if self._merges is None else set(self._pieces)
        for rank, merge in enumerate(self._merges or ()):
            if merge.replace(" ", "", 1) not in known:
                raise TokenizerError(f"merge {rank}, {merge!r}, makes no piece of the vocabulary")

    def _find(self, text: str) -> int | None:
        """Id of the piece that merges make of this text: never a control token or a byte."""
        i = self.token_id(text)
        return i if i is not None and self._mergeable[i] else None

    def _find_order(self, pair: str) -> float | None:
        """When a pair is merged, the lowest first: by the score of its piece, or by its place among the merges; None:
        never."""
        i = self._find(pair if self._merges is None else pair.replace(" ", "", 1))
        if i is None or self._merges is None:
            return None if i is None else -self.vocabulary.scores[i]
        return max(map(float, self._merges.numbers(pair)), default=None)

    @property
    def special(self) -> dict[str, str]:
        """Name of a special token in chat templates (bos_token) -> its text."""
        v = self.vocabulary
        if v.named is not None:
            return dict(v.named)
        ids = {"bos_token": v.bos_id, "eos_token": v.eos_id, "unk_token": v.unk_id, "pad_token": v.pad_id}
        return {name: v.pieces[i] for name, i in ids.items() if i is not None}

    @cached_property
    def longest(self) -> int:
        """Characters of the longest piece; a text of n characters has at least n / longest tokens."""
        return max(map(len, self.vocabulary.pieces))

    def encode(self, text: str, bos: bool = True, parse_special: bool = False, guard: str = "") -> list[int]:
        """Ids of `text`. bos: add what the vocabulary has before a text, unless present, and after it. parse_special: recognise control tokens by their text, except those that `quote` has escaped with `guard`.
        Lone surrogates become U+FFFD. TypeError if text is not a str."""
        return [i for part in self.encode_parts(text, bos, parse_special, guard) for i in part]

    def encode_parts(
        self, text: str, bos: bool = True, parse_special: bool = False, guard: str = ""
    ) -> Iterator[list[int]]:
        """`encode` in parts of a few milliseconds each, possibly empty, so that callers can interleave or abort long
        texts. Arguments and errors as of `encode`."""
        if not isinstance(text, str):
            raise TypeError(f"text to encode must be a str, not {type(text).__name__}")
        first = [self.bos_id] if bos and self.bos_id is not None else []
        begun = False
        for part in self._parts(text, parse_special, guard) if text else ():
            if not begun and part:
                begun = True
                part = part if first == part[:1] else first + part
            yield part
        if not begun:
            yield first
        if bos and self.vocabulary.after_id is not None:
            yield [self.vocabulary.after_id]

    def _parts(self, text: str, parse_special: bool, guard: str) -> Iterator[list[int]]:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace(" ", SPACE)
        if self.vocabulary.add_space_prefix:
            text = SPACE + text
        ids: list[int] = []
        for piece, known in (self._special if parse_special else self._user).cut(text):
            if len(ids) >= _PART:
                yield ids
                ids = []
            if known is not None:
                ids.append(known)
                continue
            quoted = guard and guard in piece
            for plain, own in self._unmarked.cut(piece.replace(guard, "")) if quoted else ((piece, None),):
                if own is not None:
                    ids.append(own)
                    continue
                for part in self._plain_parts(plain):
                    ids += part
                    if not part or len(ids) >= _PART:
                        yield ids
                        ids = []
        yield ids

    def quote(self, text: str, guard: str, *, joined: bool = False, thoughts: bool = True) -> str:
        """Escape control tokens and PRINTED_MARKS in `text` with the character `guard`, for `encode`. thoughts: with the
        marks THOUGHT. joined: also prefixes of control tokens, which appended text could complete."""
        cutter = self._quoted if thoughts else self._spoken
        if joined:
            firsts = "".join(re.escape(c) for c in sorted(cutter.firsts))
            return re.sub(f"([{firsts}])", rf"\1{guard}", text) if firsts else text
        out, at = [], 0
        for piece, known in cutter.whole(text.replace(" ", SPACE)):
            own = text[at : at + len(piece)]
            at += len(piece)
            out.append(own if known is None else "".join(c + guard for c in own))
        return "".join(out)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without control and unknown tokens, but with PRINTED_MARKS; bytes that are not UTF-8 become
        U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def whole_text(self, token: int) -> str | None:
        """A token's text; None if it is not complete characters. TokenizerError as of `token_bytes`."""
        if token not in self._texts:
            try:
                self._texts[token] = self.token_bytes(token).decode("utf-8")
            except UnicodeDecodeError:
                self._texts[token] = None
        return self._texts[token]

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes; empty for control tokens but PRINTED_MARKS, and for rows of the embedding beyond the pieces.
        TokenizerError for other ids."""
        if not 0 <= token < self.n_rows:
            raise TokenizerError(f"token id {token} is outside 0..{self.n_rows - 1}")
        if token >= self.n_tokens:
            return b""
        kind, piece = self.types[token], self.vocabulary.pieces[token]
        if kind in (CONTROL, UNKNOWN) and token not in self._printed:
            return b""
        if kind == BYTE:
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def token_id(self, piece: str) -> int | None:
        """Id of the token with exactly this text (U+2581 for a space), or None."""
        types = self.vocabulary.types
        return next((i for i in self._pieces.numbers(piece) if types[i] != BYTE), None)  # of equal pieces the first

    def _plain_parts(self, text: str) -> Iterator[Sequence[int]]:
        """Ids of text without user-defined pieces; yields an empty part after a few milliseconds without ids."""
        for found in _WORDS.finditer(text) if self._by_word else (re.match("(?s).*", text),):
            word = found[0]  # type: ignore[index]
            if len(word) > _LONG_WORD:
                yield from self._merge(word)
            else:
                yield self._encode_word(word)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        found = self._words.get(word)
        if found is None:
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            found = self._words[word] = tuple(i for part in self._merge(word) for i in part)
        return found

    def _merge(self, text: str) -> Iterator[list[int]]:
        """BPE over a linked list of symbols with a heap of candidate pairs: O(n log n). Yields empty parts, then the
        ids."""
        symbols: list[str] = list(text)
        before = list(range(-1, len(text) - 1))
        after = [*range(1, len(text)), -1]
        heap: list[tuple[float, int, int, int]] = []  # order, left, right, length of the concatenation
        order, joint, unused = self._order, self._joint, self._unused
        halves: dict[str, tuple[str, str]] = {}  # of unused pieces, which are split again at the end

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            first, second = symbols[left], symbols[right]
            known = order[first + joint + second]
            if known is not None:
                heapq.heappush(heap, (known, left, right, len(first) + len(second)))
                if unused and first + second in unused:
                    halves[first + second] = (first, second)

        for left in range(len(text) - 1):
            consider(left, left + 1)
            if not left % _PART:
                yield []
        merges = 0
        while heap:
            merges += 1
            if not merges % _PART:
                yield []
            _, left, right, length = heapq.heappop(heap)
            first, second = symbols[left], symbols[right]
            if not first or not second or len(first) + len(second) != length:
                continue  # stale: a symbol of the pair was merged meanwhile
            symbols[left], symbols[right] = first + second, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        out: list[int] = []
        stack = [s for s in reversed(symbols) if s]
        while stack:
            symbol = stack.pop()
            if symbol in halves:
                stack.extend(reversed(halves[symbol]))
            elif (known := self._formed[symbol]) is not None:
                out.append(known)
            else:
                out.extend(self._bytes[b] for b in symbol.encode("utf-8"))
            if len(out) >= _PART:
                yield out
                out = []
        yield out


class _Found(dict[str, Any]):
    """What was found for texts, so far."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, text: str) -> Any:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        found = self[text] = self._find(text)
        return found


class StreamDecoder:
    """Incremental decoder: its pieces and `flush()` joined equal `decode` of all ids. Never splits a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False  # whether a character is incomplete

    def push(self, token: int) -> str:
        """Text that `token` completes; "" while a character is incomplete."""
        if not self._open and (text := self._tokenizer.whole_text(token)) is not None:
            return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token))
        self._open = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD for an incomplete character, else ""; resets the decoder."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._open = False
        return rest


_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


_WHITE = SPACE + "".join(c for c in map(chr, range(0x3001)) if c.isspace())


class _Cutter:
    """Splits text at known pieces, longest match first, from left to right. reach: of Vocabulary."""

    def __init__(self, pieces: dict[str, int], reach: Iterable[tuple[int, bool, bool, bool]] = ()) -> None:
        known = set(pieces.values())
        self._strips = {i: (left, right) for i, left, right, _ in reach if i in known and (left or right)}
        self._whole = {i for i, *_, word in reach if word}
        self._pieces = pieces
        self._starts = {p[:2] for p in pieces}
        lengths: dict[str, set[int]] = {}
        for p in pieces:
            lengths.setdefault(p[0], set()).add(len(p))
        self._lengths = {c: sorted(n, reverse=True) for c, n in lengths.items()}
        self.firsts = frozenset(lengths)
        firsts = "".join(re.escape(c) for c in sorted(lengths))
        self._candidates = re.compile(f"[{firsts}]") if pieces else None

    def cut(self, text: str) -> Iterable[tuple[str, int | None]]:
        """(piece, id) for known pieces and (text, None) for non-empty text between them, without the spaces that tokens
        strip beside them."""
        if not self._strips:
            yield from self.whole(text)
            return
        parts = list(self.whole(text))
        space = [known is None or not piece.strip(SPACE) for piece, known in parts]
        for n, (_, known) in enumerate(parts):
            left, right = self._strips.get(known, (False, False)) if known is not None else (False, False)
            for wanted, step, strip in ((left, -1, str.rstrip), (right, 1, str.lstrip)):
                at = n + step
                while wanted and 0 <= at < len(parts) and space[at]:
                    piece = strip(parts[at][0], _WHITE)
                    parts[at] = piece, parts[at][1]
                    if piece:
                        break
                    at += step
        yield from ((piece, known) for piece, known in parts if piece)

    def whole(self, text: str) -> Iterator[tuple[str, int | None]]:
        """`cut`, with all of the text."""
        done = 0
        for candidate in self._candidates.finditer(text) if self._candidates else ():
            at = candidate.start()
            if at < done or (text[at : at + 2] not in self._starts and text[at] not in self._starts):
                continue
            for length in self._lengths[text[at]]:
                piece = text[at : at + length]
                if piece in self._pieces:
                    end = at + length
                    if self._pieces[piece] in self._whole and (
                        re.match(r"\w", text[max(at - 1, 0) : at]) or re.match(r"\w", text[end : end + 1])
                    ):
                        break
                    if at > done:
                        yield text[done:at], None
                    yield piece, self._pieces[piece]
                    done = end
                    break
        if done < len(text):
            yield text[done:], None


def _byte_ids(v: Vocabulary) -> list[int]:
    """Id of each byte's piece, <0x00> to <0xFF>."""
    found = {v.pieces[i]: i for i in [i for i, t in enumerate(v.types) if t == BYTE]}
    ids = [found.pop(f"<0x{b:02X}>", -1) for b in range(256)]
    if found or -1 in ids:
        problem = f"piece {next(iter(found))!r} is not a byte" if found else f"<0x{ids.index(-1):02X}> is missing"
        raise TokenizerError(f"byte pieces <0x00> to <0xFF> are needed: {problem}")
    return ids
