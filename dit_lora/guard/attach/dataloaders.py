"""Learns samples' names from every DataLoader of a script, whenever it is made."""

import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from dit_lora.guard.attach.sample_ids import Names
from dit_lora.patching import Patches

Note = Callable[[Iterator[Any]], Iterator[Any]]


class Loaders:
    """Stands between a script and the iterators of its loaders, of classes that are defined later too."""

    def __init__(self, names: Names, patches: Patches) -> None:
        self._names = names
        self._patches = patches
        self._notes: MutableMapping[Any, Note | None] = WeakKeyDictionary()
        self._follows_accelerate = False
        self._depth = 0
        """Number of loaders that are fetching: one may iterate another, as Accelerate's do."""

    def follow_all(self, kind: Any) -> None:
        """Stand in for the `__iter__` of a class of loaders and of all that are made of it."""
        for one in [kind, *_all_of(kind)]:
            if "__iter__" in vars(one):
                self._patches.method(one, "__iter__", self._iterated)

        def made(made_of: Any, **kwargs: Any) -> None:
            super(kind, made_of).__init_subclass__(**kwargs)
            if "__iter__" in vars(made_of):
                self._patches.method(made_of, "__iter__", self._iterated)

        self._patches.attribute(kind, "__init_subclass__", classmethod(made))

    def follow_accelerate(self) -> None:
        """Follow Accelerate's loaders too, which are no DataLoaders and fetch a batch ahead of the loop."""
        module = sys.modules.get("accelerate.data_loader")
        if module is not None and not self._follows_accelerate:
            self._follows_accelerate = True
            self.follow_all(module.DataLoaderAdapter)

    def _iterated(self, original: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
        # A loader's own iterator, of which a class that inherits from it makes another, is no loop's.
        if self._depth:
            return original(loader)
        if loader not in self._notes:
            self._notes[loader] = self._names.follow(loader, self._patches)
        self._depth += 1
        try:
            batches = self._fetching(original(loader))
        finally:
            self._depth -= 1
        note = self._notes[loader]
        return batches if note is None else note(batches)

    def _fetching(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._depth += 1
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._depth -= 1
            yield batch


def _all_of(kind: Any) -> list[Any]:
    made_of: list[Any] = kind.__subclasses__()
    return made_of + [inner for one in made_of for inner in _all_of(one)]
