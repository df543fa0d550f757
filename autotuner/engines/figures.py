"""One log line of any engine -> the figures that stand on it, each under one name with its unit.

A line names its figures as `key: value` or `key=value`; the table of keys is shared by all engines, because the same
figure has one meaning whoever prints it. What is said in prose has a pattern of its own. Nothing is read by position.
"""

import re

Figure = float | int | str
Figures = dict[str, Figure]

# key as printed -> name; a value with a percent sign takes the name after the bar, where there is one.
_KEYS: dict[str, str] = {
    "#running-req": "running_reqs",
    "Running": "running_reqs",
    "num_running_reqs": "running_reqs",
    "#queue-req": "queue_reqs",
    "Waiting": "queue_reqs",
    "Pending": "queue_reqs",
    "num_queue_reqs": "queue_reqs",
    "#transfer-req": "transfer_reqs",
    "#transferring-req": "transfer_reqs",
    "#retracted-req": "retracted_reqs",
    "#retracted_reqs": "retracted_reqs",
    "gen throughput (token/s)": "gen_tok_s",
    "Avg generation throughput": "gen_tok_s",
    "input throughput (token/s)": "input_tok_s",
    "Avg prompt throughput": "input_tok_s",
    "Accepted throughput": "accepted_tok_s",
    "Drafted throughput": "drafted_tok_s",
    "accept len": "accept_len_tokens",
    "Mean acceptance length": "accept_len_tokens",
    "mean acceptance length": "accept_len_tokens",
    "mean len": "accept_len_tokens",
    "Accept length": "accept_len_tokens",
    "Acceptance length": "accept_len_tokens",
    "accept rate": "accept_rate_ratio",
    "Draft acceptance rate": "accept_rate_ratio|accept_rate_pct",
    "Avg Draft acceptance rate": "accept_rate_ratio|accept_rate_pct",
    "System efficiency": "efficiency_ratio",
    "Accepted": "accepted_tokens",
    "Number of accepted tokens": "accepted_tokens",
    "#acc tokens": "accepted_tokens",
    "Drafted": "drafted_tokens",
    "Number of draft tokens": "drafted_tokens",
    "#gen tokens": "drafted_tokens",
    "Number of emitted tokens": "emitted_tokens",
    "#gen drafts": "drafts_count",
    "#mean acc len": "accept_len_tokens",
    "Number of speculative tokens": "steps_count",
    "#token": "used_tokens",
    "#full token": "full_tokens",
    "#swa token": "swa_tokens",
    "#new-token": "new_tokens",
    "#cached-token": "cached_tokens",
    "#new_tokens_gained": "gained_tokens",
    "token usage": "token_usage_ratio",
    "full token usage": "full_usage_ratio",
    "mamba usage": "mamba_usage_ratio",
    "pre-allocated usage": "preallocated_ratio",
    "KV cache usage": "kv_usage_pct",
    "Prefix cache hit rate": "prefix_hit_pct",
    "cache hit rate": "prefix_hit_pct",
    "External prefix cache hit rate": "external_hit_pct",
    "Preemptions": "preemptions_count",
    "num_preemptions": "preemptions_count",
    "total_num_cumulative_preemption": "preemptions_count",
    "max_total_num_tokens": "kv_tokens",
    "#tokens": "kv_tokens",
    "max_running_requests": "max_running_reqs",
    "max_num_seqs": "max_running_reqs",
    "n_slots": "max_running_reqs",
    "context_len": "context_tokens",
    "context_length": "context_tokens",
    "max seq len": "context_tokens",
    "max_seq_len": "context_tokens",
    "max_model_len": "context_tokens",
    "n_ctx": "context_tokens",
    "n_ctx_slot": "context_tokens",
    "available_gpu_mem": "available_gpu_gb",
    "avail mem": "available_gpu_gb",
    "max_mamba_cache_size": "mamba_slots_count",
    "n_tokens": "prompt_tokens",
    "batch.n_tokens": "batch_tokens",
    "progress": "progress_ratio",
    "spec_accept_rate": "accept_rate_ratio",
    "spec_accept_length": "accept_len_tokens",
    "spec_num_correct_drafts": "accepted_tokens",
    "spec_accept_token_num": "accepted_tokens",
    "spec_num_proposed_drafts": "drafted_tokens",
    "spec_draft_token_num": "drafted_tokens",
    "spec_verify_ct": "verify_count",
    "draft_n": "drafted_tokens",
    "cache_n": "cached_tokens",
    "cached_tokens": "cached_tokens",
    "prompt_n": "new_tokens",
    "predicted_n": "output_tokens",
    "predicted_per_second": "gen_tok_s",
    "prompt_per_second": "input_tok_s",
    "draft_n_accepted": "accepted_tokens",
    "num_accepted_draft_tokens": "accepted_tokens",
    "num_draft_tokens": "drafted_tokens",
    "mean_acceptance_length": "accept_len_tokens",
    "draft_acceptance_rate": "accept_rate_ratio",
    "avg_spec_accept_length": "accept_len_tokens",
    "last_gen_throughput": "gen_tok_s",
    "effective_max_running_requests_per_dp": "max_running_reqs",
    "speculative_num_steps": "steps_count",
    "speculative_num_draft_tokens": "draft_tokens_count",
    "GPU Current Temp": "temperature_c",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "output_tokens": "output_tokens",
    "average_time_per_proposal_tok_ms": "proposal_per_token_ms",
    "scoring_time_ms": "scoring_ms",
    "verification_time_ms": "verify_ms",
    # Load generators.
    "Output token throughput (tok/s)": "output_tok_s",
    "Output throughput": "output_tok_s",
    "Throughput": "output_tok_s",
    "Total token throughput (tok/s)": "total_tok_s",
    "Total Token throughput (tok/s)": "total_tok_s",
    "Peak output token throughput (tok/s)": "peak_output_tok_s",
    "Mean TTFT (ms)": "ttft_ms",
    "Mean TPOT (ms)": "tpot_ms",
    "Mean ITL (ms)": "itl_ms",
    "ttft_ms": "ttft_ms",
    "tpot_ms": "tpot_ms",
    "itl_ms": "itl_ms",
    "mean_ttft_ms": "ttft_ms",
    "mean_tpot_ms": "tpot_ms",
    "mean_itl_ms": "itl_ms",
    "output_throughput": "output_tok_s",
    "total_token_throughput": "total_tok_s",
    "accept_length": "accept_len_tokens",
    "Acceptance rate (%)": "accept_rate_pct",
    "Drafts": "drafts_count",
    "Draft tokens": "drafted_tokens",
    "Accepted tokens": "accepted_tokens",
    "Median ITL (ms)": "median_itl_ms",
    "Maximum request concurrency": "concurrency_reqs",
    "Request rate configured (RPS)": "offered_per_s",
    "Request throughput (req/s)": "served_per_s",
    "#Output tokens": "output_tokens",
    "Total generated tokens": "output_tokens",
    "#Input tokens": "prompt_tokens",
    "Total input tokens": "prompt_tokens",
    "Latency": "latency_s",
    "Successful requests": "completed_reqs",
    "completed": "completed_reqs",
    "max_concurrency": "concurrency_reqs",
    "Concurrency": "concurrency_reqs",
    "#questions": "questions_count",
}
# In a server's own description these are what was asked for; in its log they are what is in force.
_ASKED = {"max_running_requests": "requested_reqs"}
# Prometheus names, without the engine in front and `_total` behind.
_SERIES: dict[str, str] = {
    "num_running_reqs": "running_reqs",
    "num_requests_running": "running_reqs",
    "requests_processing": "running_reqs",
    "num_queue_reqs": "queue_reqs",
    "num_requests_waiting": "queue_reqs",
    "requests_deferred": "queue_reqs",
    "gen_throughput": "gen_tok_s",
    "token_usage": "token_usage_ratio",
    "full_token_usage": "full_usage_ratio",
    "mamba_usage": "mamba_usage_ratio",
    "num_preemptions": "preemptions_count",
    "num_retracted_reqs": "retracted_reqs",
    "num_retracted_requests": "retracted_reqs",
    "spec_accept_length": "accept_len_tokens",
    "spec_accept_rate": "accept_rate_ratio",
    "spec_num_steps": "steps_count",
    "spec_num_draft_tokens": "draft_tokens_count",
    "spec_verify_calls": "verify_count",
    "spec_decode_num_drafts": "drafts_count",
    "spec_decode_num_draft_tokens": "drafted_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
    "spec_decode_num_emitted_tokens": "emitted_tokens",
    "max_total_num_tokens": "kv_tokens",
    "num_used_tokens": "used_tokens",
    "kv_cache_usage_perc": "kv_usage_ratio",
}

