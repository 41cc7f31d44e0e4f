"""How the ranks of a domain come to share memory. One file per transport; each is found by itself.

A transport is a class with a `name` that derives from `base.Transport`, in a module of this folder or under the entry point
group `a2a.transports`. `candidates()` lists them; the communicator takes the first that has no reason against it.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from a2a.transport.base import Transport


def candidates() -> list[type[Transport]]:
    """Every transport of this installation, this package's own first."""
    found: list[type[Transport]] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if module.name != "base":
            members = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
            found += [m for m in members if _is_transport(m) and m.__module__ == f"{__name__}.{module.name}"]
    found += [cls for point in entry_points(group="a2a.transports") if _is_transport(cls := point.load())]
    return found


def _is_transport(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Transport) and bool(getattr(value, "name", ""))
