"""The topology value: ranks, the domains they share memory in, and the links inside and between domains.

A topology is plain data. Its JSON is meant to be written by hand as well as by `Topology.save`:

    {
      "a2a_topology": 1,
      "world_size": 4,
      "domains": [
        {"ranks": [0, 1], "kind": "cpu_host", "host": "alpha", "cores": 2},
        {"ranks": [2, 3], "kind": "cpu_host", "host": "beta", "rack": "r7"}
      ],
      "scale_up": {"latency_us": 3.0, "bandwidth_GBps": 6.7, "source": "measured on alpha"},
      "scale_out": {"latency_us": 150, "bandwidth_GBps": 0.125, "source": "1 Gbit/s Ethernet, line rate"},
      "notes": ["written by hand"]
    }

    a2a_topology  format version: 1
    world_size    number of ranks; the domains must hold exactly the ranks 0 to world_size - 1, each once
    domains       ranks that can load and store each other's memory
      ranks       their ranks
      kind        "cpu_host" (one operating system's shared memory) or "nvlink" (GPUs in one NVLink fabric)
      host        optional: the machine's name, for people; empty where a domain spans several machines
      rack        optional: the rack's name, for people
      cores       optional: CPU cores that the domain's ranks may use together; 0 or absent means unknown
      gpu         optional: the GPUs' model, for people
    scale_up      the link between two ranks of a domain
    scale_out     the link between ranks of two domains (required even with one domain; copy a preset's)
      latency_us      time of an empty message, one way
      bandwidth_GBps  1e9 bytes a second that a rank sends, one way, while all ranks do
      source          optional: where the numbers come from: measured, modelled or quoted
    notes         optional: remarks for people, such as why ranks that look alike are in different domains

Decisions. The order in which domains and ranks are listed means nothing: domains are kept by lowest rank, ranks ascending,
so equal wirings compare equal. `source` and `notes` are prose and take no part in equality. An unknown key is an error,
since a misspelt optional key would otherwise be ignored in silence.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, SupportsIndex, get_args

if TYPE_CHECKING:
    from a2a.topology.detect import Exchange

VERSION = 1
Kind = Literal["cpu_host", "nvlink"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Link:
    """How fast one rank reaches another: time of an empty message, and bytes a second while all ranks send at once."""

    latency_us: float
    bandwidth_GBps: float  # 1e9 bytes a second, one way, per rank
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not (_is_number(self.latency_us) and self.latency_us >= 0):
            raise ValueError(f"Link: latency_us is {self.latency_us!r}; expected a finite number, 0 or more")
        if not (_is_number(self.bandwidth_GBps) and self.bandwidth_GBps > 0):
            raise ValueError(f"Link: bandwidth_GBps is {self.bandwidth_GBps!r}; expected a finite number above 0")
        object.__setattr__(self, "latency_us", float(self.latency_us))
        object.__setattr__(self, "bandwidth_GBps", float(self.bandwidth_GBps))


@dataclass(frozen=True)
class Domain:
    """Ranks that can load and store each other's memory."""

    ranks: tuple[int, ...]
    kind: Kind
    host: str = ""
    rack: str = ""
    cores: int = 0  # that its ranks may use together; 0: unknown
    gpu: str = ""

    def __post_init__(self) -> None:
        ranks = tuple(sorted(operator.index(rank) for rank in self.ranks))
        object.__setattr__(self, "ranks", ranks)
        if not ranks:
            raise ValueError("Domain: ranks is empty; a domain holds at least one rank")
        if ranks[0] < 0:
            raise ValueError(f"Domain: rank {ranks[0]} is negative; ranks count from 0")
        if self.kind not in KINDS:
            raise ValueError(f"Domain: kind is {self.kind!r}; expected one of {', '.join(map(repr, KINDS))}")
        if self.cores < 0:
            raise ValueError(f"Domain: cores is {self.cores}; expected 0 (unknown) or more")


