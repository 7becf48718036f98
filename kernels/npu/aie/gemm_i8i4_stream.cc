// gemm_i8i4.cc with a design's objects: a core has two incoming channels, so a tile of weights brings its scales with it.
// One object holds the packed codes, the multipliers m and the column units S, in this order.
#include "gemm_i8i4.cc"

extern "C" {

void gemm_i8i4_stream_zero(float *c) { gemm_i8i4_zero(c); }

void gemm_i8i4_stream(const int8 *a, const uint8 *b, float *c) {
    const uint8 *m = b + DIM_K * DIM_N / 2, *s = m + DIM_K / 32 * DIM_N * 4;
    gemm_i8i4(a, b, reinterpret_cast<const int16 *>(m), reinterpret_cast<const float *>(s), c);
}

} // extern "C"
