// INT8 x INT4 GEMM with a scale for every 32 weights (q4_0): C[M,N] += A[M,K] W[K,N] in float32, one tile of a larger product.
// The dots of a block (int16: 32 * 127 * 8 < 2^15) meet two 12-bit multipliers (scales.h) and are summed in int32, exactly,
// over the whole tile; the column's unit meets the sums once for each call. That is 2 vector operations for a block's 2 vmac.
// One multiplier of 12 bits instead (1 operation) rounds scales to 2^-13 of the tile's largest; a float32 scale costs a
// conversion, a split into parts and four products of them: 14 operations.
// aie::mmul 4x16x8, 1x2 blocks: four sums and one dot are live, which is what the accumulator registers hold. For two blocks: 12
// loads of 256 bits, 4 vmac, 2 shift-round-saturate, 4 vector macs. K at most 512, or the int32 sums could overflow.
// Layouts: A [M/4][K/16][4][16] (codes -127..127), W [K/16][N/8][16][8] two codes to a byte, m [K/32][N/8][2][8], S [N],
// C [M/4][N/8][4][8]. Memory at M 32, K 256, N 64: A 8, W 8, m 2, S 0.25, C 8 KB; all twice: 52.5 KB.
#include <aie_api/aie.hpp>

#include "scales.h"

#ifndef DIM_M
#define DIM_M 32
#endif
#ifndef DIM_K
#define DIM_K 256
#endif
#ifndef DIM_N
#define DIM_N 64
#endif

using MMUL = aie::mmul<4, 16, 8, int8, int4>;
using Sums = aie::accum<acc32, 32>;
constexpr unsigned rows = DIM_M / 4, depth = DIM_K / 16, columns = DIM_N / 8, packed = MMUL::size_B / 2;
static_assert(DIM_M % 8 == 0 && DIM_K % 32 == 0 && DIM_N % 16 == 0, "gemm_i8i4: M must be a multiple of 8, K of 32, N of 16");
static_assert(DIM_K <= 512, "gemm_i8i4: a tile's int32 sums hold K = 512 at most");

namespace {

using Left = aie::vector<int8, MMUL::size_A>;

// The sums of one tile of C, by multiplier.
struct weighed {
    Sums hi, lo;

    // A block: 32 codes, of which w holds the first 16 and w + columns * packed the others.
    void add(const Left &a0, const Left &a1, const uint8 *w, const int16 *m) {
        MMUL dot;
        dot.mac(a0, aie::load_v<packed>(w).template cast_to<int4>());
        dot.mac(a1, aie::load_v<packed>(w + columns * packed).template cast_to<int4>());
        const auto exact = dot.to_vector<int16>();
        const multipliers by(m);
        hi = aie::mac(hi, exact, by.hi);
        lo = aie::mac(lo, exact, by.lo);
    }
    Whole whole() const {
        return aie::add(Whole(aie::to_float(hi.to_vector<int32>(), -12)), aie::to_float(lo.to_vector<int32>()));
    }
};

} // namespace

extern "C" {

void gemm_i8i4_zero(float *c) {
    const auto zero = aie::zeros<float, 16>();
    for (unsigned i = 0; i < DIM_M * DIM_N; i += 16) aie::store_v(c + i, zero);
}

void gemm_i8i4(const int8 *__restrict a, const uint8 *__restrict w, const int16 *__restrict m, const float *__restrict s,
               float *__restrict c) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    aie::set_saturation(aie::saturation_mode::saturate);
    event0();
    for (unsigned z = 0; z < rows; z++) {
        for (unsigned j = 0; j < columns; j += 2) {
            const int8 *left = a + z * depth * MMUL::size_A;
            weighed first, second;
            PIPELINED(depth / 2)
            for (unsigned i = 0; i < depth; i += 2) {
                const auto a0 = aie::load_v<MMUL::size_A>(left), a1 = aie::load_v<MMUL::size_A>(left + MMUL::size_A);
                left += 2 * MMUL::size_A;
                const uint8 *codes = w + (i * columns + j) * packed;
                const int16 *scale = m + (i / 2 * columns + j) * 16;
                first.add(a0, a1, codes, scale);
                second.add(a0, a1, codes + packed, scale + 16);
            }
            float *tile = c + (z * columns + j) * MMUL::size_C;
            add_scaled(first.whole(), units(s + 8 * j), tile);
            add_scaled(second.whole(), units(s + 8 * (j + 1)), tile + MMUL::size_C);
        }
    }
    event1();
}

// out[m,n] = C[m,n] * row[m]: the activations' scales. The layout of C.
void gemm_i8i4_rows(const float *__restrict c, const float *__restrict row, float *__restrict out) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    for (unsigned z = 0; z < rows; z++) {
        const float *r = row + 4 * z;
        const auto scale = split(aie::concat(aie::broadcast<float, 8>(r[0]), aie::broadcast<float, 8>(r[1]),
                                             aie::broadcast<float, 8>(r[2]), aie::broadcast<float, 8>(r[3])));
        for (unsigned at = z * columns * MMUL::size_C; at < (z + 1) * columns * MMUL::size_C; at += MMUL::size_C)
            aie::store_v(out + at, product(split(aie::load_v<MMUL::size_C>(c + at)), scale).to_vector<float>());
    }
}

} // extern "C"
