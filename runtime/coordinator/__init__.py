"""Coordinator: decides which workers train and by which schedule.

It runs in the launcher of node 0, not in a worker. A module imports only from modules that are
listed below it.

    run_result    what a run returns
    event_loop    turns messages, missed heartbeats and ended processes into events; carries out
                  their effects
    run_fit       checks before a run that schedule, configuration and machine fit each other
    connections   connections to workers and node agents; silent and stalled workers; valid messages
    records       files of a run, and progress lines for its users
    run_spec      description of the run that the launcher passes to the coordinator
    run_options   options of a run: how it deals with failures, and where it runs
    planning      finds schedules concurrently with the event loop
    decisions     what each event changes and triggers: functions of the state and the event alone
"""
