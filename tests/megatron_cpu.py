"""Megatron Core on CPU ranks: what stands in for CUDA there, groups, and layers whose weights every rank can compute.

Megatron asks for streams, events and the current device wherever it runs. On a CPU they mean nothing, so inside `on_cpu()`
they are there and do nothing. Newer versions import triton for kernels that run on GPUs alone; where triton is not
installed, an empty module takes its place.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

TESTED = ("0.16.1", "0.18.2", "0.19.2")
MODULES = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.transformer.moe.moe_layer",
)


def why_skipped() -> str | None:
    """Why Megatron's tests can't run in this environment; None: they can."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return "megatron-core is not installed: pip install '.[trainers]'"
    return None


needs_megatron = pytest.mark.skipif(why_skipped() is not None, reason=str(why_skipped()))


class _Nothing:
    """A CUDA stream or event where there is no CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class _EmptyModule(types.ModuleType):
    """Decorators that leave functions as they are, and attributes that are such decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _decorator


def _import_megatron() -> None:
    """With nothing compiled by inductor, and with an empty triton, which is gone again before torch could find it."""
    if "megatron.core" in sys.modules:
        return
    with mock.patch.object(torch, "compile", _decorator), mock.patch.dict(sys.modules):
        if importlib.util.find_spec("triton") is None:
            for name in ("triton", "triton.language"):
                module = _EmptyModule(name)
                module.__spec__ = importlib.machinery.ModuleSpec(name, None)
                module.__path__ = []
                module.__version__ = "0"
                sys.modules[name] = module
            sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says at length what is not installed
            for name in MODULES:
                importlib.import_module(name)
        imported = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "triton"}
    sys.modules.update(imported)
    moe_utils = sys.modules["megatron.core.transformer.moe.moe_utils"]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]  # 0.16 asks for it without TransformerEngine, too


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron imports and runs inside; outside all is as it was, but for an empty triton."""
    _import_megatron()
    nothing = _Nothing()
    cuda = {
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": lambda *_: nothing,
        "default_stream": lambda *_: nothing,
        "stream": lambda *_: contextlib.nullcontext(),
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name))
        stack.enter_context(mock.patch.object(Tensor, "cuda", lambda self, *_, **__: self))
        stack.enter_context(mock.patch.object(Tensor, "record_stream"))
        tracker = sys.modules["megatron.core.tensor_parallel.random"].CudaRNGStatesTracker
        stack.enter_context(mock.patch.object(tracker, "fork", return_value=contextlib.nullcontext()))
        yield


@contextlib.contextmanager
def model_parallel(**sizes: int) -> Iterator[None]:
    """Megatron's process groups for these sizes, gone afterwards."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def weight(*key: int, shape: tuple[int, ...]) -> Tensor:
    """The same numbers for the same key on every rank."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def config(**changes: Any) -> Any:
    """A float32 model on a CPU; what this version's config doesn't have is left out by the caller."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 24,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**(options | changes))


def moe_config(dispatcher: str, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": "hybridep",
    }
    return config(**(options | changes))


def moe_layer(config: Any, pg_collection: Any = None) -> Any:
    """Megatron's MoELayer on local linears, an expert's weights by its number and this rank's part of it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False).submodules.mlp
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]  # from 0.17 on
    layer = MoELayer(config, submodules, layer_number=1, pg_collection=pg_collection)
    hidden, width = config.hidden_size, config.moe_ffn_hidden_size
    part, parts = dist.get_rank(layer.token_dispatcher.tp_group), layer.token_dispatcher.tp_size
    with torch.no_grad():
        layer.router.weight.copy_(weight(0, shape=(config.num_moe_experts, hidden)))
        for index, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
            expert.linear_fc1.weight.copy_(weight(1, index, shape=(width, hidden)).chunk(parts, 0)[part])
            expert.linear_fc2.weight.copy_(weight(2, index, shape=(hidden, width)).chunk(parts, 1)[part])
    return layer
