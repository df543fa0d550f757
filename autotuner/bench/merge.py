"""The samples of several worker processes that carried one level together -> the samples of the level. Pure."""

from autotuner.bench.samples import LevelSamples, RequestSample, pack_numbers, unpacked


def merge(parts: list[LevelSamples]) -> LevelSamples:
    """Given each process's samples, return the level's. Their steady parts began at the same instant, if they began at all.

    What describes a process is that of the worst one: a level is as good as the worst of its streams.
    """
    first = parts[0]
    worst = max(parts, key=lambda part: part.busy_ratio)
    answered = [part for part in parts if any(r.events for r in part.requests)]  # others have read nothing
    starts = [part.steady_from_s for part in parts]
    shifts = [0.0 if first.steady_from_s is None or s is None else first.steady_from_s - s for s in starts]
    length = min(len(part.bins) for part in parts) if None not in starts else 0
    bins = tuple(sum(part.bins[i] for part in parts) for i in range(length))
    ends = [part.steady_to_s - (part.steady_from_s or 0.0) for part in parts if part.steady_to_s is not None]
    start = first.steady_from_s if None not in starts else None
    return first.model_copy(
        update={
            "steady_from_s": start,
            "steady_to_s": None if start is None else round(start + min(ends), 6),
            "stopped_early": any(part.stopped_early for part in parts),
            "requests": tuple(
                _shifted(request, shift) for part, shift in zip(parts, shifts, strict=True) for request in part.requests
            ),
            "bins": bins,
            "gaps": pack_numbers(b"".join(piece for part in parts for piece in unpacked(part.gaps))),
            "merged_ratio": max(part.merged_ratio for part in parts),
            "lag_p99_ms": max(part.lag_p99_ms for part in parts),
            "cpu_ratio": worst.cpu_ratio,
            "waited_ratio": worst.waited_ratio,
            "read_delay_ms": _worst([part.read_delay_ms for part in parts]),
            "send_delay_ms": _worst([part.send_delay_ms for part in parts]),
            "unread_bytes_max": max(part.unread_bytes_max for part in parts),
            "kernel_stamps": all(part.kernel_stamps for part in answered or parts),
            "held_back": any(part.held_back for part in parts),
            "processes": len(parts),
        }
    )


def _shifted(request: RequestSample, by_s: float) -> RequestSample:
    times = ("sent_s", "due_s", "first_s", "end_s")
    known = {name: getattr(request, name) for name in times}
    return request.model_copy(update={name: round(at + by_s, 6) for name, at in known.items() if at is not None})


def _worst(tables: list[dict[str, float]]) -> dict[str, float]:
    names = {name for table in tables for name in table}
    return {name: max(table.get(name, 0.0) for table in tables) for name in sorted(names)}
