"""The load client goes where the server is not, if that can be told and there are cores enough; else it says why not."""

from dataclasses import replace

import pytest

from autotuner.bench.placement import Core, Seen, checked, core_numbers, named, place


def machine(cores: int, *, nodes: int = 1, threads: int = 1, allowed: str = "", **seen: str) -> Seen:
    """A machine of so many physical cores; the second threads of all come after the first ones, as on most servers."""
    found = []
    for number in range(cores * threads):
        first = number % cores
        whole = frozenset(range(first, cores * threads, cores))
        found.append(Core(number, whole, first * nodes // cores))
    may = core_numbers(allowed) if allowed else {core.number for core in found}
    sets = {name: core_numbers(text) for name, text in seen.items()}
    server = sets.pop("server", may)
    return Seen(tuple(core for core in found if core.number in may), frozenset(server), **sets)


KEPT_APART = [
    ("two cores, the server kept to one", machine(2, server="0"), 1, (1,)),
    ("and to the other", machine(2, server="1"), 1, (0,)),
    ("four cores, the server on two", machine(4, server="0-1"), 2, (3, 2)),
    ("a server kept to most of 64", machine(64, server="0-55"), 3, (63, 62, 61)),
    ("to the last ones", machine(64, server="8-63"), 1, (7,)),
    ("whole cores only: a thread beside one of the server's is none", machine(4, threads=2, server="0-2"), 1, (3,)),
    ("one thread of each core, before the second ones", machine(8, threads=2, server="0-3,8-11"), 4, (7, 6, 5, 4)),
    ("then those", machine(8, threads=2, server="0-3,8-11"), 6, (7, 6, 5, 4, 15, 14)),
    ("a control group that gives us the last four of 64", machine(64, allowed="60-63", server="0-59"), 2, (63, 62)),
    ("cores at rest before busy ones", machine(8, server="0-3", busy="6-7"), 2, (5, 4)),
    ("not those of another level's client", machine(8, server="0-3", taken="7"), 1, (6,)),
    ("nor the threads beside them", machine(4, threads=2, server="0-1,4-5", taken="7"), 1, (2,)),
]


@pytest.mark.parametrize(
    ("seen", "processes", "cores"), [row[1:] for row in KEPT_APART], ids=[r[0] for r in KEPT_APART]
)
def test_where_the_server_is_kept_to_some_cores_the_client_takes_others(
    seen: Seen, processes: int, cores: tuple[int, ...]
) -> None:
    placed = place("auto", seen, processes)
    assert placed.cores == cores
    assert placed.one_each
    assert placed.shares is False
    assert "the server may not use" in placed.said


ROAMING = [
    ("the last ones of eight", machine(8), 2, (7, 6)),
    ("of 64", machine(64), 1, (63,)),
    ("both threads' cores once", machine(32, threads=2), 3, (31, 30, 29)),
    ("not where its main threads are", machine(8, main="6-7"), 1, (5,)),
    ("nor on the threads beside them", machine(8, threads=2, main="15"), 1, (6,)),
    ("not where anything runs", machine(8, busy="5-7"), 1, (4,)),
    ("away from the node of the GPUs", replace(machine(64, nodes=2), gpu_nodes=frozenset({1})), 1, (31,)),
    ("away from the node of its main threads", machine(64, nodes=2, main="40"), 1, (31,)),
    ("GPUs on all nodes tell nothing", replace(machine(64, nodes=2), gpu_nodes=frozenset({0, 1})), 1, (63,)),
    ("the few that it may not use first", machine(64, server="1-63"), 2, (0, 63)),
    ("another client's are left to it", machine(64, taken="62-63"), 2, (61, 60)),
]


@pytest.mark.parametrize(("seen", "processes", "cores"), [row[1:] for row in ROAMING], ids=[r[0] for r in ROAMING])
def test_where_the_server_may_use_all_of_many_cores_the_client_takes_idle_ones_at_the_end(
    seen: Seen, processes: int, cores: tuple[int, ...]
) -> None:
    placed = place("auto", seen, processes)
    assert placed.cores == cores
    assert placed.shares is True
    assert "the server may use" in placed.said


NOT_PINNED = [
    ("one core", machine(1), 1, None, "it may use one core only"),
    (
        "two cores, the server on both",
        machine(2),
        1,
        True,
        "the server may use all of its 2 cores, too few to set some aside",
    ),
    ("four", machine(4), 1, True, "the server may use all of its 4 cores"),
    ("a group of two of 64", machine(64, allowed="10-11"), 1, True, "the server may use all of its 2 cores"),
    (
        "two processes, one core",
        machine(2, server="0"),
        2,
        True,
        "1 of its cores is not the server's, too few for 2 processes",
    ),
    ("all busy", machine(8, busy="0-7"), 1, True, "too few of the cores that the server may use were idle"),
    ("all but the server's busy", machine(8, server="0-3", busy="4-7"), 1, True, "may not use were idle"),
    ("the only one left busy", machine(2, server="0", busy="1"), 1, True, "may not use were idle when the level began"),
    ("all taken", machine(8, taken="0-7"), 1, True, "0 cores are left for its 1 processes beside other load clients"),
    ("no server in sight", replace(machine(64), server=None), 1, None, "no process of the server could be found"),
    ("only a thread beside the server's", machine(2, threads=2, server="0-1"), 1, True, "all of its 4 cores"),
]


@pytest.mark.parametrize(
    ("seen", "processes", "shares", "why"), [row[1:] for row in NOT_PINNED], ids=[r[0] for r in NOT_PINNED]
)
def test_where_nothing_can_be_kept_apart_the_client_is_not_pinned_and_says_why(
    seen: Seen, processes: int, shares: bool | None, why: str
) -> None:
    placed = place("auto", seen, processes)
    assert placed.cores == ()
    assert placed.said.startswith("the load client was not pinned: ")
    assert why in placed.said
    if shares is not None:
        assert placed.shares is shares


def test_an_operators_cores_are_one_set_for_all_processes() -> None:
    placed = place("2-3", machine(4, server="0-2"), 5)
    assert (placed.cores, placed.one_each, placed.shares) == ((2, 3), False, True)
    assert [placed.cores_of(number) for number in range(5)] == [(2, 3)] * 5
    assert placed.said == "the load client was pinned to cores 2-3, as asked; the server may use them, too"
    assert place("3", machine(4, server="0-2"), 1).shares is False
    assert place("3", replace(machine(4), server=None), 1).shares is None


def test_cores_that_the_client_may_not_use_are_left_out_and_if_none_is_left_that_is_said() -> None:
    assert place("0,3,9", machine(4, allowed="2-3", server="2"), 1).cores == (3,)
    nowhere = place("8-9", machine(4), 1)
    assert nowhere.cores == ()
    assert "it may not use cores 8-9, as it was asked to" in nowhere.said


def test_switched_off_means_not_pinned() -> None:
    placed = place("off", machine(64, server="0"), 1)
    assert (placed.cores, placed.said) == ((), "the load client was not pinned: cores for it are switched off")


def test_each_process_has_a_core_of_its_own() -> None:
    placed = place("auto", machine(64), 4)
    assert [placed.cores_of(number) for number in range(4)] == [(63,), (62,), (61,), (60,)]
    assert place("auto", machine(2), 2).cores_of(1) == ()


def test_cores_are_written_as_the_kernel_writes_them() -> None:
    assert core_numbers("0-2,7\n") == {0, 1, 2, 7}
    for wrong in ("", "a", "3-1", "-1", "1,,2", "0-99999"):
        with pytest.raises(ValueError, match=r".*"):
            core_numbers(wrong)
    assert [checked(good) for good in ("auto", "off", "4-7,12")] == ["auto", "off", "4-7,12"]
    with pytest.raises(ValueError, match=r"'last' names no cores; accepted: \"auto\""):
        checked("last")


def test_cores_are_named_as_in_a_sentence() -> None:
    assert [named(n) for n in ([7], [3, 2], [1, 4, 5, 9])] == ["core 7", "cores 2-3", "cores 1, 4-5 and 9"]
