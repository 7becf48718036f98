"""Reports of hybrid.prove in the user's cache: what is known of a device with its driver and kernels."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.core.places import cache_folder

log = logging.getLogger("hybrid")


@dataclass(frozen=True, slots=True)
class Known:
    """wrong: kernels whose results differ from the oracle's. options: those of VulkanDevice with which no wrong kernel is
    used and all others are proved; None: there are none. kernels: how many were proved."""

    wrong: tuple[str, ...]
    options: dict[str, Any] | None
    kernels: int


def report_path(device: str, driver: str, kernels: str) -> Path:
    """Where the report of a device is kept."""
    name = "".join(c if c.isalnum() else "-" for c in f"{device}-{driver}-{kernels}")
    return cache_folder() / "proofs" / f"{name}.json"


def known(device: str, driver: str, kernels: str) -> Known | None:
    """What a report says; None where there is none. A report that cannot be read is logged."""
    path = report_path(device, driver, kernels)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        wrong = tuple(str(name) for name in found["wrong"])
        options = None if found["options"] is None else dict(found["options"])
        if options and not options.keys() <= {"tuning", "without"}:
            raise ValueError(f"options: {', '.join(options)} are not known")
        return Known(wrong, options, len(found["proofs"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): renew it with python -m hybrid.prove", path, error)
        return None
