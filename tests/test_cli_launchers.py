"""Commands under torchrun, mpiexec and Slurm."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from a2a.cli.ranks import find_mpi
from a2a.config import Launch
from cli_run import (
    A2A,
    TINY,
    Here,
    clean_environment,
    free_port,
    needs_mpi,
    run,
)


def test_under_torchrun_rank_0_speaks_for_all() -> None:
    told = run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "-m", "a2a", "bench", "all_to_all", *TINY, "--json", "-",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert [json.loads(text)["ranks"] for text in told.stdout.splitlines()] == [2, 2, 2]


def test_another_number_of_ranks_than_the_launchers_is_refused(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a2a.cli.ranks.launch", lambda: Launch(0, 2, 0, "torchrun"))
    monkeypatch.setattr("a2a.cli.topo.launch", lambda: Launch(0, 2, 0, "torchrun"))
    told = here("topo", "--ranks", "3")
    assert told.returncode == 2
    assert "torchrun has started 2 ranks" in told.stderr


@needs_mpi
def test_under_mpiexec_ranks_find_each_other() -> None:
    told = run(*find_mpi().mpiexec, "-n", "2", *A2A, "topo", "--json", "-")
    assert told.returncode == 0, told.stderr
    assert [domain["ranks"] for domain in json.loads(told.stdout)["domains"]] == [[0, 1]]


def test_under_slurm_ranks_meet_at_the_given_address() -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [*A2A, "topo", "--json", "-"],
            env={
                **clean_environment(),
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_ID": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [domain["ranks"] for domain in json.loads(outputs[0])["domains"]] == [[0, 1]]
    assert outputs[1] == ""
