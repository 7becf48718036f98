"""What a model that serves consists of is looked through by no collection."""

import gc
import weakref

from hybrid.core import garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_lives_is_not_looked_through_and_garbage_is_gone():
    alive, dead = Node(), Node()
    seen = weakref.ref(dead)
    del dead
    garbage.keep()
    assert seen() is None
    assert not any(found is alive for found in gc.get_objects()), "a full collection would still look through it"


def test_what_was_kept_and_died_is_collected_before_the_next_is_kept():
    first = Node()
    garbage.keep()
    seen = weakref.ref(first)
    del first
    gc.collect()
    assert seen() is not None, "kept: no collection looks"
    garbage.keep()
    assert seen() is None
