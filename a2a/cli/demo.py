"""`a2a demo`: a MoE layer over ranks, forward and backward: right, and how much faster than NCCL or gloo.

Every rank knows every other's tokens and all experts' weights (from the seed), so each can compute the layer densely by
itself and hold its own outputs and gradients against that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from a2a.cli import show
from a2a.cli.devices import NCCL_REFUSES, Site, site
from a2a.cli.ranks import Emit, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    import a2a
    from a2a.measure import Control

TOLERANCE = 1e-5  # largest difference from the dense layer (float64), relative to its largest value: float32 rounding
TIMED_S = 2.5
CPU_TOKENS, CUDA_TOKENS = 1024, 8192
BASELINE = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Request:
    """The layer to run. Sent to every rank."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    repeat: int | None = None
    device: str = "cpu"


def run(request: Request, ranks: int | None, default_ranks: int) -> int:
    """Run the demo and print what it found; returns the exit code: 1 if a2a's layer was not the dense one."""
    checks: dict[str, float] = {}
    times: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with show.progress(3) as steps:

        def receive(message: dict[str, Any]) -> None:
            if "begin" in message:
                steps.begin(message["begin"])
            checks.update(message.get("checks", {}))
            facts.update(message.get("facts", {}))
            times.extend(message.get("times", []))

        run_ranks(work, request, ranks, receive, default=default_ranks)
    if not facts:  # a rank other than 0, under a launcher
        return 0
    return _show(request, facts, checks, times)


def _show(request: Request, facts: dict[str, Any], checks: dict[str, float], times: Sequence[dict[str, Any]]) -> int:
    out = show.console()
    ranks, baseline = facts["ranks"], BASELINE[request.device]
    name = "NCCL" if baseline == "nccl" else baseline
    out.print(
        f"A Mixture-of-Experts layer on [bold]{ranks} ranks[/bold]: {request.tokens} tokens each, hidden {request.hidden}, "
        f"{request.experts} experts, top-{request.top_k}, float32.\n[dim]{facts['machine']}; {facts['topology']}[/dim]\n"
    )
    rows = [
        [what, f"{error:.1e}", "[green]yes[/green]" if error <= TOLERANCE else "[bold red]NO[/bold red]"]
        for what, error in checks.items()
    ]
    right = all(error <= TOLERANCE for error in checks.values())
    show.print_table(
        out,
        ["against a dense layer", "largest difference", "equal"],
        rows,
        title="Is it right? (float32 against float64)",
    )
    out.print()
    rows = [
        [
            entry["part"].replace("_", " "),
            show.us_text(entry["a2a"]),
            show.us_text(entry[baseline]),
            f"[bold]{show.ratio_text(entry[baseline] / entry['a2a'])}[/bold]",
        ]
        for entry in times
    ]
    show.print_table(
        out,
        ["phase", "a2a us", f"{name} us", "times faster"],
        rows,
        title="How fast? (p50 of alternating runs, slowest rank)",
    )
    total = times[-1]
    faster = total[baseline] / total["a2a"]
    out.print()
    if right:
        out.print(
            f"[bold]a2a moved the tokens of {ranks} ranks to their experts and back {show.ratio_text(faster)[:-1]} times as "
            f"fast as {name}, and every output and gradient is that of a dense layer.[/bold]"
        )
    else:
        out.print("[bold red]a2a's layer is NOT the dense one on this machine; please report this.[/bold red]")
    return 0 if right else 1


# ----------------------------------------------------------------------------------------------------- on every rank


def work(request: Request, emit: Emit) -> None:
    """Check the layer against the dense one, then time dispatch and combine against the baseline; on each rank."""
    from a2a.measure import Control

    control = Control()
    with site(request.device, control) as here:
        _work(request, control, here, emit)


def _work(request: Request, control: Control, here: Site, emit: Emit) -> None:
    import torch

    import a2a
    from a2a.cli import moe_contenders as moe
    from a2a.cli.moe_case import MoeCase
    from a2a.measure import alternate, environment

    baseline = BASELINE[request.device]
    with a2a.communicator(here.group, device=here.device) as comm:
        env = environment(comm.topology.summary(), "a2a demo", here.device)
        facts = {"ranks": comm.world_size, "machine": env["gpu"] or env["cpu"], "topology": env["topology"]}
        emit({"begin": "checking against a dense layer", "facts": facts})
        names, errors = zip(*_check(request, comm, control).items(), strict=True)
        emit({"checks": dict(zip(names, control.maximum(errors), strict=True))})
        emit({"begin": f"timing a2a and {baseline} in turn"})
        case = MoeCase(
            tokens=request.tokens,
            hidden=request.hidden,
            experts=request.experts,
            top_k=request.top_k,
            dtype=torch.float32,
            ranks=comm.world_size,
            device=str(here.device),
        )
        refused = NCCL_REFUSES if baseline == "nccl" and here.group is None else ""
        contenders = [
            moe.a2a_contender(case, comm, here.clock),
            moe.c10d_contender(baseline, case, comm.rank, here.clock, here.group, why_not=refused),
        ]
        timings = alternate(contenders, control, budget_s=TIMED_S, repeat=request.repeat, clock=here.clock)
        wrong = {name: parts["total"].wrong for name, parts in timings.items() if parts["total"].wrong}
        if wrong:
            raise RuntimeError(f"the timed layers gave wrong elements: {wrong}")
        times = [
            {"part": part, **{name: timings[name][part].p50_us for name in ("a2a", baseline)}}
            for part in (*moe.PARTS, "total")
        ]
        emit({"begin": "done", "times": times})
        del contenders


