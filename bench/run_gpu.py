"""Produce every number that README.md and bench/README.md show for GPUs: bench/results/h200x2.jsonl.

    python bench/run_gpu.py [--out bench/results/h200x2.jsonl] [--only NAME,NAME] [--short]

Runs `a2a bench` with each of COMMANDS, one after the other, on two H200 that should do nothing else: at most 8 minutes with
`--only exchange,moe`, and as long with `--only copy,reduce`; half of it as a rule. A command that outlasts its limit
is ended, and its lines so far are kept. With `--only`, commands whose names contain one of the words are run, and replace
their own lines in the file. Then the results are held against FLOORS, what a2a promises on two H200. The exit code is 1 if a
result was wrong or a command failed, and 2 if a floor was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import runs

from a2a.measure import Line

_SIZES = "4K,64K,1M,16M,64M,512M"
_HERE = "--device cuda --ranks 2 --dtype bf16 --link-GBps 388"  # both copy engines at once, each way
_EXCHANGE = f"all_to_all {_HERE} --bytes {_SIZES} --memory symmetric,ordinary"
_REDUCED = f"{_HERE} --bytes {_SIZES} --memory symmetric,ordinary"
_MOE = f"moe {_HERE} --hidden 7168 --experts 256 --top-k 8"
# name: (limit in seconds, words)
COMMANDS: Mapping[str, tuple[int, str]] = {
    "exchange-graph": (80, f"{_EXCHANGE} --graph"),
    "exchange-eager": (80, _EXCHANGE),
    "exchange-beside": (
        35,
        f"all_to_all {_HERE} --bytes 1M,64M --graph --beside gemm",
    ),
    "copy-graph": (35, f"all_to_all {_HERE} --bytes 64M,512M --graph --algorithm copy"),
    "copy-beside": (35, f"all_to_all {_HERE} --bytes 64M --graph --algorithm copy --beside gemm"),
    "reduce-all-graph": (75, f"all_reduce {_REDUCED} --graph"),
    "reduce-scatter-graph": (75, f"reduce_scatter {_REDUCED} --graph"),
    "reduce-gather-graph": (75, f"all_gather {_REDUCED} --graph"),
    "reduce-all-eager": (50, f"all_reduce {_REDUCED}"),
    "reduce-scatter-eager": (50, f"reduce_scatter {_REDUCED}"),
    "reduce-gather-eager": (50, f"all_gather {_REDUCED}"),
    "reduce-norm-graph": (35, f"all_reduce_rms_norm {_HERE} --bytes 64K,1M --graph"),
    "moe-graph": (40, f"{_MOE} --tokens 128,4096,8192 --graph"),
    "moe-eager": (50, f"{_MOE} --tokens 128,4096,8192"),
    "moe-compact-graph": (40, f"{_MOE} --tokens 128,4096,8192 --graph --layout compact"),
    "moe-compact-eager": (25, f"{_MOE} --tokens 4096 --layout compact"),
    "moe-aligned": (25, f"{_MOE} --tokens 4096 --graph --alignment 128"),
    "moe-few-sms": (25, f"{_MOE} --tokens 4096 --graph --num-sms 24"),
    "moe-fp8": (25, f"{_MOE} --tokens 4096 --graph --wire fp8 --rows wire"),
    "moe-mxfp8": (25, f"{_MOE} --tokens 4096 --graph --wire mxfp8 --rows wire"),
    "moe-beside": (30, f"{_MOE} --tokens 4096 --graph --beside gemm"),
}
SHORT = ("--bytes", "4K", "--tokens", "64", "--repeat", "3")
# Nobody gets the switch's help: a2a doesn't use it, and this machine is used without.
VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Floor:
    """What a2a must reach in the lines of one kind.

    Attributes:
        op, case: which lines: those whose `case` has these values.
        bytes: of these sizes, where given.
        most_us: the longest p50.
        least_GBps: the least bus bandwidth.
        baseline, ratio: at least so many times as fast as this baseline.
        spread: the largest p99, in terms of p50.
    """

    op: str
    case: Mapping[str, object]
    bytes: tuple[int, ...] = ()
    most_us: float | None = None
    least_GBps: float | None = None
    baseline: str = "nccl"
    ratio: float | None = None
    spread: float | None = None
    absent: tuple[str, ...] = field(default=("beside",))  # lines that have one of these keys are of another kind

    def missed(self, line: Line) -> list[str]:
        """What `line` misses; nothing where it isn't of this kind."""
        if line.impl != "a2a" or line.op != self.op or (self.bytes and line.bytes not in self.bytes):
            return []
        if any(line.case.get(key) != value for key, value in self.case.items()):
            return []
        if any(key in line.case for key in self.absent):
            return []
        if line.p50_us is None or line.p99_us is None:
            return [f"{self._name(line)}: not measured"]
        found = []
        if self.most_us is not None and line.p50_us > self.most_us:
            found.append(f"{line.p50_us:.4g} us, expected at most {self.most_us:g}")
        if self.least_GBps is not None and (line.busbw_GBps or 0) < self.least_GBps:
            found.append(f"{line.busbw_GBps:.4g} GB/s, expected {self.least_GBps:g}")
        against = line.ratio.get(self.baseline)
        if self.ratio is not None and against is not None and against < self.ratio:
            found.append(f"{against:.3g} times {self.baseline}, expected {self.ratio:.3g}")
        if self.spread is not None and line.p99_us > self.spread * line.p50_us:
            found.append(f"p99 is {line.p99_us / line.p50_us:.3g} times p50, expected at most {self.spread:g}")
        return [f"{self._name(line)}: {text}" for text in found]

    def _name(self, line: Line) -> str:
        return f"{line.op} of {line.bytes} bytes, {line.dtype}, {dict(self.case)}"


