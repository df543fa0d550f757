"""One slot whose host does not answer holds up nobody else, is not begun twice, and is wedged only after its deadline."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from autotuner import rounds
from autotuner.errors import HostError, StoreError
from autotuner.rounds import Rounds


class Worker:
    """A slot whose cycles wait for a gate, or raise."""

    def __init__(self, name: str, error: Exception | None = None, *, opened: bool = True, here: bool = True) -> None:
        self.ctx = SimpleNamespace(name=name, host=SimpleNamespace(here=here))
        self.begun = self.ended = 0
        self.error = error
        self.gate = asyncio.Event()
        if opened:
            self.gate.set()

    async def cycle(self) -> None:
        self.begun += 1
        await self.gate.wait()
        self.ended += 1
        if self.error is not None:
            raise self.error


def of(*workers: Worker, deadline_s: float = 600.0) -> Rounds:
    return Rounds(workers, deadline_s)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PATIENCE_S", 0.02)


def test_a_slot_that_waits_for_its_host_delays_no_other() -> None:
    async def work() -> None:
        slow, quick = Worker("slow", opened=False), Worker("quick")
        both = of(slow, quick)
        for _ in range(5):
            await both.go()
        assert (slow.begun, slow.ended, quick.ended) == (1, 0, 5)
        slow.gate.set()
        await asyncio.sleep(0)
        await both.go()
        await both.go()
        assert slow.ended >= 2
        await both.end()

    asyncio.run(work())


def test_what_cannot_be_recorded_comes_before_any_other_error() -> None:
    async def work() -> None:
        with pytest.raises(StoreError, match="disk"):
            await of(Worker("a", HostError("gone")), Worker("b", StoreError("disk")), Worker("c")).go()
        with pytest.raises(HostError, match="gone"):
            await of(Worker("a", HostError("gone")), Worker("c")).go()

    asyncio.run(work())


def test_a_slot_without_a_whole_cycle_is_wedged_until_it_has_one() -> None:
    async def work() -> None:
        stuck = Worker("stuck", opened=False)
        some = of(stuck, Worker("other"), deadline_s=0.2)
        failed = 0
        while failed < 30:
            try:
                await some.go()
                assert not failed, "it was wedged, and has had no whole cycle since"
            except TimeoutError as error:
                assert "slot stuck" in str(error)  # noqa: PT017 - the other rounds must not raise
                failed += 1
        assert 1 < stuck.begun < failed, "a cycle that hangs is begun anew, but not in each round"
        stuck.gate.set()
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await some.go()
        assert stuck.ended
        await some.go()
        await some.end()

    asyncio.run(work())


def test_a_cycle_that_hangs_and_does_not_let_go_is_not_begun_beside_itself() -> None:
    class Deaf(Worker):
        async def cycle(self) -> None:
            self.begun += 1
            while not self.gate.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.gate.wait()

    async def work() -> None:
        deaf = Deaf("deaf", opened=False)
        some = of(deaf, deadline_s=0.1)
        said = []
        while len(said) < 20:
            try:
                await some.go()
            except TimeoutError as error:
                said.append(str(error))
        assert deaf.begun == 1
        assert all("test_rounds.py" in text and "cycle" in text for text in said), "where it waits is told"
        deaf.gate.set()
        await some.end()

    asyncio.run(work())


def test_a_slot_on_another_host_may_take_longer() -> None:
    async def work() -> None:
        far = Worker("far", opened=False, here=False)
        some = of(far, Worker("near"), deadline_s=0.05)
        for _ in range(10):
            await some.go()
        assert far.begun == 1
        await some.end()

    asyncio.run(work())
