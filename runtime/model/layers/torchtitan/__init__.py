"""torchtitan's models, by name: each layer is torchtitan's own decoder with all other modules taken out.

    specification  what `[model] torchtitan` names, and which models of it can be cut into layers
    model          the `LayeredModel`
    ranks          layers over the ranks of a worker, as torchtitan cuts them
    weights        its checkpoints (torch.distributed.checkpoint), read layer by layer
    training       what torchtitan's Trainer is configured to do, as the configuration of a run
    trainer_state  the state of that Trainer, as a run's checkpoint, and back

Nothing here can be imported where torchtitan is not installed.
"""