WORDS_MAX = 7  # of the longest key
# Columns of a driver query, as its header names them; the first of two that mean the same counts.
_COLUMNS: dict[str, str] = {
    "index": "gpu_index",
    "temperature.gpu": "temperature_c",
    "clocks.current.sm": "clock_mhz",
    "clocks.current.graphics": "clock_mhz",
    "clocks.sm": "clock_mhz",
    "clocks.gr": "clock_mhz",
}

_N = r"(-?[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?)"


def _said(*named: str) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    """Pairs of a pattern, in which `~` stands for a number, and the names of its groups."""
    found = []
    for pattern, names in zip(named[::2], named[1::2], strict=True):
        found.append((re.compile(pattern.replace("~", _N)), tuple(names.split())))
    return tuple(found)


# Said in prose, by whichever engine. `~` is a number; the names follow its groups.
_SAID = _said(
    r"draft acceptance(?: rate)?\s*=\s*~\s*\(\s*~\s+accepted\s*/\s*~\s+generated\)",
    "accept_rate_ratio accepted_tokens drafted_tokens",
    r"accepted\s+~/~ draft tokens",
    "accepted_tokens drafted_tokens",
    r"dur\(b,g,a\) = [\d.]+, ~, [\d.]+ ms",
    "draft_time_ms",
    r"prompt eval time =\s*[\d.]+ ms /\s*~ tokens.*?,\s*~ tokens per second",
    "prompt_tokens input_tok_s",
    r"(?<!prompt )eval time =\s*[\d.]+ ms /\s*~ (?:tokens|runs).*?,\s*~ tokens per second",
    "output_tokens gen_tok_s",
    r"\btg = *~ t/s",
    "gen_tok_s",
    r"[Mm]ax running requests is reset to ~",
    "max_running_reqs",
    r"max_running_requests is capped to ~",
    "max_running_reqs",
    r"max_running_requests was reduced from (?:the )?requested (?:value )?~ to ~",
    "requested_reqs max_running_reqs",
    r"~ state slots per request",
    "slots_per_request_count",
    r"Load weight end\..*?\bmem usage=~ ?GB",
    "weights_gb",
    r"Load weight end\..*?\belapsed=~ ?s",
    "weights_s",
    r"model weights take ~ ?GiB",
    "weights_gib",
    r"Model loading took ~ ?(?:GiB|GB)",
    "weights_gib",
    r"Model loading took .*? and ~ s",
    "weights_s",
    r"Loading weights took ~ s",
    "weights_s",
    r"reserved for KV Cache is ~ ?GiB",
    "kv_gib",
    r"Available KV cache memory: ~ ?GiB",
    "kv_gib",
    r"Prefix cache hit rate: GPU: ~%",
    "prefix_hit_pct",
    r"Using max model len ~",
    "context_tokens",
    r"KV cache size: ~ tokens",
    "kv_tokens",
    r"Capture .{0,60}graph end\..*?(?:elapsed[=:]|Time elapsed:) ?~ ?s",
    "capture_s",
    r"Graph capturing finished in ~ secs?",
    "capture_s",
    r"found in ~ seconds",
    "repeat_s",
    r"for last ~ seconds",
    "probe_limit_s",
    r"Tried to allocate ~ ?GiB",
    "tried_gib",
    r"Tried to allocate ~ ?MiB",
    "tried_mib",
    r"allocating ~ ?MiB on device ~",
    "tried_mib gpu_index",
    r"GPU ~ has a total capacity of ~ ?GiB of which ~ ?GiB is free",
    "gpu_index total_gib free_gib",
    r"GPU ~ has a total capacity of ~ ?GiB of which ~ ?MiB is free",
    "gpu_index total_gib free_mib",
    r"this process has ~ ?GiB memory in use",
    "process_gib",
    r"Free memory on device .*?\(~/~ GiB\) on startup",
    "free_gib total_gib",
    r"on device cuda:~",
    "gpu_index",
    r"GPU Current Temp\s*: ~ C",
    "temperature_c",
    r"desired GPU memory utilization \(~, ~ GiB\)",
    "utilisation_ratio wanted_gib",
    r"max seq len \(~\).*?~ GiB KV cache is needed",
    "context_tokens needed_gib",
    r"available KV cache memory \(~ GiB\)",
    "kv_gib",
    r"estimated maximum model length is ~",
    "suggested_tokens",
    r"[Ee]xit ?code:? ~",
    "exit_code",
    r"\bexited with code ~",
    "exit_code",
    r'HTTP/1\.[01]" ~',
    "http_code",
    r"\bXid \([^)]*\): ~",
    "xid_code",
    r"Timeout\(ms\)=~",
    "timeout_ms",
    r"ran for ~ milliseconds",
    "ran_ms",
    r"after ~ seconds waiting for clients",
    "waited_s",
    r"\bWaited ~ ?s",
    "waited_s",
    r"timed out after ~ ?ms",
    "timeout_ms",
    r"max_num_seqs \(~\) exceeds .{0,40}blocks \(~\)",
    "requested_reqs mamba_slots_count",
    r"~/~ clients joined",
    "joined_count expected_count",
    r"[Ww]atchdog[_ ]timeout=?\(?(?:self\.watchdog_timeout=)?~",
    "watchdog_s",
    r"(?:target|[Tt]arget model).{0,40}vocab.{0,20}? ~.{0,60}?draft.{0,40}? ~",
    "target_vocab_tokens draft_vocab_tokens",
    r"Target model vocab_size=~\. Draft model vocab_size=~",
    "target_vocab_tokens draft_vocab_tokens",
    r"progress = [\d.]+, t = *[\d.]+ s / ~ tokens per second",
    "input_tok_s",
    r"prompt processing, n_tokens = *~",
    "batch_tokens",
    r"(?<!prompt )eval time =\s*[\d.]+ ms /\s*~ (?:tokens|runs)",
    "completion_tokens",
    r"param with shape torch\.Size\(\[~[,\]].*?current model is torch\.Size\(\[~[,\]]",
    "checkpoint_vocab_tokens model_vocab_tokens",
    r"Mean acceptance length:? =? *~",
    "accept_len_tokens",
    r"mean (?:acceptance length|len) = *~",
    "accept_len_tokens",
    r"Throughput: [\d.]+ requests/s, ~ total tokens/s, ~ output tokens/s",
    "total_tok_s output_tok_s",
    r"total_num_cumulative_preemption=~",
    "preemptions_count",
)
_NUMBER = re.compile(r"\s*" + _N)
_EQUALS = re.compile(r"(?:^|[\s,({\[])(#?[A-Za-z_][\w.#/ ]{0,40}?)\s*=\s*" + _N)
_JSON_KEY = re.compile(r"""["']?\b([a-z_]\w+)["']?\s*:\s*""" + _N)
_SERIES_LINE = re.compile(r"^([a-z]+):([a-z_]+?)(_total)?(?:\{[^}]*\})?\s+" + _N + r"\s*$")
_ELAPSED = re.compile(r"\[(?:(\d+):)?(\d+):(\d+)<")
_ITEM = re.compile(r"[<,]\s*([\d.]+)(s/it|it/s)\]")
_BAR = re.compile(r"(\d{1,3})%(?: Completed )?\s*\|(?:[^|]*\|)?\s*(\d{1,9})/(\d{1,9})\b")


