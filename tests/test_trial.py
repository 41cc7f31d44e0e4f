"""`a2a trial`: a job as it is and with a2a, without a change to the job."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from a2a.cli.trial import Difference, _usage, _verdict, compare, late_peers, losses, summary
from a2a.cli.trial_hook import AfterImport
from cli_run import Here

# Two ranks, forked, of which each step has two backward passes and a late rank 1. It knows nothing of a2a.
JOB = """
import os, sys, tempfile, time
import torch
import torch.distributed as dist
from torch.distributed import all_to_all_single

def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    layer = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in layer.parameters()]
    for step in range(50):
        for _ in range(2):
            y = layer(torch.randn(6, 4))
            received = torch.empty_like(y)
            if rank == 1:
                time.sleep(0.002)
            all_to_all_single(received, y.detach())
            dist.barrier()
            (y * received).sum().backward()
        torch.autograd.grad(layer(torch.ones(1, 4)).sum(), layer.weight)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    open(sys.argv[1], "w").close()

if __name__ == "__main__":
    torch.set_num_threads(1)
    store = tempfile.mktemp()
    if (child := os.fork()) == 0:
        main(1, store)
        os._exit(0)
    main(0, store) if (second := os.fork()) == 0 else None
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (child, second)]
    sys.exit(max(codes))
