"""A played step as a trace that chrome://tracing and https://ui.perfetto.dev open."""

from __future__ import annotations

from typing import Any

from a2a.simulate.accounts import CATEGORIES, COMPUTE, LINKS
from a2a.simulate.step import Step


def trace(step: Step) -> dict[str, Any]:
    """The trace: a process for each stage's GPU, a thread for compute and for each kind of communication there."""
    lanes = (COMPUTE, *CATEGORIES)
    events: list[dict[str, Any]] = []
    seen: set[tuple[int, str]] = set()
    for number, task in enumerate(step.tasks):
        start, end = step.played.start_s[number], step.played.end_s[number]
        if task.category not in lanes or end <= start:
            continue
        for gpu in sorted({link // len(LINKS) for link in task.links} or {task.owner}):
            seen.add((gpu, task.category))
            event = {
                "name": task.name, "cat": task.category, "ph": "X", "pid": gpu, "tid": lanes.index(task.category),
                "ts": start * 1e6, "dur": (end - start) * 1e6,
            }  # fmt: skip
            if task.links:
                ways = [LINKS[link % len(LINKS)] for link in task.links if link // len(LINKS) == gpu]
                event["args"] = {"bytes": task.num_bytes, "links": ", ".join(ways)}
            events.append(event)
    names: list[dict[str, Any]] = []
    for gpu in sorted({gpu for gpu, _ in seen}):
        label = {"name": f"modelled: a GPU of stage {gpu}"}
        names.append({"name": "process_name", "ph": "M", "pid": gpu, "args": label})
    for gpu, category in sorted(seen, key=lambda lane: (lane[0], lanes.index(lane[1]))):
        names.append(
            {"name": "thread_name", "ph": "M", "pid": gpu, "tid": lanes.index(category), "args": {"name": category}}
        )
    return {"displayTimeUnit": "ms", "otherData": {"source": "modelled by a2a simulate"}, "traceEvents": names + events}