def figures(line: str) -> Figures:
    """Given one clean log line, return the figures on it by name; empty if it has none."""
    found: Figures = {}
    if series := _SERIES_LINE.match(line):
        name = _SERIES.get(series.group(2))
        return {name: _value(series.group(4))} if name else {}
    if line.startswith("|"):
        return found  # a row of somebody's own table: its columns have no fixed meaning
    _from_bar(line, found)
    _from_pairs(line, found)
    if "=" in line:
        _from_equals(line, found)
    if "{" in line:
        _from_json(line, found)
    _from_prose(line, found)
    if "Decode batch" in line or "accept len: " in line:
        found.setdefault("cuda_graph_flag", "unknown")
    return found


def columns(line: str) -> tuple[str, ...]:
    """Given a line, return its columns if it is the header of a driver query, else nothing."""
    names = tuple(name.strip().partition(" ")[0] for name in line.split(","))
    return names if len(names) > 2 and any("." in name and name in _COLUMNS for name in names) else ()


def row(line: str, header: tuple[str, ...]) -> Figures:
    """Given a row of a driver query and its header's columns, return the figures in it."""
    found: Figures = {}
    values = [value.strip() for value in line.split(",")]
    for column, value in zip(header, values, strict=False):
        name = _COLUMNS.get(column)
        if name is not None and (number := _NUMBER.match(value)):
            found.setdefault(name, _value(number.group(1)))
    active = [column.rpartition(".")[2] for column, value in zip(header, values, strict=False) if value == "Active"]
    return {**found, "active_reasons": ",".join(active)} if active else found


