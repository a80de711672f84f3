"""Decoder models of transformers, by name: they become layers, take pretrained weights, and are written back.

    configuration  what `[model] hugging_face` names: the model's config.json; which kinds of models are known
    layers         transformers' own modules as layers
    parallel       decoder layers cut over the ranks of a worker
    experts        mixtures of experts whose shapes do not depend on the routing
    weights        pretrained safetensors, read layer by layer
    model          the `LayeredModel`

Only `configuration` can be imported where transformers is not installed.
"""
