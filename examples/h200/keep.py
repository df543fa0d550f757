"""Makes a kept campaign of what examples/h200/campaign.py packed: journal, state and servers' logs, small and checked.

    python examples/h200/keep.py WORK/rules.tgz WORK/exhaustive.tgz --out examples/campaigns/h200-sglang

For each archive a folder of its name is written, with the journal as it is, the state as state.db.gz, settings, rules, and each
launch's log, compressed. An entry must not be changed, so a journal that names a path of one machine (--forbid) is refused; in
logs such paths are replaced (--replace OLD=NEW). tests/unit/test_kept_campaigns.py verifies and replays what was kept.
"""

import argparse
import gzip
import json
import re
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from autotuner.edge.store import Store
from autotuner.errors import AutotunerError, Refused

SIZE_MAX = 2_000_000  # bytes of all that is kept: it is part of the repository
FORBIDDEN = (
    f"{Path.home()}/",
    "/home/",
    "/tmp/",
    "/scratch/",
)  # folders of a machine or a person; services live elsewhere
LOG_MAX = 400_000  # bytes of a log before compression; of a longer one its beginning and its end are kept
# What a server says each second of a load, and what tells nothing that the state does not have.
CHATTER = re.compile(rb'"(?:GET|POST) /(?:metrics|health|health_generate|v1/completions|tokenize|flush_cache)\b')


def main() -> None:
    """Keep each archive, or none of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path, help="the new folder")
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW", help="in logs and settings")
    parser.add_argument("--forbid", action="append", default=list(FORBIDDEN), metavar="TEXT", help="must not be kept")
    given = parser.parse_args()
    pairs = [tuple(pair.split("=", 1)) for pair in given.replace]
    try:
        size = keep(given.archives, given.out, [(old, new) for old, new in pairs], given.forbid)
    except AutotunerError as error:
        sys.exit(f"{error}")
    print(f"{given.out}: {len(given.archives)} campaigns, {size / 1000:,.0f} kB")


def keep(archives: list[Path], out: Path, replace: list[tuple[str, str]], forbid: list[str]) -> int:
    """Write the kept campaigns to a new folder and return its size in bytes. Raise Refused with what speaks against it."""
    if out.exists():
        raise Refused(f"{out} is there already; name a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "made")
        for path in archives:
            with tarfile.open(path) as archive:
                archive.extractall(Path(temporary, "packed"), filter="data")
            name = path.name.removesuffix(".tgz")
            keep_one(Path(temporary, "packed", name), made / name, replace)
        found = [f"{where} has {text!r}" for where, text in offences(made, forbid)]
        if found:
            raise Refused("a path of one machine would be kept:\n" + "\n".join(found[:20]))
        size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        if size > SIZE_MAX:
            raise Refused(f"{size:,} bytes are too much; at most {SIZE_MAX:,} are kept")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, out)
    return size


def keep_one(packed: Path, made: Path, replace: list[tuple[str, str]]) -> None:
    """Given an unpacked run, write what is kept of it. Raise Refused where nothing came of it."""
    if not (packed / "journal").is_dir():
        raise Refused(f"{packed.name} has no journal: nothing was concluded in it; leave it out")
    shutil.copytree(packed / "journal", made / "journal")
    (made / "autotuner.toml").write_text(
        replaced((packed / "autotuner.toml").read_text(encoding="utf-8"), replace), encoding="utf-8"
    )
    shutil.copytree(packed / "policies", made / "policies")
    slim(packed / "state.db")
    (made / "state.db.gz").write_bytes(gzip.compress((packed / "state.db").read_bytes(), 9, mtime=0))
    (made / "logs").mkdir()
    for name, log in logs(packed):
        text = replaced(shortened(log).decode("utf-8", "replace"), replace)
        (made / "logs" / f"{name}.log.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def slim(database: Path) -> None:
    """Take out of a state the folders of candidate files and the raw gaps between events, which are half of it.

    What was computed of the gaps stays, so that every figure of a verdict still comes out again.
    """
    with closing(sqlite3.connect(database, isolation_level=None)) as db:
        for table, column, key in (("candidates", "source_name", "id"), ("proposals", "file", "id")):
            rows = db.execute(f"SELECT {column}, {key} FROM {table}").fetchall()
            shorter = [(Path(name).name, row) for name, row in rows]
            db.executemany(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", shorter)
        for row, body, packed in db.execute("SELECT rowid, body, evidence FROM results").fetchall():
            evidence, table = json.loads(zlib.decompress(packed)), json.loads(body)["figures"]["itl_ms"]
            if table and not evidence["samples"]["itl_ms"]:
                evidence["samples"]["itl_ms"] = table
                kept = zlib.compress(json.dumps(evidence, separators=(",", ":")).encode())
                db.execute("UPDATE results SET evidence = ? WHERE rowid = ?", (kept, row))
        db.execute("UPDATE results SET gaps = NULL")
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("VACUUM")


def logs(packed: Path) -> Iterator[tuple[str, bytes]]:
    """Each launch's log with a name: the order of the launches, the candidate's name, and what it was for."""
    store = Store(packed / "state.db")
    try:
        for number, row in enumerate(store.launches(), 1):
            path = packed / "launches" / row.id / "server.log"
            if path.is_file():
                yield f"{number:02d}-{row.name}-{row.purpose.value}", path.read_bytes()
    finally:
        store.close()


def shortened(log: bytes) -> bytes:
    """A log without the requests that our own load made, and of a long one the middle left out."""
    text = b"".join(line for line in log.splitlines(keepends=True) if not CHATTER.search(line))
    if len(text) <= LOG_MAX:
        return text
    half = LOG_MAX // 2
    return text[:half] + f"\n... {len(text) - LOG_MAX:,} bytes are left out here ...\n".encode() + text[-half:]


def replaced(text: str, pairs: list[tuple[str, str]]) -> str:
    """A text with each pair's old words replaced by its new ones."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def offences(made: Path, forbid: list[str]) -> Iterator[tuple[str, str]]:
    """Each kept file that holds a forbidden text, with it; a state is looked at column by column."""
    for path in sorted(made.rglob("*")):
        if path.is_dir():
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8", "replace")
        yield from ((str(path.relative_to(made)), word) for word in forbid if word in text)


if __name__ == "__main__":
    main()
