"""The topology value, its JSON and the presets."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2a.topology import Domain, Link, Topology, model, presets

UP, OUT = Link(3.0, 6.7), Link(100.0, 0.125)
positive = st.floats(min_value=1e-6, max_value=1e9)
links = st.builds(Link, st.floats(min_value=0, max_value=1e9), positive, st.text(max_size=8))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any partition of up to 12 ranks, with any names and numbers."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 12)))))
    cuts = draw(st.sets(st.integers(1, len(ranks) - 1))) if len(ranks) > 1 else set()
    name = st.text(max_size=4)
    domains = [
        Domain(tuple(ranks[a:b]), draw(st.sampled_from(model.KINDS)), draw(name), draw(name), draw(st.integers(0, 300)))
        for a, b in pairwise([0, *sorted(cuts), len(ranks)])
    ]
    return Topology(tuple(domains), draw(links), draw(links), tuple(draw(st.lists(st.text(max_size=8), max_size=3))))


def hosts(*ranks: tuple[int, ...]) -> Topology:
    """CPU hosts with these ranks."""
    return Topology(tuple(Domain(r, "cpu_host") for r in ranks), UP, OUT)


# ---- the value


@given(topologies(), st.randoms())
def test_equal_wirings_are_equal_however_they_are_listed(topology: Topology, random: object) -> None:
    backwards = tuple(
        Domain(domain.ranks[::-1], domain.kind, domain.host, domain.rack, domain.cores)
        for domain in topology.domains[::-1]
    )
    up, out = (Link(link.latency_us, link.bandwidth_GBps) for link in (topology.scale_up, topology.scale_out))
    other = Topology(backwards, up, out, notes=("something else",))
    assert other == topology
    assert hash(other) == hash(topology)
    assert len({other, topology}) == 1


def test_other_ranks_links_kinds_or_hosts_are_unequal() -> None:
    base = Topology((Domain((0,), "cpu_host", "a"), Domain((1,), "cpu_host", "b")), UP, OUT)
    others = [
        Topology((Domain((0, 1), "cpu_host", "a"),), UP, OUT),
        Topology(base.domains, OUT, OUT),
        Topology(base.domains, UP, UP),
        Topology((Domain((0,), "nvlink", "a"), base.domains[1]), UP, OUT),
        Topology((Domain((0,), "cpu_host", "c"), base.domains[1]), UP, OUT),
        Topology((Domain((0,), "cpu_host", "a", "r1"), base.domains[1]), UP, OUT),
        Topology((Domain((0,), "cpu_host", "a", cores=2), base.domains[1]), UP, OUT),
    ]
    assert len({base, *others}) == 8


@given(topologies())
def test_every_rank_is_in_the_domain_it_is_said_to_be_in(topology: Topology) -> None:
    assert sorted(rank for domain in topology.domains for rank in domain.ranks) == list(range(topology.world_size))
    assert topology.is_single_domain == (len(topology.domains) == 1)
    for a in range(topology.world_size):
        assert a in topology.domain_of(a).ranks
        assert topology.domains[topology.domain_index(a)] is topology.domain_of(a)
        for b in range(topology.world_size):
            assert topology.same_domain(a, b) == (b in topology.domain_of(a).ranks)


@given(topologies())
def test_a_rail_has_one_rank_of_each_domain_and_every_rank_is_on_one(topology: Topology) -> None:
    rails = topology.rails()
    assert len(rails) == max(len(domain.ranks) for domain in topology.domains)
    assert {rank for rail in rails for rank in rail} == set(range(topology.world_size))
    for i, rail in enumerate(rails):
        assert [topology.domain_index(rank) for rank in rail] == list(range(len(topology.domains)))
        for rank, domain in zip(rail, topology.domains, strict=True):
            assert domain.ranks.index(rank) == i % len(domain.ranks)


def test_ranks_of_a_smaller_domain_take_turns_on_the_rails() -> None:
    assert hosts((0, 1, 2, 3, 4), (5, 6)).rails() == ((0, 5), (1, 6), (2, 5), (3, 6), (4, 5))
    assert hosts((0, 2), (1, 3)).rails() == ((0, 1), (2, 3))
    assert hosts((0, 1, 2)).rails() == ((0,), (1,), (2,))


@given(topologies(), st.data())
def test_a_restricted_topology_keeps_who_shares_memory_with_whom(topology: Topology, data: st.DataObject) -> None:
    members = data.draw(st.lists(st.sampled_from(range(topology.world_size)), min_size=1, unique=True))
    group = topology.restrict(members)
    assert group.world_size == len(members)
    assert (group.scale_up, group.scale_out) == (topology.scale_up, topology.scale_out)
    for new_a, old_a in enumerate(members):
        old, new = topology.domain_of(old_a), group.domain_of(new_a)
        assert (new.kind, new.host, new.rack, new.cores) == (old.kind, old.host, old.rack, old.cores)
        for new_b, old_b in enumerate(members):
            assert group.same_domain(new_a, new_b) == topology.same_domain(old_a, old_b)


@given(topologies(), st.data())
def test_restricting_twice_is_restricting_once(topology: Topology, data: st.DataObject) -> None:
    assert topology.restrict(range(topology.world_size)) == topology
    some = data.draw(st.lists(st.sampled_from(range(topology.world_size)), min_size=1, unique=True))
    fewer = data.draw(st.lists(st.sampled_from(range(len(some))), min_size=1, unique=True))
    assert topology.restrict(some).restrict(fewer) == topology.restrict([some[i] for i in fewer])


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "no ranks"),
        ([0, 1, 0], "rank 0 is given more than once"),
        ([0, 4], "rank 4 is not"),
        ([-1], "rank -1 is not"),
    ],
)
def test_restrict_refuses_ranks_that_make_no_group(ranks: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hosts((0, 1), (2, 3)).restrict(ranks)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([(0, 1), (1, 2)], "rank 1 is listed more than once"),
        ([(0, 0)], "rank 0 is listed more than once"),
        ([(0, 1), (3, 4)], "4 ranks, which must be 0 to 3; rank 2 is missing and rank 4 is too high"),
        ([(1,)], "1 rank, which must be 0 to 0; rank 0 is missing and rank 1 is too high"),
        ([(0, 10**12)], "rank 1 is missing and rank 1000000000000 is too high"),
        ([(-1, 0)], "rank -1 is negative"),
        ([(0,), ()], "ranks is empty"),
        ([], "no domain"),
    ],
)
def test_domains_that_do_not_hold_every_rank_once_are_refused(ranks: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hosts(*ranks)


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1, 1), (1, 0), (float("nan"), 1), (1, float("inf")), (True, 1), ("1", 1)]
)
def test_a_link_refuses_impossible_numbers(latency: float, bandwidth: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        Link(latency, bandwidth)


def test_asking_for_a_rank_beyond_the_world_says_which_ranks_there_are() -> None:
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is not in this topology of ranks 0 to 1"):
            hosts((0, 1)).domain_of(rank)


def test_summary_shows_the_shape() -> None:
    assert presets.get("cpu:2x4").summary() == "8 ranks: 2 x 4 cpu_host"
    assert hosts((0, 1), (2, 3), (4,)).summary() == "5 ranks: 2 x 2 cpu_host, 1 x 1 cpu_host"
    assert presets.get("cpu:1").summary() == "1 rank: 1 x 1 cpu_host"


# ---- JSON


@given(topologies())
def test_json_and_pickle_keep_everything(topology: Topology) -> None:
    for copy in (Topology.from_json(topology.to_json()), pickle.loads(pickle.dumps(topology))):
        assert copy == topology
        assert copy.notes == topology.notes
        assert (copy.scale_up.source, copy.scale_out.source) == (topology.scale_up.source, topology.scale_out.source)
        assert copy.to_json() == topology.to_json()


def test_the_documented_example_is_valid() -> None:
    text = re.search(r"\n    \{\n.*?\n    \}\n", model.__doc__ or "", re.DOTALL)
    assert text is not None
    topology = Topology.from_json(text[0])
    assert [domain.ranks for domain in topology.domains] == [(0, 1), (2, 3)]
    assert topology.domain_of(2) == Domain((2, 3), "cpu_host", host="beta", rack="r7")
    assert topology.domain_of(0).cores == 2
    assert topology.scale_out == Link(150, 0.125)
    assert topology.scale_up.source == "measured on alpha"
    assert topology.notes == ("written by hand",)


def test_a_saved_topology_is_loaded_from_its_path(tmp_path: Path) -> None:
    topology = presets.get("gb200:nvl72x2").restrict(range(60, 80))
    topology.save(tmp_path / "racks.json")
    assert Topology.load(tmp_path / "racks.json") == topology
    assert Topology.load(str(tmp_path / "racks.json")) == topology


def test_a_name_with_a_preset_family_is_a_preset_and_a_path_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts((0,), (1,), (2,)).save("cpu:2")
    assert Topology.load("cpu:2").world_size == 2
    assert Topology.load("./cpu:2").world_size == 3
    assert Topology.load(Path("cpu:2")).world_size == 3


def test_a_missing_file_is_told_with_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'h300:2x8' is neither a preset nor a readable file .*gb200:nvl72xA"):
        Topology.load("h300:2x8")
    with pytest.raises(ValueError, match="neither a preset nor a readable file"):
        Topology.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="neither a preset nor a readable file"):
        Topology.load(tmp_path / "binary")


GOOD = json.loads(hosts((0, 1), (2, 3)).to_json())


def spoiled(place: list[object], value: object) -> str:
    """GOOD with `value` at `place`; the place may be new."""
    data = json.loads(json.dumps(GOOD))
    target = data
    for step in place[:-1]:
        target = target[step]
    if value is KeyError:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ["domain"],
            1,
            r"topology: unknown key 'domain' \(did you mean 'domains'\?\); known keys: a2a_topology, world_size",
        ),
        (["domains", 1, "hosts"], "x", r"domains\[1\]: unknown key 'hosts' \(did you mean 'host'\?\)"),
        (
            ["scale_up", "bandwidth_GBs"],
            1,
            r"scale_up: unknown key 'bandwidth_GBs' \(did you mean 'bandwidth_GBps'\?\)",
        ),
        (["zzz"], 1, "unknown key 'zzz'; known keys"),
        (["world_size"], KeyError, "key 'world_size' is missing; required: a2a_topology"),
        (["domains", 0, "kind"], KeyError, r"domains\[0\]: key 'kind' is missing"),
        (["scale_out"], KeyError, "key 'scale_out' is missing"),
        (["a2a_topology"], 2, "is 2; this version of a2a reads 1"),
        (["world_size"], 5, "world_size is 5, but the domains list 4 ranks"),
        (["world_size"], 4.0, "world_size: got 4.0; expected a whole number"),
        (["domains"], {}, r"domains: got \{\}; expected a list"),
        (["domains", 0], [0, 1], r"domains\[0\]: got \[0, 1\]; expected an object with the keys ranks, kind"),
        (["domains", 0, "ranks"], "0-1", r"domains\[0\].ranks: got \"0-1\"; expected a list"),
        (["domains", 0, "ranks", 1], True, r"domains\[0\].ranks\[1\]: got true; expected a whole number"),
        (["domains", 0, "ranks", 1], 2, "topology: Topology: rank 2 is listed more than once"),
        (["domains", 0, "kind"], "host", r"domains\[0\]: Domain: kind is 'host'; expected one of 'cpu_host', 'nvlink'"),
        (["domains", 0, "cores"], -1, "cores is -1"),
        (["domains", 0, "host"], 7, r"domains\[0\].host: got 7; expected a text"),
        (["scale_up", "latency_us"], "3", "scale_up: Link: latency_us is '3'; expected a finite number"),
        (["scale_up", "bandwidth_GBps"], float("inf"), "bandwidth_GBps is inf"),
        (["scale_up", "bandwidth_GBps"], 10**400, "bandwidth_GBps is 1000"),
        (["notes"], "a", 'notes: got "a"; expected a list'),
        (["notes"], [1], r"notes\[0\]: got 1; expected a text"),
    ],
)
def test_json_mistakes_are_named_with_their_place(place: list[object], value: object, message: str) -> None:
    Topology.from_json(json.dumps(GOOD))
    with pytest.raises(ValueError, match=message):
        Topology.from_json(spoiled(place, value))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a2a_topology": 1, "a2a_topology": 1}', "[]", "null", "7"])
def test_text_that_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not readable as JSON|expected an object"):
        Topology.from_json(text)


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(spoiled(["domains", 0, "cpu"], 1))
    with pytest.raises(ValueError, match=r"cluster.json: domains\[0\]: unknown key 'cpu'"):
        Topology.load(path)


# ---- presets


@pytest.mark.parametrize("name", presets.names())
def test_a_listed_preset_is_there_and_says_where_its_numbers_come_from(name: str) -> None:
    topology = presets.get(name)
    assert Topology.from_json(topology.to_json()) == topology
    for link in (topology.scale_up, topology.scale_out):
        assert re.search(r"measured|quoted|modelled", link.source)
    assert topology.scale_up.bandwidth_GBps > topology.scale_out.bandwidth_GBps


@pytest.mark.parametrize(
    ("name", "domains", "ranks", "kind", "up_GBps"),
    [
        ("cpu:3", 1, 3, "cpu_host", 6.7),
        ("cpu:2x2", 2, 2, "cpu_host", 6.7),
        ("h100:16x8", 16, 8, "nvlink", 388.0),
        ("h200:4x8", 4, 8, "nvlink", 388.0),
        ("h200:1x2", 1, 2, "nvlink", 388.0),
        ("gb200:nvl72x3", 3, 72, "nvlink", 900.0),
        ("gb300:nvl72x1", 1, 72, "nvlink", 900.0),
        ("gb300:16x64", 16, 64, "nvlink", 900.0),
    ],
)
def test_a_preset_fills_one_domain_after_the_other(
    name: str, domains: int, ranks: int, kind: str, up_GBps: float
) -> None:
    topology = presets.get(name)
    assert [d.ranks for d in topology.domains] == [tuple(range(i * ranks, (i + 1) * ranks)) for i in range(domains)]
    assert {d.kind for d in topology.domains} == {kind}
    assert topology.scale_up.bandwidth_GBps == up_GBps
    assert len({(d.host, d.rack) for d in topology.domains}) == domains


@pytest.mark.parametrize(
    "name",
    [
        *("", "cpu", "cpu:", "cpu:0", "cpu:2x0", "cpu:0x2", "cpu:-1", "cpu:2x2x2", "cpu:nvl72x1", "cpu: 2", "cpu:２"),
        *("h200:8", "h200:1x9", "gb200:nvl36x2", "gb200:1x73", "gb200:nvl72x", "tpu:2x2", "cpu:1_0"),
        *("cpu:99999999", "cpu:2000x1000"),
    ],
)
def test_a_preset_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="preset"):
        presets.get(name)


def test_the_package_itself_does_not_import_torch() -> None:
    root = Path(model.__file__).parents[2]
    program = (
        "import sys, types; a2a = types.ModuleType('a2a'); a2a.__path__ = [sys.argv[1]]; sys.modules['a2a'] = a2a; "
        "import a2a.topology; assert a2a.topology.Topology.detect().world_size == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(root / "a2a")], check=True, timeout=60)
