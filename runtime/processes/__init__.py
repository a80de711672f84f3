"""Start, watch and end processes.

    fork_server            a process that imports torch once and forks others: the launcher's side
    fork_server_messages   messages between the launcher and the fork server
    child_processes        parallel tasks, each in a process of its own that returns a result
    worker_start           settings that a worker's process is started with
    process_manager        the processes of a run's workers, on all nodes
    file_descriptors       limit on open files and connections, and the number that node 0 needs
    restart_policy         whether and when a worker is started again; limit on starts by node 0
    process_attributes     names shown by ps, top and nvidia-smi; a signal when the parent dies
    stop_signals           SIGTERM and Ctrl-C
    launch_environment     environment variables set by torchrun, srun or mpirun
    torchrun_store         finds node 0 by the store of torchrun's agent

May import: `protocol`. The fork server's own process is `worker.fork_server_process`, since it
imports what workers need before it forks them.
"""
