"""What torch builds on process groups works on backend "a2a": functional collectives, compiled code, DDP, FSDP2, ..."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from a2a_world import A2AWorld, exchange, received, same, sent, served


def check_functional() -> None:
    before = served()
    same(funcol.wait_tensor(funcol.all_to_all_single(sent(), None, None, dist.group.WORLD)), received())
    size = dist.get_world_size()
    out = funcol.all_to_all_single(sent(), [2] * size, [2] * size, dist.group.WORLD)
    same(out + 0, received())
    leaf = sent().requires_grad_()
    (funcol.all_to_all_single_autograd(leaf, None, None, dist.group.WORLD) * received().detach()).sum().backward()
    same(leaf.grad, sent())  # what came back is what the receiver multiplied with: 10 x own rank + receiver
    assert served() == before + 4


def test_functional_collectives_and_their_gradient(two: A2AWorld) -> None:
    two.run(check_functional)


def check_every_functional() -> None:
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    before = served()
    mine, ranks = torch.full((size, 3), 1.0 + rank), torch.arange(1.0, size + 1)
    every = ranks.repeat_interleave(size)[:, None].expand(-1, 3)
    same(funcol.all_reduce(mine, "sum", world) + 0, torch.full_like(mine, ranks.sum().item()))
    same(funcol.all_gather_tensor(mine, 0, world) + 0, every)
    same(funcol.all_gather_tensor(mine, 1, world) + 0, ranks.repeat_interleave(3).expand(size, -1))
    same(funcol.reduce_scatter_tensor(mine, "avg", 0, world) + 0, torch.full((1, 3), ranks.mean().item()))
    shifted = funcol.permute_tensor(
        mine.flatten(), [(r + 1) % size for r in range(size)], world
    )  # takes flat ones only
    same(shifted + 0, torch.full_like(mine, ranks[rank - 1]).flatten())
    assert served() == before + 5
    same(funcol.broadcast(mine, 1, world) + 0, torch.full_like(mine, 2.0))
    for got, factor in zip(funcol.all_reduce_coalesced([mine, 2 * mine], "sum", world), (1, 2), strict=True):
        same(got + 0, torch.full_like(mine, factor * ranks.sum().item()))
    for got, factor in zip(funcol.all_gather_into_tensor_coalesced([mine, 2 * mine], world), (1, 2), strict=True):
        same(got + 0, factor * every)
    assert served() == before + 9  # lists count one by one; the broadcast is gloo's


def check_functional_gradients() -> None:
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    before = served()
    leaf = torch.full((size, 2), 1.0 + rank, requires_grad=True)
    (funcol.all_gather_tensor_autograd(leaf, 0, world) * (1.0 + rank)).sum().backward()
    same(leaf.grad, torch.full_like(leaf, sum(range(1, size + 1))))  # every rank multiplied what it got by 1 + its own
    leaf.grad = None
    (funcol.reduce_scatter_tensor_autograd(leaf, "sum", 0, world) * (1.0 + rank)).sum().backward()
    same(leaf.grad, torch.arange(1.0, size + 1)[:, None].expand(-1, 2))
    assert served() == before + 4


@pytest.mark.parametrize(
    "check", [check_every_functional, check_functional_gradients], ids=lambda check: check.__name__
)
def test_the_other_functional_collectives(two: A2AWorld, check: Callable[[], None]) -> None:
    two.run(check)


def functional_step(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_to_all_single_autograd(x * 2, None, None, dist.group.WORLD) + 1


def imperative_step(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dist.all_to_all_single(output, x * 2)
    return output + 1


def check_compiled() -> None:
    before = served()
    leaf = sent().requires_grad_()
    result = torch.compile(functional_step, backend="aot_eager", fullgraph=True)(leaf)
    same(result.detach(), received() * 2 + 1)
    result.sum().backward()
    same(leaf.grad, torch.full_like(leaf, 2.0))
    compiled = torch.compile(imperative_step, backend="aot_eager", fullgraph=True)
    same(compiled(torch.empty_like(received()), sent()), received() * 2 + 1)
    assert served() == before + 3


def test_compiled_with_fullgraph(two: A2AWorld) -> None:
    two.run(check_compiled)


def check_ddp() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1 + dist.get_rank())  # DDP sends rank 0's
    replica = torch.nn.parallel.DistributedDataParallel(model)
    same(model.weight.detach(), torch.ones(2, 3))
    x = torch.full((1, 3), float(dist.get_rank()))
    before = served()
    replica(x).sum().backward()
    assert served() > before  # the gradients were a2a's to reduce
    same(model.weight.grad, torch.full((2, 3), sum(range(dist.get_world_size())) / dist.get_world_size()))


def test_ddp(two: A2AWorld) -> None:
    two.run(check_ddp)


def check_fsdp2() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(size, 4)
    before = served()
    model(x[rank : rank + 1]).sum().backward()
    assert served() >= before + 4  # each layer's weights are gathered, its gradients reduced
    (reference(x).sum() / size).backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def test_fsdp2(two: A2AWorld) -> None:
    two.run(check_fsdp2)


def check_dtensor() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(16.0).view(4, 4)
    rows = DTensor.from_local(whole.chunk(size)[rank], mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])  # on a CPU torch gathers and cuts
    same(columns.to_local(), whole.chunk(size, dim=1)[rank])
    same(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    same(DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local(), whole * size)
    before = served()
    local = torch.ops._dtensor.shard_dim_alltoall(rows.to_local(), 0, 1, mesh.get_group().group_name)  # elsewhere: this
    same(local, whole.chunk(size, dim=1)[rank])
    assert served() == before + 1


def test_dtensor_redistributes(two: A2AWorld) -> None:
    two.run(check_dtensor)


class Block(torch.nn.Module):
    """What tensor parallelism cuts: embedding, norm, two linear layers, and a head whose loss is cut as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = torch.nn.Embedding(8, 16), torch.nn.LayerNorm(16)
        self.up, self.down, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


