"""A rehearsed server of several GPUs speaks as NCCL was recorded, and its lines say of each variant what the recorded ones do."""

import pytest
from unit.core.test_nccl import RECORDED, asked, read

from autotuner.core.nccl import Nccl, absorb
from autotuner.engines.base import NcclSaid
from autotuner.engines.nccl import WATCHING
from autotuner.engines.nccl_log import read_line
from autotuner.rehearsal import nccl_voice


def rehearsed(env: dict[str, str], ranks: int = 2) -> Nccl:
    env = {"NCCL_NVLS_ENABLE": "0", **WATCHING, **env}
    text = nccl_voice.begins(ranks, env) + nccl_voice.formed(ranks, env)
    facts = [fact for line in text.splitlines() for fact in read_line(line)]
    return absorb(Nccl(), (fact for fact in facts if isinstance(fact, NcclSaid)))


@pytest.mark.parametrize("variant", [name for name in RECORDED if name.startswith("NCCL_") and "PROTO" not in name])
def test_what_it_says_of_a_variant_is_what_was_recorded(variant: str) -> None:
    mine, recorded = rehearsed(asked(variant)), read(variant)
    assert (mine.version, mine.channels, mine.links) == (recorded.version, recorded.channels, recorded.links)
    assert mine.connected == recorded.connected
    assert mine.warned == recorded.warned
    assert mine.settings == recorded.settings


def test_it_is_silent_where_nobody_asked_it_to_speak_and_on_one_gpu() -> None:
    assert nccl_voice.begins(2, {}) == nccl_voice.formed(2, {"NCCL_DEBUG": "WARN"}) == ""
    assert rehearsed({}, ranks=1) == Nccl()
