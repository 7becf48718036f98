"""Run every tile kernel once, compiled with sanitisers: started by test_npu_kernels.py in a process that has loaded
their runtimes.

Prints `caught` when a read one vector beyond an array is detected (in a child process, which it ends), then each
kernel's name.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np

from conformance.npu import tiles
from hybrid.harness.fixed import variant
from hybrid.harness.sizes import base_bind
from hybrid.kernels.npu import compile as npu
from hybrid.spec import load_ops

libc = ctypes.CDLL(None)


def exact_buffer(shape: int | tuple[int, ...], dtype: Any, fill: Any = 0) -> np.ndarray:
    """As kernels.npu.compile.buffer, but ending at the end of an allocation. Never freed: the process is short."""
    dtype, pointer = np.dtype(dtype), ctypes.c_void_p()
    size = int(np.prod(shape)) * dtype.itemsize
    if libc.posix_memalign(ctypes.byref(pointer), ctypes.c_size_t(64), ctypes.c_size_t(size)) or pointer.value is None:
        raise MemoryError
    out = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer.value)).view(dtype).reshape(shape)
    out[...] = fill
    return out


def sees_overflow() -> bool:
    """A child that reads beyond an array must be stopped."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        k = npu.kernel("exp2_bf16", options=npu.SANITISE, SIZE=64)
        k._sizes["x"] = 32  # half of the kernel's input
        k(exact_buffer(32, np.uint16), exact_buffer(64, np.uint16))
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def main() -> None:
    npu.buffer = tiles.buffer = exact_buffer
    if sees_overflow():
        print("caught", flush=True)
    kernels = tiles.Kernels(options=npu.SANITISE)
    specs, dtypes = load_ops(), {"gemm_i8": {"x": "f32", "w": "q8_0"}, "gemm_i8i4": {"x": "f32", "w": "q4_0"}}
    dtypes["gemm_i8q8"] = dtypes["gemm_i8"]
    for file in sys.argv[1:]:
        op, run = tiles.RUNS[file]
        spec = specs[op]
        run(
            spec,
            variant(spec, base_bind(spec), spec.dtypes(dtypes.get(file, {next(iter(spec.outputs)): "f32"})), 1),
            kernels,
        )
        print(file, flush=True)


if __name__ == "__main__":
    main()
