"""The simulator: its timeline by hand, its accounts, its bytes, and the command."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from a2a.simulate import (
    CATEGORIES,
    COMPUTE,
    MODELS,
    PRESETS,
    SOURCES,
    Assumptions,
    Job,
    Model,
    Step,
    load_model,
    simulate,
)
from a2a.simulate.accounts import accounts
from a2a.simulate.scaling import at, published, sensitivity, weak_scaling
from a2a.simulate.step import rows_crossing, schedule
from a2a.simulate.timeline import Task, play
from a2a.simulate.trace import trace
from a2a.simulate.workload import spread
from a2a.topology.presets import HARDWARE
from cli_run import PNG, Here, needs_plot

V3, GB300 = MODELS["deepseek-v3"], PRESETS["deepseek-v3-gb300"]
SMALL = Model("small", 1024, 8, 1, 4_000_000, 4096, 4096, 512, 16, 1, 2, 32000, 0, 1024)
ONE_LAYER = replace(SMALL, name="one", layers=1, dense_layers=0)
JOB = Job(hardware="h200-400", gpus=16, pp=2, vp=2, ep=8, global_batch=64, precision="bf16")


def flow(num_bytes: float, *links: int, after: tuple[int, ...] = (), seconds: float = 0.0) -> Task:
    return Task("flow", "dispatch", after, seconds, num_bytes, links)


def work(seconds: float, *, after: tuple[int, ...] = (), owner: int = 0) -> Task:
    return Task("work", COMPUTE, after, seconds, owner=owner)


# ---- timelines by hand; every number is a binary fraction, so answers are exact


def test_two_gpus_by_hand() -> None:
    """GPU 0 computes 1 s and sends 8 bytes at 4 B/s after 0.5 s of latency; GPU 1 computes 2 s before it uses them."""
    tasks = [work(1.0), flow(8, 0, 1, after=(0,), seconds=0.5), work(2.0, owner=1), work(1.0, after=(1, 2), owner=1)]
    played = play(tasks, [4.0, 8.0])
    assert played.start_s == (0.0, 1.0, 0.0, 3.5)
    assert played.end_s == (1.0, 3.5, 2.0, 4.5)
    assert played.carried == (8.0, 8.0)


def test_four_gpus_by_hand() -> None:
    """Links 0 to 3 leave GPUs 0 to 3, links 4 to 7 enter them; all carry 4 B/s.

    0 and 1 send to 2, so each gets half of link 6. 3 sends to 0 alone. At 4 s the flow of 0 is over, that of 1 speeds up.
    """
    tasks = [flow(8, 0, 6), flow(16, 1, 6), flow(8, 3, 4), flow(4, 2, 5, after=(0,))]
    played = play(tasks, [4.0] * 8)
    assert played.start_s == (0.0, 0.0, 0.0, 4.0)
    assert played.end_s == (4.0, 6.0, 2.0, 5.0)
    assert played.carried == (8.0, 16.0, 4.0, 8.0, 8.0, 4.0, 24.0, 0.0)


def test_contention_doubles_the_time() -> None:
    alone = play([flow(64, 0)], [8.0]).length_s
    assert play([flow(64, 0), flow(64, 0)], [8.0]).length_s == 2 * alone
    assert play([flow(64, 0), flow(64, 1)], [8.0, 8.0]).length_s == alone


def test_a_flow_leaves_what_it_cannot_use_to_others() -> None:
    """Link 0 carries 8 B/s; the first flow is held to 2 by link 1, so the second gets 6."""
    played = play([flow(4, 0, 1), flow(12, 0)], [8.0, 2.0])
    assert played.end_s == (2.0, 2.0)


def test_tasks_that_wait_in_a_circle_are_told() -> None:
    with pytest.raises(ValueError, match="2 tasks wait for each other in a circle, 'work' among them"):
        play([work(1.0), work(1.0, after=(2,)), work(1.0, after=(1,))], [])


def test_exposed_and_hidden_by_hand() -> None:
    """A flow from 0 to 4 s beside compute from 0 to 1 and from 4 to 6: 1 s hidden, 3 exposed; nothing from 6 to 7."""
    tasks = [work(1.0), flow(16, 0), work(2.0, after=(1,)), Task("latency", "join", (2,), 1.0)]
    compute_s, bubble_s, shares = accounts(tasks, play(tasks, [4.0]), 1)
    assert (compute_s, bubble_s) == (3.0, 1.0)
    assert asdict(shares["dispatch"]) == {"hidden_s": 1.0, "exposed_s": 3.0, "total_s": 4.0}


# ---- whole steps by hand


def seconds_of(flop: float, hardware: str = "h200-400") -> float:
    return flop * ONE_LAYER.sequence / (HARDWARE[hardware].bf16_TFLOPS * 1e12 * Assumptions().compute_fraction)


def weights_s(job: Job, local: int, domains: int) -> float:
    """One layer's attention, shared expert and router: reduced or gathered over NVLink, then across; and the latencies."""
    assume, machine = Assumptions(), HARDWARE[job.hardware]
    count = ONE_LAYER.attention_params + ONE_LAYER.expert_params() + ONE_LAYER.hidden * ONE_LAYER.experts
    up_s = 2 * count * (local - 1) / local / (machine.scale_up.bandwidth_GBps * 1e9 * 0.86) + 2.1e-6
    out_s = 2 * count / local * (domains - 1) / domains / (machine.scale_out.bandwidth_GBps * 1e9 * 0.9)
    assert (assume.scale_up_fraction, assume.scale_out_fraction) == (0.86, 0.9)
    return up_s + (out_s + (domains - 1) * 14e-6 if domains > 1 else 0.0)


