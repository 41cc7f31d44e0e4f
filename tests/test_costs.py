"""The cost model: curves, tables that ranks agree on, algorithms in primitives, and what the planner makes of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import a2a
from a2a import cost_cache
from a2a.algorithms import candidates
from a2a.algorithms.base import Cost, Part, Request
from a2a.calibrate import calibrate, sizes
from a2a.cli.plan import Request as PlanCommand
from a2a.cli.plan import moe_request
from a2a.kernels import cpu
from a2a.measure import Control
from a2a.plan import choose
from a2a.primitives import PROGRAMS, Bench
from a2a.topology import Topology, presets
from a2a.topology.built_in import built_in
from a2a.topology.costs import Costs, Curve
from cli_run import A2A, Here, run
from pool import World

KIB, MIB = 1 << 10, 1 << 20
PRESETS = ("cpu:2", "cpu:4", "cpu:2x2", "h200:1x8", "h200:2x8", "gb200:nvl72x1", "gb300:nvl72x2")


# -------------------------------------------------------------------------------------------------------------- curves


def test_a_curve_goes_through_its_points_and_on_in_proportion() -> None:
    curve = Curve(((1000, 2.0), (4000, 8.0), (8000, 32.0)))
    assert [curve.us(size) for size in (1000, 4000, 8000)] == pytest.approx([2.0, 8.0, 32.0])
    assert curve.us(2000) == pytest.approx(4.0)  # straight in logarithms
    assert curve.us(16000) == pytest.approx(64.0)
    assert curve.us(10) == 2.0
    assert curve.us(0) == 0.0


def test_one_point_at_no_bytes_is_a_constant() -> None:
    assert [Curve(((0, 3.5),)).us(size) for size in (0, 1, MIB)] == [3.5] * 3


def test_fitting_levels_what_falls_and_drops_what_neighbours_tell() -> None:
    assert Curve.fitted([(4, 4.0), (1, 1.0), (2, 2.0), (8, 8.0)]).points == ((1, 1.0), (8, 8.0))
    level = Curve.fitted([(1, 1.0), (2, 5.0), (4, 3.0), (8, 9.0)])
    assert level.us(2) == level.us(4) == 4.0


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 1.0)), ((1, -1.0),), ((1, float("nan")),)])
def test_what_is_no_curve_is_refused(points: Any) -> None:
    with pytest.raises(ValueError, match="Curve"):
        Curve(points)


def test_a_part_pays_the_rate_of_what_it_is_among() -> None:
    costs = Costs({"copy": Curve(((KIB, 1.0), (MIB, 4096.0)))}, "test")
    assert Part("copy", KIB).time_us(costs) == pytest.approx(1.0)
    assert Part("copy", KIB, among=MIB).time_us(costs) == pytest.approx(4.0)
    assert Part("copy", KIB, times=-2).time_us(costs) == pytest.approx(-2.0)


# -------------------------------------------------------------------------------------------------------------- tables


def table(**curves: float) -> Costs:
    """A measured table: each primitive's time, at any size."""
    return Costs({name: Curve(((0, us),)) for name, us in curves.items()}, "measured in a test", frozenset(curves))


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    costs = Costs({"copy": Curve(((1, 0.5), (8, 3.25)))}, "measured in a test", frozenset({"copy"}))
    path = tmp_path / "new" / "table.json"
    cost_cache.save(costs, path)
    found = cost_cache.load(path)
    assert found == costs
    assert found.digest == costs.digest != table(copy=1.0).digest


def test_a_file_that_is_no_table_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cost_cache.load(tmp_path / "none.json") is None
    for text in (
        "",
        "[]",
        '{"a2a_costs": 99, "source": "", "curves": {}}',
        '{"a2a_costs": 1, "curves": {"copy": [[1]]}}',
    ):
        (tmp_path / "bad.json").write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "a2a"):
            assert cost_cache.load(tmp_path / "bad.json") is None
        assert "a2a topo --measure" in caplog.text


