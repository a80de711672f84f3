"""Layers and their optimizer states on disk.

    checkpoint           parameters and optimizer state, one file a layer
    parameters           the final parameters, one file a layer
    hugging_face_export  a checkpoint as transformers reads it
"""
