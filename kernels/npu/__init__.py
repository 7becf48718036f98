"""The NPU backend (AMD XDNA1, "npu1"): tile kernels, and what runs them where there is no NPU."""
