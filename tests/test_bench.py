"""The measuring machinery, what is measured with it, and the long runs in their short form."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import a2a
from a2a.cli.exchanges import Exchange, memcpy_contender
from a2a.cli.moe_case import MoeCase, Outcome, factor, wrong
from a2a.cli.moe_contenders import copies_contender
from a2a.measure import Cell, Contender, Control, Line, Timing, alternate, percentile

ROOT = Path(__file__).resolve().parent.parent
ENV = {
    "commit": "abc",
    "dirty": False,
    "torch": "2",
    "cuda": None,
    "nccl": None,
    "gpu": None,
    "cpu": "cpu",
    "topology": "t",
    "command": "c",
}


def script(name: str) -> ModuleType:
    """A module of bench/, which is no package; what it imports of its neighbours is found, too."""
    if str(ROOT / "bench") not in sys.path:
        sys.path.append(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(a2a.__file__).parent.parent)}  # the a2a that is tested here
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


# ------------------------------------------------------------------------------------------------------------ measure


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([3.0], 50, 3.0),
        ([4.0, 1.0], 50, 2.5),
        ([3.0, 1.0, 2.0], 50, 2.0),
        (range(1, 101), 99, 99.0),
        ([5.0, 7.0], 99, 7.0),
    ],
)
def test_percentiles_are_nearest_ranks_and_the_median_the_middle(samples: Any, percent: float, expected: float) -> None:
    assert percentile([float(sample) for sample in samples], percent) == expected


def test_the_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 50))


def test_contenders_alternate_and_take_turns_at_going_first() -> None:
    calls: list[str] = []
    contenders = [Contender(name, lambda name=name: calls.append(name), lambda: 0) for name in "ab"]
    alternate(contenders, Control(), repeat=4)
    order = [name for index, name in enumerate(calls) if index == 0 or calls[index - 1] != name]
    # a warms up, then b; four rounds, each begun by another one than the round before
    assert order == ["a", "b", "a", "b", "a", "b", "a"]


def test_wrong_elements_before_and_after_the_timing_are_counted() -> None:
    found = iter([2, 5])
    timings = alternate([Contender("a", lambda: None, lambda: next(found))], Control(), repeat=1)
    assert timings["a"]["total"].wrong == 7


def test_a_baseline_that_refuses_is_left_out_with_its_reason() -> None:
    def refuse() -> int:
        raise RuntimeError("no int16 here")

    contenders = [Contender("a", lambda: None, lambda: 0), Contender("b", lambda: None, refuse, optional=True)]
    timings = alternate(contenders, Control(), repeat=3)
    assert timings["b"]["total"] == Timing(why="RuntimeError: no int16 here")
    assert len(timings["a"]["total"].samples_us) == 3


def test_what_the_candidate_raises_is_not_swallowed() -> None:
    def refuse() -> int:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        alternate([Contender("a2a", lambda: None, refuse)], Control(), repeat=1)


def test_parts_are_timed_separately_and_in_total() -> None:
    contender = Contender("a", lambda: (2_000_000, 5_000_000), lambda: 0, parts=("first", "second"))
    timings = alternate([contender], Control(), repeat=2)["a"]
    assert timings["first"].samples_us == (2000.0, 2000.0)
    assert timings["second"].samples_us == (5000.0, 5000.0)
    assert 0 < timings["total"].p50_us < 2000  # the whole call by the clock, not the sum of what it claims


def test_short_calls_are_timed_in_rows() -> None:
    timing = alternate([Contender("a", lambda: None, lambda: 0)], Control(), repeat=1)["a"]["total"]
    assert timing.calls > 10


def test_a_sample_is_the_slowest_ranks_time() -> None:
    class Doubled(Control):
        """As if another rank had taken twice as long for everything."""

        def maximum(self, values: Any) -> list[float]:
            return [2 * value for value in values]

    contender = Contender("a", lambda: (1_000_000,), lambda: 0, parts=("only",))
    assert alternate([contender], Doubled(), repeat=1)["a"]["only"].samples_us == (2000.0,)


# --------------------------------------------------------------------------------------------------------- JSON lines


def line(impl: str = "a2a", **changes: Any) -> Line:
    cell = Cell("all_to_all", 1 << 20, "float32", 2, {"memory": "symmetric", "through": "a2a"}, ENV)
    baselines = {"gloo": Timing((400.0,)), "mpi": Timing(why="none")} if impl == "a2a" else None
    return dataclasses.replace(cell.line(impl, Timing((100.0, 50.0, 200.0), calls=3), baselines=baselines), **changes)


def test_a_line_has_the_documented_fields_in_order() -> None:
    fields = "op impl algorithm bytes dtype ranks p50_us p99_us min_us algbw_GBps busbw_GBps sms wrong n ratio case env"
    assert list(json.loads(line().to_json())) == fields.split()


def test_bandwidth_counts_as_nccl_tests_does() -> None:
    assert line().p50_us == 100.0
    assert line().p99_us == 200.0
    assert line().min_us == 50.0
    assert line().algbw_GBps == pytest.approx((1 << 20) / 100e-6 / 1e9, rel=1e-4)
    assert line().busbw_GBps == pytest.approx(line().algbw_GBps / 2, rel=1e-4)  # (ranks - 1) / ranks


def test_the_ratio_is_the_baselines_time_by_ours_and_only_on_our_line() -> None:
    assert line().ratio == {"gloo": 4.0}
    assert line("gloo").ratio == {}


def test_a_line_survives_json() -> None:
    assert Line.from_json(line().to_json()) == line()


# ------------------------------------------------------------------------------------------------- what is exchanged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("op", ["all_to_all", "all_to_allv"])
def test_an_exchange_knows_right_from_wrong(op: str, dtype: torch.dtype) -> None:
    exchanges = [Exchange.of_bytes(op, 600, dtype, rank, 3) for rank in range(3)]
    sent = []
    for exchange in exchanges:
        assert exchange.num_bytes <= 600
        source = torch.empty(sum(exchange.sends), dtype=dtype)
        exchange.fill(source)
        sent.append(source.split(exchange.sends))
    received = torch.cat([pieces[1].view(torch.uint8) for pieces in sent]).view(dtype)
    assert exchanges[1].wrong(received) == 0
    flipped = received.clone()
    flipped.view(torch.uint8)[7] ^= 1
    assert exchanges[1].wrong(flipped) == 1
    assert (
        exchanges[1].wrong(torch.cat([pieces[0].view(torch.uint8) for pieces in sent]).view(dtype)[: len(received)])
        if (op == "all_to_all")
        else True
    )


def test_uneven_exchanges_are_uneven_and_send_every_byte() -> None:
    exchange = Exchange.of_bytes("all_to_allv", 4096, torch.float32, 0, 4)
    assert [sum(row) for row in exchange.counts] == [1024] * 4
    assert len(set(exchange.sends)) > 1


def test_a_buffer_too_small_for_its_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than one for each of 4 ranks"):
        Exchange.of_bytes("all_to_all", 8, torch.float32, 0, 4)


def test_memcpy_moves_what_it_should() -> None:
    exchange = Exchange.of_bytes("all_to_all", 4096, torch.float32, 0, 2)
    assert memcpy_contender(exchange).check() == 0


# ----------------------------------------------------------------------------------------------------------- MoE layer

CASE = MoeCase(tokens=7, hidden=8, experts=5, top_k=2, dtype=torch.float32, ranks=2, skew=0.5)


def right_outcome(rank: int) -> Outcome:
    """What the layer means, computed without any exchange."""
    rows, _ = CASE.expected_rows(rank)
    x, ids, weights, grad = CASE.inputs(rank)
    total = (weights * factor(ids)).sum(1, keepdim=True)
    dots = (x * grad).sum(1, keepdim=True) * factor(ids)
    return Outcome(rows, total * x, total * grad, dots)


def test_expected_rows_are_expert_major() -> None:
    for rank in range(2):
        first, after = CASE.experts_of(rank)
        by_hand = [
            (expert, inputs[0][token])
            for expert in range(first, after)
            for inputs in (CASE.inputs(0), CASE.inputs(1))
            for token in range(CASE.tokens)
            for k in range(CASE.top_k)
            if inputs[1][token, k] == expert
        ]
        rows, experts = CASE.expected_rows(rank)
        assert experts.tolist() == [expert for expert, _ in by_hand]
        assert torch.equal(rows, torch.stack([row for _, row in by_hand]))


def test_a_right_moe_round_has_nothing_wrong() -> None:
    assert [wrong(CASE, rank, right_outcome(rank)) for rank in range(2)] == [0, 0]


@pytest.mark.parametrize("field", ["rows", "y", "grad_x", "grad_weights"])
@pytest.mark.parametrize("wire", [None, "fp8"])
def test_a_wrong_moe_round_is_found_out(field: str, wire: str | None) -> None:
    right = right_outcome(0)
    flipped = dataclasses.replace(right, **{field: getattr(right, field).flip(0)})
    assert wrong(dataclasses.replace(CASE, wire=wire), 0, flipped) > 0


def test_a_missing_row_is_found_out() -> None:
    right = right_outcome(0)
    assert wrong(CASE, 0, dataclasses.replace(right, rows=right.rows[1:])) > 0


def test_what_is_no_number_is_found_out() -> None:
    right = right_outcome(0)
    right.y[0, 0] = math.nan
    assert wrong(CASE, 0, right) == 1


def test_routing_is_uniform_unless_skewed() -> None:
    def share_of_first(skew: float) -> float:
        case = dataclasses.replace(CASE, tokens=4000, skew=skew)
        return float((case.inputs(0)[1] == 0).any(1).float().mean())

    assert share_of_first(0) == pytest.approx(CASE.top_k / CASE.experts, abs=0.03)
    assert share_of_first(2) > 0.8


def test_room_for_rows_holds_uniform_routing_padded() -> None:
    case = dataclasses.replace(CASE, tokens=512, experts=16, top_k=4, alignment=64)
    for rank in range(2):
        rows, experts = case.expected_rows(rank)
        padded = sum(-(-int((experts == expert).sum()) // 64) * 64 for expert in range(*case.experts_of(rank)))
        assert len(rows) < padded <= case.roomy_rows()
    everything = dataclasses.replace(CASE, skew=1.0)
    assert everything.roomy_rows() >= CASE.ranks * CASE.tokens * CASE.top_k


def test_remote_bytes_count_a_token_once_for_each_other_rank() -> None:
    case = dataclasses.replace(CASE, experts=2, top_k=2)  # an expert on each rank, and every token goes to both
    assert case.remote_bytes(0) == case.tokens * case.hidden * 4
    assert dataclasses.replace(case, wire="fp8").remote_bytes(0) == case.tokens * (case.hidden + 4)
    assert dataclasses.replace(case, wire="mxfp8").remote_bytes(0) == case.tokens * (case.hidden + 1)


def test_plain_copies_touch_every_row() -> None:
    contender = copies_contender(CASE, 0)
    assert contender.check() == 0
    assert len(contender.run() or ()) == 4


# ------------------------------------------------------------------------------------------------------ README's table


@pytest.fixture
def results() -> list[Line]:
    lines = []
    for size in (4096, 1 << 20):
        for memory in ("symmetric", "ordinary"):
            case = {"memory": memory, "through": "a2a"}
            lines += [line(bytes=size, case=case), line("gloo", bytes=size, case=case)]
    for part in ("dispatch", "total"):
        case = {"part": part, "tokens": 8, "hidden": 16, "experts": 4, "top_k": 2, "skew": 0.0}
        lines.append(line(op="moe", ranks=4, case=case, ratio={"gloo": 3.5, "copies": 0.8}))
    return lines


def test_the_readme_table_shows_what_the_results_say(results: list[Line]) -> None:
    table = script("readme_table").markdown(results)
    assert "| all-to-all, 2 ranks, float32 | 4K | 1M |" in table
    assert "| `a2a.all_to_all_single`, symmetric tensors, us | 100 | 100 |" in table
    assert "| ... times faster than gloo | 4.0x | 4.0x |" in table
    assert "| total | 0.1 | 3.5x | 1.25x |" in table
    assert "dist.all_to_all_single" not in table  # not run, so not shown


@pytest.fixture
def gpu_results() -> list[Line]:
    env = {**ENV, "gpu": "NVIDIA H200", "nccl": "2.28.9"}
    place = {"device": "cuda", "link_GBps": 400.0}
    lines = []
    for graph in (True, False):
        case = {"memory": "symmetric", "through": "a2a", "graph": graph, **place}
        lines += [
            line(case=case, env=env, dtype="bfloat16", busbw_GBps=300.0, ratio={"nccl": 2.5}, sms=24),
            line("nccl", case=case, env=env, dtype="bfloat16", p50_us=250.0),
        ]
    together = {"beside": "gemm 8x8x8", "gemm_slowdown": 1.25, "beside_p50_us": 110.0}
    lines.append(line(case={**lines[0].case, **together}, env=env, dtype="bfloat16"))
    for part, us in (("dispatch", 200.0), ("combine", 210.0), ("total", 900.0)):
        layer = {"part": part, "tokens": 4096, "hidden": 16, "experts": 4, "top_k": 2, "skew": 0.0, "graph": True}
        kind = {"layout": "compact", "alignment": 1, "wire": None, "num_sms": None, "max_rows": 5, "rows": "dtype"}
        lines.append(line(op="moe", dtype="bfloat16", case={**layer, **kind, **place}, env=env, p50_us=us, ratio={}))
    return lines


def test_results_on_gpus_have_tables_of_their_own(results: list[Line], gpu_results: list[Line]) -> None:
    readme = script("readme_table")
    table = readme.markdown(results + gpu_results)
    assert readme.markdown(results) in table  # those on CPUs are what they were
    assert "| all-to-all, 2 x NVIDIA H200, bfloat16, calls in a CUDA graph | 1M |" in table
    assert "| all-to-all, 2 x NVIDIA H200, bfloat16, eager calls | 1M |" in table
    assert "| ... share of the link's 400 GB/s | 75% |" in table
    assert "| ... times faster than NCCL | 2.5x |" in table
    assert "| NCCL, us | 250 |" in table
    assert "| in a CUDA graph, compact rows | 200 / 210 / 900 |" in table
    assert "| all-to-all of 1M | 1.25x, 110 |" in table
    assert "NVIDIA H200" not in readme.markdown(results)


def test_only_what_is_between_the_marks_changes() -> None:
    readme = script("readme_table")
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    assert readme.replaced(text, "new") == f"before\n{readme.BEGIN}\nnew\n{readme.END}\nafter\n"
    with pytest.raises(ValueError, match="needs one"):
        readme.replaced("no marks", "new")


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README yet")
def test_the_readme_is_up_to_date() -> None:
    checked = run("bench/readme_table.py", "--check")
    assert checked.returncode == 0, checked.stderr


def test_a_missed_floor_is_told() -> None:
    floor = script("run_cpu").Floor("all_to_all", 2, (("memory", "symmetric"),), "gloo", ((1 << 20, 5.0),))
    assert "4 times gloo, expected 5" in floor.missed(line())
    assert floor.missed(line(ratio={"gloo": 5.0})) is None
    assert floor.missed(line(case={"memory": "ordinary"})) is None


def test_a_floor_of_one_dtype_is_not_anothers() -> None:
    floor = script("run_cpu").Floor("all_to_all", 2, (), "gloo", ((0, 5.0),), "bfloat16")
    assert floor.missed(line()) is None
    assert "expected 5" in floor.missed(line(dtype="bfloat16"))


def test_every_floor_of_reductions_is_of_something_that_is_run() -> None:
    reductions = script("run_reductions")
    words = [command.split() for command in reductions.COMMANDS]
    dtypes = {"bf16": "bfloat16", "fp32": "float32"}
    ran = set()
    for command in words:
        given = dict(itertools.pairwise(command))
        for baseline in given["--against"].split(","):
            ran.add(
                (command[0], int(given["--ranks"]), given["--memory"], dtypes[given.get("--dtype", "fp32")], baseline)
            )
    for floor in reductions.FLOORS:
        asked = floor.op, floor.ranks, dict(floor.case)["memory"], floor.dtype or "float32", floor.baseline
        assert asked in ran, floor
        assert {size for size, _ in floor.by_bytes} <= {0, 64 << 10, 1 << 20, 16 << 20, 64 << 20}


def test_reductions_have_a_table_of_their_own() -> None:
    case = {"memory": "ordinary", "through": "a2a"}
    lines = [
        line(op="all_gather", case=case),
        line(op="all_reduce", case=case, dtype="bfloat16", ratio={"gloo": 3.0}),
        line(op="all_reduce", case=case, ratio={"gloo": 4.0, "mpi": 2.0}),
        line("gloo", op="all_reduce", case=case),
    ]
    table = script("readme_table").markdown(lines).splitlines()
    assert table[0] == "| reductions and gathers, 2 ranks | 1M |"
    assert table[2:][:5] == [
        "| all-reduce, float32, ordinary tensors, us | 100 |",
        "| ... times faster than gloo | 4.0x |",
        "| ... times faster than MPI | 2.0x |",
        "| all-reduce, bfloat16, ordinary tensors, us | 100 |",
        "| ... times faster than gloo | 3.0x |",
    ]
    assert "run_reductions.py" in table[-1]


def test_predictions_are_held_against_what_was_measured() -> None:
    predictions = script("predictions")
    case = {"memory": "ordinary", "through": "a2a"}
    lines = [
        line(case={**case, "predicted_us": 110.0}),
        line(bytes=4096, case={**case, "predicted_us": 140.0}),
        line("memcpy", case=case),
    ]
    assert "| 2 ranks, all_to_all, float32, ordinary | **140 / 100 (+40%)** | 110 / 100 (+10%) |" in (
        predictions.markdown(lines)
    )
    assert predictions.summary(lines).startswith("1 of 2 predictions within 25 %; the worst is off by +40 %")


def test_sizes_that_predictions_are_tested_at_were_not_fitted() -> None:
    from a2a.calibrate import sizes
    from a2a.cli import parse

    assert not set(parse.sizes(script("predictions").SIZES)) & set(sizes())


@pytest.mark.parametrize(
    "words",
    [("run_reductions.py", "--only", "bf16"), ("predictions.py", "--ranks", "2", "--only", "all_g")],
)
def test_scripts_run_in_their_short_form(words: tuple[str, ...], tmp_path: Path) -> None:
    told = run(f"bench/{words[0]}", *words[1:], "--short", "--out", str(tmp_path / "lines.jsonl"))
    assert told.returncode == 0, told.stderr
    lines = [Line.from_json(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {x.impl for x in lines} >= {"a2a", "memcpy"}
    assert all(x.wrong == 0 for x in lines)


def test_a_missed_floor_on_gpus_is_told(gpu_results: list[Line]) -> None:
    gpu = script("run_gpu")
    graph = {"graph": True}
    mine, baseline = gpu_results[0], gpu_results[1]
    assert gpu.Floor("all_to_all", graph, (1 << 20,), most_us=100).missed(mine) == []
    assert "100 us, expected at most 99" in gpu.Floor("all_to_all", graph, (1 << 20,), most_us=99).missed(mine)[0]
    assert gpu.Floor("all_to_all", graph, (4096,), most_us=1).missed(mine) == []  # another size
    assert gpu.Floor("all_to_all", graph, most_us=1).missed(baseline) == []
    assert gpu.Floor("all_to_all", graph, most_us=1).missed(gpu_results[2]) == []  # eager
    assert gpu.Floor("all_to_all", graph, most_us=1).missed(gpu_results[4]) == []  # beside a product
    assert "300 GB/s, expected 370" in gpu.Floor("all_to_all", graph, least_GBps=370).missed(mine)[0]
    assert "2.5 times nccl, expected 3" in gpu.Floor("all_to_all", graph, ratio=3).missed(mine)[0]
    assert "p99 is 2 times p50" in gpu.Floor("all_to_all", graph, spread=1.15).missed(mine)[0]
    assert "not measured" in gpu.Floor("all_to_all", graph, most_us=1).missed(dataclasses.replace(mine, p50_us=None))[0]


def test_every_floor_on_gpus_is_of_something_that_is_run() -> None:
    """Each command's words, as the case of its lines has them, meet each floor's."""
    gpu = script("run_gpu")
    words = [command.split() for _, command in gpu.COMMANDS.values() if "--beside" not in command]
    for floor in gpu.FLOORS:
        assert any(command[0] == floor.op and meets(command, floor.case) for command in words), floor


def meets(command: list[str], case: Any) -> bool:
    given = dict(itertools.pairwise(command))
    asked = {
        "memory": given.get("--memory", "symmetric"), "through": "a2a", "graph": "--graph" in command,
        "tokens": given.get("--tokens", ""), "layout": given.get("--layout", "expert"),
        "alignment": int(given.get("--alignment", 1)), "wire": given.get("--wire"), "rows": given.get("--rows", "dtype"),
        "num_sms": int(given["--num-sms"]) if "--num-sms" in given else None, "max_rows": None,
    }  # fmt: skip
    return all(
        str(value) in asked[key].split(",") if key in ("memory", "tokens") else asked[key] == value
        for key, value in case.items()
        if key != "part"
    )


def test_commands_on_gpus_have_limits_that_make_8_minutes_each_half() -> None:
    limits = {name: limit_s for name, (limit_s, _) in script("run_gpu").COMMANDS.items()}
    second = sum(limit_s for name, limit_s in limits.items() if name.startswith(("copy", "reduce")))
    assert second <= 480 and sum(limits.values()) - second <= 480


# ---------------------------------------------------------------------------------------------- long runs, short form


@pytest.fixture(scope="module")
def _no_leftovers() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    yield
    left = {path for path in Path("/dev/shm").iterdir() if "a2a" in path.name} - before if before else set()
    assert not left


@pytest.mark.usefixtures("_no_leftovers")
def test_many_small_collectives_are_right_and_hold_memory_flat() -> None:
    soak = run("bench/soak.py", "--short", "--ranks", "3")
    assert soak.returncode == 0, soak.stderr
    assert "no wrong element" in soak.stdout


def test_many_layers_are_right() -> None:
    soak = run("bench/soak_moe.py", "--device", "cpu", "--layers", "21", "--ranks", "3")
    assert soak.returncode == 0, soak.stderr
    assert "21 layers on 3 ranks" in soak.stdout


@pytest.mark.usefixtures("_no_leftovers")
def test_survivors_of_a_kill_name_the_dead_rank_in_time() -> None:
    kills = run("bench/kills.py", "--short", "--ranks", "3")
    assert kills.returncode == 0, kills.stderr
    assert "every survivor named it in time" in kills.stdout
