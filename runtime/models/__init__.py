"""Models as lists of layers.

    layered_model        the interface of a model
    uninitialized        layers built without initial values, for received or stored state
    calling              the arguments of a layer's forward, and losses that a layer adds
    split_backward       the backward in two: I and W
    recomputing          layers, and parts of them, that are computed again before their backward
    compiling            layers compiled by torch.compile, with a backward in two
    sharing              parameters that several layers share
    step_rules           parameters that a rule of their layer steps, in place of the optimizer
    documents            attention within the documents of a sample
    cross_entropy        the loss of language models, a few rows of logits at a time
    gpt                  the GPT that comes with the package
    distributed_tensors  layers that torch's parallelize_module has cut
    grouped_products     products of rows with the matrices of their groups, for experts
    hugging_face/        decoder models of transformers, by name
    torchtitan/          torchtitan's models, by name
    flops                floating-point operations of a model's training, counted
    identity             the identity of a run: configuration, user code, data, grid, libraries

Adds to the replay: layers by name, with a backward in two. May import: `replay`, `ranks`.
"""
