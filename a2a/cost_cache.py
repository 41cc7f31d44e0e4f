"""Measured costs, kept in a file for each machine, and taken by a communicator only if all its ranks hold the same.

A table is of one machine (host, processor, GPU), one shape of ranks and cores, and one build of the library: change any
of them and it is measured again (`a2a topo --measure`). Ranks compare digests when a communicator is made; where they
differ, all of them say so and take the built-in costs, since a plan must come out alike on all ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from a2a.config import config
from a2a.kernels import cpu
from a2a.topology import Topology
from a2a.topology.built_in import built_in
from a2a.topology.costs import VERSION, Costs
from a2a.topology.host import cpu_model

_log = logging.getLogger("a2a")


def folder() -> Path:
    """Where tables are kept."""
    chosen = config().cache_dir
    return (Path(chosen) if chosen else Path.home() / ".cache" / "a2a") / "costs"


def path_of(topology: Topology, rank: int) -> Path:
    """The file of the machine that `rank` is on, for the ranks of `topology`; this process runs there."""
    domain = topology.domain_of(rank)
    identity = {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "gpu": domain.gpu,
        "kind": domain.kind,
        "cores": domain.cores,
        "ranks": [len(other.ranks) for other in topology.domains],
        "library": _library(),
        "version": VERSION,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return folder() / f"{domain.kind}-{topology.world_size}-{key[:24]}.json"


@functools.cache
def _library() -> str:
    """Which build of the kernels this is."""
    path = cpu.find()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else ""


def save(costs: Costs, path: Path) -> None:
    """Write a table; whoever reads meanwhile finds the old one or the new one.

    Raises:
        OSError: the folder can't be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(costs.to_json())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: Path) -> Costs | None:
    """The table in a file; None, with a warning where it can't be read, if there is none."""
    try:
        return Costs.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("a2a: the measured costs in %s can't be used: %s; run `a2a topo --measure` again", path, error)
        return None


def agreed(exchange: Callable[[str, bytes], list[bytes]], rank: int, topology: Topology) -> Costs:
    """The measured costs if every rank has the same, else the built-in ones. Collective; the same on all ranks."""
    usual = built_in(topology)
    mine = load(path_of(topology, rank))
    digests = [payload.decode() for payload in exchange("costs", (mine.digest if mine else "none").encode())]
    if mine is not None and set(digests) == {mine.digest}:
        return mine.over(usual)
    if len(set(digests)) > 1:
        without = [peer for peer, digest in enumerate(digests) if digest == "none"]
        why = f"ranks {without} have none" if without else "they were measured apart"
        _log.warning(
            "a2a: the ranks hold different tables of measured costs (%s); all use the built-in ones. Run `a2a topo "
            "--measure` on all machines at once, or remove %s",
            why,
            folder(),
        )
    return usual


__all__ = ["agreed", "folder", "load", "path_of", "save"]
