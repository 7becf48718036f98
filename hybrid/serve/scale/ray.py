"""--ray: engines run as Ray Serve replicas (hybrid/serve/scale/replicas.py). This process has the socket, the front and
the signal handlers, as in a server with one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.cli import UsageError
from hybrid.cli.cluster import cluster
from hybrid.serve.process import Server, announce, configured, listen
from hybrid.serve.scale.front import Front, guarded
from hybrid.serve.settings import Settings


def run(
    options: Mapping[str, Any],
    settings: Settings,
    devices: Sequence[str],
    *,
    host: str,
    port: int,
    drain: float,
    address: str | None = None,
    access_log: bool = False,
) -> int:
    """Serve until a signal; returns the exit code. options: of hybrid.load, without the device. address: of a running
    Ray cluster (default: start a local one). OSError if the port cannot be bound."""
    if address is not None and "://" in address:
        raise UsageError(
            f"--ray-address {address}: run on a machine of the cluster and name HOST:PORT of its head, or auto"
        )
    listening = listen(host, port)
    with listening, cluster(address):
        from hybrid.serve.scale.replicas import replicas

        with replicas(options, settings, devices, drain) as engines:
            app = guarded(Front(engines, settings), settings)
            server = Server(configured(app, settings, drain, access_log), lambda: None)
            announce(host, listening, settings, f" with {len(devices)} replicas: {', '.join(devices)}")
            asyncio.run(server.serve([listening]))
    return 0
