"""Thoughts before an answer: turn them on by a request's fields, bound them, keep them out of a grammar's text."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid.engine.sampling import Constraint, is_ready, likely_by, mask_of, mask_without
from hybrid.serve.wire import ChatRequest, Templated
from hybrid.text.marks import CLOSE, OPEN, THINK, Channel, ids_of

if TYPE_CHECKING:
    from hybrid.model import Model
    from hybrid.text.tokenizer import Tokenizer

EFFORTS = {"minimal": 256, "low": 1024, "medium": 4096, "high": 16384, "xhigh": 65536}
"""reasoning_effort -> most tokens of thoughts; max has no bound."""
ALWAYS = 1 << 30  # tokens


def template(body: Templated) -> dict[str, Any]:
    """How a request's conversation is written: options of chat.written."""
    effort = getattr(body, "reasoning_effort", None)
    wanted = {} if effort is None else {"enable_thinking": effort != "none"}
    return {
        "variables": {**wanted, **(body.chat_template_kwargs or {})},
        "generate": body.add_generation_prompt is not False,
        "continued": bool(body.continue_final_message),
    }


def channel_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Channel | None:
    """Before an answer to a prompt; None for a vocabulary without thoughts."""
    marks = ids_of(tokenizer, (OPEN, CLOSE))
    return Channel.after((marks[OPEN], marks[CLOSE]), prompt) if len(marks) == 2 else None


def bounded(
    model: Model, body: ChatRequest, prompt: Sequence[int], channel: Channel | None, choices: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Options of the choices, whose stop strings and constraints, those of a grammar, are about what follows a thought.
    Their thoughts have a budget. Without thinking, a grammar applies from the first token."""
    if channel is None:
        return choices
    thinks = channel.inside or model.checkpoint.tokenizer.token_id(THINK) in prompt
    budget = body.thinking_token_budget
    if budget is None:
        budget = EFFORTS.get(body.reasoning_effort or "")
    out = []
    for own in choices:
        grammar, most = own.get("constraint"), None if budget is None or budget >= own["max_tokens"] else budget
        if thinks if grammar is not None else most is not None:
            own = {**own, "constraint": ThoughtConstraint(model, copy(channel), most, grammar)}
        out.append({**own, "thought": (channel.opening, channel.closing)})
    return out


class ThoughtConstraint(Constraint):
    """Within a thought every token is allowed, an end of text only without a grammar, until `budget` tokens are spent;
    then the closing mark alone. Outside, what the grammar allows; a thought may begin before its text, within the
    budget."""

    def __init__(self, model: Model, channel: Channel, budget: int | None, grammar: Constraint | None) -> None:
        self._channel, self._budget, self._grammar = channel, budget, grammar
        self._begun = False  # the grammar's text
        self._shared = False  # whether a copy has the same grammar
        tokenizer, rows = model.checkpoint.tokenizer, model.hparams.vocab
        n = tokenizer.n_tokens
        self._open = mask_of([channel.opening], rows)
        self._close = mask_of([channel.closing], rows)
        self._without_open = mask_without([channel.opening], n, rows)
        self._without_end = mask_without(tokenizer.eos_ids, n, rows)

    @property
    def _spent(self) -> bool:
        return self._budget is not None and self._channel.tokens >= self._budget

    def ready(self, wait: float = 0.0) -> bool:
        """Whether the next mask is there, after waiting at most `wait` seconds."""
        return self._channel.inside or self._grammar is None or is_ready(self._grammar, wait)

    def mask(self) -> np.ndarray | None:
        grammar = self._grammar
        if self._channel.inside:
            return self._close if self._spent else None if grammar is None else self._without_end
        if grammar is None:
            return self._without_open if self._spent else None
        mask = grammar.mask()
        return mask if mask is None or self._begun or self._spent else mask | self._open

    def likely(self) -> Sequence[int]:
        """The next tokens of the grammar's text."""
        return likely_by(self._grammar) if self._begun and self._grammar is not None else ()

    def steady(self) -> int:
        """For how many tokens the mask stays: without a grammar until the budget is spent, and after that."""
        if self._grammar is not None or self._budget is None:
            return 0
        left = self._budget - self._channel.tokens
        return left if left > 0 else 0 if self._channel.inside else ALWAYS

    def accept(self, token: int) -> None:
        if self._channel.take(token) or self._grammar is None:
            return
        if self._shared:
            self._grammar, self._shared = self._grammar.copy(), False
        self._grammar.accept(token)
        self._begun = True

    def copy(self) -> ThoughtConstraint:
        """Within a thought, where drafts ask for a copy before each pass, without one of the grammar's state."""
        made = copy(self)
        made._channel = copy(self._channel)
        if self._channel.inside:
            self._shared = made._shared = True
        elif self._grammar is not None:
            made._grammar, made._shared = self._grammar.copy(), False
        return made
