"""Layers and their optimizer states on disk.

    checkpoint           parameters and optimizer state, one file a layer
    parameters           the final parameters, one file a layer
    hugging_face_export  a checkpoint as transformers reads it
    trainer_state        the state of torchtitan's Trainer, as a checkpoint, and back

Adds to the replay: a run that ends can be continued, on any grid. May import: `models`.
"""
