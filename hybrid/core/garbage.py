"""Python's garbage collector beside a model that serves.

A full collection looks through every plan and pass of a model: 0.35 s for one of 62 layers with 32 slots and its draft,
in which no stream goes on (H100's host, Python 3.12, 600,000 objects).
"""

from __future__ import annotations

import gc


def keep() -> None:
    """Collect what is garbage now and let no later collection look through what is left: for a process whose model
    lives until it ends, or until another takes its place, before which garbage of the first is collected."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
