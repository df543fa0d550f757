"""P21, P20: words that a shell would love to interpret go through a real /bin/sh and must come back as they were.

One shell reads a script of many command lines, each made by `command_line` for a function of that script that prints what it was
given; so an argv costs microseconds and not a process. Programs with hostile names and variables are real processes, and fewer.
P20 is tried on the source here, and on real connections by the part `hosts`: no call may leave the check of host keys out or let an
operator's ssh configuration do it.
"""

import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from autotuner.core import shell
from torture.sources import calls_that_trust_any_host, sources
from torture.tally import Tally

SHELL = "/bin/sh"
BATCH = 2000  # argvs that one shell reads back
PROGRAMS = 5  # programs with hostile names, a process each, beside every batch
ALPHABET = "'\"\\$`(){}[]*?~!#;&|<> \n\t\r=-%,.:/@^+_aZ09é日\U0001f600\x01\x7f\x1b\u202e\u2028\udcff\udc80"
HOSTILE = (
    "", " ", "\n", "a\nb\n", "'", '"', "''", "'\"'\"'", "\\", "\\'", "$HOME", "${HOME}", "$(echo x)", "`echo x`", "$'\\n'", "*", "?",
    "[a-z]*", "~", "{a,b}", "!", "!!", "#", "# x", "; echo x", "&", "&&", "||", "<", ">x", "2>&1", "(", ")", "A=1", "--x=y z", "-", "--",
    "-e", "-n", "%s", "%n", "\r\n", "a\\\nb", "\ufeff", "$((1+1))", "\\0", "\\c", "eval", "exit 1", "done", "EOF", "}", "x'; echo '",
)  # fmt: skip
SHOW = 'show() { printf \'%s\\0\' "$#" "$@"; }\n'
NAMES = (
    "eval",
    "exec",
    "if",
    "A=1",
    "a b",
    "$x",
    "`x`",
    "*",
    "~",
    "-x",
    "'",
    '"',
    "é",
    "a;b",
    "[",
    "{",
    "!",
    "\udcff",
    "time",
    "x\ny",
)


def words(rng: random.Random) -> tuple[str, ...]:
    """An argv's words: short ones that mean something to a shell, and random ones."""
    return tuple(
        rng.choice(HOSTILE) if rng.random() < 0.4 else "".join(rng.choices(ALPHABET, k=rng.randrange(10)))
        for _ in range(rng.randrange(1, 6))
    )


def read_back(argvs: list[tuple[str, ...]], folder: Path) -> list[tuple[str, ...]]:
    """Given argvs, return what a function in a real shell was given for each; fewer if the shell gave up or lost its way."""
    script = SHOW + "\n".join(shell.command_line(("show", *argv)) for argv in argvs) + "\n"
    said = through_shell(script, folder, {"PATH": ""})
    found, fields = [], iter(said.split("\0"))
    for count in fields:
        if not count.isdecimal():
            break
        found.append(tuple(field for _, field in zip(range(int(count)), fields, strict=False)))
    return found


def through_shell(script: str, folder: Path, env: dict[str, str]) -> str:
    """Given a script, return what it prints in an empty folder, in time or not."""
    file = folder / "script"
    file.write_bytes(script.encode("utf-8", "surrogateescape"))
    try:
        ran = subprocess.run(
            [SHELL, str(file)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=env,
            cwd=folder,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return ran.stdout.decode("utf-8", "surrogateescape")


def batch(tally: Tally, rng: random.Random, folder: Path, how: str) -> None:
    """Many argvs through one shell."""
    argvs = [words(rng) for _ in range(BATCH)]
    found = read_back(argvs, folder)
    tally.counts["argvs"] += len(argvs)
    if found == argvs:
        tally.held("P21", len(argvs))
        return
    first = next((i for i, argv in enumerate(argvs) if i >= len(found) or found[i] != argv), len(argvs) - 1)
    tally.broken("P21", f"{argvs[first]!r} came back as {found[first : first + 1]!r} ({how})")


def programs(tally: Tally, rng: random.Random, folder: Path, how: str) -> None:
    """Programs whose names a shell would carry out itself or interpret, with words and a variable."""
    place, printf = folder / "programs", shutil.which("printf")
    place.mkdir(exist_ok=True)
    for _ in range(PROGRAMS):
        name, argv, value = rng.choice(NAMES), words(rng), rng.choice(HOSTILE)
        link = place / os.fsencode(name).decode("utf-8", "surrogateescape")
        if not link.is_symlink():
            link.symlink_to(str(printf))
        line = shell.command_line((name, "%s\\0", value, *argv)) + "\n" + shell.command_line(("show",), {"AT": value})
        script = SHOW.replace('"$@"', '"$AT"') + line + "\n"
        said = through_shell(script, folder, {"PATH": f"{place}:{os.environ['PATH']}"})
        expected = "".join(f"{word}\0" for word in (value, *argv, "0", value))
        tally.counts["programs with hostile names"] += 1
        tally.check("P21", kept=said == expected, how=f"{name!r} {argv!r} came back as {said!r} ({how})")


def run(seed: int, seconds: float) -> Tally:
    """Batches until the time is over."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    for name, text in sources():
        wrong = calls_that_trust_any_host(text)
        tally.check("P20", kept=not wrong, how=f"{name}: {'; '.join(wrong)}")
    with tempfile.TemporaryDirectory(prefix="torture-") as place:
        while number == 0 or time.monotonic() < until:
            rng = random.Random(f"shells {seed}/{number}")
            how = f"batch {number}: python -m torture --part shells --seed {seed}"
            batch(tally, rng, Path(place), how)
            programs(tally, rng, Path(place), how)
            number += 1
    return tally
