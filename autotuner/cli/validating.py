"""`validate`: check files without touching anything."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from autotuner.cli.common import json_option, print_json, user_cache
from autotuner.core.candidate import Candidate, parse_candidates
from autotuner.core.policy import load_policy
from autotuner.core.source import Source, parse
from autotuner.edge.campaigns import read_campaign
from autotuner.edge.destination import LOCAL
from autotuner.edge.helpcache import HelpCache
from autotuner.edge.host_local import LocalHost
from autotuner.engines.flags import Findings
from autotuner.engines.nccl import unchecked
from autotuner.errors import AutotunerError, HostUnreachable, InvalidInput, Problem
from autotuner.hosts import Hosts
from autotuner.preflight import Preflight, by_itself, place_warnings, slot_problems
from autotuner.settings import Settings, find_settings, load_settings, read_source


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--no-preflight", is_flag=True, help="Do not look at this host: neither at installed programs nor at the slot."
)
@json_option
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...], no_preflight: bool, as_json: bool) -> None:
    """Check candidate, settings, policy and campaign FILES; exit code 3 if one is wrong.

    What a file is shows in its content: a settings file has [slots], a policy has [[rule]], a recorded campaign has
    [[candidate]], all else is a candidate. A candidate is also checked against its program's own flags where that is
    installed, and against its slot where there are settings; what is worth knowing but not wrong is printed as a warning.

    \b
    Examples:
      autotuner validate config.toml
      autotuner validate examples/kimi-k2.5/*.toml policies/*.toml
    """
    checks = _Checks(None if no_preflight else Preflight(LocalHost(_scratch()), HelpCache(user_cache())))
    if not no_preflight:
        checks.use(_settings(ctx))
    problems: list[Problem] = []
    results: list[dict[str, Any]] = []
    for name in files:
        try:
            kind, said, warnings = checks.check(Path(name))
            results.append({"file": name, "kind": kind, "ok": True, "says": said, "warnings": warnings})
        except InvalidInput as error:
            problems += error.problems
            results.append({"file": name, "ok": False, "problems": [str(p) for p in error.problems]})
    if as_json:
        print_json(results)
    else:
        for row in results:
            if row["ok"]:
                click.echo(f"{row['file']}: {row['kind']} ok: {row['says']}")
                for warning in row["warnings"]:
                    click.echo(f"{row['file']}: warning: {warning}", err=True)
        for problem in problems:
            click.echo(str(problem), err=True)
    if problems:
        ctx.exit(InvalidInput.exit_code)


@dataclass
class _Checks:
    """The checks of one call: what is installed and who holds a slot is looked at once."""

    preflight: Preflight | None
    settings: Settings | None = None
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def use(self, settings: Settings | None) -> None:
        """Check against these settings' slots, and keep answers where they say."""
        if settings is not None and self.preflight is not None:
            self.settings = settings
            self.preflight.cache = HelpCache(settings.cache)

    def check(self, path: Path) -> tuple[str, str, list[str]]:
        """Given a file, return its kind, what it says, and warnings. Raise InvalidInput."""
        source = read_source(path)
        keys = parse(source)
        if "slots" in keys and "engine" not in keys:
            settings = load_settings(path, whole=True)
            objectives = "; ".join(f"slot {name}: {settings.objective_in_words(name)}" for name in settings.slots)
            return "settings", objectives, list(settings.warnings)
        if "rule" in keys:
            policy = load_policy(source)
            return "policy", ", ".join(rule.name for rule in policy.rules), []
        if "candidate" in keys and "engine" not in keys:
            recorded = read_campaign(path.parent)
            return "recorded campaign", ", ".join(trial.candidate.name for trial in recorded.trials), []
        return self._candidates(source)

    def _candidates(self, source: Source) -> tuple[str, str, list[str]]:
        candidates = parse_candidates(source)
        wrong: list[Problem] = []
        warned: dict[str, list[str]] = {}  # a sweep's candidates mostly share their warnings
        for candidate, found in zip(candidates, asyncio.run(self._find_all(candidates)), strict=True):
            wrong += [Problem(source.name, f"{candidate.name}: {said}") for said in found.problems]
            for said in found.warnings:
                warned.setdefault(said, []).append(candidate.name)
        if wrong:
            raise InvalidInput(wrong)
        said = ", ".join(f"{candidate.name} ({candidate.id})" for candidate in candidates)
        every = len(candidates)
        warnings = [
            text if len(names) == every else f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}: {text}"
            for text, names in warned.items()
        ]
        return "candidate", said, warnings

    async def _find_all(self, candidates: Sequence[Candidate]) -> list[Findings]:
        if self.settings is None:
            return [await self._find(candidate, None) for candidate in candidates]
        with contextlib.closing(Hosts(self.settings)) as hosts:
            return [await self._find(candidate, hosts) for candidate in candidates]

    async def _find(self, candidate: Candidate, hosts: Hosts | None) -> Findings:
        if self.preflight is None:
            return by_itself(candidate)
        names = self._slots_of(candidate)
        if not names or self.settings is None or hosts is None:
            return self._unknown(candidate) + await self.preflight.check(candidate, strict=False)
        every = [await self._find_on(name, candidate, self.settings, self.preflight, hosts) for name in names]
        problems = [
            tuple(said if len(names) == 1 else f"slot {name}: {said}" for said in found.problems)
            for name, found in zip(names, every, strict=True)
        ]
        warnings = dict.fromkeys(said for found in every for said in found.warnings)
        return self._unknown(candidate) + Findings(tuple(itertools.chain(*problems)), tuple(warnings))

    def _unknown(self, candidate: Candidate) -> Findings:
        """That `enqueue` will refuse a candidate for the slots that it names."""
        unknown = candidate.unknown_slots(self.settings.slots) if self.settings is not None else ()
        said = f"its `slots` name {', '.join(unknown)}, which the settings do not have: enqueue will refuse it"
        return Findings(warnings=(said,)) if unknown else Findings()

    async def _find_on(
        self, name: str, candidate: Candidate, settings: Settings, common: Preflight, hosts: Hosts
    ) -> Findings:
        slot, host = settings.slots[name], hosts.of(name)
        preflight = common if slot.host == LOCAL and not slot.nodes else Preflight(host, common.cache)
        try:
            found = await preflight.check(candidate, strict=False, gpus=slot.gpus)
        except HostUnreachable as error:
            found = by_itself(candidate) + Findings(warnings=(f"not checked against its program: {error}",))
        if name not in self.held:
            self.held[name] = await place_warnings(host, slot)
        risks = unchecked(candidate, settings.objective_of(name).constraints.answers_agree_min)
        return found + Findings((*slot_problems(candidate, slot), *risks), self.held[name])

    def _slots_of(self, candidate: Candidate) -> list[str]:
        names = list(self.settings.slots) if self.settings else []
        if candidate.slots:
            return [name for name in dict.fromkeys(candidate.slots) if name in names]
        return names if len(names) == 1 else []


def _settings(ctx: click.Context) -> Settings | None:
    """The settings, if there are any: files are checked without them too."""
    try:
        return load_settings(find_settings(ctx.obj))
    except AutotunerError:
        return None


def _scratch() -> Path:
    """The host's folder of launches, of which `validate` makes none."""
    return user_cache() / "launches"
