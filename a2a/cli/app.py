"""The commands' options, and how errors of theirs are told."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from a2a.cli import devices, parse, show
from a2a.cli.ranks import RanksFailedError
from a2a.config import config
from a2a.errors import A2AError

app = typer.Typer(
    name="a2a",
    help="Topology-aware collectives for PyTorch: see what they do on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Ranks to start; under torchrun, mpirun or Slurm: those that are there."),
]
Op = Annotated[
    str,
    typer.Argument(
        metavar="OP", help="all_to_all, all_to_allv, all_reduce, reduce_scatter, all_gather, moe, gradients, ..."
    ),
]
Sizes = Annotated[str, typer.Option("--bytes", help="Send buffer of each rank, as nccl-tests counts it: 4K,1M,64M.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Data types: float32,bf16.")]
Tokens = Annotated[int, typer.Option(min=1, help="moe: tokens of each rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="moe: size of a token.")]
Experts = Annotated[int, typer.Option(min=1, help="moe: experts, spread over the ranks.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, max=32, help="moe: experts of each token.")]
Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write JSON lines to this file, or to stdout (-).")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="PNG", help="Draw the result into this file.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu or cuda; default: cuda where there is a GPU for every rank, or a launcher has started them."
    ),
]
Repeat = Annotated[
    int | None, typer.Option("--repeat", min=1, help="Samples to take of each; default: what fits a few seconds.")
]


def run() -> None:
    """Run the command line and exit: 0, 1 for a failure, 2 for a mistake on the command line, 130 for Ctrl-C."""
    try:
        code = app(standalone_mode=False, prog_name="a2a")
    except typer.Exit as left:
        code = left.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except (ValueError, A2AError, RanksFailedError, OSError) as error:
        show.console(stderr=True).print(f"a2a: {error}", markup=False, style="red")
        code = 2 if isinstance(error, ValueError) else 1
    except Exception as error:
        if not hasattr(error, "exit_code"):  # not one of the command line parser's own
            raise
        error.show()  # type: ignore[attr-defined]
        code = error.exit_code
    sys.exit(code or 0)


@app.command()
def demo(
    ranks: Ranks = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each rank; default: 1024 on CPUs, 8192 on GPUs.")
    ] = None,
    hidden: Hidden = 512,
    experts: Experts = 16,
    top_k: TopK = 4,
    device: Device = None,
    repeat: Repeat = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="2: an all-reduce of CPU ranks on two made-up hosts instead; needs root.")
    ] = 1,
) -> int:
    """A MoE layer over GPUs or CPU ranks, forward and backward: is it right, and how much faster than NCCL or gloo?"""
    from a2a.cli import demo as command
    from a2a.topology import local_facts

    if hosts == 2:
        from a2a.cli import demo_hosts

        return demo_hosts.run(demo_hosts.Request(16 << 20, repeat), ranks)

    check_top_k(top_k, experts)
    kind = _device(device, ranks)
    if kind == "cuda":
        usual, default_ranks = command.CUDA_TOKENS, devices.num_gpus()
    else:
        usual, default_ranks = command.CPU_TOKENS, 4 if local_facts().cores >= 4 else 2
    request = command.Request(tokens or usual, hidden, experts, top_k, repeat, kind)
    return command.run(request, ranks, default_ranks=default_ranks)


@app.command()
def doctor() -> int:
    """What this machine can do, what keeps a transport or algorithm from being used, and what to do about it."""
    from a2a.cli import doctor as command

    return command.run()


@app.command()
def topo(
    ranks: Ranks = None,
    topology: Annotated[
        str | None, typer.Option("--topology", metavar="FILE|PRESET", help="Show this one instead of detecting.")
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="PATH", help="Write it as a file that A2A_TOPOLOGY takes; - for stdout, on one line."
        ),
    ] = None,
    plot: Plot = None,
    device: Annotated[
        str, typer.Option(help="cpu: who shares the host's memory; cuda: whose GPUs reach each other, rank r on GPU r.")
    ] = "cpu",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure what the parts of a collective cost here, on all ranks at once, and keep it in A2A_CACHE_DIR "
            "for the planner; half a minute for 2 CPU ranks. --json then writes what was measured.",
        ),
    ] = False,
    repeat: Repeat = None,
    most: Annotated[
        str | None, typer.Option(metavar="BYTES", help="--measure: the largest size; default: 96M.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Say which expert- or tensor-parallel groups the rank order puts across domains, and an order that "
            "doesn't; exit with 1 if there are any. Groups are --group-size consecutive ranks, or ranks --stride apart.",
        ),
    ] = False,
    group_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="--check: ranks of a group: EP or TP. Default: the largest number that divides every domain.",
        ),
    ] = None,
    stride: Annotated[
        int,
        typer.Option(
            min=1,
            help="--check: distance of a group's ranks: 1 for TP and EP as Megatron and TorchTitan make them (their "
            "innermost dimensions); the TP size where EP leaves TP's ranks out.",
        ),
    ] = 1,
    groups: Annotated[
        str | None, typer.Option(help="--check: these groups instead, as 0-3,8/4-7,9: each rank in one at most.")
    ] = None,
    ranks_file: Annotated[
        Path | None,
        typer.Option(help="--check: write the better order here, a line a rank; see what --check prints."),
    ] = None,
) -> int:
    """Which ranks can load and store each other's memory, and how fast the links are."""
    from a2a.cli import topo as command
    from a2a.cli import topo_check

    if not check and (group_size is not None or groups is not None or ranks_file is not None or stride != 1):
        raise ValueError("--group-size, --stride, --groups and --ranks-file say what --check does; add --check")
    if groups is not None and (group_size is not None or stride != 1):
        raise ValueError("--groups lists the groups; leave --group-size and --stride out")
    if not measure and (most is not None or repeat is not None):
        raise ValueError("--most and --repeat say what --measure does; add --measure")
    if measure:
        from a2a.cli import topo_measure

        if topology is not None or check or plot is not None:
            raise ValueError("--measure measures the ranks at hand; leave --topology, --check and --plot out")
        size = topo_measure.most_bytes(most or "96M")
        default = max(2, devices.num_gpus() if device == "cuda" else 2)
        request = topo_measure.Request(devices.choose(device, ranks), size, repeat)
        return topo_measure.run(request, ranks, json, default_ranks=default)
    if not check:
        return command.run(topology, ranks, json, plot, device)
    listed = None if groups is None else parse.groups(groups)
    checked = topo_check.Request(listed, group_size, stride, ranks_file)
    return topo_check.run(checked, command.find(topology, ranks, device), json)


