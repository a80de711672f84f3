"""What a worker holds and runs: layers, their optimizer, the text they train on; and how these are saved.

    layers            a model as a list of layers
    gpt               the GPT that comes with the package
    gpt_parallel      its layers as one of several processes of a worker has them
    worker_group      the process group of a worker's ranks, for layers
    tensor_parallel   collectives in it that a backward goes through
    shards            what a rank has of a layer, and the whole of it
    own_ranks         what a process has that stands for several ranks, as each of them has it
    degraded          whether a worker could go on as half its processes
    distributed_tensors  layers that torch's parallelize_module has cut
    object_reference  a user's own model, data or optimizer, named in the job file
    passed            what passes from layer to layer: a tensor, or a tuple of tensors
    calling           what a layer is given, and what it may add to the loss
    forms             the shapes of what passes, found once; whether a model keeps its contract
    sharing           parameters that several layers share
    hugging_face      decoder models of transformers, by name
    slices            the slices that a worker runs, and their micro-batches in flight
    split             the backward in two: I and W
    holding           the layers that a worker holds, their gradients, their optimizer
    undoable_steps    steps that can be undone exactly; the optimizers there are
    optimizer         the optimizer of whole layers; state by layer
    layer_sizes       how large layers are that another worker needs
    parts             which worker keeps which part of a layer's optimizer state, and a copy of which
    part_state        parts of layers' states, as they are moved and saved
    part_optimizer    the optimizer of parts, and of float32 master weights
    late_steps        steps of copies of others' parts, made once their iteration is committed
    copied_sums       where the gradients for them come
    followed_part     parts that another worker keeps, on their way here while it trains
    rank_holding      layers, and the holdings of the ranks that a process stands for, which keep parts
    rank_parts        such a holding, whose parameters and gradients are elsewhere for most of the time
    rank_optimizers   the optimizers of these ranks, as one
    learning_rate     the learning rate of an iteration
    parameter_groups  which options of the optimizer each parameter has
    clipping          how far to scale a step down, or not to make it
    steps             steps that depend on the gradients of all layers, validated afterwards
    microbatch        the name of a micro-batch
    data              text, cut into micro-batches; whose data they are
    token_data        tokens, read epoch by epoch
    token_file        files of tokens, mapped
    tokenized_text    text as tokens
    sample_order      the order of an epoch, computed and not kept
    seeds             random numbers by iteration, pipeline, micro-batch and layer
    flops             operations of a model's training, counted
    digest            a short text for a set of tensors
    tensor_codec      tensors as safetensors
    parameters        the final parameters, one file a layer
    checkpoint        parameters and optimizer state, one file a layer
"""
