"""Run the fork server in one thread, so that forking is safe. `runtime.processes.fork_server`
starts it, and explains its purpose."""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec

from slipstream.runtime.processes.fork_server_messages import (
    CleanUp,
    EndServer,
    HoldProcesses,
    KillProcess,
    LineReader,
    ProcessEnded,
    ProcessSpec,
    ProcessStarted,
    ServerAdopted,
    ServerReport,
    decode_request,
    get_peer_user,
    load_target,
)
from slipstream.runtime.processes.process_attributes import name_process, request_parent_death_signal

IDLE_SECONDS = 600.0
"""Longest time that the server waits for a request before it checks again."""


class _Server:
    """Loop that serves one launcher, and then each that adopts the server's processes."""

    def __init__(self) -> None:
        self._asked = LineReader(0)
        self._control = 0
        """Descriptor of the connection to the launcher."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._alive: dict[int, int] = {}
        """Process id by the pipe that closes when the process ends."""
        self._hold: HoldProcesses | None = None
        self._listener: socket.socket | None = None
        self._launcher: socket.socket | None = None
        """Connection to a launcher that has adopted this server."""
        self._clean_up: dict[CleanUp, None] = {}
        """Files and folders to remove at the end, unless a launcher ended this server."""

    def serve(self) -> None:
        try:
            self._serve_launcher()
            while self._wait_for_adoption():
                self._serve_launcher()
        finally:
            self._kill_all()
            for pid in self._alive.values():
                os.waitpid(pid, 0)
            for request in self._clean_up:
                with contextlib.suppress(Exception):  # no launcher is left to report it to
                    load_target(request.target)(request.path)

    def _serve_launcher(self) -> None:
        while not self._asked.closed:
            for key, _ in self._selector.select(IDLE_SECONDS):
                if key.fd == self._control:
                    self._handle_requests()
                else:
                    self._report_end(key.fd, key.data)

    def _wait_for_adoption(self) -> bool:
        """Wait for another launcher after the last one is gone; return whether one has come."""
        # The wait ends after the seconds that the last launcher asked for (`HoldProcesses`; without
        # that, at once), or when no process is alive.
        hold, listener = self._hold, self._listener
        if hold is None or listener is None:
            return False
        self._selector.unregister(self._control)
        deadline = time.monotonic() + hold.seconds
        self._selector.register(listener, selectors.EVENT_READ)
        try:
            while self._alive and time.monotonic() < deadline:
                for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                    if key.fileobj is not listener:
                        self._report_end(key.fd, key.data)
                    elif self._accept_launcher(listener, hold):
                        return True
            return False
        finally:
            self._selector.unregister(listener)

    def _accept_launcher(self, listener: socket.socket, hold: HoldProcesses) -> bool:
        connection, _ = listener.accept()
        if get_peer_user(connection) != os.getuid():
            connection.close()
            return False
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = connection
        self._control = connection.fileno()
        self._asked = LineReader(self._control)
        self._selector.register(self._control, selectors.EVENT_READ)
        names = [(str(self._selector.get_key(pipe).data), pid) for pipe, pid in self._alive.items()]
        self._send_reports(ServerAdopted(hold.note, tuple(name for name, _ in names)),
                           *(ProcessStarted(*item) for item in names))
        return True

    def _start_holding(self, hold: HoldProcesses) -> None:
        before, self._hold = self._hold, hold
        if before is not None and before.name == hold.name:  # the socket of this name is already open
            return
        if self._listener is not None:
            self._listener.close()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{hold.name}")
        self._listener.listen()

    def _send_reports(self, *news: ServerReport) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: its connection will be read as closed next
            os.write(self._control, b"".join(msgspec.json.encode(message) + b"\n" for message in news))

    def _handle_requests(self) -> None:
        for line in self._asked.read_lines():
            request = decode_request(line)
            if isinstance(request, ProcessSpec):
                self._fork_process(request)
            elif isinstance(request, KillProcess):
                self._kill_process(request.name)
            elif isinstance(request, HoldProcesses):
                self._start_holding(request)
            elif isinstance(request, CleanUp):
                self._clean_up[request] = None
            elif isinstance(request, EndServer):
                self._hold, self._asked.closed = None, True
                self._clean_up.clear()  # the launcher is alive, and removes them itself
            else:
                self._kill_all()

    def _kill_all(self) -> None:
        # No process has been waited for, so each pid still belongs to a process of this server.
        for pid in self._alive.values():
            os.kill(pid, signal.SIGKILL)

    def _kill_process(self, name: str) -> None:
        for pipe, pid in self._alive.items():
            if self._selector.get_key(pipe).data == name:
                os.kill(pid, signal.SIGKILL)

    def _fork_process(self, spec: ProcessSpec) -> None:
        for module in spec.imports:
            with contextlib.suppress(Exception):  # the process meets the same error, and logs it
                importlib.import_module(module)
        ours, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(spec, parent)
        # The process has the only other end, so the pipe closes when it dies, however it dies.
        os.close(theirs)
        self._alive[ours] = pid
        self._selector.register(ours, selectors.EVENT_READ, spec.name)
        self._send_reports(ProcessStarted(spec.name, pid))

    def _run_child(self, spec: ProcessSpec, parent: int) -> None:
        """Run the target of `spec` in this forked process, and end it. Never returns."""
        status = 1
        try:
            _die_with_parent(parent)
            for descriptor in self._alive:
                os.close(descriptor)
            for inherited in (self._listener, self._launcher):
                if inherited is not None:
                    inherited.close()
            _redirect_output(Path(spec.log), spec.append)
            status = load_target(spec.target)(spec.task.encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # skips what the server would do at its own exit

    def _report_end(self, pipe: int, name: str) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        _, status = os.waitpid(self._alive.pop(pipe), 0)
        self._send_reports(ProcessEnded(name, os.waitstatus_to_exitcode(status)))


def _redirect_output(log: Path, append: bool) -> None:
    """Connect input to the null device, and output and errors to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for path, descriptor in ((Path(os.devnull), 0), (log, 1)):
        fresh = 0 if append else os.O_TRUNC
        opened = os.open(path, os.O_RDWR | os.O_CREAT | fresh | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)


def _die_with_parent(parent: int) -> None:
    """Have the system kill this process with the fork server (Linux)."""
    request_parent_death_signal(signal.SIGKILL)
    if sys.platform.startswith("linux") and os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run the fork server until its launcher ends it, or none adopts it."""
    from slipstream.runtime.worker import main_thread

    name_process("fork server")
    main_thread.import_slow_modules()
    gc.freeze()  # otherwise the collector would write to, and so copy, all memory that the processes share
    try:
        _Server().serve()
    finally:
        gc.unfreeze()  # otherwise libraries complain at exit about objects that were not collected


if __name__ == "__main__":
    main()
