"""Replay schedules with torch, with one process or a group of processes for each worker.

    api            the public names
    config         what to train: the settings of the model and of the training, checked
    launch         starts and supervises a run on node 0
    run_options    how a run deals with failures, and where it runs
    run_fit        checks before a run that schedule, configuration and machine fit each other
    placement      which layers of the model belong to the layers of schedules, and which workers hold them
    run_result     what a run returns
    run_record     reads the history of a run from its folder
    node_agent     takes part in a run as a node other than node 0
    run_folder     locks a run's folder, and decides which files a run may replace
    waits          every place where a process waits, for whom, and how long at most
    events         the lines of events.jsonl: one struct for each kind of event
    model/         layers, stages, optimizer, data, checkpoints
    replay/        runs a program op by op, and passes tensors between workers
    protocol/      messages between coordinator, workers and node agents
    processes/     starts and ends processes
    coordinator/   decides which workers train, and by which schedule
    worker/        what runs in a worker's process
    tools/         profile, self-test, reference run
    torch_pipelining/  plans inside torch.distributed.pipelining, in a loop of the user's own

Shared helpers: background_queue, config_errors, device, errors, failure_domains, torch_private.
"""

import os

# torch prints some 30 lines of C++ frames when a connection of its store ends, and a line for each peer that no name
# server knows. The error itself is raised, and shown in one line. Must be set before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A change of schedules changes the sizes of allocations: segments that cannot grow would leave memory fragmented.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Otherwise torch initializes CUDA to count GPUs, and processes that are forked later cannot use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Streams that share one of the GPU's queues wait for each other. With NCCL, a worker has a stream for each neighbor
# and direction, in which a receive may wait for a long time. CUDA has 8 queues by default, and at most 32.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
