"""A benchmark's dataset on disk: read up to a limit, told apart by a hash, checked where the settings name it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.records import ACCEPTED, Records, parse_records
from autotuner.errors import InvalidInput, Problem

BYTES_MAX = 64 << 20  # the beginning of a longer file is used: some 10,000 conversations
RECORDS_MAX = 250_000  # and no more requests than this, which is more than a level sends
CHECKED = 1000  # so many are taken apart whenever the settings are read; `validate` and the load look at all
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Content:
    """What is used of a file: its bytes, their SHA-256, and whether the file goes on behind them."""

    data: bytes
    sha256: str
    cut: bool


def read_content(path: Path) -> Content:
    """Given a path, return what is used of the file. Raise InvalidInput if it cannot be read or is empty."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX)
            cut = bool(file.read(1))
    except OSError as error:
        raise InvalidInput([Problem(str(path), f"cannot be read: {error.strerror}", hint=ACCEPTED)]) from None
    return Content(data.removeprefix(_BOM), hashlib.sha256(data).hexdigest(), cut)


def with_dataset(benchmark: Benchmark, base: Path, most: int = CHECKED) -> Benchmark:
    """Given a benchmark and the folder that its dataset is relative to, return it with the full path and the content's hash.

    Raise InvalidInput if the file is missing, is wrong within its first `most` records, has no times where the load needs
    them, or is another than the settings say.
    """
    path = base / Path(benchmark.dataset).expanduser()
    content = read_content(path)
    _checked(benchmark, str(path), content, most)
    return benchmark.model_copy(update={"dataset": str(path), "dataset_sha256": content.sha256})


def load_records(benchmark: Benchmark) -> Records | None:
    """Given a benchmark as the settings give it, return its dataset's records, None without a dataset. Raise InvalidInput."""
    if not benchmark.dataset:
        return None
    return _checked(benchmark, benchmark.dataset, read_content(Path(benchmark.dataset)), RECORDS_MAX)


def _checked(benchmark: Benchmark, name: str, content: Content, most: int) -> Records:
    if benchmark.dataset_sha256 and benchmark.dataset_sha256 != content.sha256:
        hint = "what it changed to is another benchmark: reload the settings, or correct dataset_sha256 in them"
        raise InvalidInput(
            [Problem(name, f"has other content than the benchmark's: sha256 {content.sha256}", hint=hint)]
        )
    records = parse_records(name, content.data, cut=content.cut, most=most)
    if benchmark.load == "trace" and records.first_untimed is not None:
        why = 'this request has no timestamp, which load = "trace" needs'
        raise InvalidInput([Problem(name, why, records.first_untimed, hint=ACCEPTED)])
    return records
