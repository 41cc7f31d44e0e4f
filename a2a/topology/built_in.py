"""Costs where nothing was measured: those of machines that were, in proportion to a topology's links and cores."""

from __future__ import annotations

from a2a.topology.costs import Costs, Curve
from a2a.topology.model import Topology
from a2a.topology.presets import CPU_SCALE_UP, H200_NVLINK

KIB, MIB = 1 << 10, 1 << 20


def _curve(*points: tuple[float, float]) -> Curve:
    return Curve(tuple((int(size), us) for size, us in points))


# One machine of two cores (Intel Xeon, 2 MiB of L2 each), a rank on each, in us. copy, stream, push and stage beyond 8 MiB
# are what bench/results has; other curves go on at the rate of their last point.
_CPU = {
    "copy": _curve(
        (3 * KIB, 0.0408),
        (12 * KIB, 0.121),
        (48 * KIB, 1.37),
        (192 * KIB, 5.87),
        (384 * KIB, 10.7),
        (768 * KIB, 24),
        (1536 * KIB, 109),
        (3 * MIB, 283),
        (6 * MIB, 667),
        (16 * MIB, 2428),
        (64 * MIB, 11283),
    ),
    "stream": _curve(
        (768 * KIB, 39.5), (1536 * KIB, 85), (3 * MIB, 209), (6 * MIB, 421), (16 * MIB, 1800), (64 * MIB, 7165)
    ),
    "eager": _curve((3 * KIB, 0.0713), (12 * KIB, 0.269)),
    "push": _curve(
        (3 * KIB, 0.0414),
        (12 * KIB, 0.115),
        (48 * KIB, 1.38),
        (192 * KIB, 5.83),
        (384 * KIB, 10.6),
        (768 * KIB, 39.5),
        (1536 * KIB, 83.2),
        (3 * MIB, 206),
        (6 * MIB, 422),
        (16 * MIB, 1800),
        (64 * MIB, 7165),
    ),
    "read": _curve(
        (48 * KIB, 2.68), (192 * KIB, 9.59), (384 * KIB, 18.1), (768 * KIB, 39.6), (1536 * KIB, 144), (3 * MIB, 485)
    ),
    "stage": _curve(
        (48 * KIB, 2.49),
        (192 * KIB, 10.6),
        (384 * KIB, 24.6),
        (768 * KIB, 90.8),
        (1536 * KIB, 210),
        (3 * MIB, 487),
        (6 * MIB, 974),
        (8 * MIB, 1814),
        (32 * MIB, 7532),
    ),
    "gather": _curve(
        (3 * KIB, 0.0831),
        (12 * KIB, 0.303),
        (48 * KIB, 2.97),
        (192 * KIB, 11.2),
        (384 * KIB, 22.7),
        (768 * KIB, 55),
        (1536 * KIB, 162),
        (3 * MIB, 358),
        (6 * MIB, 1010),
    ),
    "one_shot": _curve((3 * KIB, 0.0785), (12 * KIB, 0.346), (48 * KIB, 2.82)),
    "reduce_staged": _curve(
        (3 * KIB, 0.0912),
        (12 * KIB, 0.801),
        (48 * KIB, 3.18),
        (192 * KIB, 12.1),
        (384 * KIB, 27.3),
        (768 * KIB, 92.4),
        (1536 * KIB, 220),
        (3 * MIB, 417),
        (6 * MIB, 873),
    ),
    "reduce_loaded": _curve(
        (3 * KIB, 0.0534),
        (12 * KIB, 0.233),
        (48 * KIB, 1.8),
        (192 * KIB, 7.22),
        (384 * KIB, 14.5),
        (768 * KIB, 66.6),
        (1536 * KIB, 159),
        (3 * MIB, 343),
        (6 * MIB, 947),
    ),
    "reduce_gather": _curve(
        (3 * KIB, 0.154),
        (12 * KIB, 1.41),
        (48 * KIB, 5.68),
        (192 * KIB, 22.5),
        (384 * KIB, 46.9),
        (768 * KIB, 110),
        (1536 * KIB, 260),
        (3 * MIB, 528),
        (6 * MIB, 1220),
    ),
    "reduce_push": _curve(
        (3 * KIB, 0.0848),
        (12 * KIB, 0.243),
        (48 * KIB, 2.73),
        (192 * KIB, 11.3),
        (384 * KIB, 21.7),
        (768 * KIB, 47.1),
        (1536 * KIB, 169),
        (3 * MIB, 357),
        (6 * MIB, 1140),
    ),
    "reduce_float32": _curve((3 * KIB, 0.0374), (48 * KIB, 0.935), (768 * KIB, 12.8)),
    "reduce_bfloat16": _curve((3 * KIB, 0.102), (48 * KIB, 1.66), (768 * KIB, 24.3)),
    "reduce_float16": _curve((3 * KIB, 0.0809), (48 * KIB, 1.25), (768 * KIB, 19.3)),
    "reduce_float64": _curve((3 * KIB, 0.088), (48 * KIB, 1.52), (768 * KIB, 23.7)),
    "reduce_uint8": _curve((3 * KIB, 0.258), (48 * KIB, 3.89), (768 * KIB, 61.9)),
    "reduce_int8": _curve((3 * KIB, 0.26), (48 * KIB, 3.99), (768 * KIB, 62.4)),
    "reduce_int16": _curve((3 * KIB, 0.178), (48 * KIB, 2.65), (768 * KIB, 43)),
    "reduce_int32": _curve((3 * KIB, 0.134), (48 * KIB, 1.64), (768 * KIB, 25.3)),
    "reduce_int64": _curve((3 * KIB, 0.0916), (48 * KIB, 1.48), (768 * KIB, 22.5)),
}
_CPU_SIGNAL_US = 0.8
_CPU_CALLS_US = {
    "all_to_all": 1.0,
    "all_reduce": 1.9,
    "reduce_scatter": 2.8,
    "all_gather": 2.6,
}  # beyond a round of signals
_CPU_TURN_US = 10.0  # until a rank gives up a core that others want
_CPU_GLOO = {
    "all_to_all": _curve((4 * KIB, 105), (64 * KIB, 123), (1 * MIB, 417), (16 * MIB, 6113), (64 * MIB, 25371)),
    "all_reduce": _curve((3 * KIB, 122), (48 * KIB, 138), (768 * KIB, 505), (3 * MIB, 1390)),
    "reduce_scatter": _curve((3 * KIB, 144), (48 * KIB, 180), (768 * KIB, 782), (3 * MIB, 2600)),
    "all_gather": _curve((3 * KIB, 105), (48 * KIB, 157), (768 * KIB, 880), (3 * MIB, 3050)),
}

