"""Every CUDA kernel compiles for every GPU it may meet, on a machine without one; and the cache of what was compiled."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import a2a
from a2a.kernels import cuda

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings (extra dev)")

ARCHITECTURES = ("sm_90", "sm_100", "sm_103", "sm_120")
# What each kernel is specialised by: the smallest and a large world; and ExpertParallel's, which are many, by a few that
# have nothing in common.
MOE = {
    "WORLD": 2, "TOP_K": 8, "HIDDEN": 7168, "DTYPE": 1, "WIRE": 0, "RANGES": 24, "CHUNKS": 7, "ROWS_WIRE": 0, "COMPACT": 0,
    "DROP": 0, "WIDE_SUMS": 0, "TEAM": 512, "TILE_BYTES": 16384, "SPOTS": 8, "SUM_DEEP": 4, "READY": 0,
}  # fmt: skip
MOES = [
    MOE,
    MOE | {
        "WORLD": 72, "TOP_K": 32, "SPOTS": 32, "SUM_DEEP": 1, "HIDDEN": 1204, "DTYPE": 0, "WIRE": 2, "CHUNKS": 1,
        "COMPACT": 1, "READY": 100,
    },
    MOE | {"WORLD": 8, "HIDDEN": 2880, "DTYPE": 2, "WIRE": 1, "ROWS_WIRE": 1, "DROP": 1, "WIDE_SUMS": 1},
    MOE | {"READY": 128},
]  # fmt: skip
REDUCTION = {"WORLD": 2, "FLAG_BYTES": 2 << 20, "CHUNK_BYTES": 64 << 10, "COLLECTIVE": 0, "TWO_SHOT": 0}
# bfloat16 sums; a reduce-scatter of float64 averages; two shots of int8 maxima; an all-gather of bytes.
REDUCTIONS = [
    REDUCTION | {"DTYPE": 1, "REDUCE": 0},
    REDUCTION | {"DTYPE": 3, "REDUCE": 1, "COLLECTIVE": 1, "WORLD": 3},
    REDUCTION | {"DTYPE": 5, "REDUCE": 2, "TWO_SHOT": 1, "WORLD": 8},
    REDUCTION | {"DTYPE": 4, "REDUCE": 4, "COLLECTIVE": 2, "WORLD": 16},
]
MULTIMEM = REDUCTION | {"SLOT_BYTES": 64 << 10, "A2A_SOFTWARE_SWITCH": 0}
# The instructions of the switch: every one that there is, and none; then its loops.
MULTIMEMS = [
    *(MULTIMEM | {"DTYPE": dtype, "REDUCE": 0, "COLLECTIVE": dtype % 2} for dtype in (0, 1, 2)),
    *(MULTIMEM | {"DTYPE": dtype, "REDUCE": reduce_op} for dtype in (7, 8) for reduce_op in (0, 2, 3)),
    MULTIMEM | {"DTYPE": 4, "REDUCE": 4, "COLLECTIVE": 2, "WORLD": 72},
    MULTIMEM | {"DTYPE": 1, "REDUCE": 0, "A2A_SOFTWARE_SWITCH": 1},
]
NORM = {"WORLD": 2, "PACKET_BYTES": 192 << 10, "ROW_BYTES": 1 << 20, "TWO_SHOT": 0}
NORMS = [
    NORM | {"DTYPE": 1, "HIDDEN": 8192},
    NORM | {"DTYPE": 2, "HIDDEN": 72, "WORLD": 1},
    NORM | {"DTYPE": 0, "HIDDEN": 16384, "WORLD": 8, "TWO_SHOT": 1},
    NORM | {"DTYPE": 1, "HIDDEN": 2880, "WORLD": 72, "TWO_SHOT": 1},
]
DEFINES = {
    "all_to_all_copy": [{"WORLD": world} for world in (1, 8, 72)],
    **{f"moe_push_{part}": MOES for part in ("send", "expand", "dots", "sum")},
    **{f"reduce_{part}": REDUCTIONS for part in ("flags", "shares")},
    **{f"norm_{part}": NORMS for part in ("flags", "rows")},
    "reduce_multimem": MULTIMEMS,
    "all_to_all_push": [
        {"WORLD": world, "FLAG_BYTES": 2 << 20, "CHUNK_BYTES": 64 << 10, "TEAMS": 2, "RAGGED": ragged}
        for world, ragged in ((1, 0), (2, 1), (2, 0), (72, 1), (8, 0), (72, 0))
    ],
}


def kernels() -> list[str]:
    return sorted(path.stem for path in (cuda.source_folder() / "cuda").glob("*.cu"))


def test_every_kernel_is_in_the_list() -> None:
    assert kernels() == sorted(DEFINES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", sorted(DEFINES))
def test_a_kernel_compiles(kernel: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_CACHE_DIR", str(tmp_path))
    for defines in DEFINES[kernel][:: 1 if arch == "sm_90" else 3]:
        if arch == "sm_103":  # sm_100's twin: here for memory that another library has mapped
            defines = {**defines, "PEER_TABLE": 1}
        cubin = cuda.compile_cubin(kernel, arch, defines)
        assert cubin.startswith(b"\x7fELF")
        assert b"\0" + kernel.encode() in cubin


def test_a_kernel_of_somebody_else_may_include_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_CACHE_DIR", str(tmp_path))
    source = (Path(__file__).parent / "cuda_shim" / "make_rows.cu").read_text()
    assert b"\0make_rows" in cuda.compile_cubin("make_rows", "sm_90", {}, source)


def compile_small(cache: str) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A2A_CACHE_DIR", cache)
        return cuda.compile_cubin("all_to_all_push", "sm_90", DEFINES["all_to_all_push"][1])


def test_many_ranks_may_fill_the_cache_at_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3) as ranks:
        cubins = list(ranks.map(compile_small, [str(tmp_path)] * 3))
    assert len(set(cubins)) == 1
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == cubins[:1]


def test_the_cache_spares_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compile_small(str(tmp_path))
    monkeypatch.setattr(cuda, "_compile", None)
    assert compile_small(str(tmp_path)) == cubin


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert compile_small(str(tmp_path / "file")).startswith(b"\x7fELF")
    assert "A2A_CACHE_DIR" in caplog.text


def test_a_compile_error_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_CACHE_DIR", str(tmp_path))
    with pytest.raises(a2a.UnsupportedError, match=r"can't compile all_to_all_push\.cu.*[\s\S]*WORLD"):
        cuda.compile_cubin("all_to_all_push", "sm_90", {})


def test_importing_a2a_imports_no_cuda() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import a2a, a2a.ops, a2a.plan; a2a.plan.candidates()\n"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] == 'cuda'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(a2a.UnsupportedError, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
        cuda.compile_cubin("all_to_all_push", "sm_90", {})
