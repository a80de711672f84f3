"""Starts and ends processes.

    fork_server            a process that imports torch once, and forks others: the end of its launcher
    fork_server_process    the process itself
    fork_server_messages   what both say to each other
    parent_death           what a process does when its parent dies
    children               tasks side by side, each in a process of its own, with an answer
    worker_start           what a worker's process is given
    process_manager        the processes of a run's workers, on all nodes
    descriptors            how many files and connections a process may have open, and node 0 needs
    start_limit            how many processes a node starts for another
    faults                 whether and when a worker that has crashed is started again
    process_title          what ps, top and nvidia-smi show
    stop_signals           SIGTERM and Ctrl-C
    launchers              what torchrun, srun or mpirun have set in the environment
"""
