"""Prove at each connection's start that both ends know the run's secret.

    accepting end    greeting: its protocol, and a random number
    connecting end   its own random number, and a proof; its first message may follow at once
    accepting end    its proof
    both             messages, each followed by a tag

Proofs and tags are HMAC-SHA256 (RFC 2104), compared in constant time. Each direction of a
connection has a key of its own, derived from the secret, the purpose of the connection, and both
random numbers. So bytes recorded in one direction are useless in the other, and on other
connections. A tag covers the number of its message, so that no message can be sent again, left out,
or moved to another place. Nothing is encrypted: any program that can listen can read.
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
"""Purpose of a connection: to the coordinator, or between workers that move layers."""

SECRET_VARIABLE = "SLIPSTREAM_SECRET"
SECRET_FILE_VARIABLE = "SLIPSTREAM_SECRET_FILE"
PROTOCOL_VERSION = b"slipstream 1"
NONCE_BYTES = TAG_BYTES = 32
GREETING_BYTES = len(PROTOCOL_VERSION) + NONCE_BYTES
HELLO_BYTES = NONCE_BYTES + TAG_BYTES
"""Size of a connecting end's reply, all that is read before it has been authenticated."""
HELLO_SECONDS = 10.0
"""Time limit for the other end's part of the handshake."""
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
SECRET_REMEDY = (
    f"set {SECRET_FILE_VARIABLE} to a file that only you can read (openssl rand -hex 32 > FILE; "
    "chmod 600 FILE)"
)


class AuthenticationError(Exception):
    """Error, in one line, for another secret or protocol, or a message that was changed."""


class SecretError(ValueError):
    """Error, in one line, for a secret that is missing or unusable."""


class TagSequence:
    """Generator of the tags of all messages in one direction of a connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def compute_next(self, digest: bytes) -> bytes:
        """Return the tag of the next message, whose SHA-256 is `digest`."""
        # The number makes a repeated, lost or moved message show.
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "little") + digest, "sha256")

    def verify_next(self, tag: bytes, digest: bytes) -> None:
        """Raise AuthenticationError unless `tag` fits the next message, of SHA-256 `digest`."""
        if not hmac.compare_digest(tag, self.compute_next(digest)):
            raise AuthenticationError("a message was changed on its way")


class ConnectionKeys(NamedTuple):
    """Tag sequences of a connection: of what this end sends, and of what it receives."""

    sending: TagSequence
    receiving: TagSequence


class Challenge:
    """Accepting end of a handshake, for a caller that sends and receives the bytes.

    `greeting` is to be sent first; `verify_hello` checks the reply to it.
    """

    def __init__(self, secret: Secret, purpose: Purpose) -> None:
        self._secret = secret
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.greeting = PROTOCOL_VERSION + self._nonce

    def verify_hello(self, hello: bytes) -> tuple[bytes, ConnectionKeys]:
        """Check the reply `hello`; return this end's proof and keys. Raises AuthenticationError."""
        nonce, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._derive_key("connecting", nonce)):
            raise AuthenticationError("it does not know the secret of this run")
        return self._derive_key("accepting", nonce), ConnectionKeys(
            TagSequence(self._derive_key("to connecting", nonce)),
            TagSequence(self._derive_key("to accepting", nonce)),
        )

    def _derive_key(self, what: str, nonce: bytes) -> bytes:
        return _derive_key(self._secret, self._purpose, what, self._nonce, nonce)


class ChallengeAnswer:
    """Connecting end of a handshake, for a caller that sends and receives the bytes.

    It is created from the other end's greeting. `hello` is to be sent; `verify_proof` checks the
    reply to it. Raises AuthenticationError if the greeting is not one of this protocol.
    """

    def __init__(self, secret: Secret, purpose: Purpose, greeting: bytes) -> None:
        if not greeting.startswith(PROTOCOL_VERSION):
            raise AuthenticationError("the program there is not Slipstream of this version")
        their_nonce, our_nonce = greeting[len(PROTOCOL_VERSION) :], secrets.token_bytes(NONCE_BYTES)

        def derive(what: str) -> bytes:
            return _derive_key(secret, purpose, what, their_nonce, our_nonce)

        self.hello = our_nonce + derive("connecting")
        self.keys = ConnectionKeys(
            TagSequence(derive("to accepting")), TagSequence(derive("to connecting"))
        )
        self._expected = derive("accepting")

    def verify_proof(self, proof: bytes) -> None:
        """Raise AuthenticationError unless the accepting end's `proof` is right."""
        if not hmac.compare_digest(proof, self._expected):
            raise AuthenticationError("it does not know the secret of this run")


