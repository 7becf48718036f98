"""The Ray cluster of --ray: one of this process's own, which nobody else gets into, or a running one that is joined."""

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

if find_spec("ray") is None:  # said at once, although Ray is imported later
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

SHORT = None if sys.platform == "win32" else "/tmp"
"""Where an own cluster's folder is: the paths of its sockets may have about a hundred characters."""


@contextmanager
def cluster(address: str | None = None) -> Iterator[None]:
    """Ray, until the block ends. Ray reads its environment when it is imported, so whoever uses it imports it in the
    block.

    address: a running cluster's, joined with the user's token. Without one a cluster is started that listens on the
    loopback address, for those who have its token: the processes that it starts. ValueError where there is none to
    join."""
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported before its cluster was described: it would let others in")
    with terminable(), ExitStack() as stack:
        terminated = signal.getsignal(signal.SIGTERM)
        options: dict[str, Any] = {"address": address}
        if address is None:
            os.environ.update(
                RAY_AUTH_MODE="token",
                RAY_AUTH_TOKEN=secrets.token_hex(32),
                # no cluster of several machines, on any system: 127.0.0.1 is its own name
                RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            )
            # Ray makes its folders writable for everybody and its logs readable; those outside do not get through this
            # one.
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
        signal.signal(signal.SIGTERM, terminated)  # Ray's own would end with an exit code of its own
        yield
