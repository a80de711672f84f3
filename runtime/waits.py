"""Declare each wait of a run's processes: where, for whom, how long.

A function that waits must be declared in `WAITS`, or a test fails. A wait for other workers in
training is also registered where it happens (`runtime.replay.stuck_calls`,
`runtime.worker.context`), so that node 0 finds who holds up a run
(`runtime.coordinator.connections.stall_watch`).
"""

from enum import Enum
from typing import NamedTuple


class Ender(Enum):
    """Kind of event that ends a wait without a fixed limit, described by its value."""

    ORDER = "the end of the order, which `GenerationSession.abort` carries out, whatever is awaited"
    CALLER = "the limit that the caller gives"
    PROCESS = "the end of the process: it is the wait for the next work"
    ENDED = "at once: the process or thread that is awaited has been killed or has ended"
    OWN = "the end of a computation of this process, which heartbeats and the stall watch observe"
    DEVICE = "the device, as soon as it has computed what this process has issued"
    DISK = "the file system; a slow write is reported"
    NOBODY = "at once: the socket does not block, or the lock is free"


class Wait(NamedTuple):
    """Declaration of a function's wait: for whom, and what ends it."""

    where: str
    """The function that waits, as `module:NAME` within `runtime`."""
    awaited: str
    """For whom the function waits, in words."""
    ends: Ender | str
    """What ends the wait; for a limit, its constant, as `module:NAME` within `runtime`."""


_TRANSFER = "replay.transfers:TRANSFER_TIMEOUT"
_ANSWER = "protocol.channel:ANSWER_SECONDS"
_PATIENCE = "torch_pipelining.place:PATIENCE_SECONDS"
_COORDINATOR = "processes.worker_start:COORDINATOR_TIMEOUT_SECONDS"