def authenticate_connection(
    connection: socket.socket,
    secret: Secret,
    purpose: Purpose,
    first: Callable[[TagSequence], bytes],
    patience_seconds: float = 0.0,
) -> ConnectionKeys:
    """Perform the connecting end's part of a handshake on a blocking socket; return the keys.

    The socket keeps a time limit, which the caller replaces. Raises AuthenticationError if the
    other end has another secret, purpose or protocol, or closes the connection after its greeting;
    and OSError if it is gone before or takes too long.

    Parameters
    ----------
    purpose
        Purpose of the connection, which must equal the other end's.
    first
        Function that returns the first message with its tag, taken from the given `TagSequence`.
        This message is sent together with the reply to the greeting.
    patience_seconds
        Time limit for the other end; `HELLO_SECONDS` if that is longer.
    """
    deadline = time.monotonic() + max(HELLO_SECONDS, patience_seconds)
    answer = ChallengeAnswer(
        secret, purpose, _receive_exactly(connection, GREETING_BYTES, deadline)
    )
    # The first message goes along, which saves a round trip. A peer that finds the proof wrong
    # closes the connection.
    try:
        connection.sendall(answer.hello + first(answer.keys.sending))
        proof = _receive_exactly(connection, TAG_BYTES, deadline)
    except ConnectionError:
        raise AuthenticationError("it closed the connection: its secret differs") from None
    answer.verify_proof(proof)
    return answer.keys


def create_secret() -> Secret:
    """Return a new random secret for one run."""
    return Secret(secrets.token_bytes(32))


def read_secret(environment: Mapping[str, str] = os.environ) -> Secret | None:
    """Return the secret that the environment sets; None if it sets none.

    SLIPSTREAM_SECRET_FILE names a file with the secret's text; without it, SLIPSTREAM_SECRET
    contains the text. The secret is the text's SHA-256, without white space at its ends. Raises
    SecretError if the text is too short or too long, or if the file cannot be read, is not a
    regular one, or gives other users any permission.
    """
    path, text = environment.get(SECRET_FILE_VARIABLE), environment.get(SECRET_VARIABLE)
    if path:
        return _validate_secret(_read_secret_file(Path(path)), f"{SECRET_FILE_VARIABLE}={path}")
    return _validate_secret(text.encode(), SECRET_VARIABLE) if text else None


def _read_secret_file(path: Path) -> bytes:
    named = f"{SECRET_FILE_VARIABLE}={path}"
    try:
        with path.open("rb") as file:
            # The open file is checked, as the path may mean another file a moment later.
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SecretError(f"{named}: not a regular file")
            if mode & 0o077:
                raise SecretError(f"{named}: others can read or write it; chmod 600 {path}")
            return file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SecretError(f"{named}: cannot be read: {error.strerror}") from None


def _validate_secret(text: bytes, source: str) -> Secret:
    """Return the SHA-256 of a secret's stripped text. Raises SecretError that names `source`."""
    text = text.strip()
    if not MIN_SECRET_BYTES <= len(text) <= MAX_SECRET_BYTES:
        raise SecretError(
            f"{source}: a secret of {len(text)} bytes; expected {MIN_SECRET_BYTES} to "
            f"{MAX_SECRET_BYTES}, such as "
            "openssl rand -hex 32 prints"
        )
    # Any text becomes a key of full length; shells and editors add line ends, which do not count.
    return Secret(hashlib.sha256(text).digest())


def _derive_key(
    secret: Secret, purpose: Purpose, what: str, accepting: bytes, connecting: bytes
) -> bytes:
    return hmac.digest(secret, f"{purpose}/{what}/".encode() + accepting + connecting, "sha256")


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError("it takes too long to answer")
        # One deadline for all, so a peer cannot take long by sending byte after byte.
        connection.settimeout(remaining_seconds)
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionResetError("it closed the connection")
        data += received
    return data


class RefusalLog:
    """Log of refused connections, of which it tells fewer as they become many.

    `say` gets a line for each of the first ten, for the 100th, for the 1000th, and so on.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0

    def __call__(self, who: str, why: str) -> None:
        """Count a refusal; if the count is to be logged, log who and why."""
        self._count += 1
        if self._count <= 10 or str(self._count).rstrip("0") == "1":
            many = ""
            if self._count > 10:
                many = f" (the {self._count}th connection that was refused)"
            self._say(f"{who} was cut off: {why}{many}")
