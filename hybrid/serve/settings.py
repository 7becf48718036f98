"""A server's settings: model name, access control, limits and timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

OnLoss = Literal["restart", "exit"]
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


def loopback_names(host: str) -> tuple[str, ...]:
    """Valid Host headers for a loopback address; empty (any) for other addresses."""
    try:
        own = ip_address(host.strip("[]"))
    except ValueError:
        return LOOPBACK if host.lower() == "localhost" else ()
    return (*LOOPBACK, f"[{own}]" if own.version == 6 else str(own)) if own.is_loopback else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a server; times in seconds."""

    name: str = ""
    """The model's name in requests and answers; empty: the checkpoint's name."""
    keys: tuple[str, ...] = ()
    """API keys, one of which each request needs; empty: no authentication."""
    hosts: tuple[str, ...] = ()
    """Valid Host headers; empty: any. A server on a loopback address restricts them against DNS rebinding."""
    cors: tuple[str, ...] = ()
    """Origins that CORS allows; empty: only the server's own."""
    max_body: int = 4 << 20
    max_prompt: int = 0
    """Most tokens of a prompt; 0: the context."""
    max_tokens: int = 0
    """Most tokens of an answer; 0: the context."""
    max_choices: int = 8
    """Most choices of a request: n times its prompts."""
    idle: float = 30.0
    """Timeout of clients that neither send nor read."""
    total: float = 600.0
    """Time limit from a request's arrival to the end of its answer."""
    on_loss: OnLoss = "restart"
    seed: int | None = None
    """Base seed for requests without a seed; None: from the system."""
