"""Plans of the decoders of transformers."""
