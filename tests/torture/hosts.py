"""Hosts over SSH: servers that show another key than the pinned one (P20), and words that a shell would love (P21).

The servers are asyncssh's own, in this process, so that a round costs a handshake. The shell is the real one, a batch of argv a
call, by the very function that makes the command line for a host.
"""

import asyncio
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncssh
from fakes.ssh_server import SshServer

from autotuner.edge import ssh
from autotuner.errors import HostError, HostKeyRefused
from torture.tally import Tally

COMMAND_MAX = 120_000  # /bin/sh gets it as one word, of which Linux takes 128 KiB
DUMP = "import os,sys; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(word) for word in sys.argv[1:]))"
NASTY = (
    *("", " ", "'", '"', "\\", "\n", "\t", "$", "$(id)", "`id`", "${HOME}", "!", "*", "?", "[a]", "{a,b}", "~", "--", "-c", "#"),
    *("; echo INJECTED", "&", "&&", "|", "<", ">", ">>x", "(", ")", "=", "a=b", "%s", "é", "漢", "\u2028", "\x01", "\x7f"),
)  # fmt: skip
CONFIG = "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n  GlobalKnownHostsFile /dev/null\n  HostKeyAlias x\n"
KINDS = ("ssh-ed25519", "ecdsa-sha2-nistp256")
WRONG = ("another key", "another type", "changed", "another server", "an authority")


def run(seed: int, seconds: float) -> Tally:
    """Half of the time for keys, half for words."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "config").write_text(CONFIG)
        os.environ.update(HOME=str(home), SSH_AUTH_SOCK=str(home / "no-agent"))
        asyncio.run(_keys(tally, seed, time.monotonic() + seconds / 2, Path(folder)))
        _words(tally, seed, time.monotonic() + seconds / 2, folder)
    return tally


async def _keys(tally: Tally, seed: int, until: float, folder: Path) -> None:
    rng = random.Random(seed)
    async with SshServer(folder / "one") as one, SshServer(folder / "two") as two:
        await _right(tally, one, f"seed {seed}: the pinned key itself")
        number = 0
        while number < len(WRONG) or time.monotonic() < until:
            wrong = WRONG[number] if number < len(WRONG) else rng.choice(WRONG)
            number += 1
            await _refused(tally, one, two, wrong, f"seed {seed}, connection {number}: {wrong}")
            if rng.random() < 0.1:
                await _right(tally, one, f"seed {seed}, after connection {number}: the pinned key itself")


async def _refused(tally: Tally, one: SshServer, two: SshServer, wrong: str, how: str) -> None:
    """Connect where the pinned key is not the one that is shown: there must be no connection, and no command run."""
    kept = one.key
    to = one.destination(host_key=_public(asyncssh.generate_private_key(KINDS[wrong == "another type"])))
    if wrong == "changed":  # it was right until now
        to = one.destination()
        await _with_key(one, asyncssh.generate_private_key("ssh-ed25519"))
    elif wrong == "another server":  # the same address, another port
        to = one.destination(port=two.port)
    elif wrong == "an authority":
        authority = asyncssh.generate_private_key("ssh-ed25519")
        one.extra["server_host_certs"] = [authority.generate_host_certificate(kept, "x", principals=["127.0.0.1"])]
        await _with_key(one, kept)
        to = one.destination(host_key=_public(authority))
        known = Path(os.environ["HOME"]) / ".ssh" / "known_hosts"
        known.write_text(f"@cert-authority * {_public(authority)}\n* {one.host_key}\n")
    try:
        connection = await ssh.connect([("far", to)])
    except HostKeyRefused:
        tally.held("P20")
    except HostError as error:
        tally.broken("P20", f"went on to log in: {how}: {error}")
    else:
        connection.abort()
        tally.broken("P20", f"connected: {how}")
    tally.counts["connections"] += 1
    one.extra.clear()
    if wrong in {"changed", "an authority"}:
        await _with_key(one, kept)


async def _right(tally: Tally, server: SshServer, how: str) -> None:
    try:
        (await ssh.connect([("far", server.destination())])).abort()
    except HostKeyRefused as error:
        tally.broken("P20", f"refused: {how}: {error}")
    else:
        tally.held("P20")


async def _with_key(server: SshServer, key: asyncssh.SSHKey) -> None:
    await server.stop()
    server.key = key
    await server.start()


def _public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


def _words(tally: Tally, seed: int, until: float, folder: str) -> None:
    rng = random.Random(seed)
    number = 0
    while not number or time.monotonic() < until:
        number += 1
        batch, size, argv = list[str](), 0, 0
        while size < COMMAND_MAX:
            made = ["".join(rng.choice(NASTY) for _ in range(rng.randrange(5))) for _ in range(rng.randrange(1, 5))]
            batch += [f"argv {argv}", *made]
            size += sum(len(shlex.quote(word).encode()) + 1 for word in made) + 12
            argv += 1
        line = ssh.command_line((sys.executable, "-I", "-S", "-c", DUMP, *batch))
        ran = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=False, cwd=folder)
        same = ran.stdout == b"\0".join(word.encode() for word in batch)
        if same:
            tally.held("P21", argv)
        else:
            tally.broken("P21", f"seed {seed}, batch {number}: a shell changed or ran a word of {argv} argv")
        tally.counts["argv"] += argv
