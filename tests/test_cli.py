"""The command line as a user meets it: started alone, under launchers, piped, on a narrow terminal, and with mistakes."""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

import a2a
from a2a.cli import devices, main, parse, show
from a2a.cli.ranks import find_mpi
from a2a.config import Launch
from a2a.errors import UnsupportedError
from a2a.kernels import cpu
from a2a.topology import Topology, presets
from pool import PRELOADED

A2A = (sys.executable, "-m", "a2a")
FOLDER = Path(a2a.__file__).parent.parent  # the a2a that is tested here
PNG = b"\x89PNG\r\n\x1a\n"
TINY = ("--device", "cpu", "--bytes", "4K", "--repeat", "3")
TINY_MOE = ("--device", "cpu", "--tokens", "16", "--hidden", "16", "--experts", "4", "--top-k", "2", "--repeat", "3")


def run(*words: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        env={**clean_environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@dataclass(frozen=True)
class Told:
    returncode: object
    stdout: str
    stderr: str


Here = Callable[..., Told]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a command in this process: seconds less than in one of its own, which has to import torch first.

    Ranks are forked from the server that the other tests' pool uses, with that pool's modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name)])
    monkeypatch.setattr(type(context), "set_forkserver_preload", lambda *_: None)

    def call(*words: str | Path, environment: dict[str, str] | None = None) -> Told:
        monkeypatch.setattr(sys, "argv", ["a2a", *map(str, words)])
        for name in set(os.environ) - set(clean_environment()):
            monkeypatch.delenv(name)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            main()
        return Told(left.value.code, *capsys.readouterr())

    return call


def clean_environment() -> dict[str, str]:
    """This process's, without what launchers and users set, and with the tested a2a first."""
    prefixes = ("A2A_", "OMPI_", "PMI_", "SLURM_", "COLUMNS")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in names}
    return {**kept, "PYTHONPATH": str(FOLDER)}


def mpi_available() -> bool:
    try:
        find_mpi()
    except UnsupportedError:
        return False
    return True


needs_mpi = pytest.mark.skipif(not mpi_available(), reason="needs mpi4py and an mpiexec: pip install 'a2a[mpi]' mpich")
needs_plot = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs Matplotlib: pip install 'a2a[plot]'"
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
    (c10d,) = [line for line in told.stdout.splitlines() if " c10d " in line]
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


# -------------------------------------------------------------------------------------------------------------- bench


@needs_mpi
@needs_plot
def test_bench_compares_with_gloo_and_mpi_in_one_run(tmp_path: Path) -> None:
    told = run(
        *A2A, "bench", "all_to_allv", *TINY, "--against", "gloo,mpi", "--json", tmp_path / "out.jsonl",
        "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["impl"] for line in lines] == ["a2a", "gloo", "mpi", "memcpy"]
    assert all(line["wrong"] == 0 and line["n"] == 3 and line["p50_us"] > 0 for line in lines)
    assert set(lines[0]["ratio"]) == {"gloo", "mpi", "memcpy"}
    assert lines[0]["env"]["command"].startswith("a2a bench all_to_allv --device cpu")
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_bench_through_torch_distributed_and_of_several_dtypes(here: Here) -> None:
    told = here("bench", "all_to_all", *TINY, "--through", "dist", "--dtype", "bf16,int16", "--json", "-")
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in told.stdout.splitlines()]  # nothing but JSON there
    of = {(line["impl"], line["dtype"]): line for line in lines}
    assert of["a2a", "int16"]["wrong"] == 0
    assert of["a2a", "bfloat16"]["ratio"]["gloo"] > 0
    assert of["gloo", "int16"]["p50_us"] is None  # gloo has no int16
    assert "gloo: not measured" in told.stderr


def test_bench_of_ordinary_tensors_with_a_chosen_algorithm() -> None:
    told = run(
        *A2A,
        "bench",
        "all_to_all",
        *TINY,
        "--ranks",
        "3",
        "--memory",
        "ordinary",
        "--algorithm",
        "pairwise",
        "--json",
        "-",
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout.splitlines()[0])["algorithm"] == "pairwise"


