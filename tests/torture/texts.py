"""P12, P22: text that wants to be more than text, and secrets, go through every place where text is kept or shown.

P12: hostile strings through the renderer into a journal of three entries and through its reader again: three entries must come
out, each with one heading, one hash line and one bold sentence, no control character, and no more text than is allowed.
P22: canary secrets, plain and as programs encode them, are put into whatever a server, an operator or an error may say; then
what the entry renderer, the log, the database's files, the status file and the status line keep is searched for them.
"""

import base64
import io
import json
import random
import re
import shutil
import tempfile
import time
import urllib.parse
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import structlog

from autotuner import log
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, figures
from autotuner.core import redact
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.entry import GENESIS, Draft, Entry, file_header, read_journal, render
from autotuner.core.verdict import LevelResult
from autotuner.edge import statusfile
from autotuner.edge.store import Store
from torture.tally import Tally

AT = "2026-02-23 00:14:07Z"
HOSTILE = (
    "## 0002 · 2026-02-23 00:14:07Z · slot kimi · promoted mine", "\n## 0002 · x", "<!-- autotuner entry=1 prev=", "-->", " -->\n\n",
    f"<!-- autotuner entry=1 prev={'0' * 64} sha256={'0' * 64} -->\n\n", "# autotuner journal 2026-02\n\n", "**", "** forged **", "***",
    "<script>", "</script>", "<!--", "<!DOCTYPE", "<?", "\x1b[31m", "\x1b]0;t\x07", "\x1b]8;;http://x\x1b\\", "\x1bc", "\x9b31m", "\r", "\r\n",
    "\n", "\n\n", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x00", "\u202e", "\u2066", "\u200b", "\ufeff", "\udcff", "\ud800", "|", "| a | b |",
    "\n|---|\n", "    ", "\t", "- ", "- Rule: x", "* ", "\\", "\\* ", "`", "```\n", "~~~", "> ", "1. ", "[a](javascript:x)", "é", "日本", "\U0001f600",
    "a\u0301" * 9, "x" * 3000, "=" * 80, "\n===\n", "\n---\n", "&lt;", "&#60;!--", "\x7f", "\x08" * 9, "e\x1b[0mxit", "<\x1b[0m!--", "*\x00*",
)  # fmt: skip
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
LONGEST = 60_000  # characters that an entry of these drafts may have, whatever is put into it


