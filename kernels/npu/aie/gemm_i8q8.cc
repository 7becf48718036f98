// INT8 GEMM with a scale for every 32 weights (q8_0): C[M,N] += A[M,K] W[K,N] in float32, one tile of a larger product.
// The dots of a block (int32: 32 * 127 * 127 < 2^19) meet two 12-bit multipliers (scales.h) and are summed in 64 bits, exactly,
// over the whole tile; the column's unit meets the sums once for each call. An int32 x int16 product of 32 lanes is 2 vector
// operations, so a block has 4 of them for its 4 vmac. (One multiplier with a row's scale instead is gemm_i8.cc: none at all, but
// weights that were stored by blocks are then rounded a second time. float32 scales: 6 products of parts, 12 operations.)
// aie::mmul 4x8x8, one tile of C at a time: two sums of 64 bits x 32 lanes fill four accumulators, the dot a fifth. For a block:
// 13 loads of 256 bits, 4 vmac, 2 shift-round-saturate, 4 vector macs.
// Layouts: A [M/4][K/8][4][8] (codes -127..127), W [K/8][N/8][8][8], m [K/32][N/8][2][8], S [N], C [M/4][N/8][4][8].
// Memory at M 32, K 256, N 32: A 8, W 8, m 1, S 0.1, C 4 KB; all twice: 42.3 KB. (K 128, N 64 takes as much, and turns twice
// as many sums into float32: 1.25 TOPS modelled for 27B's shapes, 2.0 with K 256.)
#include <aie_api/aie.hpp>

#include "scales.h"

#ifndef DIM_M
#define DIM_M 32
#endif
#ifndef DIM_K
#define DIM_K 256
#endif
#ifndef DIM_N
#define DIM_N 32
#endif

using MMUL = aie::mmul<4, 8, 8, int8, int8>;
using Sums = aie::accum<acc64, 32>;
constexpr unsigned rows = DIM_M / 4, depth = DIM_K / 8, columns = DIM_N / 8;
static_assert(DIM_M % 4 == 0 && DIM_K % 32 == 0 && DIM_N % 8 == 0, "gemm_i8q8: M must be a multiple of 4, K of 32, N of 8");
static_assert(DIM_K <= 2048, "gemm_i8q8: the upper part of a tile's sums is an int32: K = 2048 at most");

namespace {

// 4096 hi + lo in 64 bits, then as float32: what is shifted out is taken back as an integer, so both parts are exact.
Whole whole(const Sums &hi, const Sums &lo) {
    const auto above = hi.to_vector<int32>(12), below = aie::sub(hi, Sums(above, 12)).to_vector<int32>();
    const Sums sum = aie::add(aie::add(Sums(above, 24), Sums(below, 12)), lo);
    const auto upper = sum.to_vector<int32>(20), lower = aie::sub(sum, Sums(upper, 20)).to_vector<int32>();
    return aie::add(Whole(aie::to_float(upper, -20)), aie::to_float(lower));
}

} // namespace

extern "C" {

void gemm_i8q8_zero(float *c) {
    const auto zero = aie::zeros<float, 16>();
    for (unsigned i = 0; i < DIM_M * DIM_N; i += 16) aie::store_v(c + i, zero);
}

void gemm_i8q8(const int8 *__restrict a, const int8 *__restrict w, const int16 *__restrict m, const float *__restrict s,
               float *__restrict c) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    aie::set_saturation(aie::saturation_mode::none);
    event0();
    for (unsigned z = 0; z < rows; z++) {
        for (unsigned j = 0; j < columns; j++) {
            const int8 *left = a + z * depth * MMUL::size_A, *right = w + j * MMUL::size_B;
            const int16 *scale = m + j * 16;
            Sums hi, lo;
            PIPELINED(depth / 4)
            for (unsigned i = 0; i < depth; i += 4) {
                MMUL dot;
                for (unsigned k = 0; k < 4; k++) {
                    dot.mac(aie::load_v<MMUL::size_A>(left), aie::load_v<MMUL::size_B>(right));
                    left += MMUL::size_A, right += columns * MMUL::size_B;
                }
                const auto exact = dot.to_vector<int32>();
                const multipliers by(scale);
                scale += columns * 16;
                hi = aie::mac(hi, exact, by.hi);
                lo = aie::mac(lo, exact, by.lo);
            }
            add_scaled(whole(hi, lo), units(s + 8 * j), c + (z * columns + j) * MMUL::size_C);
        }
    }
    event1();
}

} // extern "C"
