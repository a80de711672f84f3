"""Code that several commands share: output, input, options."""
