"""Reports of hybrid.prove in the user's cache: what is known of a device with its driver and kernels."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.core.places import cache_folder

log = logging.getLogger("hybrid")


OPTIONS = {"tuning", "without", "subgroup", "exact"}
"""Options of VulkanDevice that a report may name."""


@dataclass(frozen=True, slots=True)
class Known:
    """wrong: kernels whose results differ from the oracle's. options: those of VulkanDevice with which no wrong kernel is
    used and all others are proved; None: there are none. proved: kernels without an error, with these options. plans:
    digests of the loads that use no others."""

    wrong: tuple[str, ...]
    options: dict[str, Any] | None
    proved: frozenset[str]
    plans: frozenset[str]


def report_path(device: str, driver: str, kernels: str) -> Path:
    """Where the report of a device is kept."""
    name = "".join(c if c.isalnum() else "-" for c in f"{device}-{driver}-{kernels}")
    return cache_folder() / "proofs" / f"{name}.json"


def known(path: Path) -> Known | None:
    """What the report of a device says; None where there is none. A report that cannot be read is logged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        options = None if found["options"] is None else dict(found["options"])
        if options and not options.keys() <= OPTIONS:
            raise ValueError(f"options: {', '.join(options)} are not known")
        proved = frozenset(str(p["kernel"]) for p in found["proofs"] if not p["error"])
        return Known(tuple(map(str, found["wrong"])), options, proved, frozenset(map(str, found["plans"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): renew it with python -m hybrid.prove", path, error)
        return None
