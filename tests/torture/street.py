"""Works houses side by side: each is built, gets its rounds, and is torn down; what goes wrong with one is told, not raised."""

import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from torture import faults
from torture.forks import Forks
from torture.home import Home, shared_cache
from torture.tally import Tally

SHORT_S = 5.0  # a run this short is one round on one house: somebody looks at a seed


def work(
    build: Callable[[Path, Forks, Path], Home],
    one_round: Callable[[Home, int, Tally], bool],
    seed: int,
    seconds: float,
    *,
    promise: str,
    homes: int,
    rounds: int,
) -> Tally:
    """Give every house rounds until the time is over; a round returns whether its house can go on. Return what was found."""
    until_s = time.monotonic() + seconds
    found, lock = Tally(), threading.Lock()
    seeds = iter(range(seed, seed + 10**9))
    with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as where:
        folder = Path(where)
        library = faults.compiled(folder)
        if library is None:
            found.counts["no C compiler: kills at random moments, nothing made to fail"] += 1
        cache = shared_cache(folder / "cache")
        with Forks(library) as forks:

            def lane(number: int) -> None:
                time.sleep(number)  # building takes the machine; not all at once
                builds = 0
                while builds == 0 or time.monotonic() < until_s:
                    builds += 1
                    home, tally = build(folder / f"home-{number}-{builds}", forks, cache), Tally()
                    try:
                        home.begin()
                        home.hold()
                        for done in range(rounds):
                            if done and time.monotonic() > until_s:
                                break
                            with lock:
                                round_seed = next(seeds)
                            if not one_round(home, round_seed, tally):
                                break
                    except Exception:  # noqa: BLE001 - a house that fails is a finding, and the others go on
                        tally.broken(promise, f"a house failed:\n{traceback.format_exc()}\n{home.log_tail()}")
                    finally:
                        home.close()
                        with lock:
                            found.add(tally)

            lanes = [threading.Thread(target=lane, args=(n,)) for n in range(homes if seconds > SHORT_S else 1)]
            for each in lanes:
                each.start()
            for each in lanes:
                each.join()
    return found
