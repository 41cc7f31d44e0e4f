"""One file for each way to do a collective. Each is found by itself.

An algorithm is a class with a `name` and an `op` that derives from `base.Algorithm`, in a module of this folder or under the
entry point group `a2a.algorithms`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib.metadata import entry_points

from a2a.algorithms.base import Algorithm


@functools.cache
def candidates() -> tuple[Algorithm, ...]:
    """Every algorithm of this installation, this package's own first."""
    found: list[Algorithm] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if module.name != "base":
            full = f"{__name__}.{module.name}"
            found += [m() for m in vars(importlib.import_module(full)).values() if _is(m) and m.__module__ == full]
    return (*found, *(cls() for point in entry_points(group="a2a.algorithms") if _is(cls := point.load())))


def _is(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm) and bool(getattr(value, "name", ""))