@dataclass(frozen=True)
class _Weights:
    router_HE: Tensor
    up_EHF: Tensor
    down_EFH: Tensor


def _check(request: Request, comm: a2a.Communicator, control: Control) -> dict[str, float]:
    """Run the layer once; this rank's largest differences from the dense layer, relative to the largest value."""
    import torch

    import a2a

    tokens, hidden, experts = min(request.tokens, 128), request.hidden, request.experts
    generator = torch.Generator(comm.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        normal = torch.randn(*shape, generator=generator, dtype=torch.float64, device=comm.device)
        return normal.mul_(shape[-2] ** -0.5)

    feed = 64
    dense = _Weights(random(hidden, experts), random(experts, hidden, feed), random(experts, feed, hidden))
    x_all, grad_all = random(comm.world_size, tokens, hidden), random(comm.world_size, tokens, hidden)
    first = sum(_owned(experts, comm.world_size)[: comm.rank])
    here = slice(first, first + _owned(experts, comm.world_size)[comm.rank])

    mine = _Weights(
        dense.router_HE.float().requires_grad_(),
        dense.up_EHF[here].float().requires_grad_(),
        dense.down_EFH[here].float().requires_grad_(),
    )
    x = x_all[comm.rank].float().requires_grad_()
    layer = a2a.ExpertParallel(
        num_experts=experts, top_k=request.top_k, hidden=hidden, max_tokens=tokens, dtype=torch.float32, comm=comm
    )
    weights, ids = (x @ mine.router_HE).softmax(dim=-1).topk(request.top_k, dim=-1)
    rows, rows_per_expert, routing = layer.dispatch(x, ids, weights)
    outputs = [
        torch.nn.functional.gelu(of_expert @ up) @ down
        for of_expert, up, down in zip(
            torch.split(rows, rows_per_expert.tolist()), mine.up_EHF, mine.down_EFH, strict=True
        )
    ]
    y = layer.combine(torch.cat(outputs), routing)
    torch.autograd.backward(y, grad_all[comm.rank].float())

    leaves = [leaf.requires_grad_() for leaf in (dense.router_HE, dense.up_EHF, dense.down_EFH, x_all)]
    y_all = torch.stack([_dense(x_rank, dense, request.top_k) for x_rank in x_all])
    torch.autograd.backward(y_all, grad_all)
    grads = [leaf.grad for leaf in leaves]
    total = control.total(mine.router_HE.grad.flatten().tolist())  # type: ignore[union-attr]
    router_grad = torch.tensor(total, device=comm.device).view_as(dense.router_HE)
    return {
        "output": _difference(y, y_all[comm.rank]),
        "gradient of the tokens": _difference(x.grad, grads[3][comm.rank]),  # type: ignore[index]
        "gradient of the router": _difference(router_grad, grads[0]),
        "gradients of the experts": max(
            _difference(mine.up_EHF.grad, grads[1][here]),  # type: ignore[index]
            _difference(mine.down_EFH.grad, grads[2][here]),  # type: ignore[index]
        ),
    }


def _dense(x_TH: Tensor, weights: _Weights, top_k: int) -> Tensor:
    """The layer without dispatch: every expert on every token, weighted with what the router says (0 beyond top_k)."""
    import torch

    values, ids = (x_TH @ weights.router_HE).softmax(dim=-1).topk(top_k, dim=-1)
    gates_TE = x_TH.new_zeros(len(x_TH), weights.router_HE.shape[1]).scatter(1, ids, values)
    hidden_ETF = torch.nn.functional.gelu(torch.einsum("th,ehf->etf", x_TH, weights.up_EHF))
    y_TH: Tensor = torch.einsum("te,etf,efh->th", gates_TE, hidden_ETF, weights.down_EFH)
    return y_TH


def _owned(experts: int, ranks: int) -> list[int]:
    base, more = divmod(experts, ranks)
    return [base + (rank < more) for rank in range(ranks)]


def _difference(value: Tensor | None, reference: Tensor | None) -> float:
    if value is None or reference is None:
        return float("nan")
    if reference.numel() == 0:
        return 0.0
    scale = max(float(reference.detach().abs().max()), 1e-30)
    return float((value.detach().double() - reference.detach()).abs().max()) / scale
