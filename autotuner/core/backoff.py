"""How long a best-known waits for its next try after launches that ended by themselves. Pure.

A port that is in TIME_WAIT, memory that comes late or a driver's hiccup passes within seconds: without a pause such a moment
would cost the whole restart budget. The first try is made at once, since a server that has served for long and crashes is
wanted back.
"""

from collections.abc import Collection

PAUSES_S = (0.0, 0.0, 10.0, 30.0, 60.0)  # by how many launches have failed lately; the last for any more


def pause_left_s(failed_s: Collection[float], last_end_s: float, now_s: float, window_s: float) -> float:
    """Given when failed launches of the ladder began and when the last one ended, return the seconds until the next try.

    Those that began longer ago than the window do not count. All on one boot's monotonic clock.
    """
    recent = recent_failures(failed_s, now_s, window_s)
    pause_s = PAUSES_S[min(recent, len(PAUSES_S) - 1)]
    return max(0.0, max(failed_s, default=now_s) + pause_s - now_s, last_end_s + pause_s - now_s) if pause_s else 0.0


def recent_failures(failed_s: Collection[float], now_s: float, window_s: float) -> int:
    """Given when failed launches began, return how many of them did so within the window that ends now."""
    return sum(began_s > now_s - window_s for began_s in failed_s)
