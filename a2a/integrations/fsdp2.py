"""FSDP2 in a hierarchy: parameters sharded inside a domain, replicated across domains.

    hybrid = fsdp2.Hybrid(wire="bf16")
    for block in model.blocks:
        hybrid.fully_shard(block)
    hybrid.fully_shard(model)

Inside a domain, all-gathers and reduce-scatters are those of a process group of backend "a2a". What a rank's
reduce-scatters leave it with is then averaged over the domains, by rails, in FSDP2's all-reduce hook. On a GPU that
runs on a stream of its own, behind the backward pass; on a CPU, where FSDP2 waits for each of its calls, it does not
overlap.

`set_requires_gradient_sync(False)` and `set_requires_all_reduce(False)` mean what they mean with torch's own
two-dimensional mesh: nothing is reduced, or domains only; the next backward pass that reduces across domains brings all
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import a2a


class Hybrid:
    """Where modules are sharded and where they are replicated. Made by all ranks of a group together.

    Args:
        group: a ProcessGroup; None: the default one.
        topology, wire: as in `a2a.GradientReducer`. Domains have equal numbers of ranks.
        device: where the modules are.
    Raises:
        UnsupportedError: domains have different numbers of ranks.

    Attributes:
        mesh: of this rank's domain, one-dimensional.
    """

    def __init__(
        self,
        group: Any = None,
        topology: a2a.Topology | None = None,
        wire: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.empty(0, device=device).device
        self._reducer = a2a.GradientReducer.of_tensors(device, group, topology, wire)
        topology = self._reducer.topology
        if len({len(domain.ranks) for domain in topology.domains}) > 1:
            self._reducer.close()
            raise a2a.UnsupportedError(
                f"fsdp2.Hybrid: {topology.summary()}. Domains have different numbers of ranks, so a module's shards in one "
                f"are no shards in the other; shard over all ranks instead (torch's fully_shard)"
            )
        everyone = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self._domain: Any = None
        for domain in topology.domains:
            ranks = [everyone[rank] for rank in domain.ranks]
            # Where all ranks are here, all make each group, as torch wants it: the names of groups that only their members
            # make depend on how many groups a rank has, which may differ.
            alone = group is not None
            if dist.get_rank() in ranks or not alone:
                made = dist.new_group(ranks, backend="a2a", use_local_synchronization=alone)
                self._domain = made if dist.get_rank() in ranks else self._domain
        # DTensor takes meshes of the same ranks and names for one, and would go on with the group of one that is gone.
        name = f"domain_{self._domain.group_name[:12]}"
        self.mesh = DeviceMesh.from_group(self._domain, device.type, mesh_dim_names=(name,))
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._modules = 0

    def fully_shard(self, module: Any, **options: Any) -> Any:
        """torch's `fully_shard`, on this rank's domain, with gradients averaged over all ranks.

        Ranks begin with the same parameters, as FSDP2 wants it. Of a module that has parameters on other meshes too
        (those that `shard_placement_fn` names), only the ones on this mesh are averaged over the domains.

        Args:
            options: torch's, but no `mesh`.
        """
        if "mesh" in options:
            raise ValueError("Hybrid.fully_shard: the mesh is the domain's; leave mesh= out")
        sharded = fully_shard(module, mesh=self.mesh, **options)
        self._hook_in(module[0] if isinstance(module, list | tuple) else module)
        return sharded

    def _hook_in(self, module: Any) -> None:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # a torch that has at most one
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for number, params in enumerate(groups):
            if params.mesh_info.shard_process_group is not self._domain:
                continue
            # set_all_reduce_hook refuses modules with several groups, as it could not know which is meant
            params._all_reduce_hook = _averaged(self._reducer, params, f"module {self._modules}, group {number}")
            params._all_reduce_hook_stream = self._stream
        self._modules += 1

    @property
    def bytes_sent(self) -> int:
        """To other domains so far."""
        sent: int = self._reducer.stats()["bytes_sent"]
        return sent

    def close(self) -> None:
        """Leave. Local and idempotent; the next backward pass of the modules raises."""
        self._reducer.close()


def _averaged(reducer: a2a.GradientReducer, params: Any, name: str) -> Callable[[Tensor], None]:
    """The hook of one group of parameters, which FSDP2 calls with what a reduce-scatter has left here."""
    kept: list[Tensor] = []

    def hook(reduced: Tensor) -> None:
        if reduced.is_cuda:  # made on another stream, whose allocator must not have it back too early
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        if not params.all_reduce_grads:
            if kept:
                kept[0].add_(reduced)
            else:
                kept.append(reduced.clone())
            reduced.zero_()  # it comes with the pass that reduces across domains
            return
        if kept:
            reduced.add_(kept.pop())
        reducer.reduce_across_domains(reduced, name)

    return hook


__all__ = ["Hybrid"]
