"""The command line as a user meets it: started alone, under launchers, piped, on a narrow terminal, and with mistakes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from a2a.cli import parse, show
from a2a.kernels import cpu
from a2a.topology import Topology, presets
from cli_run import (
    A2A,
    FOLDER,
    PNG,
    Here,
    clean_environment,
    needs_plot,
    run,
)

# -------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", [4096]),
        ("4K,1M,64M", [4 << 10, 1 << 20, 64 << 20]),
        ("1g, 2MiB ,3kb", [1 << 30, 2 << 20, 3 << 10]),
    ],
)
def test_sizes_are_powers_of_1024(text: str, expected: list[int]) -> None:
    assert parse.sizes(text) == expected


@pytest.mark.parametrize("text", ["", "4Q", "-1", "0", "1.5M", "K"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse.sizes(text)


def test_sizes_are_shown_as_they_are_written() -> None:
    assert [show.size_text(size) for size in (4 << 10, 3 << 20, 1 << 30, 4095)] == ["4K", "3M", "1G", "4095"]


def test_dtypes_have_short_names_and_torch_ones() -> None:
    assert parse.dtype_names("bf16,fp32,int16") == ["bfloat16", "float32", "int16"]
    with pytest.raises(ValueError, match="no dtype 'nn'"):
        parse.dtype("nn")


def test_a_baseline_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="'nccl' is not one of gloo, mpi"):
        parse.words("gloo,nccl", ("gloo", "mpi"), "--against")


# ------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_lists_this_machine_and_exits_with_0(here: Here) -> None:
    told = here("doctor")
    assert told.returncode == 0, told.stderr
    for word in (
        "python",
        "torch",
        "library",
        "memfd",
        "futex",
        "pidfd",
        "cpu_shm",
        "pairwise",
        "A2A_TIMEOUT_S",
        "mpi",
    ):
        assert word in told.stdout
    assert "Nothing here keeps a2a from working" in told.stdout
    baselines = [line for line in told.stdout.splitlines() if " c10d " in line]
    assert len(baselines) == 5  # of all collectives but moe
    for c10d in baselines:
        assert c10d.startswith("+")
        assert "takes what nothing else can" in c10d


@pytest.fixture
def _no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "find", lambda: None)
    cpu.lib.cache_clear()
    yield
    cpu.lib.cache_clear()


@pytest.mark.usefixtures("_no_library")
def test_doctor_says_how_to_get_a_library_that_is_missing(here: Here) -> None:
    told = here("doctor")
    assert told.returncode == 0, told.stderr
    assert "pip install ." in told.stdout
    assert "keep a2a from working" in told.stdout


def test_doctor_works_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    told = run(*A2A, "doctor", environment={"PYTHONPATH": f"{tmp_path}:{FOLDER}"})
    assert told.returncode == 0, told.stderr
    assert "pip install torch" in told.stdout


# --------------------------------------------------------------------------------------------------------------- topo


def test_topo_of_a_preset_can_be_read_again(here: Here, tmp_path: Path) -> None:
    told = here("topo", "--topology", "cpu:2x2", "--json", tmp_path / "topo.json")
    assert told.returncode == 0, told.stderr
    assert "4 ranks: 2 x 2 cpu_host" in told.stdout
    assert Topology.load(tmp_path / "topo.json") == presets.get("cpu:2x2")


def test_topo_writes_json_alone_to_stdout(here: Here) -> None:
    told = here("topo", "--topology", "h200:2x8", "--json", "-")
    assert Topology.from_json(told.stdout) == presets.get("h200:2x8")
    assert len(told.stdout.splitlines()) == 1


def test_topo_groups_the_ranks_that_it_starts(here: Here) -> None:
    told = here("topo", "--ranks", "2", "--json", "-")
    assert told.returncode == 0, told.stderr
    assert [domain["ranks"] for domain in json.loads(told.stdout)["domains"]] == [[0, 1]]


@needs_plot
def test_topo_draws_large_topologies(here: Here, tmp_path: Path) -> None:
    told = here("topo", "--topology", "gb200:nvl72x14", "--plot", tmp_path / "topo.png")
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "topo.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("all_reduced",),
            "'all_reduced' is not one of all_to_all, all_to_allv, all_reduce",
        ),
        (("all_to_all", "--bytes", "4Q"), "'4Q' is not a size"),
        (("all_to_all", "--dtype", "nn"), "no dtype 'nn'"),
        (("all_to_all", "--through", "dist", "--memory", "symmetric"), "use --memory ordinary"),
        (("moe", "--top-k", "9", "--experts", "8"), "--top-k 9 is more than --experts 8"),
        (("moe", "--against", "mpi"), "the MoE layer is compared with gloo"),
        (("moe", "--tokens", "8,none"), "--tokens: 'none' is not a whole number above 0"),
        (("all_to_all", "--device", "cpu", "--graph"), "--graph is for GPUs"),
        (("all_to_all", "--device", "cpu", "--beside", "gemm"), "--beside is for GPUs"),
        (
            ("all_to_all", "--device", "cpu", "--against", "nccl"),
            "--against nccl: not on cpu, where there are gloo, mpi",
        ),
        (("all_to_all", "--device", "tpu"), "--device: 'tpu' is not one of cpu, cuda"),
        (("all_to_all", "--nonsense"), "No such option"),
    ],
)
def test_mistakes_are_told_without_a_traceback(here: Here, words: tuple[str, ...], message: str) -> None:
    told = here("bench", *words)
    assert told.returncode == 2
    assert message in " ".join(told.stderr.split())
    assert "Traceback" not in told.stderr


# ------------------------------------------------------------------------------------------------------ plan and demo


def test_plan_names_the_algorithm_and_why_not_the_others(here: Here) -> None:
    told = here("plan", "all_to_all", "--bytes", "4K,64M", "--json", "-")
    assert told.returncode == 0, told.stderr
    plans = [json.loads(text) for text in told.stdout.splitlines()]
    assert [(plan["bytes"], plan["algorithm"]) for plan in plans] == [(4 << 10, "pairwise"), (64 << 20, "pairwise")]
    assert "c10d" in dict(plans[0]["rejected"])
    assert "not c10d: " in told.stderr


def test_plan_says_what_no_algorithm_supports_and_the_way_out(here: Here) -> None:
    told = here("plan", "moe", "--experts", "288", "--topology", "gb200:nvl72x2", "--json", "-")
    assert told.returncode == 1
    (plan,) = [json.loads(text) for text in told.stdout.splitlines()]
    assert (plan["algorithm"], plan["ranks"], plan["time_us"]) == (None, 144, None)
    rejected = dict(plan["rejected"])
    assert rejected.keys() >= {"direct", "staged", "hierarchical"}
    assert "serves cpu tensors" in rejected.pop("hierarchical")
    assert all("spans 2 domains" in why for why in rejected.values())
    text = " ".join(told.stderr.split())
    assert "no algorithm supports this" in text
    assert "not staged: " in text
    assert "of the ranks of one domain (72 here)" in text
    assert "Traceback" not in text


def test_plan_holds_a_layer_across_domains_against_a_flat_one(here: Here) -> None:
    """Two domains of two: a token needs the other one unless all of its 8 experts are here, and sends it 4 rows if flat."""
    arguments = ("--tokens", "1000", "--hidden", "1000", "--experts", "64", "--top-k", "8", "--topology", "cpu:2x2")
    told = here("plan", "moe", *arguments, "--json", "-")
    assert told.returncode == 0, told.stderr
    (plan,) = [json.loads(text) for text in told.stdout.splitlines()]
    assert plan["algorithm"] == "hierarchical"
    assert plan["cost"]["scale_out_bytes"] == int(4_000_000 * (1 - 0.5**8))
    (remark,) = plan["remarks"]
    assert "would send 16,000,000 bytes across rails instead of 3,984,375 (4.0 times)" in remark
    assert "16,000,000 bytes across rails" in " ".join(told.stderr.split())


def test_ranks_that_no_algorithm_supports_are_told_without_a_traceback() -> None:
    told = run(*A2A, "plan", "moe", "--ranks", "2", environment={"A2A_TOPOLOGY": "h200:2x1"})
    assert told.returncode == 1
    assert "no algorithm supports this" in told.stdout
    assert "spans 2 domains" in told.stdout
    assert "is of kind nvlink" in " ".join(told.stdout.split())
    assert "Traceback" not in told.stdout + told.stderr


@pytest.mark.parametrize("topology", ["cpu:2x2", "h200:4x8", "gb300:nvl72x2"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_plan_explains_what_crosses_domains(here: Here, op: str, topology: str) -> None:
    told = here("plan", op, "--bytes", "64M", "--topology", topology, "--json", "-")
    (plan,) = [json.loads(text) for text in told.stdout.splitlines()]
    assert (told.returncode, plan["algorithm"]) == (0, "hierarchical")
    assert 0 < plan["cost"]["scale_out_bytes"] < 64 << 20
    assert "times as long" in dict(plan["rejected"])["c10d"]


def test_plan_for_a_topology_needs_none_of_its_ranks(here: Here) -> None:
    given = here("plan", "all_to_all", "--topology", "gb200:nvl72x2")
    assert given.returncode == 0
    assert "144 ranks" in given.stdout
    assert "1M float32: c10d" in given.stdout
    assert here("plan", "all_to_all", environment={"A2A_TOPOLOGY": "gb200:nvl72x2"}).stdout == given.stdout
    within = here("plan", "all_to_all", "--topology", "gb200:nvl72x1")
    assert "1M float32: push" in within.stdout
    assert "spans" not in within.stdout
    assert "leave --ranks out" in here("plan", "moe", "--topology", "cpu:2", "--ranks", "3").stderr


def test_demo_is_right_and_ends_with_one_clear_sentence() -> None:
    told = run(*A2A, "demo", "--device", "cpu", "--ranks", "2", "--tokens", "64", "--hidden", "64", "--repeat", "3")
    assert told.returncode == 0, told.stderr
    assert "every output and gradient is that of a dense layer." in told.stdout.rstrip().splitlines()[-1]
    for word in ("output", "gradient of the router", "dispatch backward", "times faster"):
        assert word in told.stdout


# ---------------------------------------------------------------------------------------------------------- terminals


def test_a_terminal_gets_tables_that_fit_it() -> None:
    lines = [line.rstrip() for line in on_a_terminal(60, "topo", "--topology", "h200:4x8").splitlines()]
    assert max(map(len, lines)) <= 60
    assert any("nvlink" in line for line in lines)


@pytest.mark.parametrize("width", [12, 20, 24, 25, 26, 27, 28, 29, 30, 200])
def test_tables_lose_nothing_on_narrow_terminals(width: int) -> None:
    text = io.StringIO()
    show.print_table(
        Console(file=text, width=width), ["impl", "p50 us", "p99 us"], [["a2a", "1,234", "5.67"]], title="Times"
    )
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) <= max(width, len("p50 us 1,234"))
    for word in ("Times", "impl", "p99 us", "a2a", "1,234", "5.67"):
        assert any(word in line for line in lines)


def on_a_terminal(columns: int, *words: str) -> str:
    """What the command prints on a terminal so wide, without colours and movements."""
    import fcntl
    import struct
    import termios

    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**clean_environment(), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen([*A2A, *words], env=environment, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    seen = b""
    while True:
        try:
            chunk = os.read(outer, 65536)
        except OSError:  # the last writer is gone
            break
        if not chunk:
            break
        seen += chunk
    os.close(outer)
    assert process.wait(timeout=240) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
