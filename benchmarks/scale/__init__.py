"""Run the control plane at scale: the real coordinator, and fake workers.

The workers speak its protocol and compute nothing.

    shapes      the job of so many workers, and its first schedule
    node_0      the coordinator, in a process of its own
    fakes       workers and node agents, all in one process
    cluster     what is done to them, phase by phase
    virtual     virtual time, and connections within one process
    chaos       a command: all kinds of failures in virtual time
    __main__    the command
"""
