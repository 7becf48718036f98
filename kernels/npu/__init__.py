"""The NPU backend (AMD XDNA1, "npu1"): tile kernels, and their simulator for machines without an NPU."""
