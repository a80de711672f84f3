"""Where the secret of a run comes from.

How it is used is tried by tests/runtime/test_hostile_peer.py.
"""

import contextlib
import socket
import threading
import time

import pytest

from slipstream.runtime.protocol import authentication
from slipstream.runtime.protocol.authentication import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    RefusalLog,
    SecretError,
    authenticate_connection,
    create_secret,
    read_secret,
)

TEXT = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def test_a_file_and_a_variable_with_the_same_text_give_the_same_secret(file):
    assert read_secret({SECRET_FILE_VARIABLE: str(file)}) == read_secret({SECRET_VARIABLE: TEXT})
    assert read_secret({SECRET_VARIABLE: TEXT}) != read_secret({SECRET_VARIABLE: TEXT[:-1]})
    assert read_secret({}) is None and read_secret({SECRET_VARIABLE: ""}) is None


def test_each_run_makes_another():
    assert len({create_secret() for _ in range(10)}) == 10 and len(create_secret()) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(mode, file):
    file.chmod(mode)
    with pytest.raises(
        SecretError,
        match=f"^{SECRET_FILE_VARIABLE}={file}: others can read or write it; chmod 600 {file}$",
    ):
        read_secret({SECRET_FILE_VARIABLE: str(file)})


def test_what_is_no_secret_is_refused_in_one_line_that_does_not_show_it(file, tmp_path):
    file.write_text("short")
    for environment, reason in (
        ({SECRET_FILE_VARIABLE: str(file)}, "a secret of 5 bytes; expected 16 to 4096"),
        ({SECRET_VARIABLE: "x" * 5000}, "a secret of 5000 bytes; expected 16 to 4096"),
        ({SECRET_FILE_VARIABLE: "/no/such"}, "cannot be read: No such file"),
        ({SECRET_FILE_VARIABLE: "/dev/null"}, "not a regular file"),
    ):
        with pytest.raises(SecretError, match=reason) as caught:
            read_secret(environment)
        assert (
            "\n" not in str(caught.value)
            and "short" not in str(caught.value)
            and "xxx" not in str(caught.value)
        )


def test_of_many_refusals_ten_are_told_and_then_each_power_of_ten():
    said: list[str] = []
    refused = RefusalLog(said.append)
    for _ in range(2000):
        refused("somebody", "no reason")
    assert (
        len(said) == 12
        and said[0] == "somebody was cut off: no reason"
        and "the 1000th connection" in said[-1]
    )


def test_who_answers_a_byte_at_a_time_is_not_waited_for(monkeypatch):
    # The time is one for the whole handshake: a worker that looks for a coordinator has no other to
    # spend on it.
    monkeypatch.setattr(authentication, "HELLO_SECONDS", 0.3)
    ours, theirs = socket.socketpair()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(authentication.PROTOCOL_VERSION[:1])
                time.sleep(0.2)

    with ours, theirs:
        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            authenticate_connection(ours, create_secret(), "control", lambda _: b"")
        assert time.monotonic() - began < authentication.GREETING_BYTES * 0.2
