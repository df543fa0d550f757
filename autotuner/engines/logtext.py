r"""Bytes of a server's log -> clean lines: carriage returns, escapes, cut lines, bytes that are not UTF-8.

A progress bar is redrawn with `\r` and may be glued in front of a log line, so both characters end a line; a reader
that waits for `\n` sees nothing for minutes.
"""

import re

LINE_MAX = 65536  # bytes; a longer line is handed on in pieces, so that memory stays bounded

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


class LineSplitter:
    """Cuts a stream of bytes into lines and keeps the unfinished rest for the next piece."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, data: bytes) -> list[bytes]:
        """Given the next bytes of the log, return the raw lines that are now complete; some may be blank."""
        buffer = self._rest + data
        held_back = b""
        if buffer.endswith(b"\r"):  # it may be the first half of \r\n
            buffer, held_back = buffer[:-1], b"\r"
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = buffer.split(b"\n")
        if len(rest) > LINE_MAX:
            lines.append(rest)
            rest = b""
        self._rest = rest + held_back
        return lines

    def rest(self) -> list[bytes]:
        """Return the unfinished last line, if any: the log has ended."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def feed(self, data: bytes) -> list[str]:
        """Given the next bytes of the log, return the clean lines that are now complete, without blank ones."""
        return [clean for line in self.cut(data) if (clean := clean_line(line))]

    def flush(self) -> list[str]:
        """Return the unfinished last line, clean, if any: the log has ended."""
        return [clean for line in self.rest() if (clean := clean_line(line))]


def clean_line(line: bytes) -> str:
    """Given one raw line, return it as text without colours and trailing blanks."""
    text = line.decode("utf-8", "replace")
    return (_ESCAPE.sub("", text) if "\x1b" in text else text).rstrip()


def split_lines(data: bytes) -> list[str]:
    """Given a whole log, return its clean lines."""
    splitter = LineSplitter()
    return [*splitter.feed(data), *splitter.flush()]
