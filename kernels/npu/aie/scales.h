// Scales of blocks of 32 weights as integers, so that a tile's sums stay exact: scale = unit (4096 hi + lo), a power of two
// for each column of the tile over K and two multipliers of 12 bits for each block. float16 has 11 bits: every scale within a
// factor of 2^12 of the column's largest is exact, a smaller one is off by less than 2^-23 of the largest.
#pragma once

#include "hints.h"
#include "split.h"

// 8 columns' multipliers [2][8], hi and lo, under the 4 rows of a tile.
struct multipliers {
    aie::vector<int16, 32> hi, lo;

    explicit multipliers(const int16 *m) {
        const auto both = aie::load_v<16>(m);
        const auto high = both.template extract<8>(0), low = both.template extract<8>(1);
        hi = aie::concat(high, high, high, high);
        lo = aie::concat(low, low, low, low);
    }
};

// Units of 8 columns under 4 rows; bfloat16 holds every power of two.
inline aie::vector<bfloat16, 32> units(const float *s) {
    const auto eight = aie::accum<accfloat, 8>(aie::load_v<8>(s)).to_vector<bfloat16>();
    return aie::concat(eight, eight, eight, eight);
}

using Whole = aie::accum<accfloat, 32>;

// c += x * unit. Multiplying by a power of two is exact.
inline void add_scaled(const Whole &x, const aie::vector<bfloat16, 32> &unit, float *c) {
    const auto part = split(x.to_vector<float>());
    Whole sum(aie::load_v<32>(c));
    sum = aie::mac(sum, part.lo, unit);
    sum = aie::mac(sum, part.mid, unit);
    aie::store_v(c, aie::mac(sum, part.hi, unit).to_vector<float>());
}
