"""The client runs on the cores that it was given and the server keeps its own; the machine is read as the kernel tells it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import pytest
from patience import comes_true

from autotuner.bench import worker
from autotuner.bench.placement import Core
from autotuner.bench.samples import LevelSamples
from autotuner.edge import cores as edge
from autotuner.edge.cores import ClientCores

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
OURS = sorted(os.sched_getaffinity(0))
needs = [
    pytest.mark.skipif(len(OURS) < count, reason=f"needs {count} cores, and this process may use {len(OURS)}")
    for count in range(4)
]


class Server:
    """A null server in a process of its own, kept to some cores."""

    def __init__(self, cores: list[int]) -> None:
        argv = [sys.executable, "-m", "autotuner.bench.nullserver", "5", "5"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        os.sched_setaffinity(self.process.pid, cores)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()


def worked(server: Server, **order: Any) -> tuple[list[set[int]], LevelSamples]:
    """Run a worker; return the affinity of its processes in the steady part (those that carry load last), and its samples."""
    benchmark = {"levels": [4], "prompt_tokens": 16, "output_tokens": 20, "seconds": 600.0, "warmup_requests": 0}
    line = {"url": f"http://127.0.0.1:{server.port}", "benchmark": benchmark, "concurrency": 4, **order}
    with subprocess.Popen(worker.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
        while b'"phase":"steady"' not in (told := process.stdout.readline()):
            assert told, "it ended before its steady part"
        found = [os.sched_getaffinity(pid) for pid in edge.procfs.descendants(process.pid)]
        process.stdin.close()
        return found, LevelSamples.model_validate_json(process.stdout.readlines()[-1])


@needs[2]
def test_a_client_takes_a_core_that_its_server_may_not_use_and_the_server_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bound is this very process, for what else the machine is doing must not matter here."""
    monkeypatch.setattr(edge, "busy_cores", lambda _root: frozenset())
    with Server([OURS[0]]) as server:
        cores = ClientCores("auto", server.port)
        placed = cores.take(1)
        bound = os.sched_getaffinity(0)
        cores.release()
        assert os.sched_getaffinity(server.process.pid) == {OURS[0]}
    assert len(placed.cores) == 1
    assert placed.shares is False
    assert bound == set(placed.cores) <= set(OURS[1:])
    assert os.sched_getaffinity(0) == set(OURS)


@needs[2]
def test_a_worker_runs_on_the_core_that_it_says_or_says_that_it_was_busy() -> None:
    with Server([OURS[0]]) as server:
        bound, samples = worked(server, cores="auto")
        assert os.sched_getaffinity(server.process.pid) == {OURS[0]}
    assert samples.placed is not None
    if samples.placed.cores:
        assert bound == [set(samples.placed.cores)]
        assert OURS[0] not in samples.placed.cores
    else:
        assert bound == [set(OURS)]
        assert "were idle when the level began" in samples.placed.said


@needs[3]
def test_several_workers_have_a_core_each_and_none_is_the_servers() -> None:
    with Server([OURS[0]]) as server:
        bound, samples = worked(server, cores="auto", processes=2, processes_max=2)
    assert samples.placed is not None
    assert samples.processes == 2
    if not samples.placed.cores:
        pytest.skip(f"this machine is busy: {samples.placed.said}")
    assert sorted(bound[1:], key=min) == sorted(({core} for core in samples.placed.cores), key=min)
    assert OURS[0] not in samples.placed.cores


@needs[2]
def test_workers_on_an_operators_cores_all_have_all_of_them_and_the_server_keeps_its_own() -> None:
    with Server(OURS) as server:
        bound, samples = worked(server, cores=f"{OURS[1]}", processes=2, processes_max=2)
        assert os.sched_getaffinity(server.process.pid) == set(OURS)
    assert bound == [{OURS[1]}] * 3
    assert samples.placed is not None
    assert samples.placed.shares is True


