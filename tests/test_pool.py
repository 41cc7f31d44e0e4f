"""The pool of ranks itself: results come back in order, and whatever goes wrong in a rank is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pool as pool_module
from pool import Pool, RankError, World


@pytest.fixture(scope="module")
def own_pool(pool: Pool | None):
    """A pool beside the session's, so that what these tests break costs the others no restart."""
    if pool is None:
        pytest.skip("under torchrun there is no pool")
    with Pool() as ranks:
        yield ranks


@pytest.fixture
def three(own_pool: Pool) -> World:
    return own_pool.world(3)


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def own_pid() -> int:
    return os.getpid()


def sum_of_ranks(value: torch.Tensor) -> torch.Tensor:
    total = value + dist.get_rank()
    dist.all_reduce(total)
    return total


@dataclass(frozen=True)
class Answer:
    rank: int


class Question:
    @staticmethod
    def answered() -> Answer:
        return Answer(dist.get_rank())


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"only rank {rank} fails")


def raise_while_others_wait(rank: int) -> None:
    raise_on(rank)
    dist.barrier()


def compare(left: list[int], right: list[int]) -> None:
    assert left == right


def expect_an_exception() -> None:
    with pytest.raises(ZeroDivisionError):
        pass


def die_on(rank: int, how: int) -> int:
    if dist.get_rank() == rank:
        print("last words of the rank")
        os.kill(os.getpid(), how)
    return dist.get_rank()


def exit_on(rank: int, code: int) -> int:
    if dist.get_rank() == rank:
        sys.exit(code)
    return dist.get_rank()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def returns_what_does_not_pickle() -> object:
    return lambda: None


def die_later() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # SIGALRM's default action ends the process


def leave_the_group() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def threads() -> int:
    return torch.get_num_threads()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_every_rank_knows_its_world_and_results_come_in_rank_order(world: World) -> None:
    assert world.run(rank_and_world) == [(rank, world.size) for rank in range(world.size)]


def test_arguments_and_results_are_copied_to_and_from_ranks(world: World) -> None:
    results = world.run(sum_of_ranks, value=torch.tensor([1, 10]))
    assert [result.tolist() for result in results] == [[3, 21], [3, 21]]


def test_classes_of_a_test_module_and_its_methods_travel(world: World) -> None:
    assert world.run(Question.answered) == [Answer(0), Answer(1)]


def test_ranks_stay_up_between_checks_and_are_shared_by_worlds(own_pool: Pool) -> None:
    pids = own_pool.world(3).run(own_pid)
    assert len(set(pids)) == 3
    assert own_pool.world(2).run(own_pid) == pids[:2]
    assert own_pool.world(3).run(own_pid) == pids
    assert os.getpid() not in pids


def test_a_rank_has_one_torch_thread(world: World) -> None:
    assert world.run(threads) == [1, 1]


def test_an_exception_comes_back_as_that_ranks_traceback(three: World) -> None:
    with pytest.raises(RankError) as caught:
        three.run(raise_on, rank=1)
    text = str(caught.value)
    assert "raise_on on 3 ranks" in text
    assert "rank 1 raised" in text
    assert "KeyError: 'only rank 1 fails'" in text
    assert "in raise_on" in text
    assert "rank 0" not in text and "rank 2" not in text


def test_a_failing_assert_in_a_rank_shows_its_values(three: World) -> None:
    with pytest.raises(RankError, match=r"assert \[1, 2\] == \[1, 3\]"):
        three.run(compare, left=[1, 2], right=[1, 3])


def test_a_missing_exception_in_a_rank_is_a_failure(three: World) -> None:
    with pytest.raises(RankError, match="DID NOT RAISE"):
        three.run(expect_an_exception)