def hostile(rng: random.Random) -> str:
    """A text of a few hostile pieces; seldom a very long one."""
    if rng.random() < 0.002:
        return rng.choice(HOSTILE) * (1_000_000 // 40)
    return "".join(rng.choice(HOSTILE) for _ in range(rng.randrange(1, 7)))


def hostile_draft(rng: random.Random) -> Draft:
    """A draft with hostile text wherever text goes."""
    return Draft(
        slot=hostile(rng),
        title=hostile(rng),
        sentence=hostile(rng),
        bullets=tuple((hostile(rng), hostile(rng)) for _ in range(rng.randrange(3))),
        table=tuple((hostile(rng), hostile(rng)) for _ in range(rng.randrange(3))),
        notes=tuple(hostile(rng) for _ in range(rng.randrange(2))),
        quote=tuple(hostile(rng) for _ in range(rng.randrange(4))),
    )


def forged(entries: list[Entry]) -> str:
    """Given entries of hostile text, return what is wrong with the journal that they make; empty if nothing."""
    data = (file_header("2026-02") + "".join(entry.text for entry in entries)).encode()
    reading = read_journal("2026-02", data, GENESIS, 1)
    if reading.flaws or list(reading.entries) != entries:
        return f"it does not read back: {reading.flaws[:1]}"
    for entry in entries:
        lines = entry.text.split("\n")
        if len(entry.text.splitlines()) != len(lines) - 1 or CONTROL.search(entry.text):
            return "control characters are left"
        if [i for i, line in enumerate(lines) if line.startswith("#")] != [0]:
            return "there is another heading"
        if [i - len(lines) for i, line in enumerate(lines) if line.startswith("<!--")] != [-3]:
            return "there is another comment"
        if not re.fullmatch(r"\*\*.*\*\*", lines[2]) or re.search(r"(?<!\*)\*\*(?!\*)", lines[2][2:-2]):
            return "the bold sentence was ended early"
        if [line for line in lines[:-3] if re.search(r"<[A-Za-z/!?]", line) and not line.startswith("    ")]:
            return "there is HTML outside of the server's own words"
        if len(entry.text) > LONGEST:
            return f"it has {len(entry.text)} characters"
        allowed = ("- ", "    ", "| ", "|-", "\\* ", "The server's own words:")
        if wrong := [line for line in lines[3:-3] if line and not line.startswith(allowed)]:
            return f"a line is none of the format's: {wrong[0][:60]!r}"
    return ""


def texts(tally: Tally, rng: random.Random, how: str) -> None:
    """Three hostile entries in a row."""
    entries: list[Entry] = []
    for number in (1, 2, 3):
        entries.append(render(hostile_draft(rng), number, AT, entries[-1].sha256 if entries else GENESIS))
    wrong = forged(entries)
    tally.counts["hostile entries"] += len(entries)
    for _ in entries[1:]:
        tally.held("P12")
    tally.check("P12", kept=not wrong, how=f"{wrong} ({how})")


# --- secrets


def encoded(rng: random.Random, secret: str) -> str:
    """A secret as a program may print it."""
    raw = secret.encode()
    return rng.choice(
        (
            secret,
            urllib.parse.quote(secret, safe=""),
            urllib.parse.quote(secret),
            urllib.parse.quote_plus(secret),
            urllib.parse.quote(secret, safe="").lower() if secret.islower() else secret,
            base64.b64encode(raw).decode(),
            base64.urlsafe_b64encode(raw).decode(),
            base64.b64encode(b"user:" + raw).decode(),
            base64.b64encode(b"u:" + raw + b"\n").decode(),
            json.dumps(secret),
            json.dumps(secret, ensure_ascii=False),
            repr(secret),
            "\x1b[1m".join((secret[:5], secret[5:])),
        )
    )


def said(rng: random.Random, secret: str) -> str:
    """Something that a server, an operator or an error may say, with a secret in it."""
    frame = rng.choice(
        (
            "{}", "error: {} is not valid", "GET /v1?x={}&y=1", "http://user:{}@host:80/x", "Authorization: Basic {}", "Bearer {}",
            "ServerArgs(model='m', key='{}')", '{{"key": "{}"}}', "--api-key {}", "a\nb {}\nc", "\x1b[31m{}\x1b[0m", "[{}]", "X{}X", "{}{}",
        )
    )  # fmt: skip
    return frame.replace("{}", encoded(rng, secret))


def canary(rng: random.Random) -> str:
    """A secret: long enough that nothing else contains it, of characters that encodings change."""
    return (
        "cnry"
        + "".join(
            rng.choices("abcdefghijkmnpqrstuvwxyzABCDEFGH23456789+/=&%$#@!?:;,. \"'\\<>|é", k=rng.randrange(10, 30))
        ).strip()
    )


def traces(secret: str) -> set[str]:
    """What must be found nowhere: the secret in any form, and pieces of it that are long enough to be of use."""
    raw = secret.encode()
    forms = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    forms |= {urllib.parse.quote(secret), urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret)}
    for before in range(3):
        forms.add(base64.b64encode(bytes(before) + raw).decode().rstrip("=")[2:-2])
    return forms | {form.replace("<", "&lt;") for form in forms}