@needs[2]
def test_a_worker_of_several_is_bound_to_what_it_is_told() -> None:
    with Server(OURS) as server:
        begin = {"shard": 0, "shards": 1, "bind": [OURS[1]]}
        benchmark = {"levels": [1], "prompt_tokens": 16, "output_tokens": 5, "seconds": 600.0, "warmup_requests": 0}
        line = {"url": f"http://127.0.0.1:{server.port}", "benchmark": benchmark, "concurrency": 1, **begin}
        with subprocess.Popen(worker.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
            assert comes_true(lambda: os.sched_getaffinity(process.pid) == {OURS[1]})
            process.stdin.close()


def test_nothing_is_bound_where_it_is_switched_off_or_the_server_is_elsewhere() -> None:
    with Server(OURS) as server:
        for wanted, why in (("off", "switched off"), (None, "on another machine")):
            bound, samples = worked(server, cores=wanted)
            assert bound == [set(OURS)]
            assert samples.placed is not None
            assert why in samples.placed.said


def test_two_clients_do_not_take_the_same_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine of eight cores, whatever this one has."""
    eight = tuple(Core(number, frozenset({number})) for number in range(8))
    monkeypatch.setattr(edge, "look", lambda *_: edge.Seen(eight, frozenset(range(8))))
    monkeypatch.setattr(edge, "bind", lambda _: None)
    first, second = ClientCores("auto", 1), ClientCores("auto", 1)
    assert first.take(1).cores == (7,)
    assert second.take(2).cores == (6, 5)
    assert first.take(2).cores == (7, 4), "its own core is not in its way"
    first.release()
    assert second.take(1).cores == (7,), "what a client gives back is free"
    second.release()


def test_where_binding_is_refused_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(edge, "bind", refuse)
    placed = ClientCores(str(OURS[0]), 1).take(1)
    assert placed.cores == ()
    assert placed.said.endswith("it may not bind itself to cores here (Operation not permitted)")


def test_a_server_is_all_that_hangs_together_and_never_the_client_itself() -> None:
    program = "import os, socket, time\ns = socket.create_server(('127.0.0.1', 0))\nchild = os.fork()\n"
    program += "if child: print(s.getsockname()[1], child, flush=True)\ntime.sleep(600)"
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert server.stdout is not None
        port, child = (int(word) for word in server.stdout.readline().split())
        assert edge.server_processes(port) == {server.pid, child}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert edge.server_processes(own.getsockname()[1]) == set()


@needs[2]
def test_a_servers_cores_are_those_of_all_its_threads() -> None:
    begun, over = threading.Event(), threading.Event()
    with Server([OURS[0]]) as server:
        allowed, main = edge.threads([server.process.pid])
        assert allowed == {OURS[0]}
        assert main <= set(OURS)
        assert main, "it has run, so one of its threads did most"

    def alone() -> None:
        os.sched_setaffinity(0, {OURS[0]})  # of this thread
        begun.set()
        over.wait()

    thread = threading.Thread(target=alone)
    thread.start()
    begun.wait()
    assert edge.threads([os.getpid()])[0] == set(OURS), "one thread of several is bound"
    over.set()
    thread.join()


def write(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


def test_threads_nodes_and_gpus_are_read_as_the_kernel_tells_them(tmp_path: Path) -> None:
    for number in range(4):
        siblings = f"{number % 2},{number % 2 + 2}\n"
        write(tmp_path, f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", siblings)
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0,2\n")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "1,3\n")
    assert edge.topology({1, 2, 3}, tmp_path) == (
        Core(1, frozenset({1, 3}), 1),
        Core(2, frozenset({0, 2}), 0),
        Core(3, frozenset({1, 3}), 1),
    )
    devices = {"a": ("0x10de", "0x030200", "1"), "b": ("0x1a03", "0x030000", "0"), "c": ("0x10de", "0x020000", "0")}
    for name, (vendor, kind, node) in devices.items():
        for file, text in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            write(tmp_path, f"sys/bus/pci/devices/{name}/{file}", text + "\n")
    assert edge.gpu_nodes(tmp_path) == {1}, "neither the display of a board's controller nor a network card"


def test_a_machine_that_tells_nothing_has_cores_of_one_thread_and_no_busy_ones(tmp_path: Path) -> None:
    assert edge.topology({0, 5}, tmp_path) == (Core(0, frozenset({0})), Core(5, frozenset({5})))
    assert edge.gpu_nodes(tmp_path) == set()
    assert edge.busy_cores(tmp_path) == set()


def test_busy_cores_are_those_on_which_something_ran_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "cpu  900 0 0 900 0 0 0 0 0 0\ncpu0 100 0 0 500 0 0 0 0 0 0\ncpu1 100 0 0 500 0 0 0 0 0 0\nintr 1\n"
    after = "cpu  900 0 0 900 0 0 0 0 0 0\ncpu0 103 0 5 502 0 0 0 0 0 0\ncpu1 101 0 0 504 5 0 0 0 0 0\nintr 1\n"
    write(tmp_path, "proc/stat", before)
    monkeypatch.setattr(edge, "pause", lambda _: write(tmp_path, "proc/stat", after))
    assert edge.busy_cores(tmp_path) == {0}
