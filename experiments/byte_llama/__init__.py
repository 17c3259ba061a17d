"""A byte-level Llama trained twice, unsharded and sharded, with the losses side by side."""