def optimizer_s(job: Job) -> float:
    shared = ONE_LAYER.attention_params + ONE_LAYER.expert_params() + ONE_LAYER.hidden * ONE_LAYER.experts
    count = shared / job.dp + ONE_LAYER.experts / job.ep * ONE_LAYER.expert_params()
    return 28 * count / (4800e9 * 0.86)


def test_a_step_on_two_gpus_by_hand() -> None:
    job = Job(hardware="h200-400", gpus=2, ep=2, global_batch=2, precision="bf16", overlap="none", once_per="copy")
    step = simulate(ONE_LAYER, job)
    compute = 3 * seconds_of(ONE_LAYER.attention_flop() + ONE_LAYER.mlp_flop(moe=True) + ONE_LAYER.head_flop())
    rows = 1024 * 2 / 2  # half of a rank's copies go to the other one
    exchange = rows * 1024 * 2 / (450e9 * 0.86) + 2.1e-6
    assert step.compute_s == pytest.approx(compute + optimizer_s(job), rel=1e-12)
    assert step.shares["dispatch"].exposed_s == pytest.approx(2 * exchange, rel=1e-12)
    assert step.shares["gradients"].exposed_s == pytest.approx(weights_s(job, 2, 1), rel=1e-12)
    assert step.step_s == pytest.approx(compute + optimizer_s(job) + 4 * exchange + 2 * weights_s(job, 2, 1), rel=1e-12)
    assert step.bubble_s == pytest.approx(0.0, abs=1e-15)


def test_a_step_on_four_gpus_in_two_domains_by_hand() -> None:
    job = Job(
        hardware="h200-400",
        gpus=4,
        ep=4,
        global_batch=4,
        precision="bf16",
        overlap="none",
        wire="fp8",
        gpus_per_domain=2,
    )
    step = simulate(ONE_LAYER, job)
    compute = 3 * seconds_of(ONE_LAYER.attention_flop() + ONE_LAYER.mlp_flop(moe=True) + ONE_LAYER.head_flop())
    to_each = 1024 * (1 - math.comb(12, 2) / math.comb(16, 2))  # tokens with at least one of a rank's 4 experts
    across = 2 * to_each * 1024 / (50e9 * 0.9)  # two ranks in the other domain; NVLink is done long before
    fp8, bf16 = across * (1 + 4 / 128) + 14e-6, across * 2 + 14e-6
    expected = compute + optimizer_s(job) + 2 * (fp8 + bf16) + 2 * weights_s(job, 2, 2)
    assert step.step_s == pytest.approx(expected, rel=1e-12)


# ---- properties

JOBS = [
    replace(JOB, overlap=overlap, gradients=gradients, once_per=once_per)
    for overlap, gradients, once_per in itertools.product(
        ("none", "gradients", "full"), ("hierarchical", "flat"), ("rank", "copy")
    )
] + [
    replace(JOB, vp=1),
    replace(JOB, vp=1, pp=1, gpus=8, global_batch=16),
    replace(JOB, tp=2, gpus=32),
    replace(JOB, pp=4, vp=2, gpus=32),
    replace(JOB, ep=16, gpus=32, gpus_per_nic=8),
    replace(JOB, bucket_mb=1.0),
]  # fmt: skip


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job.overlap}-{job.gradients}-{job.once_per}-{job.gpus}")
def step(request: pytest.FixtureRequest) -> Step:
    return simulate(SMALL, request.param)