@app.command()
def bench(
    op: Op,
    ranks: Ranks = None,
    sizes: Sizes = "4K,64K,1M,16M,64M",
    dtype: Dtype = "float32",
    against: Annotated[
        str | None,
        typer.Option(help="Baselines, or none: gloo,mpi on CPUs; nccl,nccl_symm,nccl_ce,deep_ep (moe) on GPUs."),
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="The algorithm to use instead of the planner's choice.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="symmetric (tensors of comm.empty; the default), ordinary tensors, or both.")
    ] = None,
    through: Annotated[
        str, typer.Option(help='a2a, or dist: dist.all_to_all_single on a group of backend "a2a".')
    ] = "a2a",
    device: Device = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="GPUs: time calls in CUDA graphs instead of eager ones.")
    ] = False,
    beside: Annotated[
        str | None, typer.Option(metavar="gemm", help="GPUs: also time them beside a matrix product, and its slowdown.")
    ] = None,
    link: Annotated[
        float | None,
        typer.Option("--link-GBps", min=0, help="What a rank can send; default: the topology's, on NVLink."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="moe: tokens of each rank: 128,4096.")] = "1024",
    hidden: Hidden = 1024,
    experts: Experts = 32,
    top_k: TopK = 4,
    skew: Annotated[
        float, typer.Option(min=0, help="moe: 0 routes uniformly; s prefers expert e by (e + 1) to the power -s.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="moe: of tokens and routing.")] = 0,
    layout: Annotated[str, typer.Option(help="moe: expert or compact rows.")] = "expert",
    alignment: Annotated[int, typer.Option(min=1, help="moe: rows of an expert are padded to a multiple of this.")] = 1,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="moe: rows that a rank has room for; default: as many as come, which the host waits for, and with --graph "
            "1.25 times what uniform routing brings (with --skew: all that could come).",
        ),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(help="moe: fp8 or mxfp8: how rows travel. gradients: bf16,fp8: also these between domains."),
    ] = None,
    rows: Annotated[str, typer.Option(help="moe: dtype, or wire: hand rows out as they travel.")] = "dtype",
    num_sms: Annotated[int | None, typer.Option(min=1, help="moe: the most SMs that may be used.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="gradients: layers of --hidden by --hidden weights.")] = 8,
    bucket_mb: Annotated[float, typer.Option(min=0.001, help="gradients: MiB that travel together.")] = 4.0,
    topology: Annotated[
        str | None, typer.Option(metavar="FILE|PRESET", help="gradients: this one instead of the detected: cpu:2x2.")
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="2: start CPU ranks on two made-up hosts with a cable; needs root.")
    ] = 1,
    order: Annotated[str, typer.Option(help="--hosts 2: ranks in blocks, or dealt in turn (cyclic).")] = "blocks",
    mbit: Annotated[float, typer.Option("--mbit", min=1, help="--hosts 2: speed of the cable, Mbit/s.")] = 1000.0,
    repeat: Repeat = None,
    json: Json = None,
    plot: Plot = None,
) -> int:
    """Time a collective, a training step's gradients, or a MoE layer's dispatch and combine, in turn with its baselines."""
    from a2a.cli import bench as command

    op = parse.word(op, command.OPS, "OP")
    through = parse.word(through, ("a2a", "dist"), "--through")
    wanted = None if against is None else parse.words(against, command.ALL_BASELINES, "--against")
    if device is None and set(command.BASELINES["cpu"]).intersection(wanted or ()):
        device = "cpu"
    kind = _device(device, ranks)
    memories = parse.words(memory or ("ordinary" if through == "dist" else "symmetric"), ("symmetric", "ordinary"),
                           "--memory")  # fmt: skip
    if algorithm is not None:
        _with_algorithm("all_to_all" if op == "all_to_allv" else op, algorithm)
    request = command.Request(
        op=op,
        command=" ".join(["a2a", *sys.argv[1:]]),
        dtypes=tuple(parse.dtype_names(dtype)),
        against=command.USUAL[kind] if wanted is None else tuple(wanted),
        repeat=repeat,
        device=kind,
        graph=graph,
        beside=None if beside is None else parse.word(beside, ("gemm",), "--beside"),
        link_GBps=link,
        cell_s=command.CELL_S if kind == "cpu" else command.CUDA_CELL_S,
        sizes=tuple(parse.sizes(sizes)),
        memories=tuple(memories),
        through=through,
        tokens=tuple(parse.counts(tokens, "--tokens")),
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        skew=skew,
        seed=seed,
        layout=parse.word(layout, ("expert", "compact"), "--layout"),
        alignment=alignment,
        max_rows=max_rows,
        wire=None if wire is None or op == "gradients" else parse.word(wire, ("fp8", "mxfp8"), "--wire"),
        wires=tuple(parse.words(wire or "", ("bf16", "fp8"), "--wire")) if op == "gradients" else (),
        rows=parse.word(rows, ("dtype", "wire"), "--rows"),
        num_sms=num_sms,
        layers=layers,
        bucket_mb=bucket_mb,
        topology=topology,
        hosts=hosts,
        order=parse.word(order, ("blocks", "cyclic"), "--order"),
        mbit_per_s=mbit,
    )
    return command.run(request, ranks, json, plot, default_ranks=devices.num_gpus() if kind == "cuda" else 2)


