"""Run the fork server in one thread, so that forking is safe (`runtime.processes.fork_server`)."""

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
from slipstream.runtime.processes.process_attributes import (
    name_process,
    request_parent_death_signal,
)

IDLE_SECONDS = 600.0
"""Longest time that the server waits for events at once."""


class _Server:
    """Fork server, which serves a launcher, and after its death the one that takes over."""

    def __init__(self) -> None:
        self._requests = LineReader(0)
        # Descriptor of the connection to the launcher.
        self._control = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        # Process id by the pipe that closes when the process ends.
        self._alive: dict[int, int] = {}
        self._hold: HoldProcesses | None = None
        self._listener: socket.socket | None = None
        # Connection to a launcher that has adopted this server.
        self._launcher: socket.socket | None = None
        # Files and folders to remove at the end, unless a launcher ended this server.
        self._clean_up: dict[CleanUp, None] = {}

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
        while not self._requests.closed:
            for key, _ in self._selector.select(IDLE_SECONDS):
                if key.fd == self._control:
                    self._handle_requests()
                else:
                    self._report_end(key.fd, key.data)

    def _wait_for_adoption(self) -> bool:
        """Wait for another launcher to take over; return whether one has come."""
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
        # An abstract socket has no permissions: any user of the machine can connect.
        connection, _ = listener.accept()
        if get_peer_user(connection) != os.getuid():
            connection.close()
            return False
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = connection
        self._control = connection.fileno()
        self._requests = LineReader(self._control)
        self._selector.register(self._control, selectors.EVENT_READ)
        # The new launcher does not know the processes yet.
        processes = [
            ProcessStarted(str(self._selector.get_key(pipe).data), pid)
            for pipe, pid in self._alive.items()
        ]
        names = tuple(process.name for process in processes)
        self._send_reports(ServerAdopted(hold.note, names), *processes)
        return True

    def _start_holding(self, hold: HoldProcesses) -> None:
        # The next launcher connects to a socket by name, of Linux's abstract kind, without a file.
        before, self._hold = self._hold, hold
        # The socket of this name is already open.
        if before is not None and before.name == hold.name:
            return
        if self._listener is not None:
            self._listener.close()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{hold.name}")
        self._listener.listen()

    def _send_reports(self, *reports: ServerReport) -> None:
        lines = b"".join(msgspec.json.encode(report) + b"\n" for report in reports)
        # If the launcher is gone, its connection will be read as closed next.
        with contextlib.suppress(OSError):
            os.write(self._control, lines)

    def _handle_requests(self) -> None:
        for line in self._requests.read_lines():
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
                self._hold, self._requests.closed = None, True
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
        # Imported here once, these modules share memory between all processes.
        for module in spec.imports:
            with contextlib.suppress(Exception):  # the process meets the same error, and logs it
                importlib.import_module(module)
        read_end, write_end = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(spec, parent)
        # The process has the only other end, so the pipe closes when it dies, however it dies.
        os.close(write_end)
        self._alive[read_end] = pid
        self._selector.register(read_end, selectors.EVENT_READ, spec.name)
        self._send_reports(ProcessStarted(spec.name, pid))

    def _run_child(self, spec: ProcessSpec, parent: int) -> None:
        """Run the target of `spec` in this forked process, and end the process."""
        status = 1
        try:
            _die_with_parent(parent)
            # The server's pipes and sockets: a copy here would keep them open.
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
    # Descriptors, not sys.stdout: C++ code, such as torch's, writes to its log as well.
    log.parent.mkdir(parents=True, exist_ok=True)
    for path, descriptor in ((Path(os.devnull), 0), (log, 1)):
        truncate = 0 if append else os.O_TRUNC
        file = os.open(path, os.O_RDWR | os.O_CREAT | truncate | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(1, 2)


def _die_with_parent(parent: int) -> None:
    """Let the system kill this process when the fork server `parent` dies (Linux only)."""
    request_parent_death_signal(signal.SIGKILL)
    # The server may have ended before the request.
    if sys.platform.startswith("linux") and os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run the fork server until its launcher ends it, or dies and none takes over."""
    from slipstream.runtime.worker import main_thread

    name_process("fork server")
    main_thread.import_slow_modules()
    # Otherwise the collector would write to, and so copy, all memory that the processes share.
    gc.freeze()
    try:
        _Server().serve()
    finally:
        gc.unfreeze()  # otherwise libraries complain at exit about objects that were not collected


if __name__ == "__main__":
    main()