def _exchange(memory: str, graph: bool) -> dict[str, object]:
    return {"memory": memory, "through": "a2a", "graph": graph}


def _moe(part: str, tokens: int, most_us: float, **case: object) -> Floor:
    usual = {"layout": "expert", "alignment": 1, "wire": None, "num_sms": None, "graph": True}
    return Floor("moe", {"part": part, "tokens": tokens, **usual, **case}, most_us=most_us)


def _phases(most_us: tuple[float, float, float, float], part: str, **case: object) -> list[Floor]:
    """Floors at 128 and 4,096 tokens in a graph, at 4,096 eager with the exact number of rows, at 8,192 in a graph."""
    small, middle, exact, large = most_us
    return [
        _moe(part, 128, small, **case),
        _moe(part, 4096, middle, **case),
        _moe(part, 4096, exact, graph=False, max_rows=None, **case),
        _moe(part, 8192, large, **case),
    ]


def _reductions(op: str, most_us: tuple[float, float, float, float], large: Floor) -> list[Floor]:
    """Floors of symmetric tensors of 4 KiB, 64 KiB, 1 MiB and 16 MiB in a graph, and at 512 MiB; of eager calls and ordinary
    tensors.
    """
    sizes = (4 * _KI, 64 * _KI, _MI, 16 * _MI)
    graph = {"memory": "symmetric", "graph": True}
    return [
        *(Floor(op, graph, (size,), most_us=us) for size, us in zip(sizes, most_us, strict=True)),
        large,
        Floor(op, {"memory": "symmetric", "graph": False}, sizes[:3], ratio=2),
        Floor(op, {}, ratio=1 / 1.03),
        Floor(op, {"graph": True}, spread=1.15),
    ]


_KI, _MI = 1 << 10, 1 << 20
_SYMMETRIC, _ORDINARY = _exchange("symmetric", True), _exchange("ordinary", True)
_LARGE = {"memory": "symmetric", "graph": True}
FLOORS: Sequence[Floor] = (
    Floor("all_to_all", _SYMMETRIC, (4 * _KI,), most_us=2.8),
    Floor("all_to_all", _SYMMETRIC, (64 * _KI,), most_us=3.6),
    Floor("all_to_all", _SYMMETRIC, (_MI,), most_us=5.8),
    Floor("all_to_all", _SYMMETRIC, (16 * _MI,), most_us=28),
    Floor("all_to_all", _SYMMETRIC, (64 * _MI,), ratio=1.6),
    Floor("all_to_all", _SYMMETRIC, (512 * _MI,), least_GBps=370),
    Floor("all_to_all", _exchange("symmetric", False), (4 * _KI, 64 * _KI, _MI), ratio=2),
    Floor("all_to_all", _ORDINARY, (64 * _MI,), ratio=1.4),
    Floor("all_to_all", _ORDINARY, (512 * _MI,), ratio=1.25),
    Floor("all_to_all", {"through": "a2a"}, ratio=1 / 1.03),
    Floor("all_to_all", {"through": "a2a", "graph": True}, spread=1.15),
    *_reductions("all_reduce", (2.7, 3.5, 6.5, 52), Floor("all_reduce", _LARGE, (512 * _MI,), least_GBps=350)),
    *_reductions("reduce_scatter", (2.7, 3.5, 5.8, 29), Floor("reduce_scatter", _LARGE, (512 * _MI,), ratio=1.4)),
    *_reductions("all_gather", (2.7, 3.5, 5.8, 28), Floor("all_gather", _LARGE, (512 * _MI,), ratio=1.4)),
    Floor("all_reduce_rms_norm", {"graph": True}, (64 * _KI,), most_us=5),
    Floor("all_reduce_rms_norm", {"graph": True}, (_MI,), most_us=9),
    *_phases((16, 240, 265, 460), "dispatch"),
    *_phases((16, 240, 265, 460), "combine"),
    *_phases((13, 195, 215, 380), "dispatch", layout="compact"),
    _moe("dispatch", 4096, 265, alignment=128),
    _moe("combine", 4096, 265, alignment=128),
    _moe("dispatch", 4096, 450, num_sms=24),
    _moe("combine", 4096, 450, num_sms=24),
    _moe("dispatch", 4096, 140, wire="fp8", rows="wire"),
    _moe("dispatch", 4096, 140, wire="mxfp8", rows="wire"),
    Floor("moe", {"graph": True, "part": "dispatch"}, spread=1.15),
    Floor("moe", {"graph": True, "part": "combine"}, spread=1.15),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200x2.jsonl")
    parser.add_argument(
        "--only", default="", help="commands whose names contain one of these words, e.g. moe-fp8,eager"
    )
    parser.add_argument("--short", action="store_true", help="tiny, to see that everything runs; floors mean nothing")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    extra = SHORT if arguments.short else ()
    lines: list[Line] = []
    if arguments.only and arguments.out.exists():
        lines = [Line.from_json(text) for text in arguments.out.read_text().splitlines()]
    failed = 0
    for name, (limit_s, command) in COMMANDS.items():
        if not any(word in name for word in wanted):
            continue
        begin = time.monotonic()
        code, new = runs.measure(command, extra, limit_s=limit_s, variables=VARIABLES)
        failed += code != 0
        print(f"{name}: {len(new)} lines in {time.monotonic() - begin:.0f} s", flush=True)
        told = " ".join(["a2a bench", command, *extra])
        lines = [line for line in lines if line.env["command"] != told] + new
        runs.write(arguments.out, lines)
    missed = [text for line in lines for floor in FLOORS for text in floor.missed(line)]
    return runs.verdict(arguments.out, lines, failed, None if arguments.short else missed)


if __name__ == "__main__":
    sys.exit(main())