# Two H200, 18 NVLink 4 links: the presets. In CUDA graphs: a launch 0.8 us, with one exchange of signals 3.1 to 3.5,
# with 32 KiB pushed first 4.1, 512 KiB 5.4, 1.8 MB 9.5 by 16 blocks; 348 GB/s by 8 SMs, 388 by copy engines; a copy within
# the GPU reads and writes 4.15 TB/s. NCCL 2.28.9 eager.
_GPU = {
    "launch": _curve((0, 0.8)),
    "push": _curve((32 * KIB, 0.8), (512 * KIB, 2.1), (1.8e6, 6.2), (64 * MIB, 193)),
    "engine": _curve((KIB, 0.0026), (64 * MIB, 173)),
    "copy": _curve((KIB, 0.0005), (64 * MIB, 32.3)),
}
_GPU_SIGNAL_US = 2.5
_GPU_NCCL = {
    "all_to_all": _curve((64 * KIB, 62.8), (MIB, 54.5), (16 * MIB, 82.5), (64 * MIB, 174), (512 * MIB, 957)),
    "all_reduce": _curve((64 * KIB, 49.7), (MIB, 52.3), (16 * MIB, 103), (64 * MIB, 290), (512 * MIB, 1767)),
    "reduce_scatter": _curve((64 * KIB, 48.8), (MIB, 51.0), (16 * MIB, 86.3), (64 * MIB, 234), (512 * MIB, 1142)),
    # by what a rank brings
    "all_gather": _curve((32 * KIB, 46.8), (512 * KIB, 47.6), (8 * MIB, 80.5), (32 * MIB, 214), (256 * MIB, 1099)),
}


def built_in(topology: Topology) -> Costs:
    """Costs where nothing was measured: those of one machine that was, in proportion to the topology's links and cores."""
    kind = topology.domains[0].kind
    curves = _gpu(topology) if kind == "nvlink" else _cpu(topology)
    return Costs(curves, f"built-in, for {_of(topology)}")


def _of(topology: Topology) -> str:
    up = topology.scale_up
    return f"links of {up.latency_us:g} us and {up.bandwidth_GBps:g} GB/s"


def _crowd(topology: Topology) -> float:
    """How many ranks share a core."""
    return max(max(1.0, len(d.ranks) / d.cores) if d.cores else 1.0 for d in topology.domains)


def _cpu(topology: Topology) -> dict[str, Curve]:
    crowd, up = _crowd(topology), topology.scale_up
    slower = crowd * CPU_SCALE_UP.bandwidth_GBps / up.bandwidth_GBps
    later = up.latency_us / CPU_SCALE_UP.latency_us if up.latency_us else 0.0
    curves = {name: curve.times(slower) for name, curve in _CPU.items()}
    ranks = max(len(domain.ranks) for domain in topology.domains)
    # A rank that has no core of its own waits until a peer gives up its own.
    round_us = _CPU_SIGNAL_US * later if crowd == 1 else _CPU_TURN_US * ranks * crowd
    curves["signal"] = _curve((0, round_us))
    for op, us in _CPU_CALLS_US.items():
        curves[f"call_{op}"] = _curve((0, us * max(1.0, later) + round_us))
    for op, curve in _CPU_GLOO.items():
        more = ranks / 2  # gloo's threads share the cores with the ranks, and its rounds grow with them
        curves[f"c10d_{op}"] = curve.times(max(1.0, more) * max(1.0, crowd))
    return curves


def _gpu(topology: Topology) -> dict[str, Curve]:
    up = topology.scale_up
    slower = H200_NVLINK.bandwidth_GBps / up.bandwidth_GBps
    curves = {name: curve.times(slower if name in ("push", "engine") else 1.0) for name, curve in _GPU.items()}
    curves["signal"] = _curve((0, _GPU_SIGNAL_US * up.latency_us / H200_NVLINK.latency_us))
    for op, curve in _GPU_NCCL.items():
        curves[f"c10d_{op}"] = Curve(
            tuple((size, us if size <= MIB else us * max(slower, 1e-3)) for size, us in curve.points)
        )
    return curves
