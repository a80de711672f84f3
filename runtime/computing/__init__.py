"""Execute the layers that a worker holds.

    slices     the slices that a worker runs, and their micro-batches in flight
    rehearsal  runs each kind of op once, before anything is communicated
    forms      shapes and dtypes of values between layers; checks that a model keeps its contract
    trial      a user's layers run once before the start: the same whenever they are built,
               gradients as autograd's own, no state that a forward changes

Adds to the replay: the layers of a worker (`replay.seams.Slices`). May import: `replay`, `ranks`,
`models`, `data`, `state`.
"""
