// 2^x for float32 x <= 0 on XDNA1: to fixed point with 8 bits of fraction, one look-up for the integer, one for the
// fraction, one multiply. Tables: 256 values each, in four copies: 4 KB.
// The integer's values are powers of two, so the product is exact: the error is half a step of the argument, ln2 2^-9, and
// half a unit of the fraction's bfloat16, 2^-8. (An argument rounded to bfloat16 first saves a third of the operations and
// costs ln2 2^-8 |x| more: a key six powers below the maximum was 1.6 % off, and values of very different size showed it.)
#pragma once

#include <aie_api/aie.hpp>

namespace exp2_table {

struct table {
    alignas(aie::vector_decl_align) int16 values[512];
};

// Lines of 8 values, each twice in a row: the layout of a four-fold parallel look-up.
template <class F> constexpr table make(F value) {
    table t{};
    for (int i = 0; i < 256; i++) {
        const int line = i / 8 * 16 + i % 8;
        t.values[line] = t.values[line + 8] = static_cast<int16>(value(i));
    }
    return t;
}

// Bits of 2^i, i the key's upper byte as a signed number. What would be subnormal is 0: masked scores vanish.
constexpr int integer_bits(int i) {
    const int power = i < 128 ? i : i - 256;
    return power < -126 ? 0 : (power + 127) << 7;
}

// Bits of 2^(f/256) rounded to nearest: a series for e^(f/256 ln 2), exact to double precision.
constexpr int fraction_bits(int f) {
    const double x = f / 256.0 * 0.6931471805599453;
    double term = 1, sum = 1;
    for (int n = 1; n < 20; n++) sum += term *= x / n;
    return 0x3f80 + static_cast<int>((sum - 1) * 128 + 0.5);
}

// Two copies, for two memory banks.
static constexpr table integer_ab = make(integer_bits), integer_cd = make(integer_bits);
static constexpr table fraction_ab = make(fraction_bits), fraction_cd = make(fraction_bits);

} // namespace exp2_table

// Arguments from -127 down give 0. Leaves the tile in rounding mode conv_even.
inline aie::vector<bfloat16, 32> exp2_vector(const aie::accum<accfloat, 32> &x) {
    using lut = aie::lut<4, bfloat16, bfloat16>;
    using lookup = aie::parallel_lookup<uint16, lut, aie::lut_oor_policy::truncate>;
    lookup integers(lut(256, exp2_table::integer_ab.values, exp2_table::integer_cd.values), 8);
    lookup fractions(lut(256, exp2_table::fraction_ab.values, exp2_table::fraction_cd.values), 0);
    // Added to 1.5 * 2^15, a float32 has 8 bits of fraction left; what comes back is the sum of two bfloat16 of 8 bits each.
    const auto magic = aie::broadcast<bfloat16, 32>(49152.0f);
    const auto step = aie::sub(aie::add(x, magic), magic);
    const auto hi = step.to_vector<bfloat16>();
    const auto lo = aie::sub(step, hi).to_vector<bfloat16>();
    const auto most = aie::broadcast<bfloat16, 32>(0.25f); // of lo, where hi is not below -128
    const auto upper = aie::to_fixed<int16>(aie::max(hi, aie::broadcast<bfloat16, 32>(-127.5f)), 8);
    const auto lower = aie::to_fixed<int16>(aie::min(aie::max(lo, aie::neg(most)), most), 8);
    const auto keys = aie::add(upper, lower).cast_to<uint16>();
    aie::set_rounding(aie::rounding_mode::floor); // a look-up's index is a rounded shift
    const auto whole = integers.fetch(keys), part = fractions.fetch(keys);
    aie::set_rounding(aie::rounding_mode::conv_even);
    return aie::mul(whole, part).to_vector<bfloat16>();
}
