"""What a worker holds: layers in stages, their optimizers, the text they train on; and how these are saved."""
