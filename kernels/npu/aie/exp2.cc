// y = 2^x for x <= 0 in bfloat16: the tables' own entry point, for their proof and for activations beside a GEMM.
// Two look-ups and one multiply for 32 lanes; x from -127 down gives 0, x above 0 is not meant (up to 127 it works).
#include <aie_api/aie.hpp>

#include "exp2_table.h"
#include "hints.h"

#ifndef SIZE
#define SIZE 256
#endif

static_assert(SIZE % 32 == 0, "exp2: SIZE must be a multiple of 32");

extern "C" void exp2_bf16(const bfloat16 *__restrict x, bfloat16 *__restrict y) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    PIPELINED(SIZE / 32)
    for (unsigned i = 0; i < SIZE; i += 32) aie::store_v(y + i, exp2_vector(aie::accum<accfloat, 32>(aie::load_v<32>(x + i))));
}
