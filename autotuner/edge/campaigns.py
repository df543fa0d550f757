"""Recorded campaigns on disk: a folder with campaign.toml, candidate files, and a table or logs with results; also .gz."""

import gzip
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w
from pydantic import ValidationError

from autotuner.core import recorded_log, recorded_table
from autotuner.core.candidate import Candidate, parse_candidates, to_toml
from autotuner.core.recorded import Campaign, CampaignFile, CandidateEntry, RecordedTrial, assembled
from autotuner.core.recorded_log import Results, candidate_of
from autotuner.core.source import Source, problem_at, validate
from autotuner.engines import engine_for
from autotuner.errors import InvalidInput, NotFound, Problem, Refused

FILE = "campaign.toml"


def is_campaign(folder: Path) -> bool:
    """Tell whether a folder holds a recorded campaign."""
    return (folder / FILE).is_file()


def read_campaign(folder: Path) -> Campaign:
    """Given a campaign's folder, return the campaign. Raise NotFound or InvalidInput naming file and line."""
    source = Source(str(folder / FILE), _text(folder / FILE))
    file = validate(CampaignFile, source)
    trials = _from_table(folder, source, file) if file.table else [_from_log(folder, entry) for entry in file.candidate]
    campaign = assembled(folder.resolve().name, file, trials)
    problems = _unfit(source, campaign)
    if problems:
        raise InvalidInput(problems)
    return campaign


def _unfit(source: Source, campaign: Campaign) -> list[Problem]:
    """What the objective asks for and no recording, or not this one, has."""
    objective = campaign.objective
    hint = f"levels: {', '.join(map(str, campaign.levels))}"
    problems = [
        problem_at(source, ("objective", *key), f"the campaign has no level {level}", hint)
        for key, level in objective.named_levels
        if level not in campaign.levels
    ]
    if objective.limits is not None:
        message = "goodput needs the times of each request, and a recorded campaign has those of whole levels"
        hint = "use output_tok_s with constraints.ttft_p99_ms_max or tpot_p99_ms_max"
        problems.append(problem_at(source, ("objective", "maximise"), message, hint))
    return problems


def _from_table(folder: Path, source: Source, file: CampaignFile) -> list[RecordedTrial]:
    table = Source(str(folder / str(file.table)), _text(folder / str(file.table)))
    rows = recorded_table.parse_table(table)
    trials = []
    for index, entry in enumerate(file.candidate):
        for candidate in _candidates(folder / entry.file):
            mine = tuple(row for row in rows if row.config == candidate.name)
            if not mine:
                message = f"{candidate.name} has no row in {file.table}"
                raise InvalidInput([problem_at(source, ("candidate", index, "file"), message)])
            asked = engine_for(candidate.engine).speculation(candidate)
            trials.append(recorded_table.trial_of(mine, candidate, asked, file.benchmark))
    known = {trial.candidate.name for trial in trials}
    problems = [
        Problem(table.name, f"{row.config} is no candidate of {FILE}", row.line)
        for row in rows
        if row.config not in known
    ]
    if problems:
        raise InvalidInput(problems)
    return trials


def _from_log(folder: Path, entry: CandidateEntry) -> RecordedTrial:
    candidates = _candidates(folder / entry.file)
    if len(candidates) != 1:
        raise InvalidInput([Problem(str(folder / entry.file), "sweeps, and a log is of one candidate")])
    log, results = folder / str(entry.log), read_results(folder / str(entry.results))
    engine = engine_for(candidates[0].engine)
    return recorded_log.trial_of(str(log), candidates[0], engine, _bytes(log), results, entry.void)


def read_results(path: Path) -> Results:
    """Given the client's results (JSON), return them. Raise NotFound or InvalidInput."""
    try:
        return Results.model_validate_json(_bytes(path))
    except ValidationError as error:
        problems = [
            Problem(str(path), item["msg"], key=".".join(str(part) for part in item["loc"])) for item in error.errors()
        ]
        raise InvalidInput(problems) from None