# The sequence is cut between the layers: all-gathers before the linear layers, reduce-scatters behind them.
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def check_tensor_parallel(compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    ids, targets = torch.arange(12).view(3, 4) % 8, torch.arange(1, 13).view(3, 4) % 8
    reference = Block()
    expected = torch.nn.functional.cross_entropy(reference(ids).flatten(0, 1), targets.flatten())
    expected.backward()
    module = parallelize_module(Block(), mesh, PLAN)
    forward = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    before = served()
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(forward(ids).flatten(0, 1), targets.flatten())
        loss.backward()
    assert served() >= before + 8  # what is gathered and reduced, forward and backward
    torch.testing.assert_close(loss.full_tensor(), expected)
    for (name, part), whole in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(part, DTensor), name
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_tensor_parallel_plan(two: A2AWorld, compiled: bool) -> None:
    two.run(check_tensor_parallel, compiled=compiled)


def check_mesh() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name, members in (("rows", [rank % 2, rank % 2 + 2]), ("columns", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == members
        output = torch.empty(2, dtype=torch.int64)
        dist.all_to_all_single(output, torch.tensor([10 * rank + members[0], 10 * rank + members[1]]), group=group)
        same(output, torch.tensor([10 * members[0] + rank, 10 * members[1] + rank]))
        assert served(group) == 1


def test_device_mesh_has_groups_on_a2a(four: A2AWorld) -> None:
    four.run(check_mesh)


def check_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    group = dist.new_group(backend="a2a")
    with FakeTensorMode():
        output, source = torch.empty(4), torch.ones(4)
        dist.all_to_all_single(output, source, group=group)
        assert output.shape == (4,)
    assert sum(group.stats()["calls"].values()) == 0
    assert group.stats()["communicators"] == group.stats()["handed_over"] == {}
    exchange(group)


def test_fake_tensors_move_no_data(two: A2AWorld) -> None:
    two.run(check_fake)