def _from_pairs(line: str, found: Figures) -> None:
    for piece in line.split(", "):
        key, colon, value = piece.rpartition(": ")
        name = _name(key.strip()) if colon else None
        if name is None:
            continue
        ratio, _, percent = name.partition("|")
        put = percent if percent and "%" in value else ratio
        if put == "cuda_graph_flag":
            found[put] = "true" if value[:1].lower() == "t" else "false"
        elif (number := _NUMBER.match(value)) and put not in found:
            found[put] = _value(number.group(1))


def _name(key: str) -> str | None:
    """The name for a key as printed; a timestamp, a device's label or a line's own head may stand in front of it."""
    if key in _KEYS:
        return _KEYS[key]
    if key.endswith(" graph"):
        return "cuda_graph_flag"
    words = key.split(" ")
    longest = range(max(0, len(words) - WORDS_MAX), len(words))
    return next((_KEYS[ending] for at in longest if (ending := " ".join(words[at:]).strip(" {[(")) in _KEYS), None)


def _from_equals(line: str, found: Figures) -> None:
    for key, value in _EQUALS.findall(line):
        name = _name(key.strip())
        if name is not None and "|" not in name and name != "cuda_graph_flag":
            found.setdefault(name, _value(value))


def _from_json(line: str, found: Figures) -> None:
    for key, value in _JSON_KEY.findall(line):
        name = _ASKED.get(key) or _KEYS.get(key)
        if name is not None and "|" not in name:
            found.setdefault(name, _value(value))


def _from_prose(line: str, found: Figures) -> None:
    for pattern, names in _SAID:
        if match := pattern.search(line):
            found |= {name: _value(value) for name, value in zip(names, match.groups(), strict=True)}


def _from_bar(line: str, found: Figures) -> None:
    if "%" not in line or "|" not in line:
        return
    bars = list(_BAR.finditer(line))
    if not bars:
        return
    match = bars[-1]
    found |= {
        "done_pct": int(match.group(1)),
        "done_count": int(match.group(2)),
        "total_count": int(match.group(3)),
    }
    tail = line[match.end() :]
    if elapsed := _ELAPSED.search(tail):
        hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
        found["bar_elapsed_s"] = hours * 3600 + minutes * 60 + seconds
    if item := _ITEM.search(tail):
        rate = float(item.group(1))
        found["item_s"] = rate if item.group(2) == "s/it" else (round(1 / rate, 4) if rate else 0.0)


def _value(text: str) -> float | int:
    plain = text.replace(",", "")
    return float(plain) if "." in plain else int(plain)