def import_table(table: Path, candidates: Sequence[Path], first: str | None, out: Path, description: str) -> Campaign:
    """Given a table, the candidate files that go with it, and perhaps which one is first, write a campaign and return it.

    A configuration without a candidate file gets one that names its engine and no more.
    """
    rows = recorded_table.parse_table(Source(str(table), _text(table)))
    given = {candidate.name: (path, candidate) for path in candidates for candidate in _candidates(path)}
    files: dict[str, bytes] = {"figures.csv": _bytes(table)}
    entries: list[dict[str, object]] = []
    lines = {row.config: row.line for row in reversed(rows)}
    names = sorted(dict.fromkeys(row.config for row in rows), key=lambda name: name != first)
    if first is not None and first not in names:
        raise NotFound(f"there is no config called {first} in {table}; found: {', '.join(names)}")
    used = {given[name][0] for name in names if name in given}
    unused = [
        Problem(str(path), f"no row of {table} is of a candidate of this file")
        for path in candidates
        if path not in used
    ]
    if unused:
        raise InvalidInput(unused)
    for name in names:
        engine = next((row.engine for row in rows if row.config == name and row.engine), "")
        if name not in given and not engine:
            message = f"{name} has neither an engine nor a candidate file"
            hint = "fill the column engine, or name its file with --candidate"
            raise InvalidInput([Problem(str(table), message, lines[name], hint=hint)])
        candidate = given[name][1] if name in given else _made(table, name, engine)
        files[f"{name}.toml"] = to_toml(candidate).encode()
        entries.append({"file": f"{name}.toml"})
    return _written(out, {"description": description, "table": "figures.csv", "candidate": entries}, files)


def import_logs(folder: Path, engine: str, names: Sequence[str], out: Path, description: str) -> Campaign:
    """Given a folder of NAME.log and NAME.json and the names in the order of the trials, write a campaign and return it."""
    files: dict[str, bytes] = {}
    entries: list[dict[str, object]] = []
    for name in names:
        results = read_results(folder / f"{name}.json")
        files[f"{name}.toml"] = _launched(folder / f"{name}.json", candidate_of(name, engine, results))
        files[f"{name}.json"] = results.model_dump_json(indent=1, exclude_none=True).encode() + b"\n"
        files[f"{name}.log.gz"] = gzip.compress(_bytes(folder / f"{name}.log"), mtime=0)
        entries.append({"file": f"{name}.toml", "log": f"{name}.log.gz", "results": f"{name}.json"})
    return _written(out, {"description": description, "candidate": entries}, files)


def _launched(results: Path, candidate: Candidate) -> bytes:
    """The candidate file of a run. Raise InvalidInput naming the results where it would hold what such a file must not."""
    text = to_toml(candidate)
    try:
        parse_candidates(Source(str(results), text))
    except InvalidInput as error:
        hint = "take it out of args or env there"
        raise InvalidInput([replace(p, file=str(results), line=None, hint=hint) for p in error.problems]) from None
    return text.encode()


def recorded_names(folder: Path) -> tuple[str, ...]:
    """Given a folder, return the names of which it has both a log and results, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.json") if (folder / f"{path.stem}.log").is_file()))


def _written(out: Path, table: Mapping[str, object], files: Mapping[str, bytes]) -> Campaign:
    """Write a new folder, whole or not at all: what cannot be read back is not kept."""
    if out.exists():
        raise Refused(f"{out} is there already; name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name, data in {FILE: tomli_w.dumps(dict(table)).encode(), **files}.items():
            (made / name).write_bytes(data)
        read_campaign(made)
        made.chmod(0o755)
        made.rename(out)
    except InvalidInput as error:  # the folder it names is gone by then
        raise InvalidInput([replace(p, file=Path(p.file).name) for p in error.problems]) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return read_campaign(out)


def _made(table: Path, name: str, engine: str) -> Candidate:
    # What was launched is not known, but it was another server than those of other names.
    launch = {"command": [f"unknown-{name}"]} if engine == "command" else {"model": f"unknown-{name}"}
    about = {"name": name, "engine": engine, "hypothesis": f"imported from {table.name}", "launch": launch}
    return parse_candidates(Source(str(table), tomli_w.dumps(about)))[0]


def _candidates(path: Path) -> tuple[Candidate, ...]:
    return parse_candidates(Source(str(path), _text(path)))


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidInput([Problem(str(path), "is no UTF-8 text")]) from None


def _bytes(path: Path) -> bytes:
    """A file's bytes; of a .gz those inside. Raise NotFound or InvalidInput."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (FileNotFoundError, IsADirectoryError):
        raise NotFound(f"there is no file {path}") from None
    except (OSError, EOFError) as error:
        raise InvalidInput([Problem(str(path), f"cannot be read: {error}")]) from None
