"""What several commands share: output, input, options."""
