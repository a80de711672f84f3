"""Replay schedules with torch, with one process or a group of processes for each worker.

From the top, each part uses those below it:

    api            the public names
    launch         starts and supervises a run on node 0

    coordinator/   decides which workers train, and by which schedule
    worker/        what runs in a worker's process
    node_agent     takes part in a run as a node other than node 0
    tools/         profile, self-test, reference run
    torchtitan_pipelining/  plans inside torchtitan's Trainer

    own_loop       replay in a user's own loop: no coordinator, job file or run folder
    torch_pipelining/  plans inside torch.distributed.pipelining, in a loop of the user's own
    run_folder     locks a run's folder, and decides which files a run may replace

    computing/     the slices that a worker runs, and their micro-batches in flight
    moving/        layers that move from worker to worker while all train
    checkpoints/   layers and their states on disk
    data/          text and tokens, cut into micro-batches
    state/         the layers that a worker holds, their gradients, their optimizer
    models/        models as lists of layers
    processes/     starts and ends processes
    ranks/         workers of several processes
    protocol/      messages between coordinator, workers and node agents

    config         what to train: the settings of the model and of the training, checked
    placement      the layers of the model in those of schedules, and which workers hold them
    device         the kind of device, and the transport between processes
    failure_domains, object_reference, run_record

    replay/        the core: runs a program op by op, and passes tensors between workers

    errors, config_errors, events, run_identity, seeds, tensor_codec, torch_private, waits
"""

import os

# torch prints some 30 lines of C++ frames when a connection of its store ends, and a line for each
# peer that no name server knows. The error itself is raised, and shown in one line. Must be set
# before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A change of schedules changes the sizes of allocations: segments that cannot grow would leave
# memory fragmented.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Otherwise torch initializes CUDA to count GPUs, and processes that are forked later cannot use
# them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Streams that share one of the GPU's queues wait for each other. With NCCL, a worker has a stream
# for each neighbor and direction, in which a receive may wait for a long time. CUDA has 8 queues by
# default, and at most 32.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
