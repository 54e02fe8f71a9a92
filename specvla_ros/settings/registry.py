# SPDX-License-Identifier: Apache-2.0
"""The implementations of a seam by name: this package's, and those that other packages add through entry points.

Neither this nor a module that registers something of ours needs torch: settings are read before torch is loaded.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

_log = logging.getLogger(__name__)

Make = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """One implementation; `settings` is the class of its own settings, a frozen dataclass of parameters."""

    name: str
    make: Make
    settings: type | None
    order: int


class Registry:
    """Implementations of one seam.

    Args:
        group: of entry points; each names a module, or something in it, that registers when it is imported.
        modules: of this package that register.
    """

    def __init__(self, group: str, modules: Sequence[str]) -> None:
        self._group = group
        self._modules = modules
        self._entries: dict[str, Entry] = {}
        self._complete = False

    def register(self, name: str, *, settings: type | None = None, order: int = 50) -> Callable[[Make], Make]:
        """Registers the decorated function under a name; ValueError if it is taken. `order` sorts `entries`."""

        def registered(make: Make) -> Make:
            if name in self._entries:
                raise ValueError(f"{self._group} has two entries named '{name}'")
            self._entries[name] = Entry(name, make, settings, order)
            return make

        return registered

    def entries(self) -> Mapping[str, Entry]:
        """Everything that is registered, by name, in order."""
        if not self._complete:
            self._complete = True  # first: a module may ask while it is imported
            for module in self._modules:
                import_module(module)
            for point in metadata.entry_points(group=self._group):
                try:
                    point.load()
                except Exception as error:  # another package's fault must not stop a robot that does not use it
                    _log.warning("%s '%s' of %s cannot be loaded: %s", self._group, point.name, point.value, error)
        ordered = sorted(self._entries.values(), key=lambda entry: (entry.order, entry.name))
        return {entry.name: entry for entry in ordered}

    def names(self) -> tuple[str, ...]:
        return tuple(self.entries())

    def settings(self) -> dict[str, type]:
        """Classes of settings, by name."""
        return {name: entry.settings for name, entry in self.entries().items() if entry.settings is not None}
