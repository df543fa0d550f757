"""A slot whose trials are measured by being told their figures: what tests of the store's side of a campaign share."""

from pathlib import Path

from click.testing import CliRunner

from autotuner import outcome
from autotuner.cli import main
from autotuner.context import SlotContext
from autotuner.edge.rows import Trial
from autotuner.edge.store import Store
from autotuner.settings import Settings


class ToldSlot:
    """A store, and the slot `name` in it; no host."""

    def __init__(self, name: str, file: Path, settings: Settings) -> None:
        self.file = file
        self.settings = settings
        self.store = Store(settings.database)
        self.ctx = SlotContext(name, settings, (), self.store, host=None)  # type: ignore[arg-type]

    def begin(self) -> Trial:
        """Take the next trial of the queue in hand."""
        trial = self.store.queue(self.ctx.name)[0]
        outcome.begin_trial(self.ctx, trial.id)
        return self.store.trial(trial.id)

    def last_entry(self) -> str:
        return self.store.entries()[-1].text

    def cli(self, *words: str) -> str:
        ran = CliRunner().invoke(main, ["-s", str(self.file), *words])
        assert ran.exit_code == 0, ran.output
        return ran.output