def test_a_table_that_can_t_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    cost_cache.save(table(copy=1.0), path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cost_cache.save(table(copy=2.0), path)
    assert cost_cache.load(path) == table(copy=1.0)
    assert list(tmp_path.iterdir()) == [path]


def test_every_machine_shape_and_build_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Topology.load("cpu:2")
    first = cost_cache.path_of(two, 0)
    assert cost_cache.path_of(two, 1) == first  # as the other rank of this machine has it
    others = {first, cost_cache.path_of(Topology.load("cpu:4"), 0), cost_cache.path_of(Topology.load("h200:1x2"), 0)}
    monkeypatch.setattr(cost_cache.socket, "gethostname", lambda: "another")
    others.add(cost_cache.path_of(two, 0))
    assert len(others) == 4


# ------------------------------------------------------------------------------------------------------------ built in


@pytest.mark.parametrize("name", PRESETS)
def test_built_in_costs_grow_with_size_on_every_preset(name: str) -> None:
    costs = built_in(Topology.load(name))
    assert not costs.measured
    for primitive, curve in costs.curves.items():
        times = [curve.us(1 << k) for k in range(12, 31)]
        assert all(us > 0 for us in times), primitive
        assert times[-1] >= times[0], primitive


def test_ranks_that_share_a_core_take_longer_by_the_built_in_costs() -> None:
    def of(cores: int) -> Costs:
        topology = presets.get("cpu:4")
        (domain,) = topology.domains
        return built_in(
            Topology((type(domain)(domain.ranks, domain.kind, cores=cores),), topology.scale_up, topology.scale_out)
        )

    crowded, roomy = of(2), of(4)
    for name in roomy.curves:
        assert crowded.us(name, MIB) >= roomy.us(name, MIB)
    assert crowded.us("push", MIB) == pytest.approx(2 * roomy.us("push", MIB))
    assert crowded.us("signal") > 5 * roomy.us("signal")


# ----------------------------------------------------------------------------------------------------------- algorithms


def imagined(name: str, costs: Costs | None = None) -> Any:
    """What the planner asks of a communicator of a preset's ranks."""
    from a2a.cli.plan import _imagined

    comm = _imagined(name)
    return comm if costs is None else SimpleNamespace(**{**vars(comm), "costs": costs.over(comm.costs)})


def requests(op: str, num_bytes: int, ranks: int) -> list[Request]:
    if op == "moe":
        command = PlanCommand("moe", (), (), max(1, num_bytes // 4096), 1024, 2 * ranks, 2)
        return [moe_request(command, "float32", ranks)]
    if op == "all_reduce_rms_norm":
        return [Request(op, torch.bfloat16, num_bytes, (("hidden", 1024),))]
    sums = (("reduce_op", "sum"),) if op in ("all_reduce", "reduce_scatter") else ()
    dtypes = (torch.float32, torch.bfloat16) if sums else (torch.float32,)
    return [
        Request(op, dtype, num_bytes, (("memory", memory), *sums))
        for dtype in dtypes
        for memory in ("ordinary", "symmetric")
    ]


@pytest.mark.parametrize("name", ["cpu:2", "cpu:4", "h200:1x8"])
def test_every_algorithm_says_what_it_costs_in_known_primitives(name: str) -> None:
    comm = imagined(name)
    asked = 0
    for algorithm in candidates():
        for num_bytes in (4 * KIB, 64 * KIB, MIB, 64 * MIB):
            for request in requests(algorithm.op, num_bytes, comm.world_size):
                if algorithm.device_type not in ("", comm.device_type) or not comm.transport:
                    continue
                # The fused one asks a live communicator how large its slots are.
                if algorithm.op == "all_reduce_rms_norm" or algorithm.unsupported(request, comm) is None:
                    cost: Cost = algorithm.cost(request, comm)
                    assert cost.parts, f"{algorithm.op}/{algorithm.name} has no parts"
                    assert cost.primitives <= set(comm.costs.curves), f"{algorithm.op}/{algorithm.name}"
                    assert cost.time_us(comm) > 0
                    asked += 1
    assert asked > 20


@pytest.mark.parametrize("op", ["all_to_all", "all_reduce", "reduce_scatter", "all_gather"])
def test_larger_requests_take_longer(op: str) -> None:
    comm = imagined("cpu:2")
    times = [choose(requests(op, 4 * KIB << k, 2)[0], comm).time_us for k in range(17)]
    assert times == sorted(times)


# ------------------------------------------------------------------------------------------------------------- planner

DEAR, CHEAP = 100.0, 1.0


def gathers(own_us: float, engine_us: float) -> Costs:
    """A table in which an all-gather takes so long by a2a, and by the group's engine."""
    return table(
        call_all_gather=0.0, signal=0.0, copy=0.0, stream=0.0, gather=own_us, push=own_us, c10d_all_gather=engine_us
    )


@pytest.mark.parametrize(("engine_us", "chosen"), [(90.0, "c10d"), (98.0, "one_shot"), (200.0, "one_shot")])
def test_a_call_is_handed_over_where_the_engine_is_measured_to_be_faster(engine_us: float, chosen: str) -> None:
    request = Request("all_gather", torch.float32, 4 * KIB)
    plan = choose(request, imagined("cpu:2", gathers(DEAR, engine_us)))
    assert plan.algorithm.name == chosen
    assert plan.reason.startswith("handed over") == (chosen == "c10d")
    if engine_us == 98.0:
        assert "within 1.03" in dict(plan.rejected)["c10d"]
    assert plan.costs == "measured in a test"


def test_costs_that_were_not_measured_hand_nothing_over() -> None:
    costs = table(call_all_gather=DEAR, c10d_all_gather=CHEAP)  # gather, copy and signal are built in
    plan = choose(Request("all_gather", torch.float32, 4 * KIB), imagined("cpu:2", costs))
    assert plan.algorithm.name == "one_shot"
    assert "not measured here" in dict(plan.rejected)["c10d"]
    assert "built-in: copy, gather" in plan.costs


def test_sums_in_a_fixed_order_are_not_given_up_for_speed() -> None:
    costs = table(call_all_reduce=DEAR, signal=DEAR, one_shot=DEAR, reduce_gather=DEAR, c10d_all_reduce=CHEAP)
    plan = choose(Request("all_reduce", torch.float32, 4 * KIB, (("reduce_op", "sum"),)), imagined("cpu:2", costs))
    assert not plan.algorithm.baseline
    assert "no fixed order" in dict(plan.rejected)["c10d"]


# ---------------------------------------------------------------------------------------------------- on ranks: agreeing


@pytest.fixture
def _own_cache(tmp_path: Path, world: World) -> Iterator[Path]:
    """Ranks that look for tables in a folder of this test."""
    world.run(use_folder, path=str(tmp_path))
    yield tmp_path
    world.run(use_folder, path=None)


def use_folder(path: str | None) -> None:
    os.environ.pop("A2A_CACHE_DIR", None)
    if path is not None:
        os.environ["A2A_CACHE_DIR"] = path


def keep(costs: Costs) -> None:
    """Keep a table as `a2a topo --measure` does; one file for the ranks of this machine."""
    with a2a.communicator() as comm:
        cost_cache.save(costs, cost_cache.path_of(comm.topology, comm.rank))


def ways() -> tuple[str, dict[str, int]]:
    """Where the costs come from, and what an all-gather and an all-reduce hand over."""
    with a2a.communicator() as comm:
        rank, size = comm.rank, comm.world_size
        output = torch.zeros(2 * size)
        a2a.all_gather_into_tensor(output, torch.full((2,), float(rank)), comm)
        assert output.tolist() == [float(r) for r in range(size) for _ in range(2)]
        tensor = torch.full((3,), 1.0 + rank)
        a2a.all_reduce(tensor, group=comm)
        assert tensor.tolist() == [float(sum(range(1, size + 1)))] * 3
        return comm.costs.source, dict(comm.stats()["handed_over"])


@pytest.mark.usefixtures("_own_cache")
def test_a_table_that_all_ranks_hold_is_planned_with(world: World) -> None:
    before = world.run(ways)
    assert before == [before[0]] * 2
    assert before[0][0].startswith("built-in")
    assert before[0][1] == {}
    world.run(keep, costs=gathers(DEAR, CHEAP))
    assert world.run(ways) == [("measured in a test", {"all_gather": 1})] * 2


def disagreeing(path: str, own: float | None) -> tuple[str, str]:
    """Make a communicator with a table of this rank's own, or none; where costs come from then, and what was logged."""
    os.environ["A2A_CACHE_DIR"] = f"{path}/{dist.get_rank()}"
    with a2a.communicator() as comm:
        file = cost_cache.path_of(comm.topology, comm.rank)
    file.unlink(missing_ok=True)
    if own is not None:
        cost_cache.save(gathers(own + dist.get_rank(), CHEAP), file)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("a2a").addHandler(handler)
    try:
        dist.barrier()
        with a2a.communicator() as comm:
            return comm.costs.source, " ".join(seen)
    finally:
        logging.getLogger("a2a").removeHandler(handler)


def none_on_rank_1(path: str) -> tuple[str, str]:
    return disagreeing(path, DEAR if dist.get_rank() == 0 else None)


@pytest.mark.usefixtures("_own_cache")
def test_ranks_that_hold_different_tables_say_so_and_take_the_built_in_one(world: World, tmp_path: Path) -> None:
    for source, logged in world.run(disagreeing, path=str(tmp_path), own=DEAR):
        assert source.startswith("built-in")
        assert "were measured apart" in logged
    for source, logged in world.run(none_on_rank_1, path=str(tmp_path)):
        assert source.startswith("built-in")
        assert "ranks [1] have none" in logged


# ------------------------------------------------------------------------------------------------- on ranks: measuring


def programs_move_what_they_say() -> None:
    """Every primitive that goes from rank to rank, checked: what arrives is what the peers have sent."""
    with a2a.communicator() as comm:
        size, piece = comm.world_size, 4 * KIB
        bench = Bench(comm, piece * (size - 1))
        for name in ("eager", "read", "stage", "gather", "one_shot", "reduce_staged", "copy", "reduce_gather"):
            program = PROGRAMS[name](bench, piece)
            if program is None:
                assert name in ("read", "stage")  # small pieces go beside the first signal
                continue
            bench.source.view(torch.float32)[: size * piece // 4] = float(comm.rank + 1)
            bench.output.zero_()
            dist.barrier()
            run = bench.runner(program, 1)
            assert run() == 0
            dist.barrier()
            assert run() == 0  # now what the peers' first run has published is there
            got = bench.output.view(torch.float32)[: size * piece // 4].view(size, -1)
            total, others = float(sum(range(1, size + 1))), [float(peer + 1) for peer in bench.peers]
            if name in ("eager", "gather"):
                assert got[:-1].unique(dim=1).flatten().tolist() == others
            elif name in ("one_shot", "reduce_staged"):
                assert got[-1].unique().tolist() == [total]
            elif name == "reduce_gather":  # in place, and twice
                assert bench.source.view(torch.float32)[: size * piece // 4].min() >= total
            elif name == "copy":
                assert got[:-1].unique().tolist() == [float(comm.rank + 1)]
            dist.barrier()


@pytest.mark.ranks(2, 3)
def test_primitives_do_what_the_kernels_do(world: World) -> None:
    world.run(programs_move_what_they_say)


def measured() -> tuple[str, list[str], int]:
    with a2a.communicator() as comm:
        costs, tested = calibrate(comm, Control(), most=96 * KIB, repeat=1)
        assert all(each.measured_us > 0 and each.predicted_us > 0 for each in tested)
        assert {each.num_bytes for each in tested} == {64 * KIB}
        assert Costs.from_json(costs.to_json()) == costs
        return costs.digest, sorted(costs.measured), len(tested)


@pytest.mark.ranks(3)
def test_all_ranks_end_with_the_same_measured_table(world: World) -> None:
    found = world.run(measured)
    assert found == [found[0]] * world.size
    missing = set(built_in(Topology.load("cpu:2")).curves) - set(found[0][1])
    assert missing == {"stream"}  # which starts at 1 MiB
    assert 64 * KIB not in sizes()


def test_what_is_measured_is_planned_with(tmp_path: Path) -> None:
    def command(*words: str) -> tuple[Any, str]:
        told = run(*A2A, *words, "--json", "-", environment={"A2A_CACHE_DIR": str(tmp_path)})
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout), told.stderr

    found, table = command("topo", "--measure", "--ranks", "2", "--most", "6K", "--repeat", "1")
    assert set(found["curves"]) >= {
        "call_all_gather",
        "signal",
        "push",
        "reduce_gather",
        "reduce_int16",
        "c10d_all_gather",
    }
    assert Path(found["path"]).parent == tmp_path / "costs"
    assert "Fitted curves" in table
    plan, shown = command("plan", "all_reduce", "--ranks", "2", "--bytes", "4K")
    assert plan["costs"] == plan["numbers"] == found["source"]
    assert plan["time_us"] == pytest.approx(sum(part["us"] for part in plan["parts"]))
    assert f"numbers: {found['source']}" in shown


def test_a_preset_is_planned_with_what_is_built_in(here: Here) -> None:
    told = here("plan", "all_reduce", "--topology", "cpu:2", "--bytes", "4K,16M")
    assert "numbers: preset cpu:2: built-in" in told.stdout
    assert "of which, us: call" in told.stdout
    assert "not two_shot: modelled" in told.stdout
    assert "its slot takes 65536" in told.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--most", "1M"), "add --measure"),
        (("--measure", "--topology", "cpu:2"), "leave --topology"),
        (("--measure", "--most", "much"), "is not a size"),
    ],
)
def test_mistakes_with_measure_are_told(here: Here, words: tuple[str, ...], message: str) -> None:
    told = here("topo", *words)
    assert told.returncode == 2
    assert message in " ".join(told.stderr.split())


def test_a_library_that_is_built_anew_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology.load("cpu:2")
    before = cost_cache.path_of(topology, 0)
    (tmp_path / "liba2a.so").write_bytes(b"another build")
    monkeypatch.setattr(cpu, "find", lambda: tmp_path / "liba2a.so")
    cost_cache._library.cache_clear()
    try:
        assert cost_cache.path_of(topology, 0) != before
    finally:
        cost_cache._library.cache_clear()
