"""What a process finds out about its host: identity, and CPU cores under affinity masks and cgroups."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from a2a.topology import HostFacts, host, local_facts


def fake_root(root: Path, cgroup: str, mounts: list[tuple[str, str, str]], files: dict[str, str]) -> Path:
    """A file tree with /proc/self/cgroup, mounts as (part of the hierarchy, mount point, type and options), and files."""
    lines = [f"{30 + i} 23 0:{i} {part} {point} rw shared:9 - {kind}" for i, (part, point, kind) in enumerate(mounts)]
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join(lines), **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1, V2 = "cgroup cgroup rw,cpu,cpuacct", "cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "quota"),
    [
        pytest.param("0::/", [("/", "/cg", V2)], {"cg/cpu.max": "150000 100000"}, 1.5, id="v2-in-a-container"),
        pytest.param("0::/", [("/", "/cg", V2)], {"cg/cpu.max": "max 100000"}, None, id="v2-no-limit"),
        pytest.param("0::/", [("/", "/cg", V2)], {}, None, id="v2-root-has-no-file"),
        pytest.param(
            "0::/a/b",
            [("/", "/cg", V2)],
            {"cg/a/b/cpu.max": "800000 100000", "cg/a/cpu.max": "300000 100000", "cg/cpu.max": "max 100000"},
            3.0,
            id="v2-the-tightest-of-all-above",
        ),
        pytest.param(
            "0::/a", [("/", "/cg", V2)], {"cg/a/b/cpu.max": "1 1", "cg/a/x": ""}, None, id="v2-not-those-below"
        ),
        pytest.param(
            "0::/../x",
            [("/", "/cg", V2)],
            {"cg/cpu.max": "200000 100000", "x/cpu.max": "100000 100000"},
            2.0,
            id="v2-path-outside-the-namespace",
        ),
        pytest.param(
            "0::/pod/me", [("/pod/me", "/cg", V2)], {"cg/cpu.max": "50000 100000"}, 0.5, id="v2-only-its-part-mounted"
        ),
        pytest.param("0::/gone", [("/", "/cg", V2)], {"cg/cpu.max": "200000 100000"}, 2.0, id="v2-folder-not-visible"),
        pytest.param(
            "0::/", [("/", "/c\\040g", V2)], {"c g/cpu.max": "200000 100000"}, 2.0, id="mount-point-with-a-space"
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/x\n0::/",
            [("/docker/x", "/cg", V1)],
            {"cg/cpu.cfs_quota_us": "250000", "cg/cpu.cfs_period_us": "100000"},
            2.5,
            id="v1-in-a-container",
        ),
        pytest.param(
            "4:cpu:/job",
            [("/", "/cg", V1)],
            {"cg/job/cpu.cfs_quota_us": "-1", "cg/job/cpu.cfs_period_us": "100000", "cg/cpu.cfs_quota_us": "-1"},
            None,
            id="v1-no-limit",
        ),
        pytest.param(
            "4:memory:/job\n5:cpuset:/job\n6:cpu:/job",
            [("/", "/cm", "cgroup cgroup rw,memory"), ("/", "/cs", "cgroup cgroup rw,cpuset"), ("/", "/cg", V1)],
            {"cm/job/cpu.cfs_quota_us": "100000", "cm/job/cpu.cfs_period_us": "100000"},
            None,
            id="v1-other-controllers-do-not-count",
        ),
        pytest.param(
            "1:cpu:/\n0::/",
            [("/", "/one", V1), ("/", "/two", V2)],
            {"one/cpu.cfs_quota_us": "300000", "one/cpu.cfs_period_us": "100000", "two/cpu.max": "200000 100000"},
            2.0,
            id="both-versions",
        ),
        pytest.param("0::/", [("/", "/cg", V2)], {"cg/cpu.max": "what is this"}, None, id="unreadable-limit"),
        pytest.param("nonsense", [("x", "y", "z")], {}, None, id="unreadable-files"),
    ],
)
def test_the_cpu_quota_is_found(
    tmp_path: Path, cgroup: str, mounts: list[tuple[str, str, str]], files: dict[str, str], quota: float | None
) -> None:
    facts = local_facts(fake_root(tmp_path, cgroup, mounts, files))
    assert facts.cpu_quota == quota
    assert bool(facts.cpu_quota_group) == (quota is not None)


def test_a_system_that_shows_nothing_gives_empty_facts(tmp_path: Path) -> None:
    facts = local_facts(tmp_path)
    assert (facts.boot_id, facts.net_ns, facts.pid_ns, facts.ipc_ns, facts.cpu_quota) == ("", "", "", "", None)
    assert facts.pid == os.getpid()
    assert facts.cores == len(os.sched_getaffinity(0))


def test_facts_survive_their_json() -> None:
    facts = local_facts()
    assert HostFacts.from_json(facts.to_json()) == facts
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.net_ns == os.readlink("/proc/self/ns/net")


def facts_with(cpus: tuple[int, ...], quota: float | None = None, group: str = "") -> HostFacts:
    return HostFacts("h", "b", "n", "p", "i", 1, 0, cpus, quota, group)


def test_cores_obey_affinity_and_quota_and_count_shared_ones_once() -> None:
    assert facts_with((0, 1, 2, 3)).cores == 4
    assert facts_with((0, 1, 2, 3), 2.9, "g").cores == 2
    assert facts_with((0,), 8.0, "g").cores == 1
    assert facts_with((0, 1), 0.1, "g").cores == 1
    assert host.cores_together([facts_with((0,)), facts_with((1,))]) == 2  # one core each, as mpirun binds ranks
    assert host.cores_together([facts_with((0, 1)), facts_with((0, 1))]) == 2
    everything = tuple(range(8))
    assert host.cores_together([facts_with(everything, 2.0, "g"), facts_with(everything, 2.0, "g")]) == 2
    assert host.cores_together([facts_with(everything, 1.5, "g"), facts_with(everything, 1.5, "h")]) == 3
    assert host.cores_together([facts_with(everything, 1.5, "g"), facts_with(everything)]) == 8


def cores_when_bound(queue: multiprocessing.SimpleQueue[int]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    queue.put(local_facts().cores)


def test_a_process_bound_to_one_core_has_one() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=cores_when_bound, args=(queue,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert queue.get() == 1


def quota_inside(group: Path, queue: multiprocessing.SimpleQueue[float | None]) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    queue.put(local_facts().cpu_quota)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real cgroup below this process's own, limited to 0.7 cores."""
    problem: object = "no cgroup limits CPU time here"
    for folder in host._cpu_cgroups(Path("/")):
        group = folder / f"a2a-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            problem = error
            continue
        try:
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text("70000 100000")
            elif (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text("70000")
            else:
                continue
            yield group
            return
        except OSError as error:
            problem = error
        finally:
            group.rmdir()
    pytest.skip(f"needs root and a writable cgroup with a CPU controller: {problem}")


@pytest.mark.root
def test_the_quota_of_a_real_cgroup_is_found(limited_group: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=quota_inside, args=(limited_group, queue))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert queue.get() == 0.7
