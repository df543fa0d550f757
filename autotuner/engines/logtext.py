r"""Bytes of a server's log -> clean lines: carriage returns, escapes, cut lines, bytes that are not UTF-8.

A progress bar is redrawn with `\r` and may be glued in front of a log line, so both characters end a line; a reader
that waits for `\n` sees nothing for minutes.
"""

import re

LINE_MAX = 65536  # bytes; a longer line is handed on in pieces, so that memory stays bounded

_BREAK = re.compile(rb"\r\n|\n|\r")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


class LineSplitter:
    """Cuts a stream of bytes into clean lines and keeps the unfinished rest for the next piece."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Given the next bytes of the log, return the lines that are now complete, without blank ones."""
        buffer = self._rest + data
        held_back = b""
        if buffer.endswith(b"\r"):  # it may be the first half of \r\n
            buffer, held_back = buffer[:-1], b"\r"
        *lines, rest = _BREAK.split(buffer)
        if len(rest) > LINE_MAX:
            lines.append(rest)
            rest = b""
        self._rest = rest + held_back
        return [clean for line in lines if (clean := clean_line(line))]

    def flush(self) -> list[str]:
        """Return the unfinished last line, if any: the log has ended."""
        rest, self._rest = self._rest, b""
        clean = clean_line(rest)
        return [clean] if clean else []


def clean_line(line: bytes) -> str:
    """Given one raw line, return it as text without colours and trailing blanks."""
    return _ESCAPE.sub("", line.decode("utf-8", "replace")).rstrip()


def split_lines(data: bytes) -> list[str]:
    """Given a whole log, return its clean lines."""
    splitter = LineSplitter()
    return [*splitter.feed(data), *splitter.flush()]
