"""Layers that a worker holds, their gradients, and the optimizer that steps them.

    held_layers       layers, their gradients, and one optimizer over them
    gradients         flat gradients, and which parameters got one
    undoable_steps    steps that can be undone exactly; the built-in optimizers, with Muon
    parameter_groups  groups of parameters with the same options of the optimizer
    step_factors      an iteration's learning rate, and the step factor of its gradients
    steps             steps that depend on the gradients of all layers, made on a guess
    parts             owner and buddy of each part of a layer's optimizer state; versions of state
    part_state        parts of layers' states, as they are moved and saved
    part_optimizer    the optimizer, of parts of layers, and of float32 master weights
    late_steps        steps of copies of others' parts, once committed; their buffers
    part_exchange     sums of gradients at the owners of parts; parameters gathered from owners
    layer_sizes       sizes of layers that another worker needs
    checksum          checksums and digests of tensors, by which copies are compared

Adds to the replay: the optimizer (`replay.seams.Steps`), steps on a guess that can be undone, and
state of which each holder keeps a part (`replay.seams.Reducer`). May import: `replay`, `ranks`,
`models`.
"""