@dataclass(frozen=True)
class Topology:
    """Ranks 0 to world_size - 1 in domains, with the links inside a domain and between domains. A frozen, hashable value.

    Args:
        domains: in any order; together they hold every rank exactly once.
        scale_up: the link inside a domain.
        scale_out: the link between domains.
        notes: remarks for people; not part of equality.
    Raises:
        ValueError: a rank is missing, repeated, or beyond the number of ranks.
    """

    domains: tuple[Domain, ...]
    scale_up: Link
    scale_out: Link
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        domains = tuple(sorted(self.domains, key=lambda domain: domain.ranks))
        object.__setattr__(self, "domains", domains)
        object.__setattr__(self, "notes", tuple(self.notes))
        if not domains:
            raise ValueError("Topology: there is no domain; expected at least one, with rank 0 in it")
        listed = Counter(rank for domain in domains for rank in domain.ranks)
        twice = [rank for rank, times in listed.items() if times > 1]
        if twice:
            raise ValueError(
                f"Topology: {_ranks(twice)} listed more than once; each rank belongs to exactly one domain"
            )
        beyond = listed.keys() - set(range(len(listed)))
        if beyond:
            missing = set(range(len(listed))) - listed.keys()
            raise ValueError(
                f"Topology: the domains list {_count(len(listed), 'rank')}, which must be 0 to {len(listed) - 1}; "
                f"{_ranks(missing)} missing and {_ranks(beyond)} too high"
            )

    # ---- questions

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._index_of_rank)

    @property
    def is_single_domain(self) -> bool:
        """Whether every rank can load and store every other's memory."""
        return len(self.domains) == 1

    def domain_index(self, rank: SupportsIndex) -> int:
        """Return the position in `domains` of the domain that holds `rank`."""
        return self._index_of_rank[self._checked(rank)]

    def domain_of(self, rank: SupportsIndex) -> Domain:
        """Return the domain that holds `rank`."""
        return self.domains[self.domain_index(rank)]

    def same_domain(self, a: SupportsIndex, b: SupportsIndex) -> bool:
        """Say whether ranks `a` and `b` can load and store each other's memory."""
        return self.domain_index(a) == self.domain_index(b)

    def rails(self) -> tuple[tuple[int, ...], ...]:
        """Return the rails: rail i has one rank of each domain, its i-th; in a domain of m ranks, number i mod m.

        There are as many rails as the largest domain has ranks, so a rank of a smaller domain may be on several.
        """
        num_rails = max(len(domain.ranks) for domain in self.domains)
        return tuple(tuple(d.ranks[i % len(d.ranks)] for d in self.domains) for i in range(num_rails))

    def summary(self) -> str:
        """Describe the shape in one line, such as "8 ranks: 2 x 4 cpu_host"; for logs, errors and result files."""
        alike = groupby(self.domains, key=lambda domain: f"{len(domain.ranks)} {domain.kind}")
        return f"{_count(self.world_size, 'rank')}: " + ", ".join(f"{len(list(run))} x {shape}" for shape, run in alike)

    def restrict(self, ranks: Iterable[SupportsIndex]) -> Topology:
        """Return the topology of a subgroup: its rank i is this topology's rank `ranks[i]`.

        Domains without a member vanish; links, names and `cores` stay; `notes` are dropped, as they speak of the old ranks.

        Raises:
            ValueError: `ranks` is empty, names a rank twice, or one that is not here.
        """
        members = [self._checked(rank) for rank in ranks]
        if not members:
            raise ValueError("Topology.restrict: no ranks given; a group has at least one")
        if len(set(members)) != len(members):
            twice = [rank for rank, times in Counter(members).items() if times > 1]
            raise ValueError(f"Topology.restrict: {_ranks(twice)} given more than once")
        kept: dict[int, list[int]] = {}
        for new, old in enumerate(members):
            kept.setdefault(self.domain_index(old), []).append(new)
        old_domains = ((self.domains[index], tuple(new)) for index, new in kept.items())
        domains = tuple(Domain(new, d.kind, d.host, d.rack, d.cores, d.gpu) for d, new in old_domains)
        return Topology(domains, self.scale_up, self.scale_out)

    # ---- where topologies come from and go to

    @classmethod
    def detect(
        cls,
        exchange: Exchange | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        gpu_uuid: str | None = None,
        timeout_s: float = 10.0,
    ) -> Topology:
        """Find out which ranks share memory; see `a2a.topology.detect.detect`. Without arguments: this process alone.

        `gpu_uuid`: of this rank's GPU; with it, GPUs' memory instead of the hosts'.
        """
        from a2a.topology.detect import detect  # here, since detect.py and gpu.py build on this module
        from a2a.topology.gpu import gpu_facts

        gpu = None if gpu_uuid is None else gpu_facts(gpu_uuid)
        return detect(exchange, rank, world_size, gpu=gpu, timeout_s=timeout_s)

    @classmethod
    def load(cls, path_or_preset: str | Path) -> Topology:
        """Read a JSON file, or build a preset such as "cpu:2x2" or "h200:4x8" (`a2a.topology.presets`).

        Args:
            path_or_preset: text that begins with a preset family and a colon is a preset ("./cpu:2x2" is a file).
        Raises:
            ValueError: there is neither such a file nor such a preset, or the JSON is wrong; names the place in it.
        """
        from a2a.topology import presets  # here, since presets.py builds on this module

        if isinstance(path_or_preset, str) and presets.is_preset(path_or_preset):
            return presets.get(path_or_preset)
        path = Path(path_or_preset)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"topology {str(path_or_preset)!r} is neither a preset nor a readable file ({error}); "
                f"presets are {', '.join(presets.PATTERNS)}"
            ) from error
        return _parse(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write the JSON to `path`."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Parse the JSON that the module's docstring describes.

        Raises:
            ValueError: says which part is wrong, what it holds and what was expected.
        """
        return _parse(text, "topology")

    def to_json(self) -> str:
        """Return the JSON that the module's docstring describes: one line a domain, so that people can edit it."""
        domains = []
        for domain in self.domains:
            entry: dict[str, object] = {"ranks": list(domain.ranks), "kind": domain.kind}
            entry.update(
                (name, getattr(domain, name)) for name in ("host", "rack", "cores", "gpu") if getattr(domain, name)
            )
            domains.append("    " + json.dumps(entry))
        parts = [
            f'"a2a_topology": {VERSION}',
            f'"world_size": {self.world_size}',
            '"domains": [\n' + ",\n".join(domains) + "\n  ]",
        ]
        for name, link in (("scale_up", self.scale_up), ("scale_out", self.scale_out)):
            numbers: dict[str, object] = {"latency_us": link.latency_us, "bandwidth_GBps": link.bandwidth_GBps}
            parts.append(f'"{name}": ' + json.dumps(numbers | ({"source": link.source} if link.source else {})))
        if self.notes:
            parts.append('"notes": [\n' + ",\n".join("    " + json.dumps(note) for note in self.notes) + "\n  ]")
        return "{\n  " + ",\n  ".join(parts) + "\n}\n"

    # ---- inside

    @cached_property
    def _index_of_rank(self) -> tuple[int, ...]:
        pairs = sorted((rank, index) for index, domain in enumerate(self.domains) for rank in domain.ranks)
        return tuple(index for _, index in pairs)

    def _checked(self, rank: SupportsIndex) -> int:
        number = operator.index(rank)
        if not 0 <= number < self.world_size:
            raise ValueError(f"rank {number} is not in this topology of ranks 0 to {self.world_size - 1}")
        return number


def _parse(text: str, where: str) -> Topology:
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not readable as JSON: {error}") from error
    top = _object(data, where, ("a2a_topology", "world_size", "domains", "scale_up", "scale_out"), ("notes",))
    if top["a2a_topology"] != VERSION:
        raise ValueError(
            f"{where}: a2a_topology (the format's version) is {top['a2a_topology']!r}; this version of a2a reads {VERSION}"
        )
    domains = [
        _domain(item, f"{where}: domains[{i}]") for i, item in enumerate(_list(top["domains"], f"{where}: domains"))
    ]
    notes = [
        _text(item, f"{where}: notes[{i}]") for i, item in enumerate(_list(top.get("notes", []), f"{where}: notes"))
    ]
    scale_up, scale_out = (_link(top[name], f"{where}: {name}") for name in ("scale_up", "scale_out"))
    world_size = _integer(top["world_size"], f"{where}: world_size")
    listed = sum(len(domain.ranks) for domain in domains)
    if listed != world_size:
        raise ValueError(f"{where}: world_size is {world_size}, but the domains list {_count(listed, 'rank')}")
    try:
        return Topology(tuple(domains), scale_up, scale_out, tuple(notes))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _domain(value: object, where: str) -> Domain:
    entry = _object(value, where, ("ranks", "kind"), ("host", "rack", "cores", "gpu"))
    ranks = [_integer(item, f"{where}.ranks[{i}]") for i, item in enumerate(_list(entry["ranks"], f"{where}.ranks"))]
    kind, host, rack, gpu = (_text(entry.get(n, ""), f"{where}.{n}") for n in ("kind", "host", "rack", "gpu"))
    cores = _integer(entry.get("cores", 0), f"{where}.cores")
    try:
        return Domain(tuple(ranks), kind, host, rack, cores, gpu)  # type: ignore[arg-type]  # Domain checks the kind
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _link(value: object, where: str) -> Link:
    entry = _object(value, where, ("latency_us", "bandwidth_GBps"), ("source",))
    source = _text(entry.get("source", ""), f"{where}.source")
    try:
        return Link(entry["latency_us"], entry["bandwidth_GBps"], source)  # type: ignore[arg-type]  # Link checks them
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _object(value: object, where: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {_short(value)}; expected an object with the keys {', '.join(required)}")
    known = (*required, *optional)
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{where}: unknown key {key!r}{meant}; known keys: {', '.join(known)}")
    for key in required:
        if key not in value:
            raise ValueError(f"{where}: key {key!r} is missing; required: {', '.join(required)}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice in one object")
        found[key] = value
    return found


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: got {_short(value)}; expected a list")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: got {_short(value)}; expected a text")
    return value


def _integer(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where}: got {_short(value)}; expected a whole number")
    return value


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} is" if len(ranks) == 1 else f"ranks {shown} are"
