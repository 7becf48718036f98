"""--ray: the engines are Ray's (hybrid/serve/scale/replicas.py), the socket, the front and the signals are this
process's, as those of a server with one engine are."""

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
    """Until a signal; the exit code. options: of hybrid.load, without the device. address: a running Ray cluster's
    (default: one of this process's own). OSError where the port cannot be had."""
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
