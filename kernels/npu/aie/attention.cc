// Flash attention on bfloat16 tiles: O += softmax(SCALE Q K^T) V for one query tile and one tile of keys, online softmax.
// Causal, sliding window, any number of keys (those beyond k_len must be finite; they are masked). Grouped queries: GROUP
// heads that share a KV head are rows of one tile, head after head, so that its keys and values are streamed once for all.
// Eight rows at a time: scores (mmul 4x8x4, 2x2 blocks; K is stored as it is and each 4 keys x 8 dims turned by a shuffle,
// since the DMA moves no less than 4 bytes), then softmax.h. A step of 2x2 loads 256 bytes for 4 vmac: as many cycles.
// Layouts: q [LQ/4][D/8][4][8], k [LK/4][D/8][4][8], v [LK/8][D/4][8][4], o and out [LQ/4][D/4][4][4], s [2][LK/8][4][8],
// p the same; m, l as in softmax.h. Memory at LQ 32, LK 64, D 128: q 8, k 16, v 16, o 16, s 2, p 1, m 0.5, l 1, tables 4 KB:
// 64.5 KB do not fit; LQ 32, LK 32: 47 KB with one buffer each, 63 KB with two of k and v. D 256: LQ 16, LK 32: 62 KB.
#include <aie_api/aie.hpp>

#include "softmax.h"

namespace {

using QK = aie::mmul<4, 8, 4, bfloat16, bfloat16>;
constexpr unsigned depth = DIM_D / 8;

// s[2][LK/8][32] = log2(e) SCALE q k^T for eight rows, tile by tile of 4 rows x 8 keys.
void scores(const bfloat16 *__restrict q, const bfloat16 *__restrict k, float *__restrict s) {
    const auto scale = split(aie::broadcast<float, 32>(log2_scale));
    for (unsigned j = 0; j < key_tiles; j++) {
        const bfloat16 *q0 = q, *q1 = q + depth * QK::size_A;
        const bfloat16 *k0 = k + 2 * j * depth * QK::size_B, *k1 = k0 + depth * QK::size_B;
        QK c00, c01, c10, c11;
        PIPELINED(depth)
        for (unsigned i = 0; i < depth; i++) {
            const auto left0 = aie::load_v<QK::size_A>(q0), left1 = aie::load_v<QK::size_A>(q1);
            const auto right0 = aie::transpose(aie::load_v<QK::size_B>(k0), 4, 8);
            const auto right1 = aie::transpose(aie::load_v<QK::size_B>(k1), 4, 8);
            q0 += QK::size_A, q1 += QK::size_A, k0 += QK::size_B, k1 += QK::size_B;
            c00.mac(left0, right0);
            c01.mac(left0, right1);
            c10.mac(left1, right0);
            c11.mac(left1, right1);
        }
        // Two tiles of 4 keys side by side are what P V takes as 8.
        const auto top = aie::interleave_zip(c00.to_vector<float>(), c01.to_vector<float>(), 4);
        const auto low = aie::interleave_zip(c10.to_vector<float>(), c11.to_vector<float>(), 4);
        const auto four = split(aie::concat(top.first, top.second)), next = split(aie::concat(low.first, low.second));
        aie::store_v(s + 32 * j, product(four, scale).to_vector<float>());
        aie::store_v(s + 32 * (key_tiles + j), product(next, scale).to_vector<float>());
    }
}

} // namespace

extern "C" {

void attention_start(float *o, bfloat16 *m, float *l) { start(o, m, l); }

// Row r of the tile is position q_pos + r % (LQ/GROUP); key j is position k_pos + j, and there are k_len positions.
// s and p are scratch.
void attention_tile(const bfloat16 *q, const bfloat16 *k, const bfloat16 *v, float *o, bfloat16 *m, float *l, float *s,
                    bfloat16 *p, int32 q_pos, int32 k_pos, int32 k_len, int32 window) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    event0();
    for (unsigned z = 0; z < LQ / 4; z += 2) {
        scores(q + z * 4 * DIM_D, k, s);
        attend(z, s, p, v, o, m, l, keys{q_pos, k_pos, k_len, window});
    }
    event1();
}

void attention_finish(const float *o, const float *l, bfloat16 *out) { finish(o, l, out); }

} // extern "C"
