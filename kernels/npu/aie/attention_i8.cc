// Flash attention with int8 scores: Q K^T in aie::mmul 4x8x8 at twice bfloat16's rate, exact in int32, then scaled by one
// float32 for each query row and key; softmax and P V as in attention.cc (V stays bfloat16).
// Layouts: q [LQ/4][D/8][4][8], k [LK/8][D/8][8][8] int8, q_scale [LQ], k_scale [LK]; the rest as in attention.cc.
// Memory at LQ 32, LK 64, D 128: q 4, k 8, v 16, o 16, s 2, p 1, m 0.5, l 1, scales 0.4, tables 4 KB: 53 KB.
#include <aie_api/aie.hpp>

#include "softmax.h"

namespace {

using QK = aie::mmul<4, 8, 8, int8, int8>;
constexpr unsigned depth = DIM_D / 8;

// Dots of rows 4z.. and 4z+4.. with 8 keys.
struct dots {
    QK top, low;
    dots(const int8 *q, const int8 *k) {
        const int8 *q0 = q, *q1 = q + depth * QK::size_A;
        PIPELINED(depth)
        for (unsigned i = 0; i < depth; i++) {
            const auto left0 = aie::load_v<QK::size_A>(q0), left1 = aie::load_v<QK::size_A>(q1);
            const auto right = aie::transpose(aie::load_v<QK::size_B>(k), 8, 8);
            q0 += QK::size_A, q1 += QK::size_A, k += QK::size_B;
            top.mac(left0, right);
            low.mac(left1, right);
        }
    }
};

// The scales of four query rows, each in the 8 lanes of its row.
parts<32> of_rows(const float *scale) {
    return split(aie::concat(aie::broadcast<float, 8>(scale[0] * log2_scale), aie::broadcast<float, 8>(scale[1] * log2_scale),
                             aie::broadcast<float, 8>(scale[2] * log2_scale), aie::broadcast<float, 8>(scale[3] * log2_scale)));
}

aie::vector<float, 32> real_scores(const QK &dot, const parts<32> &row, const parts<32> &key) {
    const auto exact = split(aie::to_float(dot.to_vector<int32>()));
    return product(split(product(exact, row).to_vector<float>()), key).to_vector<float>();
}

} // namespace

extern "C" {

void attention_i8_start(float *o, bfloat16 *m, float *l) { start(o, m, l); }

// dots [LQ/4][LK/8][4][8] = Q K^T in int32.
void attention_i8_dots(const int8 *__restrict q, const int8 *__restrict k, int32 *__restrict out) {
    aie::set_saturation(aie::saturation_mode::none);
    for (unsigned z = 0; z < LQ / 4; z += 2)
        for (unsigned j = 0; j < key_tiles; j++) {
            const dots d(q + z * 4 * DIM_D, k + j * 8 * DIM_D);
            aie::store_v(out + (z * key_tiles + j) * 32, d.top.to_vector<int32>());
            aie::store_v(out + ((z + 1) * key_tiles + j) * 32, d.low.to_vector<int32>());
        }
}

void attention_i8_tile(const int8 *q, const int8 *k, const float *q_scale, const float *k_scale, const bfloat16 *v, float *o,
                       bfloat16 *m, float *l, float *s, bfloat16 *p, int32 q_pos, int32 k_pos, int32 k_len, int32 window) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    aie::set_saturation(aie::saturation_mode::none);
    event0();
    for (unsigned z = 0; z < LQ / 4; z += 2) {
        const auto top = of_rows(q_scale + 4 * z), low = of_rows(q_scale + 4 * (z + 1));
        for (unsigned j = 0; j < key_tiles; j++) {
            const dots d(q + z * 4 * DIM_D, k + j * 8 * DIM_D);
            const auto eight = aie::load_v<8>(k_scale + 8 * j);
            const auto key = split(aie::concat(eight, eight, eight, eight));
            aie::store_v(s + 32 * j, real_scores(d.top, top, key));
            aie::store_v(s + 32 * (key_tiles + j), real_scores(d.low, low, key));
        }
        attend(z, s, p, v, o, m, l, keys{q_pos, k_pos, k_len, window});
    }
    event1();
}

void attention_i8_finish(const float *o, const float *l, bfloat16 *out) { finish(o, l, out); }

} // extern "C"
