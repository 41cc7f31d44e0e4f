"""What `a2a doctor` finds out: one fact a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One line. `state`: "ok", "off" (absent, and nothing is wrong with that) or "bad" (something a2a needs is missing)."""

    state: str
    name: str
    text: str
    fix: str = ""


def ask(name: str, question: Callable[[], Iterator[Fact]]) -> list[Fact]:
    """The facts that answer a question; an unforeseen error becomes one more of them."""
    found: list[Fact] = []
    try:
        found.extend(question())
    except ImportError as error:  # told, with its fix, under "Software"
        found.append(Fact("off", name, f"could not be asked: {error}"))
    except Exception as error:
        found.append(Fact("bad", name, f"could not be asked: {type(error).__name__}: {error}"))
    return found
