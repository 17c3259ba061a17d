"""What compiles the lowered graphs: Inductor, or ATen's own kernels one by one."""
