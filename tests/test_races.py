"""The CPU kernels under ThreadSanitizer, and under AddressSanitizer with UndefinedBehaviorSanitizer; mutants must be caught.

`race/` holds a program in which the ranks are threads of one process. It is compiled together with the kernels' own
sources and run: as they are, and with one line of the kernels broken (`A2A_MUTANT`), which a scenario must notice by
a report of the sanitizer, a wrong result, or a wake-up that nobody gave. csrc/README.md says what each mutant breaks.

`python tests/test_races.py 1000` runs a thousand seeds of every scenario.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc" / "cpu"
HARNESS = ROOT / "tests" / "race"

# One instruction set: the others differ in their inner loops only.
SOURCES = sorted(KERNELS.glob("*.cpp"))
FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-DA2A_PLAIN_ONLY", "-DA2A_ISA=plain", "-ffp-contract=off"]
THREADS = ["-fsanitize=thread", "-Wno-tsan"]  # it warns of fences, which it does not model
MEMORY = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=nonnull-attribute",  # empty tensors have no address, and memcpy of 0 bytes takes that
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]
LINK = ["-Wl,--wrap=memcpy,--wrap=syscall", "-ldl"]  # race/jitter.cpp
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=4",
    "ASAN_OPTIONS": "exitcode=67",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
NOTICED = {1: "a wrong result", 3: "a lost wake-up", 66: "ThreadSanitizer", -11: "a crash", -6: "a crash"}
TIMEOUT_S = 600  # nothing takes long; this is for machines that stand still meanwhile

# Which scenarios must notice a mutant, each by itself.
CAUGHT_BY = {
    "kRelaxedSignal": (
        "eager",
        "push",
        "read",
        "staged",
        "dispatch",
        "combine",
        "spread",
        "one_shot",
        "reduce_staged",
        "reduce_direct",
    ),
    "kIgnoreRingSpace": ("staged", "combine", "reduce_staged"),
    "kSkipPushDone": ("push", "reduce_direct"),
    "kSkipEntry": ("eager", "push", "pull", "refusals", "dispatch", "combine", "spread", "one_shot", "reduce_direct"),
    "kSkipPullDone": ("pull", "read", "reduce_direct"),
    "kEarlySignal": ("push",),
    "kOneParity": ("eager", "refusals", "dispatch", "combine", "spread"),
    "kNoDoorbell": ("eager", "push", "pull", "staged", "dispatch", "combine", "spread", "one_shot", "reduce_staged"),
    "kIgnoreReaders": ("dispatch", "spread", "reduce_staged"),
    "kOneEager": ("eager", "refusals"),
    "kOneCounts": ("dispatch",),
    "kSkipConfirm": ("refusals", "async"),
    "kNoPublishBell": ("dispatch", "spread"),
    "kEarlyConsume": ("staged", "combine", "reduce_staged"),
    "kEarlyTake": ("dispatch", "spread", "reduce_staged"),
    "kEarlyPublish": ("dispatch", "reduce_staged", "norms"),
    "kSilentFailure": ("giving_up",),
    "kTrustTorn": ("torn",),
    "kOneInput": ("one_shot",),
    "kLateFlag": ("eager", "push", "combine"),
}
# A rank that has been told of a failure may write where others still read; they find out. That is a data race by the letter,
# and left out where ThreadSanitizer would report it.
ONLY_BYTES_SHOW = {"kTrustTorn"}


def mutants() -> dict[str, int]:
    """The numbers of the mutants in signal.h."""
    (enum,) = re.findall(r"enum Mutant \{(.*?)\};", (KERNELS / "signal.h").read_text(), re.DOTALL)
    return {name: int(number) for name, number in re.findall(r"(k\w+) = (\d+)", enum) if name != "kNoMutant"}


def text_of(source: Path) -> str:
    """A source and what it includes from csrc, but for the list of mutants."""
    seen: dict[Path, str] = {}

    def read(path: Path) -> None:
        if path in seen or not path.is_file():
            return
        seen[path] = re.sub(r"enum Mutant \{.*?\};", "", path.read_text(), flags=re.DOTALL)
        for name in re.findall(r'#include "(.+?)"', seen[path]):
            read((path.parent / name).resolve())

    read(source)
    return "\n".join(seen.values())


class Build:
    """Executables of the harness and the kernels, one a mutant, for one sanitizer."""

    def __init__(self, folder: Path, sanitizer: list[str]) -> None:
        self._folder, self._sanitizer = folder, sanitizer
        self._kernels = [*SOURCES, HARNESS / "probe.cpp"]
        self._texts = {source: text_of(source) for source in self._kernels}
        self._built: dict[str, Path] = {}
        self._prefix: list[str] = []

    def executable(self, mutant: str = "kNoMutant") -> Path:
        if mutant not in self._built:
            broken = [s for s in self._kernels if re.search(rf"mutant\((a2a::)?{mutant}\)", self._texts[s])]
            jobs = {source: self._object(source, mutant if source in broken else "") for source in self._kernels}
            for source in sorted(HARNESS.glob("*.cpp")):
                jobs.setdefault(source, self._folder.parent / "harness" / f"{source.stem}.o")
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(lambda source: self._compile(source, jobs[source], mutant), jobs))
            target = self._folder / f"races-{mutant}"
            command(["g++", *FLAGS, *self._sanitizer, *map(str, jobs.values()), *LINK, "-o", str(target)])
            self._built[mutant] = target
        return self._built[mutant]

    def _object(self, source: Path, mutant: str) -> Path:
        return self._folder / (mutant or "plain") / f"{source.stem}.o"

    def _compile(self, source: Path, target: Path, mutant: str) -> None:
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = list(FLAGS)
        if source in self._kernels:
            flags += self._sanitizer
        if target.parent.name == mutant:
            flags.append(f"-DA2A_MUTANT={mutants()[mutant]}")
        command(["g++", *flags, "-c", str(source), "-o", str(target)])

    def run(
        self, scenarios: tuple[str, ...], seeds: int, mutant: str = "kNoMutant"
    ) -> subprocess.CompletedProcess[str]:
        executable = self.executable(mutant)
        if not self._prefix:
            self._prefix = self._find_prefix(executable)
        done = self._start([*self._prefix, str(executable), "--seeds", "1", str(seeds), *scenarios])
        assert done.returncode not in (126, 127), done.stderr
        return done

    def _find_prefix(self, executable: Path) -> list[str]:
        """How to start it: ThreadSanitizers of some years can't live with all the randomness of new kernels' addresses."""
        for prefix in (["env"], ["setarch", platform.machine(), "-R"]):
            tried = self._start([*prefix, str(executable), "--seeds", "1", "0", "eager"])
            if tried.returncode == 0:
                return prefix
        pytest.skip(f"a sanitized program does not start here: {tried.stderr.strip().splitlines()[:1]}")

    def _start(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **OPTIONS}
        return subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )


def command(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stderr}"


def why_not(sanitizer: list[str], folder: Path) -> str:
    """Why a sanitizer can't be used here, or nothing."""
    if shutil.which("g++") is None:
        return "there is no g++"
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    tried = subprocess.run(
        ["g++", *sanitizer, str(source), "-o", str(folder / "empty")], capture_output=True, text=True, check=False
    )
    return f"g++ can't link with {sanitizer[0]}: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("races")


