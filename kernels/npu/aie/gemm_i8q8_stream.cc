// gemm_i8q8.cc with a design's objects: a core has two incoming channels, so a tile of weights brings its scales with it.
// One object holds the codes, the multipliers m and the column units S, in this order.
#include "gemm_i8q8.cc"

extern "C" {

void gemm_i8q8_stream_zero(float *c) { gemm_i8q8_zero(c); }

void gemm_i8q8_stream(const int8 *a, const uint8 *b, float *c) {
    const uint8 *m = b + DIM_K * DIM_N, *s = m + DIM_K / 32 * DIM_N * 4;
    gemm_i8q8(a, reinterpret_cast<const int8 *>(b), reinterpret_cast<const int16 *>(m), reinterpret_cast<const float *>(s), c);
}

} // extern "C"
