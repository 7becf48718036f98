"""SentencePiece BPE with byte fallback: one engine for tokenizer.model and for GGUF's tokenizer.ggml.* arrays.

Encoding: user-defined pieces (and control tokens, when asked) are cut out first, longest at each place; spaces
become U+2581; then the adjacent pair whose union is the piece of highest score is merged, leftmost at a tie, until
nothing merges; characters left over become byte pieces. Ids equal sentencepiece's for the same vocabulary.
"""

from __future__ import annotations

import codecs
import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # numbers shared by SentencePiece and GGUF
SPACE = "\u2581"
END_TEXTS = ("<eos>", "<end_of_turn>")
_CACHED_WORDS = 1 << 16


class TokenizerError(ValueError):
    """The vocabulary cannot be used, or an id is not in it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id, in SentencePiece's form: U+2581 for a space (bytes that are not UTF-8 as surrogate escapes).

    A user-defined piece that holds real spaces can be decoded but never encoded, as in SentencePiece.
    """

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None = None
    pad_id: int | None = None
    add_space_prefix: bool = False

    def __post_init__(self) -> None:
        n = len(self.pieces)
        if not n or not n == len(self.scores) == len(self.types):
            raise TokenizerError(f"{n} tokens with {len(self.scores)} scores and {len(self.types)} types")
        wrong = next((t for t in self.types if t not in range(1, 7)), None)
        if wrong is not None:
            raise TokenizerError(f"token type {wrong} at id {self.types.index(wrong)}; known: 1 to 6")
        for name in ("bos_id", "eos_id", "unk_id", "pad_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < n:
                raise TokenizerError(f"{name} {value} is outside the {n} tokens")

    def first(self, n: int) -> Vocabulary:
        """The first `n` pieces: files may list tokens for which the model has no embedding."""
        if n >= len(self.pieces):
            return self
        return replace(self, pieces=self.pieces[:n], scores=self.scores[:n], types=self.types[:n])


class Tokenizer:
    """Text to ids and back. `eos_ids` ends a generation: the file's ids and the pieces <eos> and <end_of_turn>."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: Iterable[int] = ()) -> None:
        v = self.vocabulary = vocabulary
        self.n_tokens = len(v.pieces)
        self.bos_id = v.bos_id
        ends = {i for i in (v.eos_id, *eos_ids) if i is not None and 0 <= i < self.n_tokens}
        self._ids = {p: i for i, (p, t) in enumerate(zip(v.pieces, v.types, strict=True)) if t != BYTE}
        self.eos_ids = frozenset(ends | {self._ids[t] for t in END_TEXTS if t in self._ids})
        mergeable = (NORMAL, USER_DEFINED, UNUSED)
        self._merges = {p: (v.scores[i], i) for i, p in enumerate(v.pieces) if v.types[i] in mergeable and " " not in p}
        self._unused = {p for i, p in enumerate(v.pieces) if v.types[i] == UNUSED}
        self._bytes = _byte_ids(v)
        user = {p: i for i, p in enumerate(v.pieces) if v.types[i] == USER_DEFINED and " " not in p and p}
        control = {p.replace(" ", SPACE): i for i, p in enumerate(v.pieces) if v.types[i] == CONTROL and p}
        self._user, self._special = _Cutter(user), _Cutter(control | user)
        # Where no piece has a space after another character, no merge crosses the start of a word: words are
        # merged one by one, and remembered.
        self._by_word = not any(SPACE in p.lstrip(SPACE) for p in self._merges)
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, after the begin-of-text id if `bos`. `parse_special` also recognises control tokens by
        their text; otherwise they are ordinary characters. Lone surrogates count as U+FFFD."""
        ids = [self.bos_id] if bos and self.bos_id is not None else []
        if not text:
            return ids
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace(" ", SPACE)
        if self.vocabulary.add_space_prefix:
            text = SPACE + text
        for piece, known in (self._special if parse_special else self._user).cut(text):
            if known is not None:
                ids.append(known)
            else:
                for word in _WORDS.findall(piece) if self._by_word else (piece,):
                    ids.extend(self._encode_word(word))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; control and unknown tokens print nothing, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What a token prints. TokenizerError for an id outside the vocabulary."""
        if not 0 <= token < self.n_tokens:
            raise TokenizerError(f"token id {token} is outside 0..{self.n_tokens - 1}")
        kind, piece = self.vocabulary.types[token], self.vocabulary.pieces[token]
        if kind in (CONTROL, UNKNOWN):
            return b""
        if kind == BYTE:
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def token_id(self, piece: str) -> int | None:
        """Id of the token with exactly this text (U+2581 for a space), None where there is none."""
        return self._ids.get(piece)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        found = self._words.get(word)
        if found is None:
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            found = self._words[word] = tuple(self._merge(word))
        return found

    def _merge(self, text: str) -> list[int]:
        """BPE over a linked list of symbols with a heap of candidate pairs: O(n log n)."""
        symbols: list[str] = list(text)
        before = list(range(-1, len(text) - 1))
        after = [*range(1, len(text)), -1]
        heap: list[tuple[float, int, int, str]] = []
        halves: dict[str, tuple[str, str]] = {}  # of unused pieces, which are split again at the end

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            union = symbols[left] + symbols[right]
            known = self._merges.get(union)
            if known is not None:
                heapq.heappush(heap, (-known[0], left, right, union))
                if union in self._unused:
                    halves[union] = (symbols[left], symbols[right])

        for left in range(len(text) - 1):
            consider(left, left + 1)
        while heap:
            _, left, right, union = heapq.heappop(heap)
            stale = not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(union)
            if stale:  # a symbol has grown or gone since the pair was seen
                continue
            symbols[left], symbols[right] = union, ""
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
            elif symbol in self._merges:
                out.append(self._merges[symbol][1])
            else:
                out.extend(self._bytes[b] for b in symbol.encode("utf-8"))
        return out


class StreamDecoder:
    """Text piece by piece: the pieces and `flush()` joined equal `decode` of all ids. A character is never split."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that `token` completes; "" while a character is unfinished."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What an unfinished character leaves (U+FFFD); the decoder may be used again afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class _Cutter:
    """Splits text at known pieces, the longest at each place, from left to right."""

    def __init__(self, pieces: dict[str, int]) -> None:
        self._pieces = pieces
        self._starts = {p[:2] for p in pieces}
        lengths: dict[str, set[int]] = {}
        for p in pieces:
            lengths.setdefault(p[0], set()).add(len(p))
        self._lengths = {c: sorted(n, reverse=True) for c, n in lengths.items()}
        firsts = "".join(re.escape(c) for c in sorted(lengths))
        self._candidates = re.compile(f"[{firsts}]") if pieces else None

    def cut(self, text: str) -> Iterable[tuple[str, int | None]]:
        """(piece, its id) for known pieces, (text between them, None); no empty ones."""
        done = 0
        for candidate in self._candidates.finditer(text) if self._candidates else ():
            at = candidate.start()
            if at < done or (text[at : at + 2] not in self._starts and text[at] not in self._starts):
                continue
            for length in self._lengths[text[at]]:
                piece = text[at : at + length]
                if piece in self._pieces:
                    if at > done:
                        yield text[done:at], None
                    yield piece, self._pieces[piece]
                    done = at + len(piece)
                    break
        if done < len(text):
            yield text[done:], None


def _byte_ids(v: Vocabulary) -> list[int]:
    """Id of each byte's piece, <0x00> to <0xFF>."""
    found = {p: i for i, (p, t) in enumerate(zip(v.pieces, v.types, strict=True)) if t == BYTE}
    ids = [found.pop(f"<0x{b:02X}>", -1) for b in range(256)]
    if found or -1 in ids:
        problem = f"piece {next(iter(found))!r} is not a byte" if found else f"<0x{ids.index(-1):02X}> is missing"
        raise TokenizerError(f"byte pieces <0x00> to <0xFF> are needed: {problem}")
    return ids
