// INT8 GEMM: C[M,N] += A[M,K] B[K,N] in int32, one tile of a larger product; then requantised to int8, or scaled to float32.
// aie::mmul 4x8x8, 2x2 blocks of accumulators: a step loads 2 A (32 bytes) and 2 B (64 bytes) for 4 vmac: 6 loads of 256 bits,
// two a cycle, so 3 cycles of loads under 4 of multiplying. C passes through memory once for each call: K should be large.
// Layouts, in tiles that are contiguous: A [M/4][K/8][4][8], B [K/8][N/8][8][8], C [M/4][N/8][4][8].
// Memory at M = K = N = 64: A 4 KB, B 4 KB, C 16 KB; twice A and B: 32 KB of 64. M 64, K 128, N 64: 48 KB.
#include <aie_api/aie.hpp>

#include "hints.h"
#include "split.h"

#ifndef DIM_M
#define DIM_M 64
#endif
#ifndef DIM_K
#define DIM_K 64
#endif
#ifndef DIM_N
#define DIM_N 64
#endif

using MMUL = aie::mmul<4, 8, 8, int8, int8>;
constexpr unsigned rows = DIM_M / 4, depth = DIM_K / 8, columns = DIM_N / 8;
static_assert(DIM_M % 8 == 0 && DIM_K % 8 == 0 && DIM_N % 16 == 0, "gemm_i8: M and K must be multiples of 8, N of 16");

extern "C" {

void gemm_i8_zero(int32 *c) {
    const auto zero = aie::zeros<int32, 16>();
    for (unsigned i = 0; i < DIM_M * DIM_N; i += 16) aie::store_v(c + i, zero);
}

void gemm_i8(const int8 *__restrict a, const int8 *__restrict b, int32 *__restrict c) {
    aie::set_saturation(aie::saturation_mode::none); // int32 sums leave as they are
    event0();
    for (unsigned z = 0; z < rows; z += 2) {
        for (unsigned j = 0; j < columns; j += 2) {
            const int8 *a0 = a + z * depth * MMUL::size_A, *a1 = a0 + depth * MMUL::size_A;
            const int8 *b0 = b + j * MMUL::size_B, *b1 = b0 + MMUL::size_B;
            int32 *c0 = c + (z * columns + j) * MMUL::size_C, *c1 = c0 + columns * MMUL::size_C;
            MMUL c00(aie::load_v<MMUL::size_C>(c0)), c01(aie::load_v<MMUL::size_C>(c0 + MMUL::size_C));
            MMUL c10(aie::load_v<MMUL::size_C>(c1)), c11(aie::load_v<MMUL::size_C>(c1 + MMUL::size_C));
            PIPELINED(depth)
            for (unsigned i = 0; i < depth; i++) {
                const auto left0 = aie::load_v<MMUL::size_A>(a0), left1 = aie::load_v<MMUL::size_A>(a1);
                const auto right0 = aie::load_v<MMUL::size_B>(b0), right1 = aie::load_v<MMUL::size_B>(b1);
                a0 += MMUL::size_A, a1 += MMUL::size_A;
                b0 += columns * MMUL::size_B, b1 += columns * MMUL::size_B;
                c00.mac(left0, right0);
                c01.mac(left0, right1);
                c10.mac(left1, right0);
                c11.mac(left1, right1);
            }
            aie::store_v(c0, c00.to_vector<int32>());
            aie::store_v(c0 + MMUL::size_C, c01.to_vector<int32>());
            aie::store_v(c1, c10.to_vector<int32>());
            aie::store_v(c1 + MMUL::size_C, c11.to_vector<int32>());
        }
    }
    event1();
}

// out = C / 2^shift, ties to even, clamped to -128..127; the layout of C.
void gemm_i8_requant(const int32 *__restrict c, int8 *__restrict out, int32 shift) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    aie::set_saturation(aie::saturation_mode::saturate);
    PIPELINED(DIM_M * DIM_N / 32)
    for (unsigned i = 0; i < DIM_M * DIM_N; i += 32) {
        const aie::accum<acc32, 32> acc(aie::load_v<32>(c + i));
        aie::store_v(out + i, acc.to_vector<int8>(shift));
    }
}

// out[m,n] = C[m,n] * row[m] * column[n] in float32 (relative error below 2^-20 where |C| < 2^24); the layout of C.
void gemm_i8_scale(const int32 *__restrict c, const float *__restrict row, const float *__restrict column,
                   float *__restrict out) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    for (unsigned z = 0; z < rows; z++) {
        const float *r = row + 4 * z;
        const auto down = split(aie::concat(aie::broadcast<float, 8>(r[0]), aie::broadcast<float, 8>(r[1]),
                                            aie::broadcast<float, 8>(r[2]), aie::broadcast<float, 8>(r[3])));
        for (unsigned j = 0; j < columns; j++) {
            const auto eight = aie::load_v<8>(column + 8 * j);
            const auto across = split(aie::concat(eight, eight, eight, eight));
            const unsigned at = (z * columns + j) * MMUL::size_C;
            const auto x = split(aie::to_float(aie::load_v<MMUL::size_C>(c + at)));
            const auto scaled = split(product(x, down).to_vector<float>());
            aie::store_v(out + at, product(scaled, across).to_vector<float>());
        }
    }
}

} // extern "C"
