"""Where a played step's time went: computing, communicating beside it or instead of it, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from a2a.simulate.timeline import Played, Task

COMPUTE = "compute"
CATEGORIES = ("dispatch", "combine", "tensor", "pipeline", "gradients", "parameters")
LINKS = ("scale-up out", "scale-up in", "scale-out out", "scale-out in")  # of each GPU: link 4 * gpu + 0 to 3
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Share:
    """Seconds of a category, the mean of all stages' GPUs: beside compute (hidden) and while none ran (exposed)."""

    hidden_s: float
    exposed_s: float
    total_s: float


def accounts(tasks: Sequence[Task], played: Played, num_gpus: int) -> tuple[float, float, dict[str, Share]]:
    """Seconds of compute, of neither compute nor communication, and of each category; means over the GPUs."""
    spans: dict[tuple[int, str], Intervals] = {}
    for number, task in enumerate(tasks):
        if played.end_s[number] > played.start_s[number] and task.category != "join":
            for gpu in {link // len(LINKS) for link in task.links} or {task.owner}:
                spans.setdefault((gpu, task.category), []).append((played.start_s[number], played.end_s[number]))
    merged = {key: _union(intervals) for key, intervals in spans.items()}
    compute = [merged.get((gpu, COMPUTE), []) for gpu in range(num_gpus)]
    shares = {}
    for category in CATEGORIES:
        parts = [merged.get((gpu, category), []) for gpu in range(num_gpus)]
        total = sum(map(_length, parts)) / num_gpus
        hidden = sum(_common(part, compute[gpu]) for gpu, part in enumerate(parts)) / num_gpus
        shares[category] = Share(hidden, total - hidden, total)
    busy = [_union([span for key, part in merged.items() if key[0] == gpu for span in part]) for gpu in range(num_gpus)]
    bubble = sum(played.length_s - _length(part) for part in busy) / num_gpus
    return sum(map(_length, compute)) / num_gpus, bubble, shares


def _union(intervals: Intervals) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def _common(a: Intervals, b: Intervals) -> float:
    """Seconds in both; each is sorted and disjoint."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