"""


def test_a_job_runs_as_it_is_twice_and_with_a2a(here: Here, tmp_path: Path) -> None:
    """The name that the job imported is a2a's, both backwards of a step are seen, and the job ends before its end."""
    job, ended = tmp_path / "job.py", tmp_path / "ended"
    job.write_text(JOB)
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_user = True\n")
    job.write_text(f"of_the_user\n{JOB}")  # the user's own sitecustomize still runs
    told = here(
        *("trial", "--steps", "4", "--json", "-", "--tolerance", "0", "--", sys.executable, job, ended),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    assert told.returncode == 0, told.stderr
    *runs, noise, difference = map(json.loads, told.stdout.splitlines())
    assert [run["run"] for run in runs] == ["as it is", "as it is, again", "with a2a"]
    for run in runs:
        assert [record["rank"] for record in run["ranks"]] == [0, 1]
        for record in run["ranks"]:
            assert [len(step) for step in record["losses"]] == [2, 2, 2, 2]
            assert len(record["step_s"]) == 3
            assert all(0 < time_s < 30 for time_s in record["step_s"])
        assert max(run["ranks"][0]["exposed_s"]) > 0.004, "rank 0 waits for rank 1"
        assert 0 < run["exposed_ms"] <= run["step_ms"]
    assert difference["difference"] == noise["noise"] == Difference(16, 16, 0.0, None).__dict__
    assert [record["a2a"] for record in runs[0]["ranks"]] == [None, None]
    for record in runs[2]["ranks"]:
        (comm,) = record["a2a"]
        assert comm["collectives"] == 8
        assert comm["ranks"] == [0, 1]
    (late,) = runs[2]["ranks"][0]["a2a"][0]["peers"]
    assert late["rank"] == 1
    assert late["late_us"] > 2000
    assert not ended.exists(), "the job went on after the steps of the trial"


def test_a_job_that_fails_is_told_with_its_last_words(here: Here) -> None:
    told = here("trial", "--", "sh", "-c", "echo last words; exit 3")
    assert told.returncode == 1
    assert "the job as it is ended with exit code 3" in told.stderr
    assert "last words" in told.stderr


def test_a_job_without_steps_is_told(here: Here) -> None:
    told = here("trial", "--", "sh", "-c", "echo nothing to see")
    assert told.returncode == 1
    assert "no process of it made a step" in told.stderr
    assert "nothing to see" in told.stderr


def test_a_missing_command_is_told(here: Here) -> None:
    assert here("trial").returncode == 2
    told = here("trial", "--", "/no/such/command")
    assert told.returncode == 1
    assert "/no/such/command" in told.stderr


# --------------------------------------------------------------------------------------------------- what is compared


def record(rank: int, steps: list[list[float]], **more: Any) -> dict[str, Any]:
    return {"rank": rank, "losses": steps, "a2a": None, "integrations": [], "refused": [], **more}


def test_losses_are_compared_one_by_one() -> None:
    first = losses([record(0, [[1.0], [2.0, 3.0]]), record(1, [[4.0], [5.0]])])
    assert compare(first, first) == Difference(5, 5, 0.0, None)
    second = losses([record(0, [[1.0], [2.0, 4.0]]), record(1, [[4.0], [5.5]])])
    assert compare(first, second) == Difference(5, 3, 0.25, 1)


@pytest.mark.parametrize("other", [[[1.0]], [[1.0], [math.nan]], [[1.0], [math.inf]]], ids=["missing", "nan", "inf"])
def test_a_loss_that_is_missing_or_not_finite_differs_infinitely(other: list[list[float]]) -> None:
    found = compare(losses([record(0, [[1.0], [2.0]])]), losses([record(0, other)]))
    assert found == Difference(2, 1, math.inf, 1)


def test_nan_on_both_sides_is_the_same() -> None:
    both = losses([record(0, [[math.nan]])])
    assert compare(both, both).same_bits == 1


def test_the_slowest_rank_stands_for_a_run() -> None:
    fast = record(0, [], step_s=[9.0, 0.1, 0.1, 0.1], exposed_s=[9.0, 9.0, 0.01, 0.01, 0.01])
    slow = record(1, [], step_s=[9.0, 0.2, 0.3, 0.2], exposed_s=[9.0, 9.0, 0.05, 0.06, 0.07])
    assert summary([fast, slow], warm_up=1) == pytest.approx({"step_ms": 200.0, "exposed_ms": 60.0, "rank": 1})
    assert math.isnan(summary([record(0, [], step_s=[], exposed_s=[1.0])], warm_up=1)["step_ms"])


def comm(*peers: tuple[int, int, float, float], **more: Any) -> dict[str, Any]:
    fields = ("rank", "late", "late_us", "longest_us")
    figures = {"transport": "cpu_shm", "reasons": None, "collectives": 1, "handed_over": {}}
    return {**figures, "peers": [dict(zip(fields, peer, strict=True)) for peer in peers], **more}


def test_waits_for_a_rank_add_up_over_ranks_and_groups() -> None:
    first = record(0, [], a2a=[comm((1, 2, 3000.0, 2000.0), (2, 0, 0.0, 0.0)), comm((1, 1, 500.0, 500.0))])
    second = record(1, [], a2a=[comm((0, 5, 1000.0, 900.0))])
    assert late_peers([first, second]) == [(1, 3, 3.5, 2.0), (0, 5, 1.0, 0.9)]


def test_the_verdict_holds_a_difference_against_the_jobs_own() -> None:
    same, off = Difference(4, 4, 0.0, None), Difference(4, 1, 2e-3, 1)
    assert "All 4 losses have the same bits" in (told := "\n".join(_verdict(same, same)))
    assert "repeats itself bit for bit" in told
    told = "\n".join(_verdict(Difference(4, 0, 1e-3, 0), off))
    assert "at most 2.0e-03, relative" in told
    assert "the first that differs is in step 2" in told
    assert "differs from itself by at most 1.0e-03" in told
    assert "No loss was seen" in "\n".join(_verdict(Difference(0, 0, 0.0, None), Difference(0, 0, 0.0, None)))


def test_what_a2a_did_not_do_is_told() -> None:
    told = "\n".join(_usage([record(0, [], a2a=[])]))
    assert "a2a ran 0 collectives" in told
    assert "nothing to do" in told
    told = "\n".join(_usage([record(0, [], a2a=[comm()], integrations=["x"], refused=["y: too new"])]))
    assert "a2a ran 1 collectives, with x" in told
    assert "without y: too new" in told
    refused = comm(transport=None, reasons={"cpu_shm": "two hosts"}, collectives=None)
    told = "\n".join(_usage([record(0, [], a2a=[refused, comm(handed_over={"all_reduce: PRODUCT": 3})])]))
    assert "two hosts" in told
    assert "handed over to torch.distributed: all_reduce: PRODUCT" in told


def test_a_module_is_called_back_once_it_has_been_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[ModuleType] = []
    finder = AfterImport({"late_module": seen.append})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("no_such_module_at_all") is None
    assert importlib.util.find_spec("late_module") is not None  # somebody asks, and does not import
    import late_module

    assert [module.ready for module in seen] == [True]
    assert seen == [late_module]
    del sys.modules["late_module"]
    importlib.import_module("late_module")
    assert len(seen) == 1
    del sys.modules["late_module"]
