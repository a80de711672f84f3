"""Share code between commands.

    console           answers, errors, progress in a log, and Ctrl-C
    options           arguments and options that several commands take
    inputs            files and options that commands read, and files that they write
    planning          plans for commands, with progress
    plan_summary      a plan in a few lines (`schedule_summary`: a schedule in one)
    train_options     the options of `slipstream train` (`launch_options`: those of its processes and rehearsals)
    run_start         where a run starts: checkpoints, tables, what is left to do
    run_process       a run's progress, result, exit status and restarts
    run_summary       a finished run and its events in words
"""
