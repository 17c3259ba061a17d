"""zgraph against FSDP2 on one Llama, in one process group."""
