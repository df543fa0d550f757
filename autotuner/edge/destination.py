"""A host reached over SSH, as the settings describe it: where it is, whose key it must show, who we are there.

A host is known by its own key and by nothing else: no known_hosts file of a user, no certificate authority, no name.
"""

import base64
import binascii
import hashlib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

LOCAL = "local"  # the slot's host where it is this machine
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$"  # of slots and hosts
KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")

HostName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Word = Annotated[str, StringConstraints(pattern=r"^[^\s@:/\x00-\x1f-][^\s@/\x00-\x1f]*$", max_length=255)]
FolderPath = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f~-][^\x00-\x1f]*$", max_length=1000)]
Program = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f-][^\x00-\x1f]*$", max_length=1000)]


class Destination(BaseModel):
    """One `[hosts.NAME]` of the settings.

    `host_key` holds the public keys that the host may show, as OpenSSH writes them: `ssh-ed25519 AAAA…`. `jump` names
    another host of the settings, whose key is pinned just so. `folder` is ours on the host; a relative one is below the
    user's home. `bench_python` is a Python there that has pydantic: with it the benchmark runs on the host itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: Word
    port: int = Field(default=22, ge=1, le=65535)
    user: Word
    host_key: tuple[str, ...] = Field(min_length=1)
    identity_file: Path | None = None
    agent: Path | None = None
    jump: str = ""
    folder: FolderPath = ".autotuner"
    python: Program = "python3"
    bench_python: Program | None = None

    @field_validator("host_key", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("host_key")
    @classmethod
    def _are_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(public_key(text) for text in value)

    @model_validator(mode="after")
    def _can_log_in(self) -> Self:
        if self.identity_file is None and self.agent is None:
            raise ValueError("needs identity_file, a private key, or agent, the socket of an SSH agent")
        return self

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """What a person compares: the fingerprints of the pinned keys."""
        return tuple(fingerprint(key) for key in self.host_key)

    @property
    def described(self) -> str:
        """Where it is, as `ssh` would be told."""
        port = f" port {self.port}" if self.port != 22 else ""
        return f"{self.user}@{self.address}{port}"


def public_key(text: str) -> str:
    """Given a public key as OpenSSH writes it, return its type and data. Raise ValueError for anything else.

    A marker such as @revoked or @cert-authority, a certificate, a file name or a fingerprint is no key to pin.
    """
    words = text.split()
    if not words:
        raise ValueError("is empty: the host's public key belongs here, see: autotuner hosts add")
    if words[0] not in KEY_TYPES:
        raise ValueError(f"must begin with the key's type ({', '.join(KEY_TYPES)}), not with {words[0][:40]!r}")
    if len(words) < 2 or _type_in(words[1]) != words[0]:
        raise ValueError(f"is no whole {words[0]} key: take the line that `autotuner hosts add` shows")
    return f"{words[0]} {words[1]}"


def fingerprint(key: str) -> str:
    """Given a public key, return its SHA-256 fingerprint as `ssh-keygen -lf` shows it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _type_in(data: str) -> str:
    """The type that the key's own data names, empty if it is no data of a key."""
    try:
        blob = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return ""
    fields, at = [], 0
    while at < len(blob):  # each field is its length in four bytes, then itself
        length = int.from_bytes(blob[at : at + 4], "big")
        fields.append(blob[at + 4 : at + 4 + length])
        at += 4 + length
    whole = at == len(blob) and len(fields) > 1
    return fields[0].decode("ascii", "replace") if whole else ""