def sanitized(folder: Path, name: str, sanitizer: list[str]) -> Build:
    (folder / name).mkdir()
    if reason := why_not(sanitizer, folder / name):
        pytest.skip(reason)
    return Build(folder / name, sanitizer)


@pytest.fixture(scope="session")
def threads(folder: Path) -> Build:
    return sanitized(folder, "threads", THREADS)


@pytest.fixture(scope="session")
def memory(folder: Path) -> Build:
    return sanitized(folder, "memory", MEMORY)


def test_no_access_races_and_every_byte_is_right(threads: Build) -> None:
    done = threads.run(("all",), seeds=4)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_no_access_is_out_of_bounds_or_undefined(memory: Build) -> None:
    done = memory.run(("all",), seeds=3)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_every_mutant_has_scenarios_that_must_notice_it() -> None:
    assert set(CAUGHT_BY) == set(mutants())


@pytest.mark.parametrize(("mutant", "scenario"), [(m, s) for m, scenarios in CAUGHT_BY.items() for s in scenarios])
def test_a_mutant_is_caught(request: pytest.FixtureRequest, mutant: str, scenario: str) -> None:
    build: Build = request.getfixturevalue("memory" if mutant in ONLY_BYTES_SHOW else "threads")
    done = build.run((scenario,), seeds=100, mutant=mutant)  # it ends with the first seed that notices
    assert done.returncode in NOTICED, f"{mutant} survived {scenario} (exit code {done.returncode}): {done.stderr}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        executable = Build(Path(name) / "threads", THREADS).executable()
        subprocess.run([executable, "--seeds", "1", sys.argv[1], "all"], env={**os.environ, **OPTIONS}, check=True)
