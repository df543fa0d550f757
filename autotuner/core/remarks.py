"""A level's figures -> sentences on what stands in no table: failures by name, tokens nobody counted, late requests. Pure."""

from autotuner.bench.benchmark import Benchmark, level_name
from autotuner.bench.measurement import Figures

LATE_MS = 10.0  # a request that goes out later than this is said; below it is a timer's own
KEPT_UP = 0.95  # fewer answers than this share of a request rate, and the server does not keep up
CACHED = 0.05  # a larger share of prompts that should be fresh, and they are not


def requests_remarks(f: Figures) -> list[str]:
    """Given a level's figures, return what is to be said of its requests; nothing where all is as it should be."""
    found = []
    if f.requests_failed:
        found.append(f"{_requests(f.requests_failed)} failed: {_named(f.errors)}")
    found += [f"{_requests(count)}: {problem}" for problem, count in sorted(f.usage_problems.items())]
    if f.requests_ok and not f.tokens_counted:
        found.append(
            "no usage: a token is an event here, so a server that sends several at once is faster than this says"
        )
    if f.send_late_ms.get("p99", 0.0) > LATE_MS:
        found.append(
            f"requests went out {f.send_late_ms['p50']:.0f} ms (p50) and {f.send_late_ms['p99']:.0f} ms (p99) after their "
            "time; latencies count from that time"
        )
    if f.load_from:
        found.append(f.load_from)
    if f.client_shared:
        found.append(f.client_shared)
    return found


def unsettled(f: Figures) -> str:
    """Given the figures of a level whose rate rose in its steady part, say that what came before is not in them."""
    return f"the rate rose {f.unsettled_s:.1f} s into what was taken for the steady part, which is counted from there"


def level_remarks(f: Figures, benchmark: Benchmark) -> list[str]:
    """Given a level's figures and its benchmark, return all that is to be said of it beside the table."""
    found = [f"void: {f.void}"] if f.void else []
    found += requests_remarks(f)
    if f.client_placed and not f.client_shared:
        found.append(f.client_placed)
    if f.client_note:
        found.append(f.client_note)
    if f.requests_retried:
        found.append(f"{_requests(f.requests_retried)} went out twice: an idle connection was closed under them")
    if f.unsettled_s:
        found.append(unsettled(f))
    if f.drift_ratio is not None:
        found.append(f"the rate changed by {100 * f.drift_ratio:+.0f} % from the first third to the last")
    answered = f.answered_req_s
    if benchmark.load == "request-rate" and answered is not None and answered < KEPT_UP * f.concurrency:
        found.append(
            f"{answered:.2f} of {f.concurrency:g} requests a second were answered: the server does not keep up"
        )
    shares_prompts = benchmark.prefix_tokens or benchmark.turns > 1 or benchmark.dataset
    if not shares_prompts and (f.cache_hit_ratio or 0.0) > CACHED:
        found.append(
            f"{100 * (f.cache_hit_ratio or 0.0):.0f} % of the prompts came from the prefix cache, though none repeats: "
            "the server has seen this seed before; take another --seed"
        )
    return found


def prompts_remark(every: list[Figures], benchmark: Benchmark) -> str:
    """Given the figures of all levels, say whether prompts had the length asked for; empty where none was asked for."""
    if benchmark.dataset or benchmark.turns > 1:
        return ""
    least = [f.prompt_tokens_min for f in every if f.prompt_tokens_min is not None]
    most = [f.prompt_tokens_max for f in every if f.prompt_tokens_max is not None]
    if not least or not most:
        return "nobody knows how long prompts were: the server sends no usage"
    asked = benchmark.prompt_tokens
    if min(least) == max(most) == asked:
        return f"prompts were exact: {asked} tokens each"
    span = f"{min(least)} to {max(most)}" if min(least) < max(most) else str(max(most))
    basis = next((f"; {f.prompts_said}" for f in every if f.prompts_said), "")
    return f"prompts had {span} tokens each, {asked} asked for{basis}"


def in_words(benchmark: Benchmark) -> str:
    """Given a benchmark, return its load as a line: levels, lengths, times."""
    levels = ", ".join(level_name(benchmark.load, level) for level in benchmark.levels)
    source = benchmark.dataset or f"{benchmark.prompt_tokens} prompt tokens"
    shared = f", {benchmark.prefix_tokens} of them shared" if benchmark.prefix_tokens else ""
    turns = f", {benchmark.turns} turns" if benchmark.turns > 1 else ""
    length = (
        f"{benchmark.requests} requests, at most {benchmark.seconds:g} s"
        if benchmark.requests
        else f"{benchmark.seconds:g} s"
    )
    return f"{levels}; {source}{shared}, {benchmark.output_tokens} output tokens{turns}; {length} a level after its warm-up"


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
