"""Synthetic text of a stated number of tokens: the words it is made of, and how sure their number of tokens is. Pure."""

import random
from functools import cache, lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# Common English words that the usual tokenizers encode as one token each with their leading space, if not all of them.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education river mountain garden winter summer letter window
street road field music paper color sound voice picture table language market science heart blood food tree
plant animal bird fish horse fire stone metal glass wood gold silver north south east west early late small
large long short high low old young new good great little big white black green blue red open close clear strong
free full real true simple special social common single final general main possible able ready certain available
local national public private human natural modern recent future past present next last first second third never
always often again still almost enough rather quite perhaps maybe indeed instead together around across between
against during without within before after above below under over through since until while because although
where when there here these those which what who whose each every both many much more most some any said made
used called found given taken known seen come gone done left kept held built sent lost play move turn start stop
stay live love help talk walk run sit stand speak read write learn teach buy sell
""".split()  # noqa: SIM905 - a paragraph of words reads better than a list of them
WORDS = tuple(_WORDS)

TOKENS_PER_WORD = 1.05  # assumed where a server tells nothing; SmolLM2's tokenizer has 1.00 for these words
NUMBERS = 1 << 24  # so many texts of one kind differ from each other in their first words for certain
KINDS = 1 << 30  # and so many kinds are told apart: two have the same mark with a chance of one in this
CACHED_CHARS = 16_000_000

How = Literal["exact", "calibrated", "estimated"]


class Words(BaseModel):
    """The words of which prompts are made for one server.

    `openers` are those that are one token also where a text begins, without a space before them. `tokens_per_word` is the
    mean, 1.0 if exact; `overhead` is the number of tokens that the server adds to each prompt (BOS, chat template). `said`
    tells in one sentence what the lengths of prompts rest on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    how: How = "estimated"
    said: str = f"the length of prompts is an estimate: {TOKENS_PER_WORD:g} tokens a word"
    words: tuple[str, ...] = Field(default=WORDS, min_length=2)
    openers: tuple[str, ...] = Field(default=WORDS, min_length=1)
    tokens_per_word: float = Field(default=TOKENS_PER_WORD, gt=0)
    overhead: int = Field(default=0, ge=0)

    def count(self, tokens: int) -> int:
        """Given a number of tokens, return how many words have about so many, at least one."""
        return max(1, round(tokens / self.tokens_per_word))


class Texts:
    """The texts of one level of a benchmark; `key` names benchmark and level, and gives each level texts of its own."""

    def __init__(self, words: Words, key: str) -> None:
        self._words = words.words
        self._openers = words.openers
        self._key = key
        base = len(self._words)
        self._numbered = _places(NUMBERS, base)
        self._marked = _places(KINDS, base)
        self._mark = cache(self._new_mark)

    def text(self, kind: str, number: int, length: int, *, opens: bool) -> str:
        """Given a kind of text, its number within the kind and a number of words, return the text, always the same.

        Its first words write the number, the quickest digit first, and then a mark of key and kind: two texts of one kind
        whose numbers are below NUMBERS differ within these eight words or so, and neighbours mostly differ in the first. So no
        prefix cache answers one from another. `opens` says that nothing stands before it, so that its first word is an opener.
        """
        turns, mark = self._mark(kind)
        opening, rest = [], number
        if opens:
            rest, digit = divmod(rest, len(self._openers))
            opening.append(self._openers[(digit + turns[0]) % len(self._openers)])
        base = len(self._words)
        for turn in turns[len(opening) :]:
            rest, digit = divmod(rest, base)
            opening.append(self._words[(digit + turn) % base])
        opening += mark
        # random.Random on a string is stable over Python versions, so both sides of a comparison send the same text.
        source = random.Random(f"{self._key}/{kind}/{number}")  # noqa: S311 - reproducible, not secret
        return " ".join([*opening[:length], *source.choices(self._words, k=max(0, length - len(opening)))])

    def _new_mark(self, kind: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """How far each digit of a kind's numbers is turned, and the words that stand for key and kind."""
        source = random.Random(f"{self._key}/{kind}")  # noqa: S311 - reproducible, not secret
        base = len(self._words)
        turns = tuple(source.randrange(base) for _ in range(self._numbered + 1))
        return turns, tuple(source.choices(self._words, k=self._marked))


class SharedTexts:
    """Texts that several requests begin with, kept while they are in use: at most about CACHED_CHARS characters."""

    def __init__(self, texts: Texts, kind: str, length: int) -> None:
        made = lru_cache(maxsize=max(1, CACHED_CHARS // (6 * max(1, length))))
        self.text = made(lambda number, words, opens: texts.text(kind, number, words, opens=opens))


def _places(numbers: int, base: int) -> int:
    """How many digits of a base it takes to write so many numbers."""
    places = 1
    while base**places < numbers:
        places += 1
    return places
