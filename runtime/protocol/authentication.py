"""Proves at the start of each connection that both ends know the secret of the run, and tags each message.

    accepting end    greeting: what it speaks, and a random number
    connecting end   its own random number, and a proof; its first message may follow at once
    accepting end    its proof
    both             messages, each with a tag behind it

Proofs and tags are HMAC-SHA256 (RFC 2104), compared in constant time. The keys of a connection are derived from the
secret, from what the connection is for, and from both random numbers, one for each direction: what was heard on one
connection is worth nothing on another, nor in the other direction. A tag covers the number of its message, so that none
can be sent again, left out, or put in another place. Nothing is encrypted: who can listen, can read.
"""

import hashlib
import hmac
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, NewType

Secret = NewType("Secret", bytes)
Purpose = Literal["control", "layers"]
"""What a connection is for."""

VARIABLE = "SLIPSTREAM_SECRET"
FILE_VARIABLE = "SLIPSTREAM_SECRET_FILE"
SPOKEN = b"slipstream 1"
NONCE_BYTES = TAG_BYTES = 32
GREETING_BYTES = len(SPOKEN) + NONCE_BYTES
HELLO_BYTES = NONCE_BYTES + TAG_BYTES
"""All that is read of a peer before it is known."""
HELLO_SECONDS = 10.0
"""How long the other end may take for its part of the handshake."""
LEAST_BYTES = 16
MOST_BYTES = 4096
"""Of a secret that is given."""
HOW = f"set {FILE_VARIABLE} to a file that only you can read (openssl rand -hex 32 > FILE; chmod 600 FILE)"


class AuthenticationError(Exception):
    """The other end does not know the secret of this run, or a message was changed on its way. One line."""


class SecretError(ValueError):
    """No usable secret is given. The message is one line."""


class Tags:
    """The tags of one direction of a connection, in the order of its messages."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, digest: bytes) -> bytes:
        """The tag of the next message, whose SHA-256 this is."""
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "little") + digest, "sha256")

    def require(self, tag: bytes, digest: bytes) -> None:
        """Raises AuthenticationError unless this is the tag of the next message."""
        if not hmac.compare_digest(tag, self.next(digest)):
            raise AuthenticationError("a message was changed on its way")


class Keys(NamedTuple):
    """Of one end of a connection."""

    sending: Tags
    receiving: Tags


class Challenge:
    """The accepting end of a handshake: `greeting` is what it sends first."""

    def __init__(self, secret: Secret, purpose: Purpose) -> None:
        self._secret = secret
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.greeting = SPOKEN + self._nonce

    def admit(self, hello: bytes) -> tuple[bytes, Keys]:
        """This end's proof, and its keys, after `HELLO_BYTES` of the other's. Raises AuthenticationError."""
        nonce, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._derive("connecting", nonce)):
            raise AuthenticationError("it does not know the secret of this run")
        return self._derive("accepting", nonce), Keys(Tags(self._derive("to connecting", nonce)),
                                                      Tags(self._derive("to accepting", nonce)))

    def _derive(self, what: str, nonce: bytes) -> bytes:
        return _derive(self._secret, self._purpose, what, self._nonce, nonce)


class Answer:
    """The connecting end of a handshake, once it has read the greeting; `hello` is what it sends then.

    Raises AuthenticationError where the greeting is none.
    """

    def __init__(self, secret: Secret, purpose: Purpose, greeting: bytes) -> None:
        if not greeting.startswith(SPOKEN):
            raise AuthenticationError("what listens there is not Slipstream of this version")
        theirs, ours = greeting[len(SPOKEN):], secrets.token_bytes(NONCE_BYTES)

        def derive(what: str) -> bytes:
            return _derive(secret, purpose, what, theirs, ours)

        self.hello = ours + derive("connecting")
        self.keys = Keys(Tags(derive("to accepting")), Tags(derive("to connecting")))
        self._expected = derive("accepting")

    def require(self, proof: bytes) -> None:
        """Raises AuthenticationError unless this is the other end's proof."""
        if not hmac.compare_digest(proof, self._expected):
            raise AuthenticationError("it does not know the secret of this run")


def introduce(connection: socket.socket, secret: Secret, purpose: Purpose, first: Callable[[Tags], bytes],
              patience_seconds: float = 0.0) -> Keys:
    """The connecting end of a handshake, on a blocking socket; `first` gives the first message with its tag.

    Raises AuthenticationError, and OSError where the other end is gone or takes longer than `HELLO_SECONDS`, or than
    its patience where that is longer.
    """
    deadline = time.monotonic() + max(HELLO_SECONDS, patience_seconds)
    answer = Answer(secret, purpose, _read(connection, GREETING_BYTES, deadline))
    try:
        connection.sendall(answer.hello + first(answer.keys.sending))
        proof = _read(connection, TAG_BYTES, deadline)
    except ConnectionError:
        raise AuthenticationError("it closed the connection: its secret is another one") from None
    answer.require(proof)
    return answer.keys


def new_secret() -> Secret:
    """For one run."""
    return Secret(secrets.token_bytes(32))


def given_secret(environment: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret that the environment gives, or names a file of; None: it says nothing. Raises SecretError."""
    path, text = environment.get(FILE_VARIABLE), environment.get(VARIABLE)
    if path:
        return _checked(_read_file(Path(path)), f"{FILE_VARIABLE}={path}")
    return _checked(text.encode(), VARIABLE) if text else None


def _read_file(path: Path) -> bytes:
    named = f"{FILE_VARIABLE}={path}"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SecretError(f"{named}: no file")
            if mode & 0o077:
                raise SecretError(f"{named}: others can read or write it; chmod 600 {path}")
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SecretError(f"{named}: cannot be read: {error.strerror}") from None


def _checked(text: bytes, source: str) -> Secret:
    """A secret without the blanks around it: they get lost too easily."""
    text = text.strip()
    if not LEAST_BYTES <= len(text) <= MOST_BYTES:
        raise SecretError(f"{source}: a secret of {len(text)} bytes; expected {LEAST_BYTES} to {MOST_BYTES}, such as "
                          "openssl rand -hex 32 prints")
    return Secret(hashlib.sha256(text).digest())


def _derive(secret: Secret, purpose: Purpose, what: str, accepting: bytes, connecting: bytes) -> bytes:
    return hmac.digest(secret, f"{purpose}/{what}/".encode() + accepting + connecting, "sha256")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it takes too long to answer")
        connection.settimeout(left)
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data


class Refusals:
    """Says who was refused and why, and not too often: ten lines, then one for each power of ten."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0

    def __call__(self, who: str, why: str) -> None:
        """Count one, and perhaps say so."""
        self._count += 1
        if self._count <= 10 or str(self._count).rstrip("0") == "1":
            many = "" if self._count <= 10 else f" (the {self._count}th time that a connection is ended so)"
            self._say(f"{who} was cut off: {why}{many}")