def test_links_carry_what_the_tasks_move(step: Step) -> None:
    expected: dict[int, float] = defaultdict(float)
    for task in step.tasks:
        for link in task.links:
            expected[link] += task.num_bytes
    for link, num_bytes in enumerate(step.played.carried):
        assert num_bytes == pytest.approx(expected[link], rel=1e-9)
    out, inward = (sum(step.played.carried[way::2]) for way in (0, 1))
    assert out == pytest.approx(inward, rel=1e-9)


def test_dispatch_moves_every_layers_rows(step: Step) -> None:
    """Both ways of every MoE layer and micro-batch, from the formula, not from the tasks."""
    job, wire = step.job, sum(task.num_bytes for task in step.tasks if task.category in ("dispatch", "combine"))
    up, out = rows_crossing(SMALL, job, 1024 / job.tp)
    layers = 7 * job.micro_batches * job.micro_batch
    assert wire == pytest.approx(4 * layers * (up + out * job.gpus_per_nic) * 1024 * 2, rel=1e-9)


def test_tensor_parallelism_gathers_and_scatters_each_block_both_ways() -> None:
    """An all-gather and a reduce-scatter of a micro-batch send (n - 1) / n of it each; MoE layers have one such block."""
    step = simulate(SMALL, replace(JOB, tp=4, gpus=32))
    moved = sum(task.num_bytes for task in step.tasks if task.category == "tensor")
    blocks = 8 + 1  # attention of eight layers, the MLP of the dense one
    assert moved == pytest.approx(2 * blocks * step.job.micro_batches * 2 * 1024 * 3 / 4 * 1024 * 2, rel=1e-12)
    assert step.shares["tensor"].hidden_s == 0.0
    assert simulate(SMALL, JOB).shares["tensor"].total_s == 0.0


def test_exposed_and_hidden_make_the_total(step: Step) -> None:
    for share in step.shares.values():
        assert share.exposed_s + share.hidden_s == pytest.approx(share.total_s, rel=1e-12)
        assert min(share.exposed_s, share.hidden_s) >= -1e-12
    assert step.compute_s + step.exposed_s + step.bubble_s == pytest.approx(step.step_s, rel=1e-12)
    assert 0 < step.efficiency < 1
    assert step.exposed_s <= sum(share.exposed_s for share in step.shares.values()) + 1e-12


