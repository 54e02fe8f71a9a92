# SPDX-License-Identifier: Apache-2.0
"""Registries of implementations by name: this package's own and those of plug-ins found through entry points.

Neither this module nor this package's registering modules import torch: settings are read before torch is loaded.
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
    """One implementation; `settings` is its own settings class, a frozen dataclass of parameters."""

    name: str
    make: Make
    settings: type | None
    order: int


class Registry:
    """Implementations of one interface, by name.

    Args:
        group: entry-point group; each entry point names a module, or an object in it, that registers on import.
        modules: this package's modules that register.
    """

    def __init__(self, group: str, modules: Sequence[str]) -> None:
        self._group = group
        self._modules = modules
        self._entries: dict[str, Entry] = {}
        self._complete = False

    def register(self, name: str, *, settings: type | None = None, order: int = 50) -> Callable[[Make], Make]:
        """Registers the decorated function under a name; ValueError if the name is taken. `order` sorts `entries`."""

        def registered(make: Make) -> Make:
            if name in self._entries:
                raise ValueError(f"{self._group} has two entries named '{name}'")
            self._entries[name] = Entry(name, make, settings, order)
            return make

        return registered

    def entries(self) -> Mapping[str, Entry]:
        """All registered implementations by name, in order."""
        if not self._complete:
            self._complete = True  # set first: a module may call this while it is imported
            for module in self._modules:
                import_module(module)
            for point in metadata.entry_points(group=self._group):
                try:
                    point.load()
                except Exception as error:  # a broken plug-in must not stop a robot that does not use it
                    _log.warning("%s '%s' of %s cannot be loaded: %s", self._group, point.name, point.value, error)
        ordered = sorted(self._entries.values(), key=lambda entry: (entry.order, entry.name))
        return {entry.name: entry for entry in ordered}

    def names(self) -> tuple[str, ...]:
        return tuple(self.entries())

    def settings(self) -> dict[str, type]:
        """Settings classes by name."""
        return {name: entry.settings for name, entry in self.entries().items() if entry.settings is not None}
