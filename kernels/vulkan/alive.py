"""Open Vulkan devices of this process, and closed devices whose work has not ended.

Open devices are closed at exit. Closed devices are freed once their work has ended. A forked child leaves both alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING

from hybrid.kernels.vulkan.api import VulkanError

if TYPE_CHECKING:
    from hybrid.kernels.vulkan.device import VulkanDevice

devices: weakref.WeakSet[VulkanDevice] = weakref.WeakSet()
left: list[VulkanDevice] = []
"""Closed but not yet freed; siblings precede the device whose queue they share."""
_parent = ""


def parent() -> str:
    """Names of the devices that the parent had open when it forked this process."""
    return _parent


def free_left() -> None:
    """Free closed devices whose work has ended since."""
    for device in list(left):
        q = device.unfreed
        if q is not None and q.process == os.getpid() and q.ended():
            left.remove(device)
            device.unfreed = None
            device.free(q)


@atexit.register
def _close_all() -> None:
    # Drivers and layers have exit handlers of their own: our objects must be destroyed before those run.
    for close in (*(device.close for device in list(devices)), free_left):
        try:
            close()
        except VulkanError as error:
            print(f"closing: {error}", file=sys.stderr)


def _forked() -> None:
    """In a forked child: the devices belong to the parent, and their drivers' threads did not survive the fork."""
    global _parent
    _parent = ", ".join(sorted(device.name for device in (*devices, *left)))
    for device in list(devices):
        device.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
