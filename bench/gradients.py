"""Gradients across two hosts that hide behind the backward pass: bench/results/gradients.jsonl.

    python bench/gradients.py [--out FILE] [--tokens 576] [--short]

Runs `a2a bench gradients` on two made-up hosts joined by 1 Gbit/s (network namespaces: as root, alone on the machine;
some four minutes for each number of tokens). Of several numbers of tokens it takes the one whose backward pass (two
thirds of `compute`) is nearest to what the gradients take to cross by themselves, and holds the floors against it,
for the gradients' own dtype; the exit code is 2 where one is missed:

* at least 85 % of what the reduction takes alone is hidden behind the passes;
* a step takes at most 1.15 times what its compute takes and the CPU time that the reduction burns, spread over the cores;
* bf16 sends half the bytes across, and fp8 at most 27 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from runs import measure, verdict, write

from a2a.measure import Line

COMMAND = (
    "gradients --hosts 2 --ranks 4 --mbit 1000 --hidden 1024 --layers 16 --bucket-mb 8 --wire bf16,fp8 --against gloo "
    "--repeat 5"
)
TOKENS = "576"
SHORT = ("--hidden", "64", "--layers", "2")
HIDDEN, STEP, BYTES = 0.85, 1.15, {"a2a_bf16": 0.501, "a2a_fp8": 0.27}


def balanced(lines: Sequence[Line]) -> dict[str, Line]:
    """The lines, by implementation, of the number of tokens whose backward pass is nearest to the reduction alone."""
    cells = [
        {line.impl: line for line in lines if line.case["tokens"] == tokens}
        for tokens in dict.fromkeys(line.case["tokens"] for line in lines)
    ]
    return min(cells, key=lambda cell: abs(backward_us(cell) / cell["a2a"].case["alone_us"] - 1))


def backward_us(cell: dict[str, Line]) -> float:
    """Of a stack of linear layers: two of its three products."""
    return (cell["compute"].p50_us or 0.0) * 2 / 3


def missed(cell: dict[str, Line]) -> list[str]:
    """The floors that these lines miss, in words."""
    own, compute_us = cell["a2a"], cell["compute"].p50_us or 0.0
    found = []
    hidden = own.case["hidden_us"] / own.case["alone_us"]
    if hidden < HIDDEN:
        found.append(
            f"{100 * hidden:.1f} % of {own.case['alone_us']:,.0f} us are hidden; the floor is {100 * HIDDEN:g} %"
        )
    allowed_us, step_us = STEP * (compute_us + own.case["cpu_us"]), own.p50_us or 0.0
    if step_us > allowed_us:
        found.append(f"a step takes {step_us:,.0f} us; {allowed_us:,.0f} are allowed")
    for name, most in BYTES.items():
        share = cell[name].case["bytes_sent"] / own.case["bytes_sent"]
        if share > most:
            found.append(f"{name} sends {100 * share:.1f} % of the bytes; {100 * most:g} % are allowed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gradients.jsonl")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--short", action="store_true", help="a tiny model, to see that everything runs")
    options = parser.parse_args()
    code, lines = measure(f"{COMMAND} --tokens {options.tokens}", SHORT if options.short else ())
    write(options.out, lines)
    if code or options.short:
        return verdict(options.out, lines, code, None)
    cell = balanced(lines)
    own = cell["a2a"].case
    print(
        f"{own['tokens']} tokens: backward {backward_us(cell):,.0f} us, reduction alone {own['alone_us']:,.0f} us, "
        f"exposed {own['exposed_us']:,.0f} us, step {cell['a2a'].p50_us:,.0f} us, compute {cell['compute'].p50_us:,.0f} us, "
        f"CPU time of the reduction {own['cpu_us']:,.0f} us"
    )
    return verdict(options.out, lines, 0, missed(cell))


if __name__ == "__main__":
    sys.exit(main())
