"""No word of ours is ever interpreted by the shell of a host: generated argv through a real OpenSSH server, read back equal."""

import asyncio
import os
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.sshd import Sshd

from autotuner.edge import ssh
from autotuner.edge.destination import Destination

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(3600)]

COUNT = int(os.environ.get("AUTOTUNER_ARGV", "1000000"))
COMMAND_MAX = 120_000  # the host's shell gets it as one word, of which Linux takes 128 KiB
DUMP = "import os,sys; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(word) for word in sys.argv[1:]))"
NASTY = (
    *("", " ", "'", '"', "\\", "\n", "\t", "\r", "\x01", "\x7f", "$", "$(id)", "`id`", "${HOME}", "!", "!!", "*", "?", "[a]", "{a,b}", "~", "~root"),
    *("-", "--", "-c", "-rf", "#", ";", "; echo INJECTED", "&", "&&", "|", "||", "<", ">", ">>x", "(", ")", "=", "a=b", "%s", "é", "漢", "\U0001f600", "\u2028", "\ufeff"),
)  # fmt: skip


def words(rng: random.Random) -> list[str]:
    """One argv: pieces that shells love, put together."""
    return ["".join(rng.choice(NASTY) for _ in range(rng.randrange(5))) for _ in range(rng.randrange(1, 5))]


def batches(rng: random.Random, count: int) -> Iterator[tuple[int, list[str]]]:
    """Batches of whole argv that one command can carry, end to end, each with a mark that no other has."""
    made, size, batch = 0, 0, list[str]()
    for number in range(count):
        argv = [f"argv {number}", *words(rng)]
        batch += argv
        made += 1
        size += sum(len(shlex.quote(word).encode()) + 1 for word in argv)
        if size > COMMAND_MAX or number == count - 1:
            yield made, batch
            made, size, batch = 0, 0, []


def test_every_word_of_a_command_line_reaches_the_program_as_it_is(tmp_path: Path) -> None:
    seed = int(os.environ.get("AUTOTUNER_SEED", "1"))
    sshd = Sshd(tmp_path / "sshd").start()
    to = Destination(
        address="127.0.0.1", port=sshd.port, user=sshd.user, host_key=sshd.host_key, identity_file=sshd.client_key
    )  # fmt: skip

    async def work() -> int:
        connection = await ssh.connect([("far", to)])
        passed = 0
        try:
            for made, batch in batches(random.Random(seed), COUNT):
                process = await connection.start((sys.executable, "-I", "-S", "-c", DUMP, *batch))
                got = (await process.stdout.read()).split(b"\0")
                assert got == [word.encode() for word in batch], f"after {passed} argv; AUTOTUNER_SEED={seed}"
                passed += made
        finally:
            connection.abort()
        return passed

    try:
        assert asyncio.run(work()) == COUNT
    finally:
        sshd.stop()
