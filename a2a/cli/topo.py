"""`a2a topo`: which ranks share memory, and how fast the links are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2a.cli import show
from a2a.cli.doctor_gpu import Machine
from a2a.cli.ranks import Emit, run_ranks
from a2a.config import config, launch
from a2a.errors import UnsupportedError
from a2a.topology.libcuda import LibCuda
from a2a.topology.nvml import NvmlError

if TYPE_CHECKING:
    from a2a.topology import Topology

MAX_ROWS = 64  # of domains; larger topologies are cut in the middle


def run(given: str | None, ranks: int | None, json_path: str | None, plot: Path | None, device: str = "cpu") -> int:
    """Detect (or load) a topology and show it; returns the exit code."""
    for topology in find(given, ranks, device):
        _show(topology, json_path, plot)
        if given is None and topology.world_size == 1 and json_path is None:
            show.console().print("One process alone; --ranks N, or your launcher, shows how several are grouped.")
        if given is None and json_path is None:
            _show_gpus()
    return 0


def find(given: str | None, ranks: int | None, device: str = "cpu") -> list[Topology]:
    """Load a topology, or detect it; an empty list on a rank other than 0, under a launcher."""
    from a2a.topology import Topology, resolve

    found: list[Topology] = []
    if given is not None:
        found.append(Topology.load(given))
    elif ranks in (None, 1) and launch().world_size == 1:
        found.append(resolve(_alone, 0, 1, config().topology, gpu_uuid=_gpu(device, 0)))
    else:
        run_ranks(work, device, ranks, lambda message: found.append(Topology.from_json(message["topology"])))
    return found


def work(device: str, emit: Emit) -> None:
    """Find out the topology together; on each rank."""
    import torch.distributed as dist

    from a2a.topology import resolve

    def exchange(tag: str, payload: bytes) -> list[bytes]:
        payloads: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(payloads, (tag, payload))
        return [item for _, item in payloads]

    started, rank = launch(), dist.get_rank()
    uuid = _gpu(device, started.local_rank if started.launcher else rank)
    topology = resolve(exchange, rank, dist.get_world_size(), config().topology, gpu_uuid=uuid)
    emit({"topology": topology.to_json()})


def _gpu(device: str, local_rank: int) -> str | None:
    """The UUID of the GPU that a rank takes; None for the CPU."""
    if device == "cpu":
        return None
    if device != "cuda":
        raise ValueError(f"--device {device}: expected cpu or cuda")
    try:
        uuids = LibCuda().uuids()
    except OSError as error:
        raise UnsupportedError(f"--device cuda: {error}. See `a2a doctor`") from error
    return uuids[local_rank % len(uuids)]


def _show_gpus() -> None:
    """The GPUs that this process sees, if there are any."""
    try:
        gpus = Machine().gpus()
    except NvmlError:
        return
    rows = []
    for index, gpu in enumerate(gpus):
        links = f"{gpu.links} x {gpu.link_GBps:g} GB/s" if gpu.links else "-"
        rows.append([str(index), gpu.name or "-", links, gpu.fabric or "-", gpu.uuid])
    if rows:
        show.print_table(show.console(), ["gpu", "model", "NVLink", "fabric", "uuid"], rows, title="GPUs here", left=5)


def _alone(_: str, payload: bytes) -> list[bytes]:
    return [payload]


def _show(topology: Topology, json_path: str | None, plot: Path | None) -> None:
    if json_path == "-":
        print(json.dumps(json.loads(topology.to_json())))
    elif json_path is not None:
        topology.save(json_path)
    out = show.console(stderr=json_path == "-")
    rows = [
        [
            str(index),
            ranges(domain.ranks),
            domain.gpu or domain.kind,
            domain.host or "-",
            domain.rack or "-",
            str(domain.cores or "-"),
        ]
        for index, domain in enumerate(topology.domains)
    ]
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 2], ["...", f"{len(rows) - MAX_ROWS + 1} more domains", *["..."] * 4], rows[-1]]
    show.print_table(out, ["domain", "ranks", "kind", "host", "rack", "cores"], rows, title=topology.summary(), left=5)
    for name, link in (
        ("scale-up, in a domain", topology.scale_up),
        ("scale-out, between domains", topology.scale_out),
    ):
        source = f" ({link.source})" if link.source else ""
        out.print(f"{name}: {link.latency_us:g} us, {link.bandwidth_GBps:g} GB/s{source}", markup=False)
    for note in topology.notes:
        out.print(f"note: {note}", markup=False)
    if plot is not None:
        from a2a.cli import plots

        plots.topology(topology, plot)
        out.print(f"plot: {plot}", markup=False)


def ranges(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 3, 8) -> "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
