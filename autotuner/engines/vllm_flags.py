"""vLLM's flags for speculation: --speculative-config in its three spellings, and what contradicts itself."""

import json
import re

from autotuner.core.candidate import Candidate, flag_name
from autotuner.engines.base import Speculation

CONFIG = ("speculative-config", "sc")
# 0.33 has these beside the JSON.
_SHORTCUTS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
# What vLLM guesses from the drafter's path where no method is named.
_GUESSES = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"))

_TAKEN = {
    "port": "belongs to the slot; set it in the settings",
    "host": "belongs to the slot; set it in the settings",
    "model": "contradicts launch.model; keep only that one",
}
_GONE = ("speculative-model", "num-speculative-tokens", "speculative-disable-by-batch-size")
_DROPPED = {"medusa": "0.33", "mlp_speculator": "0.33"}
_DROPPED_KEYS = {"speculative_token_tree": "0.22", "synthetic_acceptance_rate": "0.20"}
_SYNTHETIC = ("synthetic_acceptance_length", "synthetic_acceptance_rates")
SCHEDULE = "num_speculative_tokens_per_batch_size"
_WHERE = "args.speculative-config"
_NEEDS_MODEL = {"eagle", "eagle3", "draft_model", "dflash"}
# The others have a default: mtp its layers, dflash and dspark their block, suffix its tree.
_NEEDS_TOKENS = {"ngram", "ngram_gpu", "eagle", "eagle3", "draft_model"}


def speculation(candidate: Candidate) -> Speculation | None:
    """Given a candidate, return the speculation it asks for, or None; what vLLM chooses is None inside."""
    config = config_of(candidate)
    if not config or isinstance(config, str):
        return None
    tokens = _tokens(config)
    return Speculation(_method(config), tokens, tokens)


