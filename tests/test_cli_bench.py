"""`a2a bench` as a user meets it: what it prints and writes, and what it says to mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from a2a.cli import devices
from cli_run import (
    A2A,
    PNG,
    TINY,
    TINY_MOE,
    Here,
    needs_mpi,
    needs_plot,
    run,
)


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


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 1.0), ("reduce_scatter", 0.5), ("all_gather", 0.5)])
def test_bench_of_reductions_and_gathers(here: Here, op: str, factor: float) -> None:
    told = here("bench", op, *TINY, "--memory", "symmetric,ordinary", "--against", "gloo", "--json", "-")
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in told.stdout.splitlines()]
    assert [line["impl"] for line in lines] == ["a2a", "gloo", "memcpy"] * 2
    assert all(line["wrong"] == 0 and line["p50_us"] > 0 and line["op"] == op for line in lines)
    assert lines[0]["algorithm"] == "one_shot"
    assert lines[0]["busbw_GBps"] == pytest.approx(lines[0]["algbw_GBps"] * factor, rel=1e-3)
    assert all(line["case"]["predicted_us"] > 0 for line in lines if line["impl"] == "a2a")


@needs_mpi
@needs_plot
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_bench_of_reductions_against_mpi(op: str, tmp_path: Path) -> None:
    told = run(
        *A2A, "bench", op, *TINY, "--memory", "ordinary", "--dtype", "fp32,bf16", "--against", "gloo,mpi",
        "--json", tmp_path / "out.jsonl", "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["impl"] for line in lines] == ["a2a", "gloo", "mpi", "memcpy"] * 2
    assert all(line["wrong"] == 0 for line in lines)
    of = {(line["impl"], line["dtype"]): line for line in lines}
    assert of["mpi", "float32"]["p50_us"] > 0
    if op == "all_gather":
        assert of["mpi", "bfloat16"]["p50_us"] > 0  # bytes are bytes
    else:
        assert of["mpi", "bfloat16"]["case"]["why"] == "MPI has no bfloat16"
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


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


def test_what_a_rank_raises_is_told_with_its_rank(here: Here) -> None:
    told = here("bench", "all_to_all", "--device", "cpu", "--bytes", "4", "--repeat", "3")
    assert told.returncode == 1
    assert "fewer than one for each of 2 ranks" in told.stderr
    assert "of 2 failed" in told.stderr


def test_bench_holds_the_fused_norm_against_the_unfused_sequence(here: Here) -> None:
    told = here("bench", "all_reduce_rms_norm", "--bytes", "3000", "--hidden", "300", "--repeat", "2", "--json", "-")
    assert told.returncode == 0, told.stderr
    lines = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert [(line["impl"], line["wrong"], line["bytes"]) for line in lines] == [("a2a", 0, 2400), ("gloo", 0, 2400)]
    assert lines[0]["algorithm"] == "one_shot"
    assert lines[0]["case"]["hidden"] == 300
