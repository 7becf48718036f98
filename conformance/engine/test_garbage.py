"""The objects of a serving model are frozen: no collection scans them."""

import gc
import weakref

from hybrid.core import garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_frozen_objects_are_not_scanned_and_garbage_is_freed():
    alive, dead = Node(), Node()
    seen = weakref.ref(dead)
    del dead
    garbage.keep()
    assert seen() is None
    assert not any(found is alive for found in gc.get_objects()), "a full collection would still scan it"


def test_dead_frozen_objects_are_collected_before_the_next_freeze():
    first = Node()
    garbage.keep()
    seen = weakref.ref(first)
    del first
    gc.collect()
    assert seen() is not None, "frozen: no collection scans it"
    garbage.keep()
    assert seen() is None
