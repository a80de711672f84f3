"""The coordinator, in the launcher of node 0: it decides who trains by which schedule, and computes nothing itself.

Arrows point down: what stands higher imports what stands lower.

    event_loop   makes events of messages, missed heartbeats and ended processes; carries out their effects
    connections  to workers and node agents: who is there, silent, given up; what they may say
    records      what is kept of a run in files, and told to people
    run          what a coordinator is given
    planning     finds schedules beside the event loop
    decisions    what each event changes, and what is decided then: functions of the state and the event alone
"""