def problems(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return what vLLM would refuse or ignore, a sentence each."""
    config = config_of(candidate)
    found = [f"args.{flag} {why}" for flag, why in _TAKEN.items() if candidate.arg(flag) is not None]
    found += [
        f"args.{flag} does not exist any more; write args.speculative-config as JSON"
        for flag in _GONE
        if candidate.arg(flag) is not None
    ]
    found += [config] if isinstance(config, str) else _contradictions(config, candidate)
    if "VLLM_ATTENTION_BACKEND" in candidate.launch.env:
        found.append("env.VLLM_ATTENTION_BACKEND: no release since 0.19 reads it; use args.attention-backend")
    if candidate.arg("disable-log-stats"):
        found.append("args.disable-log-stats takes away the metrics by which a candidate is judged")
    return tuple(found)


def warnings(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return what vLLM does with it that nobody asked for, a sentence each."""
    config = config_of(candidate)
    if not config or isinstance(config, str):
        return ()
    found = []
    method = _method(config)
    if "method" not in config:
        found.append(f"{_WHERE} names no method, and vLLM would guess {method} from the drafter's path; name it")
    if method in _DROPPED:
        found.append(f"{_WHERE}: method {method} is gone by {_DROPPED[method]}")
    found += [f"{_WHERE}: {key} is gone from {gone} on" for key, gone in _DROPPED_KEYS.items() if key in config]
    if config.get("rejection_sample_method") == "synthetic":
        found.append(f"{_WHERE}: acceptance is thrown by dice and the text is garbage: never promote it")
    if config.get("rejection_sample_method") == "fly":
        found.append(f"{_WHERE}: rejection_sample_method fly is lossy, the output is no longer the target's")
    parallel = candidate.arg("data-parallel-size", "dp")
    if SCHEDULE in config and isinstance(parallel, int) and parallel > 1:
        found.append(f"{_WHERE}: {SCHEDULE} is dropped where args.data-parallel-size is above 1")
    return tuple(found)


def config_of(candidate: Candidate) -> dict[str, object] | str:
    """Given a candidate, return its speculative configuration, empty if it has none, or a sentence on what is wrong."""
    value = candidate.arg(*CONFIG)
    config: dict[str, object] = {}
    if value is not None:
        parsed = _parsed(str(value))
        if isinstance(parsed, str):
            return parsed
        config = parsed
    for key, part in candidate.launch.args.items():
        group, dot, rest = flag_name(key).partition(".")
        if group in CONFIG and dot:  # --speculative-config.num_speculative_tokens 3, which a sweep can vary
            config[rest.replace("-", "_")] = part
    for flag, key in _SHORTCUTS.items():
        if (short := candidate.arg(flag)) is not None:
            config[key] = short
    return config


def _parsed(text: str) -> dict[str, object] | str:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        return f"args.speculative-config is not valid JSON: {error}"
    if not isinstance(parsed, dict):
        return 'args.speculative-config must be a JSON object: {"method": "ngram", "num_speculative_tokens": 4}'
    return parsed


def _method(config: dict[str, object]) -> str:
    if config.get("method"):
        return str(config["method"])
    path = str(config.get("model", "")).lower()
    if path in {"ngram", "[ngram]"}:
        return "ngram"
    return next((method for part, method in _GUESSES if part in path), "draft_model")


def _tokens(config: dict[str, object]) -> int | None:
    value = config.get("num_speculative_tokens")
    return int(str(value)) if re.fullmatch(r"\d+", str(value)) else None


def _contradictions(config: dict[str, object], candidate: Candidate) -> list[str]:
    if not config:
        wants = candidate.arg("per-request-spec-decode-metrics")
        missing = "args.per-request-spec-decode-metrics stops a server that does not speculate"
        return [missing] if wants not in {None, "none"} else []
    method = _method(config)
    shape = [*_lookup(config), *_schedule(config), *_synthetic(config)]
    return [*_missing(config, method), *_drafter(config, method, candidate), *shape]


def _missing(config: dict[str, object], method: str) -> list[str]:
    found = []
    if "method" not in config and "model" not in config:
        found.append("args.speculative-config names neither method nor model")
    if method in _NEEDS_MODEL and "model" not in config:
        found.append(f"args.speculative-config: method {method} needs model, the path of the drafter")
    if "num_speculative_tokens" not in config:
        if method in _NEEDS_TOKENS:
            found.append(f"args.speculative-config: method {method} needs num_speculative_tokens")
    elif not _tokens(config):
        found.append("args.speculative-config: num_speculative_tokens must be a whole number above 0")
    return found


def _drafter(config: dict[str, object], method: str, candidate: Candidate) -> list[str]:
    found = []
    if method == "eagle" and re.search(r"eagle[-_.]?3", str(config.get("model", "")), re.IGNORECASE):
        found.append('args.speculative-config: the drafter looks like EAGLE-3; then method must be "eagle3"')
    tensor_parallel = str(candidate.arg("tensor-parallel-size", "tp") or 1)
    if str(config.get("draft_tensor_parallel_size", 1)) not in {"1", tensor_parallel}:
        found.append(f"args.speculative-config: draft_tensor_parallel_size must be 1 or {tensor_parallel}")
    return found


def _lookup(config: dict[str, object]) -> list[str]:
    least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    found = [
        f"{_WHERE}: {key} must be a whole number above 0"
        for key, value in (("prompt_lookup_min", least), ("prompt_lookup_max", most))
        if value is not None and (not isinstance(value, int) or value < 1)
    ]
    if not found and isinstance(least, int) and isinstance(most, int) and least > most:
        found.append(f"{_WHERE}: prompt_lookup_min is above prompt_lookup_max")
    return found


def _schedule(config: dict[str, object]) -> list[str]:
    """Dynamic speculation: [from, to, K] for batch sizes, from 1 on, none twice; K may be 0, which is off."""
    rows = config.get(SCHEDULE)
    if rows is None:
        return []
    shape = f"{_WHERE}: {SCHEDULE} must be a list of [from, to, K], such as [[1, 8, 4], [9, 64, 0]]"
    if not isinstance(rows, list) or not rows:
        return [shape]
    before = 0
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not all(isinstance(n, int) and n >= 0 for n in row):
            return [shape]
        first, last, _ = row
        if before == 0 and first != 1:
            return [f"{_WHERE}: the first batch size of {SCHEDULE} must be 1, not {first}"]
        if first <= before or last < first:
            return [f"{_WHERE}: the batch sizes {first} to {last} of {SCHEDULE} do not follow {before}"]
        before = last
    return []


def _synthetic(config: dict[str, object]) -> list[str]:
    """Acceptance by dice, to measure what a length would be worth; the bonus token counts."""
    named = [key for key in _SYNTHETIC if key in config]
    if not named:
        return []
    if config.get("rejection_sample_method") != "synthetic":
        return [f'{_WHERE}: {named[0]} has no effect without rejection_sample_method = "synthetic"']
    tokens, length, rates = _tokens(config), config.get(_SYNTHETIC[0]), config.get(_SYNTHETIC[1])
    if length is not None and tokens:
        inside = isinstance(length, int | float) and 1 <= length <= tokens + 1
        if not inside:
            return [f"{_WHERE}: {_SYNTHETIC[0]} must lie between 1 and {tokens + 1}, num_speculative_tokens + 1"]
    if rates is not None:
        numbers = isinstance(rates, list) and all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates)
        if not numbers or list(rates) != sorted(rates, reverse=True):  # type: ignore[call-overload]
            return [f"{_WHERE}: {_SYNTHETIC[1]} must be numbers from 0 to 1, none larger than the one before"]
    return []
