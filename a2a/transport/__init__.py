"""How the ranks of a domain come to share memory. One file per transport; each is found by itself.

A transport is a class with a `name` that derives from `base.Transport`, in a module of this folder or under the entry point
group `a2a.transports`. `candidates()` lists them; the communicator takes the first that has no reason against it, or the one
that A2A_TRANSPORT names.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from a2a.config import config
from a2a.topology import Topology
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


def why_not(transport: type[Transport], topology: Topology, device_type: str) -> str | None:
    """Why a communicator of these ranks can't take `transport`, or None. Where one is named, others of its kind step back.

    Raises:
        ValueError: A2A_TRANSPORT names none that there is.
    """
    named = config().transport
    if named not in (None, transport.name):
        kinds = {known.name: known.device_type for known in candidates()}
        if named not in kinds:
            raise ValueError(f"A2A_TRANSPORT={named!r}: there is no such transport; there are {', '.join(kinds)}")
        if kinds[named] == transport.device_type:
            return f"A2A_TRANSPORT={named} names another"
    if transport.only_by_name and named != transport.name:
        return f"taken only where A2A_TRANSPORT={transport.name} names it"
    return transport.unavailable(topology, device_type)


def _is_transport(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Transport) and bool(getattr(value, "name", ""))