@app.command()
def plan(
    op: Op,
    ranks: Ranks = None,
    topology: Annotated[
        str | None,
        typer.Option("--topology", metavar="FILE|PRESET", help="Plan for this one's ranks, without starting any."),
    ] = None,
    sizes: Sizes = "1M",
    dtype: Dtype = "float32",
    tokens: Tokens = 1024,
    hidden: Hidden = 1024,
    experts: Experts = 32,
    top_k: TopK = 4,
    memory: Annotated[
        str, typer.Option(help="Of what tensors the time is told: ordinary (what is planned with) or symmetric.")
    ] = "ordinary",
    json: Json = None,
) -> int:
    """Which algorithm an op takes here, why, why not the others, and what it should cost."""
    from a2a.cli import plan as command

    op = parse.word(op, command.OPS, "OP")
    check_top_k(top_k, experts)
    request = command.Request(
        op, tuple(parse.sizes(sizes)), tuple(parse.dtype_names(dtype)), tokens, hidden, experts, top_k,
        parse.word(memory, ("ordinary", "symmetric"), "--memory"),
    )  # fmt: skip
    if topology is not None and ranks is not None:
        raise ValueError(f"--ranks {ranks} --topology {topology}: the topology says how many ranks; leave --ranks out")
    return command.run(request, ranks, topology, json)


