"""The Vulkan devices of this process that are open, and those that were closed while work that does not end held their
objects: closed at its end, freed when that work has ended, and left alone in a process that was forked from this
one."""

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
"""Closed, and not freed yet; those on another's queue before it."""
_parent = ""


def parent() -> str:
    """Names of the devices that the process from which this one was forked had open."""
    return _parent


def free_left() -> None:
    """Free devices that were closed too early, where their work has ended since."""
    for device in list(left):
        q = device.unfreed
        if q is not None and q.process == os.getpid() and q.ended():
            left.remove(device)
            device.unfreed = None
            device.free(q)


@atexit.register
def _close_all() -> None:
    # Drivers and layers have their own exit handlers: nothing of ours may outlive them.
    for close in (*(device.close for device in list(devices)), free_left):
        try:
            close()
        except VulkanError as error:
            print(f"closing: {error}", file=sys.stderr)


def _forked() -> None:
    """In a process forked from this one: its devices belong to the parent, and their drivers' threads stayed there."""
    global _parent
    _parent = ", ".join(sorted(device.name for device in (*devices, *left)))
    for device in list(devices):
        device.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
