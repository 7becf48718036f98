// Hints for the NPU compiler's loops (mlir-aie's header of this name); a host compiler needs none.
#pragma once
#define AIE_PREPARE_FOR_PIPELINING
#define AIE_LOOP_MIN_ITERATION_COUNT(n)
#define AIE_LOOP_RANGE(a, b)
