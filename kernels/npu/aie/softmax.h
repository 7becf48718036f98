// Shared by both flash attentions, for eight rows of a query tile at a time: mask, online softmax, O = c O + P V.
//
// Scores are in units of log2: p = 2^(s - m). The running maximum m is rounded up to an integer, so that the correction
// c = 2^(m_old - m_new) is a power of two: rescaling O and l is exact, however often the maximum moves. (With the score itself
// as the maximum c is a rounded bfloat16: in a NumPy model of 64 tiles with slowly rising scores the worst error of 400 rows was
// 0.083 of 2^-8 sum p|v|, with the integer 0.060.)
// m starts at 0xff7f, the lowest bfloat16, and masked scores are 0xff7f too. A row that has seen only masked keys so far has
// p = 1 for them; its first visible key brings c = 0, which clears O and l. No infinity and no NaN can arise.
// Row state: m [LQ/4][32] bfloat16, each row's value in 8 lanes; l [LQ/4][32] float, each row's sum as 8 partial ones.
#pragma once

#include <limits>

#include "exp2_table.h"
#include "hints.h"
#include "split.h"

#ifndef LQ
#define LQ 32
#endif
#ifndef LK
#define LK 32
#endif
#ifndef DIM_D
#define DIM_D 64
#endif
#ifndef GROUP
#define GROUP 1
#endif
#ifndef SCALE
#define SCALE 0.125f
#endif

static_assert(LQ % 8 == 0 && LK % 8 == 0 && DIM_D % 8 == 0, "attention: LQ, LK and DIM_D must be multiples of 8");
static_assert(LQ % GROUP == 0, "attention: the query tile must hold as many rows of each head");

constexpr float log2_scale = SCALE * 1.44269504088896f;
constexpr unsigned key_tiles = LK / 8, wide_tiles = DIM_D / 4;
using Row4 = aie::vector<bfloat16, 32>; // 4 rows x 8 lanes
using Sum4 = aie::accum<accfloat, 32>;
using PV = aie::mmul<4, 8, 4, bfloat16, bfloat16>;

// x * c for a power of two c: exact.
template <unsigned N> inline aie::vector<float, N> scaled_exactly(const aie::vector<float, N> &x, const aie::vector<bfloat16, N> &c) {
    const parts<N> p = split(x);
    aie::accum<accfloat, N> acc = aie::mul(p.lo, c);
    acc = aie::mac(acc, p.mid, c);
    return aie::mac(acc, p.hi, c).template to_vector<float>();
}

// Which keys a row sees: positions first..last of the tile, by the row's position and the window (0: none).
struct keys {
    int32 q_pos, k_pos, k_len, window;

    int32 position(unsigned row) const { return q_pos + static_cast<int32>(row % (LQ / GROUP)); }
    int32 first(unsigned row) const { return window > 0 ? position(row) - window + 1 - k_pos : 0; }
    int32 end(unsigned row) const {
        const int32 causal = position(row) + 1 - k_pos, stored = k_len - k_pos;
        return causal < stored ? causal : stored;
    }
    // Does every one of these four rows see the whole tile?
    bool all(unsigned row) const {
        bool seen = true;
        for (unsigned r = row; r < row + 4; r++) seen = seen && first(r) <= 0 && end(r) >= LK;
        return seen;
    }
    // Lanes of the hidden keys of 4 rows x 8 keys.
    aie::mask<32> hidden(unsigned row, unsigned tile) const {
        uint32 seen = 0;
        for (unsigned r = 0; r < 4; r++) {
            int32 from = first(row + r) - static_cast<int32>(8 * tile), to = end(row + r) - static_cast<int32>(8 * tile);
            from = from < 0 ? 0 : from > 8 ? 8 : from;
            to = to < 0 ? 0 : to > 8 ? 8 : to;
            seen |= (((1u << to) - 1) & ~((1u << from) - 1)) << (8 * r);
        }
        return aie::mask<32>::from_uint32(~seen);
    }
};

// The largest lane of each row in all its 8 lanes.
inline Row4 row_max(const Row4 &v) {
    Row4 t = aie::transpose(v, 4, 8);
    for (unsigned n = 16; n >= 4; n /= 2) t = aie::max(t, aie::shuffle_down_rotate(t, n));
    return aie::transpose(t, 8, 4);
}

// Rounded up to an integer. Beyond 256 every bfloat16 is one.
inline Row4 ceiling(const Row4 &v) {
    const auto most = aie::broadcast<bfloat16, 32>(256.0f);
    const auto near = aie::min(aie::max(v, aie::neg(most)), most);
    const auto down = aie::to_fixed<int16>(aie::neg(near), 0);
    const auto up = Sum4(aie::to_float(aie::neg(down))).to_vector<bfloat16>();
    return aie::add(up, aie::sub(v, near));
}

