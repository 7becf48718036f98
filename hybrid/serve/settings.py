"""What a server was told: what it is called, whom it lets in, what it allows, and when it gives up."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

OnLoss = Literal["restart", "exit"]
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


def loopback_names(host: str) -> tuple[str, ...]:
    """Names that the Host header may have on a loopback address; none for other addresses, which have any."""
    try:
        own = ip_address(host.strip("[]"))
    except ValueError:
        return LOOPBACK if host.lower() == "localhost" else ()
    return (*LOOPBACK, f"[{own}]" if own.version == 6 else str(own)) if own.is_loopback else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes in bytes, characters or tokens as named; times in seconds."""

    name: str = ""
    """What the model is called in requests and answers; empty: the checkpoint's own name."""
    keys: tuple[str, ...] = ()
    """API keys, one of which each request must carry; none: everyone who reaches the port is let in."""
    hosts: tuple[str, ...] = ()
    """Names that the Host header may have; none: any. A server on the loopback address names that, so that a page
    elsewhere cannot reach it through a name of its own that resolves to this machine."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may read answers; none: only the server's own."""
    max_body: int = 4 << 20
    max_prompt: int = 0
    """Tokens; 0: as many as the context holds."""
    max_tokens: int = 0
    """Tokens of one answer; 0: as many as the context holds."""
    max_choices: int = 8
    """Choices of one request: n times its prompts."""
    idle: float = 30.0
    """A client that neither sends nor takes anything for so long is dropped."""
    total: float = 600.0
    """From the arrival of a request to the end of its answer."""
    on_loss: OnLoss = "restart"
    seed: int | None = None
    """Of the seeds of requests that name none; None: from the system."""
