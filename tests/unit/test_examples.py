"""Examples and documents against the program: files that validate, commands that exist, keys and codes that are named."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from autotuner.bench.benchmark import Benchmark
from autotuner.cli import main
from autotuner.core.candidate import CandidateFile, Launch
from autotuner.core.causes import Level, split_loss
from autotuner.core.confirm import Noise
from autotuner.core.objective import Constraints, Objective, score
from autotuner.core.policy import FACTS, MOMENTS, Rule
from autotuner.core.speculation import assess
from autotuner.edge.destination import Destination
from autotuner.engines.base import Speculation, Window
from autotuner.errors import AutotunerError
from autotuner.settings import Budget, Settings, Slot
from autotuner.settings import Window as MaintenanceWindow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))
CAMPAIGN = ROOT / "examples" / "kimi-k2.5"
DOCS = [ROOT / "docs" / name for name in ("guide.md", "kimi-k2.5.md", "policies.md")]


def _run(*arguments: str) -> str:
    ran = CliRunner().invoke(main, list(arguments))
    assert ran.exit_code == 0, ran.output
    return ran.output


def _code(text: str) -> Iterator[str]:
    """Lines of fenced blocks, then the code spans outside of them."""
    for block in re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def _commands(text: str) -> Iterator[list[str]]:
    """The words after each call of the program; as the name of a user, a unit or a folder it ends its line."""
    call = re.compile(r"(?<!-u)(?:^|[\s/])autotuner((?: (?:-s|--settings) \S+)? [a-z][a-z-]+(?: [^#`]*)?)")
    for line in _code(text):
        for found in call.finditer(line):
            yield re.sub(r"^ (-s|--settings) \S+", "", found.group(1)).split()


@pytest.mark.parametrize("path", [*EXAMPLES, ROOT / "systemd" / "autotuner.toml"], ids=lambda path: path.name)
def test_every_example_validates(path: Path) -> None:
    assert " ok: " in _run("validate", "--no-preflight", str(path))


def test_the_whole_campaign_can_be_enqueued(tmp_path: Path) -> None:
    settings = tmp_path / "autotuner.toml"
    text = (CAMPAIGN / "autotuner.toml").read_text(encoding="utf-8")
    settings.write_text(text.replace('"/var/lib/autotuner"', '"state"'))
    pattern = str(CAMPAIGN / "[1-6]-*.toml")
    said = _run("-s", str(settings), "enqueue", "--dry-run", "--no-preflight", pattern)
    assert said.count("would be queued on slot kimi") == 13
    assert "13 candidates, about 3 h 35 min in all" in said
    assert "13 candidates, about 3 h 35 min in all" in (ROOT / "docs/kimi-k2.5.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_command_in_the_documents_exists(path: Path) -> None:
    calls = list(_commands(path.read_text(encoding="utf-8")))
    assert len(calls) >= 5
    context = click.Context(main)
    for words in calls:
        command = main.get_command(context, words[0])
        assert command is not None, f"{path.name}: autotuner {' '.join(words)}"
        rest = words[1:]
        if isinstance(command, click.Group) and rest and re.fullmatch(r"[a-z][a-z-]+", rest[0]):
            command = command.commands.get(rest[0])
            assert command is not None, f"{path.name}: autotuner {' '.join(words)}"
        options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
        used = {word for word in rest if re.fullmatch(r"--?[a-z][a-z-]*", word)}
        assert used <= options, f"{path.name}: autotuner {' '.join(words)}: no {used - options}"


def test_the_documents_show_the_examples_own_ids() -> None:
    said = _run("validate", "--no-preflight", *(str(path) for path in sorted(CAMPAIGN.glob("[1-6]-*.toml"))))
    ids = dict(re.findall(r"(\S+) \(([0-9a-f]{16})\)", said))
    for path in DOCS:
        for name, shown in re.findall(r"candidate ok: (\S+) \(([0-9a-f]{16})\)", path.read_text(encoding="utf-8")):
            assert ids[name] == shown, f"{path.name}: {name} is {ids[name]} now"


def test_every_command_is_in_the_guide() -> None:
    guide = {words[0] for words in _commands((ROOT / "docs/guide.md").read_text(encoding="utf-8"))}
    assert guide == set(main.list_commands(click.Context(main)))


def test_the_guide_names_every_exit_code() -> None:
    def codes(error: type[AutotunerError]) -> set[int]:
        return {error.exit_code}.union(*(codes(child) for child in error.__subclasses__()))

    section = (ROOT / "docs/guide.md").read_text(encoding="utf-8").split("## Exit codes")[1].split("\n## ")[0]
    named = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert named == {0, 2} | codes(AutotunerError)


@pytest.mark.parametrize(
    "model",
    [
        Settings,
        Slot,
        Destination,
        Benchmark,
        Objective,
        Constraints,
        Noise,
        Budget,
        MaintenanceWindow,
        CandidateFile,
        Launch,
    ],
    ids=lambda model: model.__name__,
)
def test_the_guide_names_every_key(model: type[BaseModel]) -> None:
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    for name, field in model.model_fields.items():
        key = field.alias or name
        assert re.search(rf"[`\[.]{re.escape(key)}[`\].]", guide), f"docs/guide.md does not name {key}"


def test_the_policy_page_lists_every_fact_as_the_program_does() -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8").split("## Facts")[1]
    rows = [f"| `{f.name}` | {f.kind.__name__} | {f.unit or '-'} | {f.meaning} | {f.absent} |" for f in FACTS]
    assert re.findall(r"^\| `.*$", page, re.MULTILINE) == rows


def test_the_policy_page_says_what_is_known_and_obeyed_at_each_moment() -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    moments, actions = page.split("### Moments")[1].split("### Actions")
    for moment, (obeyed, groups) in MOMENTS.items():
        row = next(line for line in moments.splitlines() if line.startswith(f"| `{moment}` |"))
        named = set(re.findall(r"`(\w+)\.\*`", row)) - ({"server"} if "without `server.*`" in row else set())
        if "as `window`" in row:
            named |= MOMENTS["window"][1] - {"server"}
        assert named == groups, moment
        rows = [line for line in actions.splitlines() if re.match(r"\| `[a-z-]+` \|", line)]
        assert {line.split("`")[1] for line in rows if f"`{moment}`" in line.split("|")[2]} == obeyed, moment


def test_the_policy_page_names_every_key_of_a_rule() -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    for key in Rule.model_fields:
        assert f"| `{key}` |" in page


def test_the_policy_pages_own_rule_and_conditions_are_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    examples = re.findall(r"^\| (\w+) \| `(.+?)` \| ", page, re.MULTILINE)
    assert blocks
    assert len(examples) >= 5
    for moment, condition in examples:
        action = "pause" if moment == "next" else "abandon"
        rule = f'name = "x"\non = "{moment}"\nwhen = """{condition}"""\naction = "{action}"\nsentence = "x"\n'
        blocks.append(f'description = "x"\n[[rule]]\n{rule}')
    for number, text in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert ": policy ok: " in _run("validate", "--no-preflight", str(path))


def test_the_campaigns_illustrations_are_computed_from_its_table() -> None:
    page = " ".join((ROOT / "docs/kimi-k2.5.md").read_text(encoding="utf-8").split())
    windows = (Window(source="log", running=48, queued=16, gen_tok_s=849, accept_len=1.65),) * 3
    found = assess(windows, 128, None, Speculation("EAGLE3", 3, 4), {1: 1 / 63.6, 128: 128 / 2370})
    assert found.baseline_step is not None
    assert f"accept length 1.65 measured, {found.needed:.2f} needed" in page
    assert found.speedup is not None
    assert f"it gives {found.speedup.mean:.2f} of a plain server's rate" in page
    assert f"a plain step of {1000 * found.baseline_step.seconds:.1f} ms at 48 running" in page
    loss = split_loss(Level(128, 2370, 849, 48, found.baseline_step.seconds, found))
    cap = next(share for share in loss if share.cause == "admission-cap")
    total = sum(share.tok_s for share in loss)
    assert f"of the {total:,.0f} tok/s lost at concurrency 128, {100 * cap.tok_s / total:.0f} % is {cap.words}" in page
    single = (Window(source="log", running=1, queued=0, gen_tok_s=62.9, accept_len=1.65),) * 3
    alone = assess(single, 1, None, Speculation("EAGLE3", 3, 4), {1: 1 / 82.5})
    assert f"below break-even: 1.65, and {alone.needed:.2f} needed" in page


def test_the_two_objectives_disagree_as_the_documents_say() -> None:
    from autotuner.bench.measurement import Figures

    def side(single: float, busy: float) -> dict[int, Figures]:
        common = {"seconds": 180, "requests_ok": 1, "requests_failed": 0, "tokens_per_event": 1, "tokens_counted": True}
        return {
            level: Figures(
                concurrency=level, output_tok_s=rate, output_tok_s_low=rate, output_tok_s_high=rate, **common
            )
            for level, rate in ((1, single), (128, busy))
        }

    vllm, sglang = side(82.5, 1536), side(63.6, 2370)
    objectives = (Objective(level=1), Objective(level=128), Objective(maximise="geometric_mean"))
    scores = [score(objective, vllm, sglang, 0.03) for objective in objectives]
    assert [f"{s.mean:.2f}" for s in scores if s] == ["1.30", "0.65", "0.92"]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_between_the_documents_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
        other = path if not target else path.parent / target
        assert other.is_file(), target
        headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


def test_every_line_that_an_entry_may_have_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    read_as = guide[guide.index("| part | read it as |") : guide.index("Only accept length can be compared")]
    named = {part.strip() for row in re.findall(r"^\| (.*?) \|", read_as, re.MULTILINE) for part in row.split(",")}
    sources = [
        ROOT / "autotuner" / name
        for name in ("core/report.py", "outcome.py", "publishing.py", "edge/outbox.py", "slotworker.py")
    ]
    bullets = {b for path in sources for b in re.findall(r"\(\"([A-Z][A-Za-z ]+)\", [^)]", path.read_text())}
    assert {"Reading", "Causes", "Kept", "Do"} <= bullets
    assert bullets - named == set()
