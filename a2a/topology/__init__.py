"""Who is wired to whom, and how fast: a value that the rest of the library takes as given.

A `Topology` is detected (`Topology.detect`), read from a file or a preset (`Topology.load`), chosen between the two as the
user's environment says (`resolve`), or written by hand; nothing downstream can tell. This package never imports torch.
"""

from __future__ import annotations

from a2a.topology import presets
from a2a.topology.detect import Exchange, resolve
from a2a.topology.host import HostFacts, local_facts
from a2a.topology.model import Domain, Kind, Link, Topology

__all__ = ["Domain", "Exchange", "HostFacts", "Kind", "Link", "Topology", "local_facts", "presets", "resolve"]
