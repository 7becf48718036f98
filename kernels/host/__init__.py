"""Tensors in host memory, and plans whose steps are functions: shared by the devices `cpu` and `npu`."""
