"""What is trained and how it is cut: a model's sizes, and the parallel layout of a job."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from a2a.topology.presets import HARDWARE

WIRE_BYTES = {"bf16": 2.0, "fp8": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}  # an element with its share of a scale
OVERLAPS = ("none", "gradients", "full")


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer with Mixture-of-Experts layers; all of a layer's attention is `attention_params` and scores."""

    name: str
    hidden: int
    layers: int
    dense_layers: int  # the first ones, without experts
    attention_params: int  # of a layer
    score_flop: int  # a token and key, forward
    dense_intermediate: int
    expert_intermediate: int
    experts: int
    shared_experts: int
    top_k: int
    vocab: int
    mtp_layers: int
    sequence: int

    def attention_flop(self) -> float:
        """Of a token and layer, forward; a causal mask leaves half of the keys."""
        return 2 * self.attention_params + self.score_flop * self.sequence / 2

    def mlp_flop(self, *, moe: bool) -> float:
        """Of a token and layer, forward: top-k and shared experts and the router, or the dense MLP."""
        if not moe:
            return 6 * self.hidden * self.dense_intermediate
        return 2 * ((self.top_k + self.shared_experts) * self.expert_params() + self.hidden * self.experts)

    def expert_params(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    def head_flop(self) -> float:
        """Of a token, forward: logits."""
        return 2 * self.hidden * self.vocab

    def token_flop(self) -> float:
        """Of a token, forward and backward (twice the forward), without the multi-token-prediction layers."""
        layers = sum(self.attention_flop() + self.mlp_flop(moe=i >= self.dense_layers) for i in range(self.layers))
        return 3 * (layers + self.head_flop())


def _mla_params(hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> int:
    q = hidden * q_rank + q_rank * heads * (nope + rope)
    kv = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    return q + kv + heads * value * hidden


# DeepSeek-V3 Technical Report, arXiv:2412.19437, sections 2 and 4.2; sequence length 4,096 in pre-training.
DEEPSEEK_V3 = Model(
    name="deepseek-v3",
    hidden=7168,
    layers=61,
    dense_layers=3,
    attention_params=_mla_params(hidden=7168, heads=128, q_rank=1536, kv_rank=512, nope=128, rope=64, value=128),
    score_flop=2 * 128 * (128 + 64 + 128),
    dense_intermediate=18432,
    expert_intermediate=2048,
    experts=256,
    shared_experts=1,
    top_k=8,
    vocab=129280,
    mtp_layers=1,
    sequence=4096,
)
MODELS = {DEEPSEEK_V3.name: DEEPSEEK_V3}


def load_model(name_or_path: str) -> Model:
    """A model by name, or from a JSON file with `Model`'s fields.

    Raises:
        ValueError: there is no such model, or a field is missing, unknown or no number.
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    try:
        data = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {name_or_path}: neither one of {', '.join(MODELS)} nor a readable JSON file ({error})"
        ) from error
    names = [field.name for field in fields(Model)]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        raise ValueError(f"--model {name_or_path}: expected an object with exactly the keys {', '.join(names)}")
    wrong = [name for name in names[1:] if not isinstance(data[name], int) or data[name] < 0]
    if wrong:
        raise ValueError(f"--model {name_or_path}: {wrong[0]} is {data[wrong[0]]!r}; expected a whole number from 0")
    return Model(**data)


@dataclass(frozen=True)
class Job:
    """A training job's layout. Ranks are numbered as Megatron does: TP within EP and DP within PP, the innermost first.

    Args:
        hardware: a name in `a2a.topology.presets.HARDWARE`.
        gpus: all of them.
        global_batch: sequences a step.
        once_per: "rank": a token crosses to a rank once; "copy": once for each expert.
        wire: how dispatch (and combine's backward) send rows; the way back is bf16.
        precision: of the matrix products.
        gradients: "hierarchical" (reduce in the domain, then across) or "flat" (one ring through all ranks).
        overlap: "none": all communication stands still; "gradients": gradients, parameters and pipeline sends run beside
            compute; "full": the MoE exchange of one micro-batch's forward beside another's backward as well.
        gpus_per_domain: GPUs of a domain that the job takes; None: the hardware's `job_size`.
        gpus_per_nic: GPUs that share a NIC of the hardware's line rate.
        chunk_layers: layers of each virtual stage in model order; None: as even as can be.
    """

    hardware: str = "gb300"
    gpus: int = 256
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 32
    micro_batch: int = 1
    global_batch: int = 4096
    once_per: str = "rank"
    wire: str = "bf16"
    precision: str = "fp8"
    gradients: str = "hierarchical"
    overlap: str = "full"
    bucket_mb: float = 80.0
    gpus_per_domain: int | None = None
    gpus_per_nic: int = 1
    chunk_layers: tuple[int, ...] | None = None

    @property
    def dp(self) -> int:
        """Ranks that hold the same attention weights."""
        return self.gpus // (self.pp * self.tp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.pp * self.ep)

    @property
    def micro_batches(self) -> int:
        """Of a data-parallel replica, a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def domain(self) -> int:
        """GPUs of a domain that the job takes."""
        return self.gpus_per_domain or HARDWARE[self.hardware].job_size

    def layers_of_chunks(self, model: Model) -> tuple[int, ...]:
        """Layers of each of the pp * vp virtual stages."""
        count = self.pp * self.vp
        return self.chunk_layers or tuple(
            model.layers * (i + 1) // count - model.layers * i // count for i in range(count)
        )

    def check(self, model: Model) -> None:
        """Raise ValueError for a layout that can't be; says which number and what would do."""
        words = ((self.hardware, HARDWARE, "hardware"), (self.wire, WIRE_BYTES, "wire"),
                 (self.once_per, ("rank", "copy"), "once_per"), (self.overlap, OVERLAPS, "overlap"),
                 (self.gradients, ("hierarchical", "flat"), "gradients"),
                 (self.precision, ("fp8", "bf16"), "precision"))  # fmt: skip
        for word, known, name in words:
            if word not in known:
                raise ValueError(f"simulate: {name} is {word!r}; expected one of {', '.join(known)}")
        for name in ("gpus", "tp", "pp", "vp", "ep", "micro_batch", "global_batch", "bucket_mb", "gpus_per_nic"):
            if not getattr(self, name) > 0:
                raise ValueError(f"simulate: {name} is {getattr(self, name)}; expected more than 0")
        parts = ((self.gpus, self.pp * self.tp, "GPUs", "TP x PP"), (self.gpus // self.pp, self.ep, "GPUs a stage", "EP"),
                 (self.global_batch, self.micro_batch * self.dp, "sequences a step", "micro-batch x DP"),
                 (model.experts, self.ep, "experts", "EP"), (self.ep, self.tp, "ranks in EP", "TP"))  # fmt: skip
        for whole, part, what, by in parts:
            if whole % max(part, 1) or whole < part:
                raise ValueError(f"simulate: {whole} {what} are no multiple of {by} = {part}")
        if self.vp > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise ValueError(
                f"simulate: VP {self.vp} needs PP > 1 and micro-batches ({self.micro_batches}) in multiples of PP {self.pp}"
            )
        chunks = self.layers_of_chunks(model)
        if len(chunks) != self.pp * self.vp or sum(chunks) != model.layers or min(chunks) < 1:
            raise ValueError(
                f"simulate: layers {chunks} of the virtual stages; expected {self.pp * self.vp} numbers from 1, "
                f"{model.layers} in all"
            )
        if self.domain > HARDWARE[self.hardware].domain_size:
            raise ValueError(
                f"simulate: {self.domain} GPUs of a domain; {self.hardware} has {HARDWARE[self.hardware].domain_size}"
            )
        for size, stride in ((self.tp, 1), (self.ep, 1), (self.dp, self.tp), (self.expert_dp, self.ep)):
            spread(size, stride, self.domain)


def spread(size: int, stride: int, domain: int) -> tuple[int, int]:
    """How a group of `size` ranks, `stride` apart, lies over domains: (members in each, domains).

    Raises:
        ValueError: it lies unevenly, so that one GPU can't stand for all.
    """
    block = size * stride
    outer, inner = max(block, domain), min(block, domain)
    if outer % inner or (stride < domain and domain % stride) or (stride >= domain and stride % domain):
        raise ValueError(
            f"simulate: groups of {size} ranks, {stride} apart, lie unevenly over domains of {domain}; take a number of "
            f"GPUs of each domain that they divide, such as {max(1 << int(math.log2(domain)), 1)}"
        )
    local = min(size, max(domain // stride, 1))
    return local, size // local


# Megatron-Bridge, scripts/performance/configs/deepseek/deepseek_workload_base_configs.py: DeepSeek-V3 on 256 GB300 in MXFP8
# (PP2, VP8 with layout "Et*4|(t*4|)*14tmL", EP32, micro-batch 1, MoE all-to-all overlapped; global batch 4,096 in variant
# V2). Gradients are reduced in bf16 there (grad_reduce_in_fp32 is False).
PRESETS = {
    "deepseek-v3-gb300": Job(
        hardware="gb300", gpus=256, pp=2, vp=8, ep=32, micro_batch=1, global_batch=4096, wire="mxfp8", precision="fp8",
        chunk_layers=(*[4] * 15, 1),
    ),
}  # fmt: skip
