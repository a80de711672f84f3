"""Nodes and workers fail in virtual time, and all come back.

It is the short form of `python -m benchmarks.scale.chaos`.
"""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.scale import chaos, virtual
from slipstream.runtime.coordinator.connections.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.decisions.failover import RejoiningPhase

WORKERS = 64
FAULTS = 25
"""Failures of a run."""


def test_whoever_fails_the_run_goes_on_and_nobody_is_given_up_who_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "FAULTS", chaos.FAULTS | {"node 0": 15, "rack": 8})
    found = Counter[str]()
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        result = chaos.chaos(WORKERS, FAULTS, seed, folder)
        assert (
            result["deaths"] > FAULTS - 10
            and result["orders"] > 10
            and result["longest"] < chaos.PATIENCE
        )
        found.update(result)
    assert found["undone"] and found["node 0"] > 1


def test_one_that_gives_up_who_lives_is_found_out(tmp_path, monkeypatch):
    hears = WorkerConnections.record_sign_of_life

    def hears_late(connections, connection):
        present = hears(connections, connection)
        connection.heard -= 0.9 * connections._timeout
        return present

    monkeypatch.setattr(WorkerConnections, "record_sign_of_life", hears_late)
    with pytest.raises(chaos.BrokenError, match="although it lives"):
        chaos.chaos(WORKERS, FAULTS, 0, tmp_path)


def test_one_that_forgets_what_is_committed_is_found_out(tmp_path, monkeypatch):
    found = RejoiningPhase.build_result

    def forgets(phase):
        result = found(phase)
        return replace(result, committed=result.committed - 1, losses=result.losses[:-1])

    monkeypatch.setattr(RejoiningPhase, "build_result", forgets)
    monkeypatch.setattr(chaos, "FAULTS", {"node 0": 1})
    with pytest.raises(chaos.BrokenError, match=r"is committed after|has stepped|losses"):
        chaos.chaos(WORKERS, 4, 0, tmp_path)


def test_a_machine_gone_without_a_word_is_missed_also_where_a_worker_of_it_had_died_before(
    tmp_path, monkeypatch
):
    # Its launcher, started again, does not wait until the system gives up the connection of the one
    # before.
    monkeypatch.setattr(virtual, "SILENT_SECONDS", 1e6)
    monkeypatch.setattr(chaos, "FAULTS", {"worker": 10, "machine": 4})
    found = chaos.chaos(WORKERS, 120, 14, tmp_path, seconds=1.0)
    assert found["machine"] > 10
