"""TorchTitan: its Mixture-of-Experts layers send their tokens through `a2a.ExpertParallel`, by TorchTitan's own door.

    python -m torchtitan.train ... --override.imports a2a.integrations.torchtitan.expert_parallel

replaces each `AllToAllTokenDispatcher` of the model; nothing else changes, and without that option nothing does. A job that
has no such option calls `install()` before its model runs.

Decisions:

* **Rows come as TorchTitan's own dispatcher makes them**, ordered by (expert, rank, token, k): its grouped products see the
  same bits. The weighted sums are ExpertParallel's: float32, in a fixed order, rounded once.
* **One ExpertParallel serves all layers of one kind on one group**, made at the first layer's first call, when hidden size,
  dtype and number of tokens are known: every rank of the group is there, and TorchTitan pads all to one number of tokens.
  Compiled code asks for it while it is traced, and holds it as a constant.
* **More tokens than it was made for** need another one. `max_tokens` names the largest number in advance, which also keeps
  compiled code from being specialised to each.
* **Only the versions in `VERSIONS` are replaced**: the dispatcher is an internal of TorchTitan's, whose arguments changed
  from release to release.
* **Dispatchers derived from it** (torchao's, which pads for quantised experts) keep what they have.

Limits: `debug.spmd_typechecking` does not know a2a's ops. Layers on several streams at once (DualPipe's overlap) follow one
another, since they share a communicator.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

import a2a

VERSIONS = ("0.3.0",)
_log = logging.getLogger("a2a")

# What was made, by number, and the numbers by group and kind. Numbers, since they are what compiled code can hold as
# constants: all layers then share one graph. Groups are held, as Python's object for one may otherwise go before it does;
# what belongs to destroyed ones goes when the next is made.
_instances: dict[int, a2a.ExpertParallel] = {}
_numbers: dict[tuple[Any, ...], int] = {}
_count = itertools.count(1)


@dataclass(frozen=True)
class Metadata:
    """What combine needs of a dispatch."""

    ep: a2a.ExpertParallel
    routing: a2a.Routing


class TokenDispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]  # untyped in TorchTitan
    """TorchTitan's dispatcher for expert parallelism, on a2a."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        """As AllToAllTokenDispatcher's.

        Attributes:
            max_tokens: the most tokens that a rank brings; None: as many as the first call brings, more when more come.
            wire: "fp8" or "mxfp8": how tokens travel; None: as they are.
            num_sms: on GPUs, the most SMs that a2a may use.
        """

        max_tokens: int | None = None
        wire: str | None = None
        num_sms: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options = {"max_tokens": config.max_tokens, "wire": config.wire, "num_sms": config.num_sms}

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """As AllToAllTokenDispatcher's. Differs: `metadata` is a2a's."""
        return _dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """As AllToAllTokenDispatcher's."""
        return _combine(self, routed_output_RD, metadata, x_TD)


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="tokens travel through a2a.ExpertParallel")  # type: ignore[untyped-decorator]
def expert_parallel(
    cfg: AllToAllTokenDispatcher.Config,
    *,
    max_tokens: int | None = None,
    wire: str | None = None,
    num_sms: int | None = None,
) -> TokenDispatcher.Config:
    """The override; its keywords are those of `TokenDispatcher.Config`.

    Raises:
        a2a.UnsupportedError: this version of TorchTitan is not one of VERSIONS.
    """
    _check_version()
    _log.info("torchtitan: a2a replaces a token dispatcher of %d experts, top-%d", cfg.num_experts, cfg.top_k)
    config: TokenDispatcher.Config = derive(
        cfg, TokenDispatcher.Config, max_tokens=max_tokens, wire=wire, num_sms=num_sms
    )
    return config


# ---------------------------------------------------------------------------------- for jobs that name no override


_originals: dict[str, Any] = {}


def install() -> None:
    """Let every AllToAllTokenDispatcher of this process be a2a's, those that are there already too. `uninstall()` undoes it.

    Raises:
        a2a.UnsupportedError: this version of TorchTitan is not one of VERSIONS.
    """
    _check_version()
    if _originals:
        return
    for name, own in (("dispatch", _dispatch), ("combine", _combine)):
        original = _originals[name] = getattr(AllToAllTokenDispatcher, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, _own: Any = own, _original: Any = original, **kwargs: Any) -> Any:
            chosen = _own if type(self) is AllToAllTokenDispatcher else _original
            return chosen(self, *args, **kwargs)

        setattr(AllToAllTokenDispatcher, name, call)
    _log.info("torchtitan: a2a replaces AllToAllTokenDispatcher.dispatch and .combine")


def uninstall() -> None:
    """Give AllToAllTokenDispatcher its own methods back."""
    while _originals:
        setattr(AllToAllTokenDispatcher, *_originals.popitem())


# ------------------------------------------------------------------------------------------------------ what runs


def _dispatch(
    self: Any, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
) -> tuple[Tensor, Tensor, Any]:
    if self.ep_mesh is None:  # no expert parallelism: tokens are only sorted
        return LocalTokenDispatcher.dispatch(  # type: ignore[no-any-return]
            self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
    options = getattr(self, "options", {})
    max_tokens = options.get("max_tokens") or x_TD.shape[0]
    number = _prepared(
        self.ep_mesh.get_group(),
        self.num_experts,
        self.top_k,
        x_TD.shape[1],
        max_tokens,
        x_TD.dtype,
        x_TD.device,
        options.get("wire"),
        options.get("num_sms"),
    )
    ep = _instances[number]
    rows_RD, rows_per_expert_L, routing = ep.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
    return rows_RD, rows_per_expert_L.to(num_local_tokens_per_expert_E.dtype), Metadata(ep, routing)


def _combine(self: Any, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
    if self.ep_mesh is None:
        return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)  # type: ignore[no-any-return]
    return metadata.ep.combine(routed_output_RD, metadata.routing)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepared(
    group: Any,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    wire: str | None,
    num_sms: int | None,
) -> int:
    """The number of the group's instance of this kind, made now (collectively) if none takes so many tokens."""
    kind = (group, num_experts, top_k, hidden, dtype, device.type, wire, num_sms)
    known = _numbers.get(kind)
    if known is not None and _instances[known].spec.max_tokens >= max_tokens:
        return known
    for other in [other for other in _numbers if other[0] not in c10d._world.pg_map]:
        del _instances[_numbers.pop(other)]
    ep = a2a.ExpertParallel(
        group,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        wire=wire,
        num_sms=num_sms,
    )
    if known is not None:  # it is too small, but backward passes of its dispatches may be to come
        _numbers[(*kind, known)] = known
    number = _numbers[kind] = next(_count)
    _instances[number] = ep
    _log.info(
        "torchtitan: ExpertParallel of %d experts on %d ranks, hidden %d, up to %d tokens of %s (%s)",
        num_experts, group.size(), hidden, max_tokens, dtype, ep.plan.algorithm.name,
    )  # fmt: skip
    return number


def _check_version() -> None:
    version = importlib.metadata.version("torchtitan")
    if version not in VERSIONS:
        raise a2a.UnsupportedError(
            f"a2a.integrations.torchtitan: TorchTitan {version} is installed, and a2a knows {', '.join(VERSIONS)}: it "
            f"stands in for TorchTitan's AllToAllTokenDispatcher, whose methods change from release to release. Install "
            f'one of those, or leave the override out and use backend "a2a" for the expert-parallel group'
        )


__all__ = ["TokenDispatcher", "expert_parallel", "install", "uninstall"]
