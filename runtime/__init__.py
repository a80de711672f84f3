"""Replays schedules with torch: one process for each worker, or a group of them.

    api            the public names
    config         what to train: the model's and the training's settings, checked
    launch         starts a run on node 0 and sees it through
    run_options    how a run deals with failures, and where it takes place
    run_fit        what schedule, configuration and machine make together, checked before anything begins
    run_result     what a run leaves
    node_agent     takes part in a run as another node
    run_folder     what is in a run's folder, and whose it is
    events         what events.jsonl says: one struct for each kind of event
    model/         layers, stages, optimizer, data, checkpoints
    replay/        runs a program op by op, and passes tensors between workers
    protocol/      messages between coordinator, workers and node agents
    processes/     starts and ends processes
    coordinator/   decides who trains by which schedule
    worker/        what runs in a worker's process
    tools/         profile, self-test, reference run
    device, errors, torch_private    what all of these use
"""

import os

# torch prints some 30 lines of C++ frames wherever a connection of its store ends, and one for each peer whose name no
# name server knows. What matters of it is raised, and told in one line. To be set before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Where schedules change, so do the sizes that are asked for: memory that cannot grow would be left in pieces.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Else torch asks CUDA itself whether there are GPUs, and processes that are forked later cannot use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Streams that share one of the GPU's queues wait for each other. With NCCL, a worker has a stream for each neighbour
# and direction, in which a receive may wait for long; there are 8 queues unless it is said otherwise, and 32 at most.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
