"""What specifications don't say about a machine and a job, and where each number comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """What specifications don't say; fixed before anything was compared. `SOURCES` says where each comes from."""

    compute_fraction: float = 0.40
    scale_up_fraction: float = 0.86
    scale_out_fraction: float = 0.90
    hbm_fraction: float = 0.86
    scale_up_latency_us: float = 2.1
    scale_out_latency_us: float = 14.0
    gradient_bytes: float = 2.0
    parameter_bytes: float = 2.0
    optimizer_bytes: float = 28.0


SOURCES = {
    "compute_fraction": "assumption: of the dense peak while computing; whole Llama 3 steps reach 0.38 to 0.43 of BF16 peak "
    "on H100 (arXiv:2407.21783, table 4)",
    "scale_up_fraction": "measured on two H200: 388 of 450 GB/s each way, both at once; for NVLink 5 an assumption",
    "scale_out_fraction": "quoted: DeepEP's first README, 43 to 47 GB/s over 400 Gb/s InfiniBand (50 GB/s); for 800 Gb/s an "
    "assumption",
    "hbm_fraction": "measured on H200: a copy reads and writes 4.15 of 4.8 TB/s; for others an assumption",
    "scale_up_latency_us": "measured on two H200: 2 KiB to the peer; for NVLink 5 an assumption",
    "scale_out_latency_us": "quoted: NCCL's cost model, src/graph/tuning.cc (network, ring, Simple)",
    "gradient_bytes": "quoted: Megatron-Bridge's DeepSeek-V3 recipe for GB300, grad_reduce_in_fp32 is False",
    "parameter_bytes": "assumption: parameters are gathered in bf16",
    "optimizer_bytes": "assumption: Adam reads and writes float32 weights and two moments, reads and writes bf16 besides",
}