def test_ranks_that_wait_for_one_that_raised_are_shown_after_it(three: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE_S", 2.0)
    with pytest.raises(RankError) as caught:
        three.run(raise_while_others_wait, rank=2)
    assert re.search(r"(?s)only rank 2 fails.*rank 0.* still running.*in barrier", str(caught.value))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_is_reported_with_its_signal_and_its_last_words(three: World, how: int) -> None:
    with pytest.raises(RankError) as caught:
        three.run(die_on, rank=1, how=how)
    text = str(caught.value)
    assert f"rank 1 died: killed by {signal.Signals(how).name}" in text
    assert "last words of the rank" in text
    if how == signal.SIGSEGV:
        assert "in die_on" in text  # faulthandler's stack, from the rank's stderr


def test_a_rank_that_exits_is_reported_with_its_exit_code(three: World) -> None:
    with pytest.raises(RankError, match="rank 2 died: exit code 3"):
        three.run(exit_on, rank=2, code=3)


def test_a_rank_that_dies_between_checks_is_reported_by_the_next(own_pool: Pool) -> None:
    own_pool.world(2).run(die_later)
    end = time.monotonic() + 10
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in own_pool.pids()):
        time.sleep(0.02)
    with pytest.raises(RankError, match="rank 0 died after die_later had returned: died: killed by SIGALRM"):
        own_pool.world(2).run(rank_and_world)
    assert own_pool.world(2).run(rank_and_world) == [(0, 2), (1, 2)]


def test_survivors_of_an_expected_death_give_their_results(three: World) -> None:
    assert three.run(die_on, rank=1, how=signal.SIGKILL, expect_dead={1}) == [0, None, 2]
    assert three.run(exit_on, rank=2, code=0, expect_dead={2}) == [0, 1, None]
    assert three.run(rank_and_world) == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_that_survives_its_expected_death_is_reported(three: World) -> None:
    with pytest.raises(RankError, match="rank 0 was expected to die and did not"):
        three.run(rank_and_world, expect_dead={0})


def test_a_hang_shows_the_stacks_and_the_ranks_are_replaced(three: World) -> None:
    before = three.run(own_pid)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        three.run(sleep_on, rank=1, deadline_s=0.5)
    assert time.monotonic() - start < 5
    text = str(caught.value)
    assert "rank 1 was still running" in text
    assert "in sleep_on" in text
    assert "rank 0" not in text
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    after = three.run(own_pid)
    assert not set(after) & set(before)


def test_ranks_that_destroyed_their_group_get_a_new_one(three: World) -> None:
    pids = three.run(own_pid)
    assert three.run(leave_the_group, destroys_group=True) == [False] * 3
    assert three.run(rank_and_world) == [(0, 3), (1, 3), (2, 3)]
    assert three.run(own_pid) == pids


def test_a_result_that_does_not_pickle_is_said_to_be_so(three: World) -> None:
    with pytest.raises(RankError, match="result does not pickle"):
        three.run(returns_what_does_not_pickle)


def test_a_function_that_ranks_cannot_import_is_refused(three: World) -> None:
    with pytest.raises(TypeError, match="top level of a file"):
        three.run(lambda: None)


LEAVES = """
import sys

sys.path.insert(0, {tests!r})
from pool import Pool
import test_pool

if __name__ == "__main__":
    pool = Pool()
    print(*pool.world(2).run(test_pool.own_pid), flush=True)
    if sys.argv[1] == "after closing":
        pool.close()
    elif sys.argv[1] == "by kill":
        pool.world(2).run(test_pool.sleep_on, rank=1)
"""


def test_nothing_is_left_behind_whether_the_pool_is_closed_forgotten_or_its_process_killed(
    own_pool: Pool, tmp_path: Path
) -> None:
    ways = ["after closing", "without closing", "by kill"]
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES.format(tests=str(Path(__file__).parent)))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), way],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
        for way in ways
    ]
    for way, process in zip(ways, processes, strict=True):
        with process:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2, way
            if way == "by kill":
                time.sleep(0.2)
                process.kill()
        assert process.returncode == (-signal.SIGKILL if way == "by kill" else 0), way
        end = time.monotonic() + 10
        while members := session_members(process.pid):
            assert time.monotonic() < end, f"{way}: left behind {members}"
            time.sleep(0.02)
    kept = [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("ranks-")]
    assert len(kept) == 2, "only the closed pool can have removed its folder"


def session_members(session: int) -> list[str]:
    """The processes (zombies aside) of a session: a rank, the server it was forked from, the resource tracker."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _parent, _group, its_session = rest.split()[:4]
        if int(its_session) == session and state != "Z":
            members.append(name)
    return members
