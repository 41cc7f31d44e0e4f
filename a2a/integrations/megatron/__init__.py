"""Megatron Core on a2a: MoE dispatchers, tensor-parallel collectives and gradient buckets.

    import a2a.integrations.megatron

    print(a2a.integrations.megatron.install())  # on every rank, before process groups and model are made

and, for MoE layers, `--moe-token-dispatcher-type alltoall`, or `flex` with `--moe-flex-dispatcher-backend hybridep`.

Decisions:

* **Megatron has no registry**, so names of its modules are rebound (`_plan`), and nothing inside its classes: layers made
  before `install()` are as they were, those made before `uninstall()` stay on a2a. A new backend name would fail checks
  elsewhere, hence "hybridep".
* **Only known versions.** What is rebound is private to Megatron. A version whose tests haven't run here, or whose functions
  take other arguments than the known ones (a fork), is refused, before anything is changed.
* **Groups**: all parts call a2a by name and work on any process group, those of a `pg_collection` of yours too. Those that
  `parallel_state.create_group` makes for expert and tensor parallelism get backend "a2a" besides, so that calls which go to
  torch.distributed directly (Megatron's asynchronous ones, TransformerEngine's) are a2a's as well. Make your own with
  `backend="a2a"` for the same.
* **The 1F1B schedule** runs each step's backward by itself; see `exchange` and `dispatchers`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import a2a
from a2a.integrations.megatron import dispatchers as _dispatchers
from a2a.integrations.megatron import gradients as _gradients
from a2a.integrations.megatron import groups as _groups
from a2a.integrations.megatron import tensor_parallel as _tensor_parallel
from a2a.integrations.megatron.exchange import Exchanges, Settings

_log = logging.getLogger("a2a")

KNOWN = ("0.16", "0.17", "0.18", "0.19")  # series of megatron-core that were read and tested
GROUPS = _groups.GROUPS


@dataclass(frozen=True)
class Replacement:
    """A name of one of Megatron's modules and what takes its place.

    Attributes:
        make: from what is there now.
        parameters: those that it takes, or the first of them; otherwise it isn't what a2a knows.
    """

    module: Any
    name: str
    parameters: tuple[str, ...]
    why: str
    make: Callable[[Any], Any]

    @property
    def path(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    def unknown(self) -> str | None:
        """Why it can't be replaced; None: it can."""
        before = getattr(self.module, self.name, None)
        if before is None:
            return f"{self.path} is missing"
        called = before.forward if hasattr(before, "forward") and hasattr(before, "apply") else before
        found = tuple(inspect.signature(called).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"{self.path} takes {list(found)}; expected {list(self.parameters)}"
        return None


@dataclass(frozen=True)
class Report:
    """What `install()` did.

    Attributes:
        version: of megatron-core.
        replaced: (name in Megatron, what it is for).
    """

    version: str
    replaced: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(
            [f"megatron-core {self.version}: a2a serves", *(f"  {name}: {why}" for name, why in self.replaced)]
        )


_installed: list[tuple[Replacement, Any, Any]] = []  # in order, with what was there and what is there


def install(
    *,
    dispatchers: bool = True,
    tensor_parallel: bool = True,
    gradients: bool = True,
    groups: Collection[str] = GROUPS,
    max_tokens: int | None = None,
    wire: str | None = None,
    num_sms: int | None = None,
) -> Report:
    """Let the Megatron Core of this process communicate through a2a. Call it on all ranks alike, before groups are made.

    Args:
        dispatchers: MoE token dispatchers: all-to-all, and flex with backend "hybridep".
        tensor_parallel: the collectives of `tensor_parallel.mappings`, and those that `tensor_parallel.layers` has names
            for.
        gradients: gradient and parameter synchronisation of Megatron's DistributedDataParallel.
        groups: descriptions of the groups to which `parallel_state.create_group` gives backend "a2a".
        max_tokens: the most tokens that a rank ever brings to a MoE layer. None: the first dispatch finds out, and a larger
            one later makes new buffers; where ranks may differ (variable_seq_lengths), each dispatch asks all ranks, and
            the host waits for the answer.
        wire: how tokens travel to their experts, and gradients back: None: as they are; "fp8" or "mxfp8", as in
            `ExpertParallel`; "recipe": as Megatron's fp8 recipe quantises what the experts multiply: "mxfp8" for
            mxfp8, "fp8" for blockwise, as they are with any other and without fp8. Changes results: backward sees rows
            that were quantised once more.
        num_sms: as in `ExpertParallel`.
    Returns: what was replaced; print it, or log it. The logger `a2a` says the same.
    Raises:
        UnsupportedError: there is no megatron-core, or not a known one; says what to do. Nothing is changed.
        RuntimeError: it is installed already.
        ValueError: an argument is impossible.
    """
    if _installed:
        raise RuntimeError("a2a.integrations.megatron is installed already; call uninstall() first")
    if wire not in (None, "fp8", "mxfp8", "recipe"):
        raise ValueError(f"install: wire={wire!r}; expected None, 'fp8', 'mxfp8' or 'recipe'")
    version = _known_version()
    plan = list(_plan(dispatchers, tensor_parallel, gradients, frozenset(groups), (max_tokens, wire, num_sms)))
    unknown = list(filter(None, (replacement.unknown() for replacement in plan)))
    if unknown:
        raise a2a.UnsupportedError(
            f"a2a.integrations.megatron: megatron-core {version} here is not the released one that a2a knows: "
            f"{'; '.join(unknown)}. Nothing was replaced. Leave out the part (install(gradients=False), ...), or use "
            f"a release"
        )
    for replacement in plan:
        before = getattr(replacement.module, replacement.name)
        after = replacement.make(before)
        _installed.append((replacement, before, after))
        setattr(replacement.module, replacement.name, after)
    report = Report(version, tuple((replacement.path, replacement.why) for replacement in plan))
    _log.info("%s", report)
    return report


def uninstall() -> None:
    """Put back what `install()` replaced. Layers and groups that were made meanwhile stay on a2a.

    A name that somebody else has rebound since then is left alone, and a warning says so.
    """
    while _installed:
        replacement, before, after = _installed.pop()
        if getattr(replacement.module, replacement.name, None) is after:
            setattr(replacement.module, replacement.name, before)
        else:
            _log.warning("a2a: %s was rebound after install(); it is left as it is", replacement.path)


def _known_version() -> str:
    try:
        version = str(importlib.import_module("megatron.core").__version__)
    except ImportError as error:
        raise a2a.UnsupportedError(
            f"a2a.integrations.megatron: megatron.core can't be imported: {error}; pip install megatron-core, or what it "
            f"needs"
        ) from error
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise a2a.UnsupportedError(
            f"a2a.integrations.megatron: megatron-core {version} is not known; known are {', '.join(KNOWN)}. It replaces "
            f"private parts, which other versions may use otherwise. Without it, process groups of backend 'a2a' work "
            f"with every version"
        )
    return version


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError as error:
        raise a2a.UnsupportedError(
            f"a2a.integrations.megatron: megatron.core.{name} can't be imported: {error}; install what it needs, or leave "
            f"out the part that needs it, such as install(dispatchers=False)"
        ) from error


def _plan(
    dispatchers: bool,
    tensor_parallel: bool,
    gradients: bool,
    groups: frozenset[str],
    exchange: tuple[int | None, str | None, int | None],
) -> Iterator[Replacement]:
    """Everything that is to be replaced. Imports the modules of Megatron and changes nothing."""
    if dispatchers:
        steps, layer = _module("transformer.moe.token_dispatcher"), _module("transformer.moe.moe_layer")
        settings = Settings(*exchange, align_size=steps.get_align_size_for_quantization, capacity=steps.get_capacity)
        served = _dispatchers.exchange_class(settings, Exchanges())
        arguments = ("group", "num_local_experts", "num_experts", "config")
        why = "the flex dispatcher with backend hybridep"
        yield Replacement(steps, "_HybridEPManager", arguments, why, lambda _: served)
        arguments = ("num_local_experts", "local_expert_indices", "config", "pg_collection")
        make = partial(_dispatchers.all_to_all_class, exchange=served)
        yield Replacement(layer, "MoEAlltoAllTokenDispatcher", arguments, "the all-to-all dispatcher", make)
    if tensor_parallel:
        mappings, layers = _module("tensor_parallel.mappings"), _module("tensor_parallel.layers")
        for name, (parameters, function) in _tensor_parallel.functions(mappings).items():
            yield Replacement(
                mappings, name, parameters, "tensor and sequence parallelism", partial(_instead, function)
            )
        for module, (name, function) in itertools.product((mappings, layers), _tensor_parallel.ALIASES.items()):
            yield Replacement(module, name, (), "tensor and sequence parallelism", partial(_instead, function))
    if gradients:
        buckets = _module("distributed.param_and_grad_buffer")
        arguments = ("buckets", "ddp_config", "collective_group", "collective_group_size")
        make = partial(_gradients.bucket_group_class, shard_buffer=buckets.shard_buffer)
        yield Replacement(buckets, "_ParamAndGradBucketGroup", arguments, "gradients and parameters", make)
    if groups:
        why = f"backend a2a for {', '.join(sorted(groups))}"
        make = partial(_groups.create_group, groups=groups)
        yield Replacement(_module("parallel_state"), "create_group", _groups.PARAMETERS, why, make)


def _instead(function: Any, before: Any) -> Any:
    return function


__all__ = ["GROUPS", "KNOWN", "Replacement", "Report", "install", "uninstall"]
