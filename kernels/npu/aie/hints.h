// Hints for the NPU's compiler, without effect elsewhere. It pipelines loops in software only where it knows that they run
// often enough, and loads move over stores only where pointers cannot meet (__restrict, of every argument).
#pragma once

#include <aie_kernel_utils.h>

// Before a loop of n iterations at least, n a constant. (Peano reads the count; the hint to pipeline is the other compiler's.)
#define PIPELINED(n) AIE_PREPARE_FOR_PIPELINING AIE_LOOP_MIN_ITERATION_COUNT(n)
