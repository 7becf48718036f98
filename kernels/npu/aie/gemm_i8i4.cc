// INT8 x INT4 GEMM with a scale for every 32 weights (q4_0): C[M,N] += A[M,K] W[K,N] in float32, one tile of a larger product.
// A weight's scale is S[n] * m[group, n], m an int16 of at most 12 bits: the dots of a group (int16: 32 * 127 * 8 < 2^15) are
// weighed by m and summed in int32, exactly, over the whole tile; S meets the sum once for each call. That is 2 vector
// operations for a group's 2 vmac; a float32 scale would cost a conversion, a split into parts and a product of them.
// aie::mmul 4x16x8, 2x2 blocks: four sums and one dot are live, which is what the accumulator registers hold. For a group: 8
// loads of 64 bytes, 8 vmac, 4 shift-round-saturate, 4 vector macs. K at most 512, or the int32 sums could overflow.
// Layouts: A [M/4][K/16][4][16] (codes -127..127), W [K/16][N/8][16][8] two codes to a byte, m [K/32][N/8][8], S [N],
// C [M/4][N/8][4][8]. Memory at M 64, K 256, N 64: A 16, W 8, m 1, S 0.25, C 16 KB; A, W, m and S twice: 66.5 KB; M 32: 42.5.
#include <aie_api/aie.hpp>
#include <aie_kernel_utils.h>

#include "split.h"

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
using Right = aie::vector<int4, MMUL::size_B>;

Right weights(const uint8 *w) { return aie::load_v<packed>(w).cast_to<int4>(); }

// 8 columns' multipliers under the 4 rows of a tile.
aie::vector<int16, 32> multipliers(const int16 *m) {
    const auto eight = aie::load_v<8>(m);
    return aie::concat(eight, eight, eight, eight);
}

// sum + m * (one group's dots)
Sums weighed(const Sums &sum, const Left &a0, const Right &b0, const Left &a1, const Right &b1, const aie::vector<int16, 32> &m) {
    MMUL dot;
    dot.mac(a0, b0);
    dot.mac(a1, b1);
    return aie::mac(sum, dot.to_vector<int16>(), m);
}

void add_scaled(const Sums &sum, const parts<32> &scale, float *c) {
    const auto x = split(aie::to_float(sum.to_vector<int32>()));
    const aie::accum<accfloat, 32> before(aie::load_v<32>(c));
    aie::store_v(c, aie::add(before, product(x, scale)).to_vector<float>());
}

parts<32> super_scale(const float *s) {
    const auto eight = aie::load_v<8>(s);
    return split(aie::concat(eight, eight, eight, eight));
}

} // namespace

extern "C" {

void gemm_i8i4_zero(float *c) {
    const auto zero = aie::zeros<float, 16>();
    for (unsigned i = 0; i < DIM_M * DIM_N; i += 16) aie::store_v(c + i, zero);
}

void gemm_i8i4(const int8 *a, const uint8 *w, const int16 *m, const float *s, float *c) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    aie::set_saturation(aie::saturation_mode::saturate);
    event0();
    for (unsigned z = 0; z < rows; z += 2) {
        for (unsigned j = 0; j < columns; j += 2) {
            const int8 *a0 = a + z * depth * MMUL::size_A, *a1 = a0 + depth * MMUL::size_A;
            Sums s00, s01, s10, s11;
            AIE_PREPARE_FOR_PIPELINING
            for (unsigned i = 0; i < depth; i += 2) {
                const auto left00 = aie::load_v<MMUL::size_A>(a0), left01 = aie::load_v<MMUL::size_A>(a0 + MMUL::size_A);
                const auto left10 = aie::load_v<MMUL::size_A>(a1), left11 = aie::load_v<MMUL::size_A>(a1 + MMUL::size_A);
                a0 += 2 * MMUL::size_A, a1 += 2 * MMUL::size_A;
                const uint8 *w0 = w + (i * columns + j) * packed, *w1 = w0 + columns * packed;
                const int16 *scale = m + (i / 2 * columns + j) * 8;
                const auto right00 = weights(w0), right01 = weights(w0 + packed);
                const auto right10 = weights(w1), right11 = weights(w1 + packed);
                const auto m0 = multipliers(scale), m1 = multipliers(scale + 8);
                s00 = weighed(s00, left00, right00, left01, right10, m0);
                s01 = weighed(s01, left00, right01, left01, right11, m1);
                s10 = weighed(s10, left10, right00, left11, right10, m0);
                s11 = weighed(s11, left10, right01, left11, right11, m1);
            }
            float *c0 = c + (z * columns + j) * MMUL::size_C, *c1 = c0 + columns * MMUL::size_C;
            const auto scale0 = super_scale(s + 8 * j), scale1 = super_scale(s + 8 * (j + 1));
            add_scaled(s00, scale0, c0);
            add_scaled(s01, scale1, c0 + MMUL::size_C);
            add_scaled(s10, scale0, c1);
            add_scaled(s11, scale1, c1 + MMUL::size_C);
        }
    }
    event1();
}

// out[m,n] = C[m,n] * row[m]: the activations' scales. The layout of C.
void gemm_i8i4_rows(const float *c, const float *row, float *out) {
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
