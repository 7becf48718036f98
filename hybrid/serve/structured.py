"""Structured output: a JSON schema, or any grammar, as masks over the model's tokens (llguidance; hybrid/engine/constraint.py).

Whitespace between JSON's tokens is bounded: nothing, one space, or a new line with its indent. Without a bound a model that
has begun to write blanks may go on for ever, since every further one is allowed.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid.engine.constraint import mask_of, mask_words
from hybrid.serve.errors import ApiError, bad_request
from hybrid.serve.wire import ResponseFormat
from hybrid.text.tokenizer import CONTROL, UNKNOWN, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from hybrid.engine.constraint import Constraint

WHITESPACE = r"[ ]?|\n {0,16}"
MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')
"""Tokens that grammars name and that are never part of a text, whatever their type."""
MISSING = "response_format and tools need llguidance, which is not installed (pip install hybrid-kernels[serve])"
_KEPT = 64
"""Grammars that are kept compiled."""


def missing() -> str | None:
    """What this installation cannot constrain and why; None where it can."""
    return MISSING if importlib.util.find_spec("llguidance") is None else None


def json_rule(schema: Mapping[str, Any], exact: bool = False) -> str:
    """`%json ...`, as a rule of a Lark grammar; ASCII. exact: whitespace as json.dumps writes it."""
    if exact:
        space: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        space = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": space})


def answer_lark(schema: Mapping[str, Any]) -> str:
    """The grammar of an answer that is JSON of a schema."""
    return f"start: {json_rule(schema)}"


def schema_of(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema that a response_format asks for; None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    return {"type": "object"} if wanted.json_schema is None else dict(wanted.json_schema.schema_)


def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """The marks that a tokenizer has, and their ids."""
    return {m: i for m in MARKS if (i := tokenizer.token_id(m)) is not None}


class Grammars:
    """Grammars over one tokenizer. vocab: rows of the output matrix. For use in threads: llguidance works without the
    interpreter's lock."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """ApiError 400 where llguidance is not installed."""
        try:
            import llguidance
        except ImportError:
            raise bad_request(f"this server cannot constrain answers: {MISSING}", code="unsupported_value") from None
        self._tokenizer, self._vocab, self._matcher = tokenizer, vocab, llguidance.LLMatcher
        self._ends = sorted(tokenizer.eos_ids)
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self._ends, marks_of(tokenizer)))
        self._ll = llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.n_rows, eos_token=self._ends)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def constraint(self, lark: str, param: str) -> Constraint:
        """A constraint in its first state. ApiError 400, naming `param`, for a grammar that cannot be used."""
        if not self._ends:
            raise bad_request("this model has no end-of-text token: nothing could end a structured answer", param)
        base = self._compiled.get(lark)
        if base is None:
            base = self._matcher(self._ll, self._matcher.grammar_from_lark(lark), log_level=0)
            if base.is_error():
                raise self._refused(base.get_error(), param)
            self._compiled[lark] = base
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return GrammarConstraint(base.deep_copy(), self._ends, self._vocab)

    @staticmethod
    def _refused(error: str, param: str) -> ApiError:
        line = next((part for part in error.splitlines() if part.strip()), "it cannot be compiled")
        return bad_request(f"the schema cannot be used: {line[:300]}", param, "invalid_schema")


class GrammarConstraint:
    """One sequence's place in a grammar."""

    def __init__(self, matcher: LLMatcher, ends: list[int], vocab: int) -> None:
        self._matcher, self._ends, self._vocab = matcher, ends, vocab

    def mask(self) -> np.ndarray:
        """Which ids may come next: those that end the text where nothing else may. ValueError for a grammar that grew beyond
        llguidance's limits."""
        m = self._matcher
        if m.is_error():
            raise ValueError(f"the schema cannot be followed further: {m.get_error()[:200]}")
        if m.is_stopped():
            return mask_of(self._ends, self._vocab)
        bits = np.frombuffer(m.compute_bitmask(), np.uint32)
        if m.is_error():
            raise ValueError(f"the schema cannot be followed further: {m.get_error()[:200]}")
        words = mask_words(self._vocab)
        return bits[:words].copy() if len(bits) >= words else np.pad(bits, (0, words - len(bits)))

    def accept(self, token: int) -> None:
        if token in self._ends or self._matcher.is_stopped():
            return  # the text has ended; what a pass ahead chose is dropped
        self._matcher.consume_token(token)

    def copy(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._ends, self._vocab)


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, ends: list[int], marks: Mapping[str, int]) -> None:
        t = tokenizer
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = t.vocabulary.bos_id
        special = {i for i, kind in enumerate(t.types) if kind in (CONTROL, UNKNOWN)} | {*marks.values(), *ends}
        self.special_token_ids = sorted(special)
        self.tokens = [
            t.vocabulary.pieces[i].encode("utf-8", "replace") if i in special else t.token_bytes(i) for i in range(t.n_tokens)
        ]
        self.tokens += [b""] * (t.n_rows - t.n_tokens)
        self._tokenizer = t

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), bos=False)