@needs_plot
def test_bench_moe_times_every_phase_against_gloo_and_copies(here: Here, tmp_path: Path) -> None:
    told = here(
        "bench", "moe", *TINY_MOE, "--dtype", "bf16,fp32", "--skew", "1", "--json", tmp_path / "out.jsonl",
        "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    parts = ["dispatch", "combine", "combine_backward", "dispatch_backward", "total"]
    assert [line["case"]["part"] for line in lines if line["impl"] == "a2a" and line["dtype"] == "float32"] == parts
    assert {line["impl"] for line in lines} == {"a2a", "gloo", "copies"}
    assert all(line["wrong"] == 0 for line in lines)
    assert "times as long as plain copies" in told.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_bench_moe_of_other_layouts_and_formats(here: Here) -> None:
    told = here(
        "bench", "moe", *TINY_MOE, "--tokens", "24,7", "--layout", "compact", "--alignment", "4", "--wire", "mxfp8",
        "--rows", "wire", "--max-rows", "300", "--dtype", "bf16", "--json", "-",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in told.stdout.splitlines()]
    assert {line["case"]["tokens"] for line in lines} == {24, 7}
    assert all(line["wrong"] == 0 for line in lines)
    kind = {"layout": "compact", "alignment": 4, "wire": "mxfp8", "rows": "wire", "max_rows": 300}
    assert kind.items() <= lines[0]["case"].items()


def test_bench_of_both_kinds_of_memory_in_one_run(here: Here) -> None:
    told = here("bench", "all_to_all", *TINY, "--memory", "symmetric,ordinary", "--json", "-")
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in told.stdout.splitlines()]
    assert [line["case"]["memory"] for line in lines if line["impl"] == "a2a"] == ["symmetric", "ordinary"]
    assert "ordinary tensors: p50" in told.stderr


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "expected"),
    [
        (0, None, None, "cpu"),
        (1, None, None, "cpu"),  # one rank shows nothing
        (2, None, None, "cuda"),
        (2, 2, None, "cuda"),
        (2, 4, None, "cpu"),
        (2, 4, "cuda", "cuda"),
        (8, None, "cpu", "cpu"),
    ],
)
def test_gpus_are_taken_where_there_is_one_for_every_rank(
    gpus: int, ranks: int | None, asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: gpus)
    assert devices.choose(asked, ranks) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpus_that_are_not_there_are_told(here: Here) -> None:
    told = here("bench", "all_to_all", "--device", "cuda")
    assert told.returncode == 1
    assert "--device cuda: torch" in told.stderr
    assert "finds no GPU here" in told.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("all_reduced",), "'all_reduced' is not one of all_to_all, all_to_allv, moe"),
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


def test_what_a_rank_raises_is_told_with_its_rank(here: Here) -> None:
    told = here("bench", "all_to_all", "--device", "cpu", "--bytes", "4", "--repeat", "3")
    assert told.returncode == 1
    assert "fewer than one for each of 2 ranks" in told.stderr
    assert "of 2 failed" in told.stderr


# ------------------------------------------------------------------------------------------------------ plan and demo


def test_plan_names_the_algorithm_and_why_not_the_others(here: Here) -> None:
    told = here("plan", "all_to_all", "--bytes", "4K,64M", "--json", "-")
    assert told.returncode == 0, told.stderr
    plans = [json.loads(text) for text in told.stdout.splitlines()]
    assert [(plan["bytes"], plan["algorithm"]) for plan in plans] == [(4 << 10, "pairwise"), (64 << 20, "pairwise")]
    assert "c10d" in dict(plans[0]["rejected"])
    assert "not c10d: " in told.stderr


@pytest.mark.parametrize(("topology", "ranks"), [("cpu:2x2", 4), ("gb200:nvl72x2", 144)])
def test_plan_says_what_no_algorithm_supports_and_the_way_out(here: Here, topology: str, ranks: int) -> None:
    told = here("plan", "moe", "--experts", "288", "--topology", topology, "--json", "-")
    assert told.returncode == 1
    (plan,) = [json.loads(text) for text in told.stdout.splitlines()]
    assert (plan["algorithm"], plan["ranks"], plan["time_us"]) == (None, ranks, None)
    rejected = dict(plan["rejected"])
    assert rejected.keys() == {"direct", "staged"}
    assert all("spans 2 domains" in why for why in rejected.values())
    text = " ".join(told.stderr.split())
    assert "no algorithm supports this" in text
    assert "not staged: " in text
    assert f"of the ranks of one domain ({ranks // 2} here)" in text
    assert "Traceback" not in text


def test_ranks_that_no_algorithm_supports_are_told_without_a_traceback() -> None:
    told = run(*A2A, "plan", "moe", "--ranks", "2", environment={"A2A_TOPOLOGY": "cpu:2x1"})
    assert told.returncode == 1
    assert "no algorithm supports this" in told.stdout
    assert "spans 2 domains" in told.stdout
    assert "Traceback" not in told.stdout + told.stderr


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


# ---------------------------------------------------------------------------------------------------------- launchers


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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


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