def test_no_gpu_computes_two_things_at_once(step: Step) -> None:
    for gpu in range(step.job.pp):
        spans = sorted(
            (step.played.start_s[n], step.played.end_s[n])
            for n, task in enumerate(step.tasks)
            if task.category == COMPUTE and task.owner == gpu
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("gradients", ["hierarchical", "flat"])
@pytest.mark.parametrize(
    "layout", [(1, 1, 8, 1), (2, 1, 16, 1), (2, 2, 16, 1), (4, 2, 32, 1), (4, 1, 32, 1), (2, 4, 32, 2)]
)
@pytest.mark.parametrize("hardware", ["h100-400", "h200-800", "b200-400", "gb300"])
def test_overlap_never_makes_a_step_longer(hardware: str, layout: tuple[int, int, int, int], gradients: str) -> None:
    pp, vp, gpus, tp = layout
    job = Job(
        hardware=hardware, gpus=gpus, tp=tp, pp=pp, vp=vp, ep=8, global_batch=64, gradients=gradients, gpus_per_domain=8
    )
    none, some, full = (simulate(SMALL, replace(job, overlap=overlap)) for overlap in ("none", "gradients", "full"))
    assert none.step_s >= some.step_s
    assert none.step_s >= full.step_s
    assert none.shares["dispatch"].hidden_s == 0.0
    assert full.shares["dispatch"].hidden_s > 0.0


def test_an_exchange_that_crosses_the_network_can_lose_by_overlap() -> None:
    """Pipeline sends beside a dispatch over the same NIC take bandwidth from it, which a blocking order doesn't let them."""
    job = Job(hardware="b200-400", gpus=64, pp=2, vp=2, ep=16, global_batch=64)
    none, some = (simulate(SMALL, replace(job, overlap=overlap)) for overlap in ("none", "gradients"))
    assert none.step_s < some.step_s
    assert none.shares["dispatch"].total_s < some.shares["dispatch"].total_s


def test_hierarchical_gradients_spare_the_network() -> None:
    hierarchical, flat = (simulate(SMALL, replace(JOB, gpus=64, ep=8, gradients=g)) for g in ("hierarchical", "flat"))
    assert hierarchical.shares["gradients"].total_s < flat.shares["gradients"].total_s


def test_equal_input_gives_an_equal_timeline() -> None:
    assert simulate(SMALL, JOB).played == simulate(SMALL, JOB).played


def test_a_token_crosses_once_per_rank_or_once_per_copy() -> None:
    """Copies are 4 % more at EP64, 11 % at EP32, 51 % at EP8, four times as many at EP2: 8 of 256 experts."""
    for ep, ratio in ((64, 1.04), (32, 1.11), (8, 1.51), (2, 4.0)):
        job = Job(gpus=64, ep=ep)
        once, copies = (sum(rows_crossing(V3, replace(job, once_per=per), 4096.0)) for per in ("rank", "copy"))
        assert copies / once == pytest.approx(ratio, abs=0.02)
    assert sum(rows_crossing(V3, Job(ep=64, once_per="copy"), 4096.0)) * 14336 == pytest.approx(462e6, rel=2e-3)


def test_deepseek_v3_has_the_papers_size() -> None:
    """671 B parameters without multi-token prediction (arXiv:2412.19437, section 4.2), 250 GFLOP a token."""
    moe = V3.attention_params + (V3.experts + V3.shared_experts) * V3.expert_params() + V3.hidden * V3.experts
    dense = V3.attention_params + 3 * V3.hidden * V3.dense_intermediate
    total = 3 * dense + 58 * moe + 2 * V3.vocab * V3.hidden
    assert total == pytest.approx(671e9, rel=1e-3)
    assert V3.token_flop() == pytest.approx(250e9, rel=5e-3)


def test_the_public_preset_is_as_published() -> None:
    assert (GB300.gpus, GB300.pp, GB300.vp, GB300.ep, GB300.micro_batch) == (256, 2, 8, 32, 1)
    assert (GB300.expert_dp, at(GB300, 1024).expert_dp) == (4, 16)
    assert GB300.layers_of_chunks(V3) == (*[4] * 15, 1)


def test_a_thousand_gpus_take_seconds() -> None:
    began = time.monotonic()
    step = simulate(V3, at(GB300, 1024))
    assert time.monotonic() - began < 20
    assert published([simulate(V3, GB300), step])
    assert 0.9 < step.efficiency < 1


def test_weak_scaling_hangs_on_what_is_varied() -> None:
    first, last = replace(JOB, overlap="none"), at(replace(JOB, overlap="none"), 64)
    swings = {swing.name: swing for swing in sensitivity(SMALL, first, last)}
    assert set(swings) == set(asdict(Assumptions())) == set(SOURCES)
    usual = weak_scaling(simulate(SMALL, first), simulate(SMALL, last))
    assert swings["scale_out_fraction"].less < usual < swings["scale_out_fraction"].more
    assert swings["gradient_bytes"].more < usual < swings["gradient_bytes"].less


def test_the_schedule_runs_each_piece_once_each_way() -> None:
    for pp, vp, batches, stage, extra in ((2, 8, 32, 0, 1), (4, 2, 8, 3, 0), (1, 1, 5, 0, 1), (4, 1, 2, 0, 1)):
        pairs = schedule(pp, vp, batches, stage, extra=extra)
        pieces = sorted((v * pp + stage, batch) for v in range(vp) for batch in range(batches))
        for way in (0, 1):
            assert sorted(piece for pair in pairs if (piece := pair[way]) is not None) == pieces
        done = set()
        for ahead, back in pairs:
            done |= set() if extra else {ahead}  # with more warm-ups, a backward is of an earlier pair's forward
            assert back is None or back in done
            done.add(ahead)


def test_groups_lie_over_domains() -> None:
    assert spread(32, 1, 64) == (32, 1)
    assert spread(4, 32, 64) == (2, 2)
    assert spread(16, 64, 64) == (1, 16)
    with pytest.raises(ValueError, match="lie unevenly over domains of 72"):
        spread(32, 1, 72)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ep": 5}, "16 experts are no multiple of EP = 5|GPUs a stage are no multiple of EP = 5"),
        ({"pp": 3}, "16 GPUs are no multiple of TP x PP = 3"),
        ({"global_batch": 60}, "60 sequences a step are no multiple of micro-batch x DP = 8"),
        ({"wire": "fp4"}, "wire is 'fp4'; expected one of bf16, fp8, mxfp8"),
        ({"hardware": "tpu"}, "hardware is 'tpu'"),
        ({"chunk_layers": (8, 0, 0, 0)}, "expected 4 numbers from 1, 8 in all"),
        ({"gpus_per_domain": 16}, "h200-400 has 8"),
        ({"tp": 0}, "tp is 0; expected more than 0"),
    ],
)
def test_a_layout_that_cannot_be_is_told(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(SMALL, replace(JOB, **change))  # type: ignore[arg-type]


def test_every_machine_has_its_sources() -> None:
    assert {"h100-400", "h100-800", "h200-400", "h200-800", "b200-400", "b200-800", "gb200", "gb300"} == set(HARDWARE)
    for machine in HARDWARE.values():
        assert "https://" in machine.source
        assert "https://" in machine.scale_up.source
        assert machine.scale_up.bandwidth_GBps > machine.scale_out.bandwidth_GBps
        assert simulate(SMALL, replace(JOB, hardware=machine.name, gpus_per_domain=8)).step_s > 0


# ---- the trace and the command


def test_the_trace_is_well_formed() -> None:
    step = simulate(SMALL, JOB)
    made = json.loads(json.dumps(trace(step)))
    events = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} == {COMPUTE, *CATEGORIES} - {"tensor"}
    assert all(event["dur"] > 0 and 0 <= event["ts"] <= step.step_s * 1e6 for event in events)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(step.step_s * 1e6)
    named = {(event["pid"], event.get("tid")) for event in made["traceEvents"] if event["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in events} <= named
    assert "modelled" in made["otherData"]["source"]


WORDS = ("simulate", "--hardware", "h200-400", "--pp", "2", "--ep", "8", "--global-batch", "64")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(asdict(SMALL)))
    return path


def test_the_command_says_modelled_and_writes_json_and_trace(here: Here, small: Path, tmp_path: Path) -> None:
    told = here(
        *WORDS,
        "--model",
        small,
        "--gpus",
        "16,64",
        "--json",
        tmp_path / "out.jsonl",
        "--trace",
        tmp_path / "trace.json",
    )
    assert told.returncode == 0, told.stderr
    for words in ("One step, modelled", "ms a GPU, modelled", "Weak scaling 16 to 64 GPUs", "Most sensitive to"):
        assert words in told.stdout
    assert "Published" not in told.stdout  # nobody published this job
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [entry["gpus"] for entry in lines if entry["what"] == "step"] == [16, 64]
    assert {entry["source"] for entry in lines if entry["what"] in ("step", "sensitivity")} == {"modelled"}
    assert len([entry for entry in lines if entry["what"] == "sensitivity"]) == len(SOURCES)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_json_alone_goes_to_stdout(here: Here, small: Path) -> None:
    told = here(*WORDS, "--model", small, "--gpus", "16", "--json", "-")
    assert told.returncode == 0, told.stderr
    assert all(json.loads(text) for text in told.stdout.splitlines())


def test_published_scaling_is_told_beside_the_table(here: Here) -> None:
    told = here("simulate", "--preset", "deepseek-v3-gb300", "--gpus", "256,1024", "--no-sensitivity")
    assert told.returncode == 0, told.stderr
    for who, value in (("Megatron", "98.5 %"), ("TorchTitan, JAX", "97.0 %")):
        (line,) = [line for line in told.stdout.splitlines() if f"by {who}: {value}" in line]
        assert "quoted" in line
        assert "│" not in line
    (scaling,) = re.findall(r"256 to 1,024 GPUs: ([0-9.]+) %, modelled", told.stdout)
    assert f"it gives {float(scaling):.1f} %" in (Path(__file__).parents[1] / "README.md").read_text()


@needs_plot
def test_the_command_draws(here: Here, small: Path, tmp_path: Path) -> None:
    told = here(*WORDS, "--model", small, "--gpus", "16,32", "--no-sensitivity", "--plot", tmp_path / "step.png")
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)


def test_a_mistake_on_the_command_line_is_told(here: Here, small: Path, tmp_path: Path) -> None:
    told = here(*WORDS, "--model", small, "--gpus", "17")
    assert told.returncode == 2
    assert "17 GPUs are no multiple" in told.stderr
    assert here("simulate", "--preset", "gpt").returncode == 2
    with pytest.raises(ValueError, match="neither one of deepseek-v3 nor a readable JSON file"):
        load_model(str(tmp_path / "none.json"))
    small.write_text(json.dumps({**asdict(SMALL), "hidden": "wide"}))
    with pytest.raises(ValueError, match="hidden is 'wide'"):
        load_model(str(small))
