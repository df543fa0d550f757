"""Checks of our own client beyond speed: stalls repaired or flagged, verdicts on itself, stopping from outside."""

from contextlib import AbstractContextManager

from clientbench.contestants import Ours
from clientbench.processes import busy_loops, stalled
from clientbench.report import Run, spread, table, values
from clientbench.running import Bench
from clientbench.schedule import MODES, Mode

STALL_OFF_MS = 0.2  # ITL p99 above the truth from which a stall must have been flagged
QUIET = Mode("at ease: 6,400 tok/s", 64, 64, 128)
BATCHING = Mode("a server that batches: 4 tokens every 40 ms", 64, 64, 128, burst=4)
SHARED = Mode("its core shared with three busy loops, 100,000 tok/s", 128, 768, 128, itl_ms=1.28)
QUOTA = Mode("6 % of a core, 20,000 tok/s", 128, 256, 64, itl_ms=6.4)
TORRENT = Mode("800,000 tok/s, 8 a send", 512, 2048, 256, itl_ms=0.64, burst=8)
STOPPED = Mode("stop", 128, 1024, 128, itl_ms=20.0)
STOP_AFTER_S = 3.5  # an answer takes 2.59 s, so 128 are finished by then and 128 under way


def stall(bench: Bench, runs: int) -> list[Run]:
    """Our client in the mode acc, stopped for 5 ms every 100 ms."""
    mode = next(mode for mode in MODES if mode.name == "acc")

    def disturbed(pids: list[int]) -> AbstractContextManager[None]:
        return stalled(pids, bench.server_core, every_s=0.1, for_s=0.005)

    return [bench.run(Ours(), mode, disturbed=disturbed) for _ in range(runs)]


def stall_table(found: list[Run]) -> str:
    """Given runs with stalls, return their table."""
    rows = []
    for number, run in enumerate(found, 1):
        off = run.off_ms("itl", "p99")
        told = run.said or ("repaired" if off is not None and off <= STALL_OFF_MS else "not noticed")
        rows.append(
            (
                str(number),
                f"{run.itl_ms.get('p99', float('nan')):.2f}",
                f"{run.truth.get('itl_p99', float('nan')):.2f}",
                f"{run.extra.get('merged_ratio', 0):.3f}",
                run.failure or told,
            )
        )
    return table(("stalled run", "ITL p99 ms", "truth", "merged", "outcome"), rows)


def verdicts(bench: Bench, runs: int) -> dict[str, list[Run]]:
    """Our client at ease, on a server that batches, and made too slow in three ways; in turn, `runs` of each."""
    kinds: dict[str, list[Run]] = {m.name: [] for m in (QUIET, BATCHING, SHARED, QUOTA, TORRENT)}

    def throttled(pids: list[int]) -> AbstractContextManager[None]:
        return stalled(pids, bench.server_core, every_s=0.05, for_s=0.047)

    def crowded(_: list[int]) -> AbstractContextManager[None]:
        return busy_loops(3, bench.client_core)

    for _ in range(runs):
        for mode, disturbed in (
            (QUIET, None),
            (BATCHING, None),
            (SHARED, crowded),
            (QUOTA, throttled),
            (TORRENT, None),
        ):
            kinds[mode.name].append(bench.run(Ours(), mode, disturbed=disturbed))
    return kinds


def stop(bench: Bench, runs: int) -> list[Run]:
    """Our client, sent SIGTERM with 128 requests finished and 128 in flight."""
    found = []
    for _ in range(runs):
        run = bench.run(Ours(), STOPPED, stop_after_s=STOP_AFTER_S)
        run.truth = bench.server.stats()  # what was aborted is counted once the connections are closed
        found.append(run)
    return found


def stop_table(found: list[Run]) -> str:
    """Given stopped runs, return their table."""
    rows = []
    for run in found:
        done, aborted = int(run.truth.get("done", 0)), int(run.truth.get("aborted", 0))
        kept = run.extra.get("finished"), run.extra.get("cut")
        whole = "yes" if kept == (done, aborted) else "NO"
        rows.append(
            (
                spread(values([run], lambda r: r.exit_s), ".3f"),
                str(run.exit_code),
                f"{kept[0]} of {done}",
                f"{kept[1]} of {aborted}",
                whole if not run.failure else run.failure,
                str(run.left_behind),
            )
        )
    head = ("SIGTERM to exit s", "exit code", "finished kept", "aborted kept", "all kept", "processes left")
    return table(head, rows)
