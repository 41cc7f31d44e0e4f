"""`a2a bench gradients` as a user meets it: what it prints and writes, and what it says to mistakes."""

from __future__ import annotations

import json

import pytest

from a2a.cli import hosts
from a2a.measure import Line
from cli_run import Here
from test_bench import script

TINY = ("--device", "cpu", "--layers", "3", "--hidden", "32", "--tokens", "16", "--bucket-mb", "0.005", "--repeat", "3")


def check_lines(text: str, ranks: int, across: bool) -> None:
    lines = [json.loads(line) for line in text.splitlines()]
    of = {line["impl"]: line for line in lines}
    assert list(of) == ["compute", "a2a", "a2a_bf16", "a2a_fp8", "gloo"]
    assert all(line["wrong"] == 0 and line["n"] == 3 and line["p50_us"] > 0 for line in lines)
    assert all(line["bytes"] == 3 * 32 * 33 * 4 and line["ranks"] == ranks for line in lines)
    sent = [of[name]["case"]["bytes_sent"] for name in ("a2a", "a2a_bf16", "a2a_fp8")]
    assert sent == sorted(sent, reverse=True)
    assert (sent[-1] > 0) == across
    for name in ("a2a", "a2a_bf16", "a2a_fp8"):
        case = of[name]["case"]
        assert set(of[name]["ratio"]) == {"compute", "gloo"}
        assert case["buckets"] > 1
        assert case["alone_us"] > 0
        assert case["exposed_us"] >= 0
        assert case["hidden_us"] == pytest.approx(max(0.0, case["alone_us"] - case["exposed_us"]), abs=0.2)
        assert case["slowdown"] > 0
        assert case["cpu_us"] > 0


def test_bench_gradients_tells_hidden_and_exposed_time(here: Here) -> None:
    told = here(
        "bench", "gradients", *TINY, "--ranks", "4", "--topology", "cpu:2x2", "--wire", "bf16,fp8", "--json", "-"
    )
    assert told.returncode == 0, told.stderr
    check_lines(told.stdout, 4, across=True)
    for word in ("hidden us", "exposed us", "gloo / a2a", "2 x 2 cpu_host", "sent across"):
        assert word in told.stderr


@pytest.mark.skipif(hosts.why_not() is not None, reason=hosts.why_not() or "")
def test_bench_gradients_on_two_hosts(here: Here) -> None:
    told = here(
        "bench", "gradients", *TINY, "--hosts", "2", "--ranks", "2", "--wire", "bf16,fp8", "--order", "cyclic",
        "--json", "-",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    check_lines(told.stdout, 2, across=True)
    assert "2 hosts at 1000 Mbit/s" in told.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gradients", "--hosts", "2", "--topology", "cpu:2x2"), "leave --topology out"),
        (("gradients", "--wire", "mxfp8"), "'mxfp8' is not one of bf16, fp8"),
        (("gradients", "--plot", "x.png"), "no drawing of gradients"),
        (("moe", "--topology", "cpu:2x2"), "--topology is for gradients"),
    ],
)
def test_mistakes_are_explained(here: Here, words: tuple[str, ...], says: str) -> None:
    told = here("bench", *words, "--device", "cpu")
    assert told.returncode == 2
    assert says in told.stderr


def made_up(
    tokens: int, compute_us: float, step_us: float, alone_us: float, exposed_us: float, sent: float
) -> list[Line]:
    def line(impl: str, p50_us: float, **case: float) -> Line:
        case = {"tokens": tokens, **case}
        return Line("gradients", impl, "-", 1 << 26, "float32", 4, p50_us, case=case)

    times = {"alone_us": alone_us, "exposed_us": exposed_us, "hidden_us": alone_us - exposed_us, "cpu_us": 100.0}
    return [
        line("compute", compute_us), line("a2a", step_us, bytes_sent=1000, **times),
        line("a2a_bf16", step_us, bytes_sent=500, **times), line("a2a_fp8", step_us, bytes_sent=sent, **times),
    ]  # fmt: skip


def test_floors_are_held_against_the_step_that_is_in_balance() -> None:
    gradients = script("gradients")
    short, fair = made_up(64, 300, 1000, 1000, 900, 260), made_up(256, 1500, 1800, 1000, 100, 260)
    assert gradients.balanced(short + fair)["a2a"] is fair[1]
    assert gradients.missed(gradients.balanced(fair)) == []
    for lines, says in (
        (made_up(256, 1500, 1800, 1000, 200, 260), "80.0 % of 1,000 us are hidden"),
        (made_up(256, 1500, 1900, 1000, 100, 260), "a step takes 1,900 us; 1,840 are allowed"),
        (made_up(256, 1500, 1800, 1000, 100, 280), "a2a_fp8 sends 28.0 % of the bytes"),
    ):
        (told,) = gradients.missed(gradients.balanced(lines))
        assert says in told
