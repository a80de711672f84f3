"""The layers that a worker holds, their gradients, and the optimizer that steps them.

    holding           layers, gradients, one optimizer
    undoable_steps    steps that can be undone exactly; the optimizers there are
    parameter_groups  which options of the optimizer each parameter has
    muon              Muon, and AdamW beside it
    learning_rate     the learning rate of an iteration
    clipping          how far to scale a step down, or not to make it
    steps             steps that depend on the gradients of all layers, validated afterwards
    parts             which worker keeps which part of a layer's optimizer state, and a copy of which
    part_state        parts of layers' states, as they are moved and saved
    part_optimizer    the optimizer, of parts of layers, and of float32 master weights
    late_steps        steps of copies of others' parts, made once their iteration is committed
    copied_sums       where the gradients for them come
    followed_part     parts that another worker keeps, on their way here while it trains
    layer_sizes       how large layers are that another worker needs
    version           which iteration some state is that after, and whether it is whole
    digest            a short text for a set of tensors
    checksum          a number for tensors, by which copies are compared while all train
"""