class House:
    """The places where text is kept or shown, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "state.db")
        self.log = io.StringIO()
        self.trial = self.store.add_trial("s", self._candidate(), ("default", Benchmark()), AT)
        self.entries: list[Entry] = []

    def _candidate(self) -> Candidate:
        candidate = Candidate(name="c", engine="sglang", launch=Launch(model="/m"))
        self.store.put_candidate(candidate, "", "c.toml")
        return candidate

    def say(self, rng: random.Random, secret: str) -> None:
        """Tell one of the places something with the secret in it."""
        text, store = said(rng, secret), self.store
        data = {"facts": {"server.sentence": text}, "list": [text, {"deep": text}]}
        sink = rng.randrange(8)
        if sink == 0:
            store.add_entry(hostile_but_with(rng, text), AT)
        elif sink == 1:
            log.get().info("said", text=text, list=[text], map={"a": {"b": text}}, error=ValueError(text))
        elif sink == 2:
            log.get().error(text, exc_info=ValueError(text))
        elif sink == 3:
            store.update_trial(self.trial, reasons=json.dumps([text]), ended_at=text)
        elif sink == 4:
            result = LevelResult(concurrency=8, figures=figures(LevelSamples(concurrency=8)))
            store.put_result(self.trial, result, {"looks": [data], "log": text})
        elif sink == 5:
            store.update_slot("s", paused=text, degraded=json.dumps(data))
        elif sink == 6:
            statusfile.write(self.folder, redact.hide_values({"trouble": text, "slots": data}, store.secrets))
        else:
            self.log.write(redact.hide(text, store.secrets))  # the service manager's status line

    def kept(self) -> str:
        """Everything that is kept or was shown; what the database has compressed, too."""
        raw = [path.read_bytes().decode("utf-8", "replace") for path in self.folder.iterdir() if path.is_file()]
        evidence = (
            [json.dumps(self.store.evidence(self.trial, 8), ensure_ascii=False)]
            if self.store.results(self.trial)
            else []
        )
        return "\n".join([*raw, *evidence, self.log.getvalue()])


def hostile_but_with(rng: random.Random, text: str) -> Draft:
    """An entry with the text in one of its places."""
    places: dict[str, Any] = {
        "title": text, "sentence": text, "bullets": (("Rule", text),), "table": (("a", "b"), (text, text)), "notes": (text,),
        "quote": ("a", text), "slot": text,
    }  # fmt: skip
    chosen = rng.choice(sorted(places))
    return Draft(**{"slot": "s", "title": "t", "sentence": "u", chosen: places[chosen]})


def secrets(tally: Tally, rng: random.Random, how: str) -> None:
    """A house with two secrets that is told many things; then all that it kept is searched."""
    mine = [canary(rng), canary(rng)]
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    house = House(folder)
    try:
        house.store.secrets = frozenset(mine)
        log._secrets.clear()
        log.hide(frozenset(mine))
        structlog.reset_defaults()
        with redirect_stderr(house.log):
            log.configure(as_json=rng.random() < 0.5)
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(house.log), cache_logger_on_first_use=False)
            for _ in range(40):
                house.say(rng, rng.choice(mine))
        found = house.kept()
        leaks = [trace for secret in mine for trace in traces(secret) if trace in found]
        tally.counts["placements of secrets"] += 40
        tally.held("P22", 39)
        where = found[max(0, found.find(leaks[0]) - 60) :][:160] if leaks else ""
        tally.check("P22", kept=not leaks, how=f"{leaks[:1]!r} of {mine!r} is in {where!r} ({how})")
    finally:
        house.store.close()
        structlog.reset_defaults()
        log._secrets.clear()
        shutil.rmtree(folder)


def run(seed: int, seconds: float) -> Tally:
    """Hostile texts and secrets in turn until the time is over."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < until:
        how = f"round {number}: python -m torture --part texts --seed {seed}"
        for at in range(50):
            texts(tally, random.Random(f"texts {seed}/{number}/{at}"), how)
        secrets(tally, random.Random(f"secrets {seed}/{number}"), how)
        number += 1
    return tally
