"""A discrete-event timeline of tasks that wait for each other and share links.

A task either takes a fixed time (compute) or moves bytes over links, all at once and at one rate. Running flows share a link
fairly (max-min: no flow could go faster without slowing one that is no faster), and rates change whenever a flow starts or
ends. Nothing is random, and ties are settled by a task's number: equal input, equal timeline.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_SAME = 1e-12  # flows that end within this part of the time passed end together


@dataclass(frozen=True)
class Task:
    """A piece of a step.

    Args:
        name: for people.
        category: what it counts as, such as "compute" or "dispatch".
        after: numbers of the tasks that must have ended.
        seconds: how long it takes, or, if it moves bytes, how long until the first of them moves (latency).
        num_bytes: bytes that it moves over each of `links`.
        links: numbers of the links that it uses all at once; empty for compute.
        owner: number of the GPU that it is shown at.
    """

    name: str
    category: str
    after: tuple[int, ...]
    seconds: float
    num_bytes: float = 0.0
    links: tuple[int, ...] = ()
    owner: int = 0


@dataclass(frozen=True)
class Played:
    """When each task started and ended, in seconds, and how many bytes each link carried."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    carried: tuple[float, ...]

    @property
    def length_s(self) -> float:
        """When the last task ended."""
        return max(self.end_s, default=0.0)


class _Flows:
    """Flows that are moving bytes now."""

    def __init__(self, tasks: Sequence[Task], bytes_per_s: Sequence[float]) -> None:
        self._tasks, self._capacity = tasks, bytes_per_s
        self._left: dict[int, float] = {}
        self._rate: dict[int, float] = {}
        self._now = 0.0
        self.carried = [0.0] * len(bytes_per_s)
        self.next_end_s = float("inf")

    def change(self, now: float, started: Sequence[int]) -> list[int]:
        """Move on to `now`; return the flows that end here, in order, and let `started` begin."""
        passed = now - self._now
        self._now = now
        ended = []
        for number, rate in self._rate.items():
            left = self._left[number]
            if self.next_end_s <= now and left / rate - passed <= _SAME * now:
                moved = left
                ended.append(number)
            else:
                moved = min(rate * passed, left)
            self._left[number] = left - moved
            for link in self._tasks[number].links:
                self.carried[link] += moved
        for number in ended:
            del self._left[number]
        for number in started:
            self._left[number] = self._tasks[number].num_bytes
        self._share()
        ends = [self._left[number] / rate for number, rate in self._rate.items()]
        self.next_end_s = now + min(ends) if ends else float("inf")
        return sorted(ended)

    def _share(self) -> None:
        """Give each flow its max-min fair rate: again and again, settle the flows of the link that leaves them least."""
        self._rate = {}
        users: dict[int, list[int]] = {}
        for number in self._left:
            for link in self._tasks[number].links:
                users.setdefault(link, []).append(number)
        if all(len(numbers) == 1 for numbers in users.values()):
            self._rate = {n: min(self._capacity[link] for link in self._tasks[n].links) for n in self._left}
            return
        room = {link: self._capacity[link] for link in users}
        while users:
            tightest = min(users, key=lambda link: (room[link] / len(users[link]), link))
            share = room[tightest] / len(users[tightest])
            for number in users[tightest].copy():
                self._rate[number] = share
                for link in self._tasks[number].links:
                    room[link] = max(room[link] - share, 0.0)
                    users[link].remove(number)
                    if not users[link]:
                        del users[link]


def play(tasks: Sequence[Task], bytes_per_s: Sequence[float]) -> Played:
    """Run the tasks as soon as they may; `bytes_per_s` is what each link carries.

    Raises:
        ValueError: tasks wait for each other in a circle, or a link carries nothing.
    """
    if not all(rate > 0 for rate in bytes_per_s):
        raise ValueError(f"play: a link carries {min(bytes_per_s)} bytes a second; expected more than 0")
    waits = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for earlier in task.after:
            followers[earlier].append(number)
    start, end = [0.0] * len(tasks), [float("nan")] * len(tasks)
    flows = _Flows(tasks, bytes_per_s)
    timers: list[tuple[float, int]] = []  # compute ends, or a flow's latency has passed
    ready = [number for number, count in enumerate(waits) if count == 0]
    now, done = 0.0, 0
    while True:
        for number in ready:
            start[number] = now
            heapq.heappush(timers, (now + tasks[number].seconds, number))
        now = min(timers[0][0] if timers else float("inf"), flows.next_end_s)
        if now == float("inf"):
            break
        over: list[int] = []
        begin: list[int] = []
        while timers and timers[0][0] <= now:
            number = heapq.heappop(timers)[1]
            (begin if tasks[number].links and tasks[number].num_bytes > 0 else over).append(number)
        if begin or flows.next_end_s <= now:
            over += flows.change(now, begin)
        ready = []
        for number in over:
            end[number] = now
            for follower in followers[number]:
                waits[follower] -= 1
                if waits[follower] == 0:
                    ready.append(follower)
        done += len(over)
    if done < len(tasks):
        stuck = next(number for number, count in enumerate(waits) if count)
        raise ValueError(
            f"play: {len(tasks) - done} tasks wait for each other in a circle, {tasks[stuck].name!r} among them"
        )
    return Played(tuple(start), tuple(end), tuple(flows.carried))