// Four rows of scores s [LK/8][32] become probabilities p [LK/8][32]; m and l are brought up to date. Returns c.
inline Row4 softmax_rows(float *__restrict s, bfloat16 *__restrict p, bfloat16 *__restrict m, float *__restrict l,
                         const keys &seen, unsigned row) {
    const bool masked = !seen.all(row);
    const auto lowest = aie::broadcast<bfloat16, 32>(std::numeric_limits<bfloat16>::lowest());
    const auto lowest_score = Sum4(lowest).to_vector<float>();
    Row4 top = lowest;
    PIPELINED(key_tiles)
    for (unsigned j = 0; j < key_tiles; j++) {
        auto score = aie::load_v<32>(s + 32 * j);
        if (masked) {
            score = aie::select(score, lowest_score, seen.hidden(row, j));
            aie::store_v(s + 32 * j, score);
        }
        top = aie::max(top, Sum4(score).to_vector<bfloat16>());
    }
    const Row4 before = aie::load_v<32>(m), now = aie::max(before, ceiling(row_max(top)));
    aie::store_v(m, now);
    const Row4 c = exp2_vector(aie::sub(Sum4(before), now));
    Sum4 sum(scaled_exactly(aie::load_v<32>(l), c));
    PIPELINED(key_tiles)
    for (unsigned j = 0; j < key_tiles; j++) {
        const Row4 e = exp2_vector(aie::sub(Sum4(aie::load_v<32>(s + 32 * j)), now));
        sum = aie::add(sum, e);
        aie::store_v(p + 32 * j, e);
    }
    aie::store_v(l, sum.to_vector<float>());
    return c;
}

// O = c O + P V for eight rows: o [2][D/4][16], p [2][LK/8][32], v [LK/8][D/4][32].
inline void weigh_values(const bfloat16 *__restrict p, const bfloat16 *__restrict v, float *__restrict o, const Row4 &c0,
                         const Row4 &c1) {
    const auto small0 = aie::filter_even(c0, 4), small1 = aie::filter_even(c1, 4);
    const bool rescale = aie::reduce_min(aie::min(c0, c1)) < bfloat16(1.0f);
    for (unsigned d = 0; d < wide_tiles; d += 2) {
        float *o0 = o + d * 16, *o1 = o0 + wide_tiles * 16;
        auto t00 = aie::load_v<16>(o0), t01 = aie::load_v<16>(o0 + 16), t10 = aie::load_v<16>(o1), t11 = aie::load_v<16>(o1 + 16);
        if (rescale) {
            t00 = scaled_exactly(t00, small0), t01 = scaled_exactly(t01, small0);
            t10 = scaled_exactly(t10, small1), t11 = scaled_exactly(t11, small1);
        }
        PV c00(t00), c01(t01), c10(t10), c11(t11);
        PIPELINED(key_tiles)
        for (unsigned j = 0; j < key_tiles; j++) {
            const auto left0 = aie::load_v<32>(p + 32 * j), left1 = aie::load_v<32>(p + 32 * (key_tiles + j));
            const bfloat16 *at = v + (j * wide_tiles + d) * 32;
            const auto right0 = aie::load_v<32>(at), right1 = aie::load_v<32>(at + 32);
            c00.mac(left0, right0);
            c01.mac(left0, right1);
            c10.mac(left1, right0);
            c11.mac(left1, right1);
        }
        aie::store_v(o0, c00.to_vector<float>());
        aie::store_v(o0 + 16, c01.to_vector<float>());
        aie::store_v(o1, c10.to_vector<float>());
        aie::store_v(o1 + 16, c11.to_vector<float>());
    }
}

// Softmax and values of rows z, z+1 (of 4) of the tile; s [2][LK/8][32] holds their scores.
inline void attend(unsigned z, float *s, bfloat16 *p, const bfloat16 *v, float *o, bfloat16 *m, float *l, const keys &seen) {
    const Row4 c0 = softmax_rows(s, p, m + 32 * z, l + 32 * z, seen, 4 * z);
    const Row4 c1 = softmax_rows(s + 4 * LK, p + 4 * LK, m + 32 * (z + 1), l + 32 * (z + 1), seen, 4 * (z + 1));
    weigh_values(p, v, o + z * 4 * DIM_D, c0, c1);
}

// Header after a query tile of a design, in int32 words. The keys come in `before + seen + after` tiles, of which this
// query tile sees the middle ones; the core's loops count to the first three of `bounds`, whose fourth is the position of the
// next key.
struct header {
    int32 q_pos, k_len, window, before, seen, after, k_pos;
};
inline header begin(const void *words, int32 *bounds) {
    const header h = *static_cast<const header *>(words);
    bounds[0] = h.before, bounds[1] = h.seen, bounds[2] = h.after, bounds[3] = h.k_pos;
    return h;
}

inline void start(float *o, bfloat16 *m, float *l) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    for (unsigned i = 0; i < LQ * DIM_D; i += 16) aie::store_v(o + i, aie::zeros<float, 16>());
    for (unsigned z = 0; z < LQ / 4; z++) {
        aie::store_v(m + 32 * z, aie::broadcast<bfloat16, 32>(std::numeric_limits<bfloat16>::lowest()));
        aie::store_v(l + 32 * z, aie::zeros<float, 32>());
    }
}

// out = O / l, layout of O in bfloat16; zeros where no key was seen.
inline void finish(const float *__restrict o, const float *__restrict l, bfloat16 *__restrict out) {
    aie::set_rounding(aie::rounding_mode::conv_even);
    for (unsigned z = 0; z < LQ / 4; z++) {
        aie::vector<float, 16> inverse;
        for (unsigned r = 0; r < 4; r++) {
            const float sum = aie::reduce_add(aie::load_v<8>(l + 32 * z + 8 * r)), one = sum > 0.0f ? aie::inv(sum) : 0.0f;
            for (unsigned i = 0; i < 4; i++) inverse.set(one, 4 * r + i);
        }
        const auto by = split(inverse);
        for (unsigned d = 0; d < wide_tiles; d++) {
            const unsigned at = (z * wide_tiles + d) * 16;
            aie::store_v(out + at, product(split(aie::load_v<16>(o + at)), by).to_vector<bfloat16>());
        }
    }
}
