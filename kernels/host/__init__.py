"""Tensors in host memory and plans whose steps are functions: what the devices `cpu` and `npu` have in common."""