@app.command()
def trial(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND", help="The job, as you start it: torchrun --nproc-per-node 8 ..."),
    ],
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps after which the job is ended.")] = 20,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 if a loss with a2a differs by more than this, relative.")
    ] = None,
    json: Json = None,
) -> int:
    """Run your own job for some steps as it is, twice, and with a2a: what changes in its losses and in its time?"""
    from a2a.cli import trial as runner

    warm_up = min(2, steps - 2)
    return runner.run(runner.Request(tuple(command), steps, warm_up, tolerance), json)


@app.command()
def simulate(
    preset: Annotated[
        str | None,
        typer.Option(help="A published job: deepseek-v3-gb300 (256 GPUs). The options below change it."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="h100-400, h100-800, h200-..., b200-... (hosts of 8, NICs in Gb/s), gb200 or gb300 (NVL72)."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="deepseek-v3, or JSON with its fields.")
    ] = "deepseek-v3",
    gpus: Annotated[
        str | None,
        typer.Option(help="Numbers of GPUs: 256,1024; from the second on, as much work a GPU as on the first."),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    vp: Annotated[int | None, typer.Option(min=1, help="Virtual stages of each.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel ranks.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a micro-batch.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step, on the first number of GPUs.")
    ] = None,
    once_per: Annotated[
        str | None, typer.Option(help="A token crosses once per destination rank, or per copy (expert).")
    ] = None,
    wire: Annotated[str | None, typer.Option(help="Dispatch in bf16, fp8 or mxfp8.")] = None,
    precision: Annotated[str | None, typer.Option(help="Matrix products in fp8 or bf16.")] = None,
    gradients: Annotated[str | None, typer.Option(help="hierarchical, or flat: one ring.")] = None,
    overlap: Annotated[
        str | None, typer.Option(help="none; gradients (and parameters, pipeline); full: the MoE exchange too (1F1B).")
    ] = None,
    bucket_mb: Annotated[float | None, typer.Option(min=0, help="Bucket of gradients or parameters.")] = None,
    gpus_per_domain: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a rack or host that the job takes.")
    ] = None,
    gpus_per_nic: Annotated[int | None, typer.Option(min=1, help="GPUs that share a NIC.")] = None,
    sensitivity: Annotated[
        bool, typer.Option(help="With several numbers of GPUs: which assumption their weak scaling hangs on.")
    ] = True,
    json: Json = None,
    plot: Plot = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the last step's timeline, for Perfetto.")
    ] = None,
) -> int:
    """A training step's communication on an invented cluster, modelled: what hides behind compute, and what doesn't."""
    from a2a.cli import simulate as command
    from a2a.simulate import PRESETS, Job, load_model

    base = Job() if preset is None else PRESETS[parse.word(preset, tuple(PRESETS), "--preset")]
    numbers = [base.gpus] if gpus is None else parse.counts(gpus, "--gpus")
    given = {
        "hardware": hardware, "tp": tp, "pp": pp, "vp": vp, "ep": ep, "micro_batch": micro_batch, "once_per": once_per,
        "wire": wire, "precision": precision, "gradients": gradients, "overlap": overlap, "bucket_mb": bucket_mb,
        "gpus_per_domain": gpus_per_domain, "gpus_per_nic": gpus_per_nic,
    }  # fmt: skip
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if {"pp", "vp"} & set(changed) or model != "deepseek-v3":
        changed["chunk_layers"] = None
    batch = global_batch or base.global_batch * numbers[0] // base.gpus
    job = replace(base, gpus=numbers[0], global_batch=batch, **changed)
    request = command.Request(load_model(model), job, tuple(numbers), sensitivity)
    return command.run(request, command.Output(json, plot, trace))


def _device(asked: str | None, ranks: int | None) -> str:
    return devices.choose(None if asked is None else parse.word(asked, ("cpu", "cuda"), "--device"), ranks)


def check_top_k(top_k: int, experts: int) -> None:
    """Raise ValueError for more experts a token than there are."""
    if top_k > experts:
        raise ValueError(f"--top-k {top_k} is more than --experts {experts}")


def _with_algorithm(op: str, algorithm: str) -> None:
    """Start this command again with the algorithm in A2A_ALGORITHM, from where the planner of every rank takes it."""
    wanted = f"{op}={algorithm}"
    if wanted not in (config().algorithm or "").split(","):
        os.execvp("env", ["env", f"A2A_ALGORITHM={wanted}", sys.executable, "-m", "a2a", *sys.argv[1:]])
