"""Layers that a worker holds and runs, their optimizer, the data they train on, and the files they are saved to.

    microbatch        the name of a micro-batch
    seeds             random numbers by iteration, pipeline, micro-batch and layer
    object_reference  a user's own model, data or optimizer, named in the job file
    source_digests    digests of the sources of a user's own code
    run_identity      what a run trains, key by key: compared by workers, node 0 and checkpoints
    layer_values      values that pass from layer to layer: a tensor, or a tuple of tensors
    tensor_codec      tensors as safetensors
    layers/           models as lists of layers, whole or as one of several processes of a worker has them
    data/             text and tokens, cut into micro-batches
    state/            the layers that a worker holds, their gradients, their optimizer
    computing/        the slices that a worker runs, and their micro-batches in flight
    checkpoints/      layers and their states on disk
"""