WAITS = (
    # Workers wait for each other in training. Over NCCL, only the end of the order limits these
    # waits.
    Wait("replay.transfers:IncomingTensor.wait_for_tensor", "the worker that sends", _TRANSFER),
    Wait("replay.transfers:OutgoingTensor.wait", "the worker that receives", _TRANSFER),
    Wait("replay.transfers:PendingSum.wait_for_sums", "all members", _TRANSFER),
    Wait("replay.exchange:Exchange._free_sent", "workers that receive", _TRANSFER),
    Wait(
        "replay.session:GenerationSession.sum_over_sharers",
        "other holders of the layers",
        _TRANSFER,
    ),
    Wait("replay.session:GenerationSession.send_bytes", "another holder of the layers", _TRANSFER),
    Wait(
        "replay.session:GenerationSession.receive_bytes", "another holder of the layers", _TRANSFER
    ),
    Wait(
        "replay.session:GenerationSession.wait_for_reductions",
        "other holders of the layers",
        Ender.ORDER,
    ),
    Wait("replay.session:GenerationSession.wait_for_device", "all members, over NCCL", Ender.ORDER),
    Wait("replay.session:GenerationSession.wait_for_all", "all members", _TRANSFER),
    Wait("replay.session:GenerationSession.measure_clock_offset", "the first member", _TRANSFER),
    Wait("replay.session:_measure_offset", "the first member", _TRANSFER),
    Wait("replay.session:GenerationSession._send_staged.send", "the device", Ender.DEVICE),
    Wait(
        "replay.session:GenerationSession.drain",
        "operations that were aborted",
        "worker.generation:ABORT_SECONDS",
    ),
    Wait("replay.sum_tree:SumTree._run_sum", "neighbors in the tree", _TRANSFER),
    Wait("replay.sum_tree:_exchange_with_parent", "the parent in the tree", _TRANSFER),
    Wait(
        "state.part_exchange:PartExchange._send_to_owners",
        "other holders of the layers",
        _TRANSFER,
    ),
    Wait(
        "state.part_exchange:PartExchange._scatter_to_owners",
        "other holders of the layers",
        Ender.ORDER,
    ),
    Wait(
        "state.part_exchange:PartExchange.wait_for_copies", "other holders of the layers", _TRANSFER
    ),
    Wait(
        "state.part_exchange:PartExchange.start_gather.finish",
        "other holders of the layers",
        _TRANSFER,
    ),
    Wait("ranks.worker_group:WorkerGroup.allreduce", "other ranks of the worker", _TRANSFER),
    Wait("ranks.worker_group:WorkerGroup.broadcast", "other ranks of the worker", _TRANSFER),
    Wait(
        "ranks.worker_group:WorkerGroup.all_gather_single", "other ranks of the worker", _TRANSFER
    ),
    Wait(
        "ranks.worker_group:WorkerGroup.reduce_scatter_single",
        "other ranks of the worker",
        _TRANSFER,
    ),
    Wait("state.late_steps:LateSteps._wait_for_step", "the thread that steps copies", Ender.OWN),
    Wait("replay.background_queue:BackgroundQueue.submit", "the thread of the queue", Ender.CALLER),
    Wait("replay.background_queue:BackgroundQueue.wait", "the thread of the queue", Ender.CALLER),
    Wait(
        "replay.background_queue:BackgroundQueue.discard_pending",
        "the thread of the queue",
        Ender.CALLER,
    ),
    Wait("replay.background_queue:BackgroundQueue._run", "the device", Ender.DEVICE),
    Wait(
        "replay.python_exit:_wait_for_calls",
        "background threads",
        "replay.python_exit:EXIT_SECONDS",
    ),
    # Process groups: members meet, and what gloo or NCCL forget is ended.
    Wait("replay.group_store:GroupStore.get", "members of a group", _TRANSFER),
    Wait("replay.group_store:GroupStore.wait", "members of a group", _TRANSFER),
    Wait(
        "replay.group_cache:GenerationGroups._find_reusable",
        "all workers that it communicates with",
        _TRANSFER,
    ),
    Wait("replay.gloo:GlooBackend.create_group", "members of the group", _TRANSFER),
    Wait("replay.gloo:GlooWork.wait", "the other end", _TRANSFER),
    Wait("replay.gloo:InterruptibleCalls.run_call", "the thread of the call", Ender.ORDER),
    Wait(
        "replay.gloo:InterruptibleCalls._wait_for_closing",
        "connections",
        "replay.gloo:CLOSE_TIMEOUT_SECONDS",
    ),
    Wait("replay.gloo:_WaitingCall.__init__", "nobody", Ender.NOBODY),
    Wait("replay.gloo:_CallThread._run", "the next call", Ender.PROCESS),
    Wait("replay.nccl:NcclBackend.create_group", "members of the group", _TRANSFER),
    Wait("replay.nccl:Communicator.connect", "members of the group", Ender.ORDER),
    Wait(
        "replay.nccl:Communicator.abort_unless_quiescent",
        "the device",
        "replay.nccl:ABORT_GRACE_SECONDS",
    ),
    Wait("replay.nccl:Communicator._abort_group", "a thread that starts an operation", _TRANSFER),
    Wait("replay.torch_groups:NcclGroup.wait_for_device", "members of the group", Ender.ORDER),
    # A worker's own work.
    Wait("data.dealt_samples:DealtSamples._wait_for_dealing", "the thread that deals", Ender.ORDER),
    Wait("data.dealt_samples:DealtSamples._deal_iteration", "the thread that deals", Ender.OWN),
    Wait("replay.recorder:Recorder.start_iteration", "the device", Ender.DEVICE),
    Wait("replay.recorder:Recorder.window_seconds", "the device", Ender.DEVICE),
    Wait("moving.layer_store:_use_copy_stream", "the device", Ender.DEVICE),
    Wait("worker.injected_faults:prolong_block", "nobody: a worker slowed on purpose", Ender.OWN),
    Wait("worker.injected_faults:_compute_for", "the device", Ender.DEVICE),
    # Layers that move.
    Wait("moving.layer_sender:LayerSender.send_to_waiting", "the targets of moves", Ender.ORDER),
    Wait(
        "moving.layer_sender:LayerSender.wait_for_room",
        "a receiver",
        "moving.layer_sender:ROOM_SECONDS",
    ),
    Wait(
        "moving.layer_server:LayerServer.serve", "receivers", "moving.layer_server:TIMEOUT_SECONDS"
    ),
    Wait("moving.layer_server:LayerServer._read_request", "nobody", Ender.NOBODY),
    Wait("moving.layer_receiver:_Transfer.wait_for_order", "the sources of moves", Ender.ORDER),
    Wait(
        "moving.layer_receiver:_Transfer._receive_from",
        "a source",
        "moving.layer_receiver:CONNECT_SECONDS",
    ),
    # Checkpoints and parameters.
    Wait("checkpoints.checkpoint:PendingSave.is_done", "the thread that writes", Ender.CALLER),
    Wait("checkpoints.checkpoint:PendingSave.wait", "the thread that writes", Ender.DISK),
    Wait("checkpoints.parameters:draft_layer_with_retry", "room on a full disk", Ender.DISK),
    Wait("checkpoints.trainer_state:save_trainer", "the thread that writes", Ender.DISK),
    Wait("worker.checkpointer:Checkpointer.save_last", "the thread that writes", Ender.DISK),
    Wait("worker.checkpointer:Checkpointer.publish_last", "the thread that writes", Ender.DISK),
    # Workers and node agents wait for node 0.
    Wait(
        "worker.iteration_reports:IterationReports._wait_for_answer",
        "node 0",
        "worker.iteration_reports:ANSWER_SECONDS",
    ),
    Wait("worker.main_thread:_join_run", "node 0", _COORDINATOR),
    Wait(
        "worker.main_thread:MainThread._follow_coordinator",
        "node 0, between two heartbeats",
        Ender.PROCESS,
    ),
    Wait("worker.main_thread:MainThread._find_new_coordinator", "another node 0", _COORDINATOR),
    Wait(
        "protocol.coordinator_link:CoordinatorLink.follow_new_coordinator",
        "another node 0",
        _ANSWER,
    ),
    Wait("protocol.channel:Channel.read", "node 0", _ANSWER),
    Wait("protocol.channel:Channel.send", "node 0", _ANSWER),
    Wait("protocol.channel:Channel.close", "node 0", "protocol.channel:CLOSE_SECONDS"),
    Wait("protocol.channel:_connect_with_retries", "node 0", Ender.CALLER),
    Wait("protocol.channel:_try_connect", "node 0", Ender.CALLER),
    Wait(
        "protocol.authentication:authenticate_connection",
        "the peer",
        "protocol.authentication:HELLO_SECONDS",
    ),
    Wait(
        "protocol.authentication:_receive_exactly",
        "the peer",
        "protocol.authentication:HELLO_SECONDS",
    ),
    Wait("protocol.node_reports:ReportSender.read_acknowledgements", "nobody", Ender.NOBODY),
    Wait("node_agent:_connect_to_coordinator", "node 0", "protocol.setup:JOIN_TIMEOUT_SECONDS"),
    Wait(
        "node_agent:_NodeAgent._follow_coordinator",
        "node 0",
        "protocol.to_node_agent:SILENT_SECONDS",
    ),
    Wait("node_agent:_NodeAgent._wait_for_coordinator", "another node 0", _COORDINATOR),
    Wait("processes.torchrun_store:find_node_0", "node 0", Ender.CALLER),
    # A loop of a user's own, in torch's pipeline stages.
    Wait("torch_pipelining.agreement:Agreement.join", "the members, at a commit", _PATIENCE),
    Wait(
        "torch_pipelining.agreement:Agreement._await_decision", "the members that live", _PATIENCE
    ),
    Wait(
        "torch_pipelining.inside_torch:RoutedStage.wait_for_sends",
        "workers that receive",
        _TRANSFER,
    ),
    Wait("torch_pipelining.mates:Mates.settle", "the other ranks of this worker", _PATIENCE),
    Wait(
        "torch_pipelining.place:Place._await_quiescence",
        "operations begun before a failure",
        _PATIENCE,
    ),
    Wait("torch_pipelining.place:Place.read", "another member", _PATIENCE),
    Wait("torch_pipelining.place:_own_host", "the process of the store", _PATIENCE),
    Wait(
        "torch_pipelining.watch:_find_readable",
        "the next connection, or the end of one",
        "torch_pipelining.watch:POLL_SECONDS",
    ),
    Wait(
        "torch_pipelining.watch:Watch._take",
        "nobody: a pause without descriptors",
        "torch_pipelining.watch:POLL_SECONDS",
    ),
    Wait(
        "torch_pipelining.watch:Watch.close", "its thread", "torch_pipelining.watch:CONNECT_SECONDS"
    ),
    Wait(
        "torch_pipelining.watch:connect", "another member", "torch_pipelining.watch:CONNECT_SECONDS"
    ),
    # Node 0, and processes.
    Wait(
        "coordinator.event_loop:EventLoop.serve",
        "workers: the stall watch says whom",
        Ender.PROCESS,
    ),
    Wait(
        "coordinator.connections.node_agents:NodeAgents.announce_end",
        "node agents",
        "coordinator.connections.node_agents:ANNOUNCE_SECONDS",
    ),
    Wait("coordinator.planning.background:_read_answer", "a planning process", Ender.CALLER),
    Wait(
        "coordinator.records.writer_thread:WriterThread.__exit__",
        "the file system",
        "coordinator.records.writer_thread:CLOSE_SECONDS",
    ),
    Wait(
        "coordinator.records.writer_thread:WriterThread._run_operations",
        "the next write",
        Ender.PROCESS,
    ),
    Wait("launch:run", "nobody: a pause before node 0 is started again", Ender.CALLER),
    Wait("launch:_RunLeader._listen_for_workers", "an address in use", "launch:LISTEN_SECONDS"),
    Wait("run_folder:_open_locked", "another process", "run_folder:LOCK_TIMEOUT_SECONDS"),
    Wait("processes.fork_server:ForkServer.poll", "the fork server", Ender.CALLER),
    Wait(
        "processes.fork_server:ForkServer.close",
        "the fork server",
        "processes.fork_server:KILL_SECONDS",
    ),
    Wait(
        "processes.fork_server:AdoptedForkServer.__init__",
        "the fork server",
        "processes.fork_server:ADOPT_SECONDS",
    ),
    Wait("worker.fork_server_process:_Server.serve", "processes", Ender.ENDED),
    Wait("worker.fork_server_process:_Server._report_end", "a process", Ender.ENDED),
    Wait(
        "worker.fork_server_process:_Server._serve_launcher",
        "the launcher",
        "worker.fork_server_process:IDLE_SECONDS",
    ),
    Wait("worker.fork_server_process:_Server._wait_for_adoption", "another launcher", Ender.CALLER),
)
"""All waits of the runtime."""
