"""The parameters of CUDA kernels, as ctypes has them: each is a struct of the same name in csrc/cuda."""

from __future__ import annotations

from ctypes import Structure, c_uint32, c_uint64


class Place(Structure):
    """`Place` of signal.cuh: where ranks' memory lies, and who this one is."""

    _fields_ = (
        ("base", c_uint64),
        ("window", c_uint64),
        ("host", c_uint64),
        ("timeout_ns", c_uint64),
        ("rank", c_uint32),
        ("text", c_uint32),
    )


class Moe(Structure):
    """`Moe` of moe_push.cuh."""

    _fields_ = (
        ("place", Place),
        *((name, c_uint64) for name in ("stage", "data", "half", "counts", "workspace", "plan", "homes", "ready")),
        *(
            (name, c_uint32)
            for name in (
                "digest",
                "tokens",
                "max_tokens",
                "experts",
                "local_experts",
                "most_local",
                "alignment",
                "ring",
            )
        ),
        ("planners", c_uint32),
        ("words", c_uint32),
    )


class ReadyFlags(Structure):
    """`ReadyFlags` of ready.cuh."""

    _fields_ = (
        ("place", Place),
        *((name, c_uint64) for name in ("arrived", "sendable", "parts", "epoch")),
        ("world", c_uint32),
        ("rows", c_uint32),
    )


def _params(name: str, pointers: str, words: str) -> type[Structure]:
    fields = [("m", Moe), *((n, c_uint64) for n in pointers.split()), *((n, c_uint32) for n in words.split())]
    return type(name, (Structure,), {"_fields_": fields})


Send = _params("Send", "x x_scales ids weights ids_out", "ids_bytes unused")
Gate = _params("Gate", "", "chunk signals headers unused")
RowsGate = _params("RowsGate", "", "pass passes")
Counts = _params("Counts", "offsets counts overflow host ticket", "capacity signals")
Expand = _params(
    "Expand",
    "rows scales weights rank token k index x x_scales ids topk_weights out_rows grad_weights",
    "capacity compact_capacity first_chunk end_chunk own_first own_end credits last",
)
Sum = _params(
    "Sum",
    "rows weights row_grads ids y weight_grads",
    "compact compact_rows brings pass passes first_chunk end_chunk credits last unused",
)
