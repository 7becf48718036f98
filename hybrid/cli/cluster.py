"""The Ray cluster of --ray: a private local one, or a running one."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from hybrid.cli import terminable

if find_spec("ray") is None:  # fail early, although Ray is imported later
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

SHORT = None if sys.platform == "win32" else "/tmp"
"""Parent of a local cluster's folder: short, since socket paths are limited to about a hundred characters."""


@contextmanager
def cluster(address: str | None = None) -> Iterator[None]:
    """Context manager of an initialised Ray. Import Ray inside the block: it reads its environment on import.

    address: of a running cluster, joined with the user's token. Without one, starts a cluster on the loopback address,
    whose token only its own processes have. ValueError if the cluster cannot be joined."""
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported before its cluster was described: it would be open to other users")
    with terminable(), ExitStack() as stack:
        terminated = signal.getsignal(signal.SIGTERM)
        options: dict[str, Any] = {"address": address}
        if address is None:
            os.environ.update(
                RAY_AUTH_MODE="token",
                RAY_AUTH_TOKEN=secrets.token_hex(32),
                # single machine on all systems: 127.0.0.1
                RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            )
            # Ray's folders are world-writable and its logs world-readable; this private parent folder protects them.
            folder = stack.enter_context(TemporaryDirectory(prefix="hybrid-", dir=SHORT, ignore_cleanup_errors=True))
            options = {"address": "local", "_temp_dir": os.path.join(folder, "ray")}
        elif os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ.setdefault("RAY_AUTH_MODE", "token")

        import ray
        from ray.exceptions import AuthenticationError

        stack.callback(ray.shutdown)
        try:
            ray.init(**options, include_dashboard=False, log_to_driver=False, logging_level="error")
        except (AuthenticationError, ConnectionError):
            raise ValueError(
                f"cannot join a Ray cluster at {address}; if it asks for a token, set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a "
                "file that holds it"
            ) from None
        signal.signal(signal.SIGTERM, terminated)  # Ray's handler exits with another code
        yield
