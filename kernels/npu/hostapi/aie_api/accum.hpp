// Accumulators: 32- and 64-bit integers that wrap, and float32. Included by aie_api/aie.hpp.
//
// to_vector(shift) is the core's shift-round-saturate: it obeys the tile's rounding and saturation modes.
#pragma once

#include "vector.hpp"

namespace aie {

namespace host {

template <class Tag> struct cell;
template <> struct cell<acc32> { using type = int32; };
template <> struct cell<acc64> { using type = int64; };
template <> struct cell<accfloat> { using type = float; };

} // namespace host

template <class Tag, unsigned N> class accum {
    static_assert(N == 4 || N == 8 || N == 16 || N == 32 || N == 64 || N == 128, "aie::accum: no such number of lanes");
    static constexpr bool real = std::is_same_v<Tag, accfloat>;

public:
    using cell = typename host::cell<Tag>::type;
    std::array<cell, N> lanes{};

    accum() = default;
    template <class T> explicit accum(const vector<T, N> &v, int shift = 0) { from_vector(v, shift); }

    static constexpr unsigned size() { return N; }

    // Lanes times 2^shift.
    template <class T> void from_vector(const vector<T, N> &v, int shift = 0) {
        constexpr bool from_real = std::is_same_v<T, bfloat16> || std::is_same_v<T, float>;
        static_assert(real == from_real, "aie::accum: integers go into acc32 or acc64, bfloat16 and float into accfloat; use "
                                         "to_float or to_fixed");
        for (unsigned i = 0; i < N; i++) {
            if constexpr (real)
                lanes[i] = v.get(i);
            else
                lanes[i] = static_cast<cell>(static_cast<std::uint64_t>(static_cast<int64>(v.get(i))) << shift);
        }
    }

    template <class T> vector<T, N> to_vector(int shift = 0) const {
        host::count(host::srs, host::groups(vector<T, N>::bits(), 512));
        vector<T, N> out;
        for (unsigned i = 0; i < N; i++) {
            if constexpr (real) {
                static_assert(!real || std::is_same_v<T, bfloat16> || std::is_same_v<T, float>,
                              "aie::accum: accfloat becomes bfloat16 or float; use to_fixed for integers");
                out.set(lanes[i], i);
            } else {
                out.set(host::saturate<T>(host::shift_round(lanes[i], shift)), i);
            }
        }
        return out;
    }

    template <unsigned M> accum<Tag, M> extract(unsigned part) const {
        accum<Tag, M> out;
        for (unsigned i = 0; i < M; i++) out.lanes[i] = lanes[part * M + i];
        return out;
    }
    template <unsigned M> accum &insert(unsigned part, const accum<Tag, M> &v) {
        for (unsigned i = 0; i < M; i++) lanes[part * M + i] = v.lanes[i];
        return *this;
    }
};

namespace host {

template <class T> struct is_accum_tag : std::false_type {};
template <> struct is_accum_tag<acc32> : std::true_type {};
template <> struct is_accum_tag<acc64> : std::true_type {};
template <> struct is_accum_tag<accfloat> : std::true_type {};

// Two's complement addition that wraps, and float32's.
template <class C> C wrap_add(C a, C b) {
    if constexpr (std::is_floating_point_v<C>)
        return a + b;
    else
        return static_cast<C>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

// A factor or an accumulator as the core's adder reads it. Exponent 255 is one more exponent: an infinity is 2^128, a NaN
// larger. `scale` is 2^exponent, whatever the fraction (a denormal number has the smallest exponent); 0 for zero.
struct operand {
    double value, scale;
    explicit operand(float x = 0) {
        const auto bits = bit_cast<std::uint32_t>(x);
        const std::uint32_t exponent = bits >> 23 & 255, fraction = bits & 0x7fffff;
        value = exponent == 255 ? 0x1p128 * (1 + 0x1p-23 * fraction) * (bits >> 31 ? -1 : 1) : x;
        scale = bits << 1 ? bit_cast<double>(std::uint64_t{(exponent ? exponent : 1) + 1023 - 127} << 52) : 0;
    }
    bool infinite() const { return std::fabs(value) == 0x1p128; }
    bool nan() const { return std::fabs(value) > 0x1p128; }
};

// A float32 result. What is too small for a normal number becomes zero; a NaN keeps the sum's sign and fraction.
inline float normed(double sum, bool nan) {
    float out = static_cast<float>(sum);
    if (std::fabs(sum) < 0x1p-100) {
        out = static_cast<float>(sum * 0x1p100);
        out = std::fabs(out) < 0x1p-26f ? 0 : out * 0x1p-100f;
    }
    if (!nan) return out;
    const auto bits = bit_cast<std::uint32_t>(out);
    return bit_cast<float>((sum < 0 ? 0x80000000u : 0) | 0x7f800001u | (bits & 0x7fffffu));
}

// bf16 products into a float32 accumulator: all terms are aligned to the largest exponent among them, each is rounded to 24
// bits there, ties to even, and their sum is exact. A product's exponent is the sum of its factors', so its largest bit may
// stand one above. Only the sum overflows. So a Phoenix NPU was seen to add: ignite-xdna, bf16_mac_position_probe_npu.
template <unsigned K> float aligned_sum(float start, const operand *a, const operand *b) {
    const operand first(start);
    std::array<double, K> terms;
    double scale = first.scale;
    bool special = std::fabs(first.value) >= 0x1p128, nan = false;
    for (unsigned k = 0; k < K; k++) {
        terms[k] = a[k].value * b[k].value;
        scale = std::max(scale, a[k].scale * b[k].scale);
        special |= std::fabs(a[k].value) >= 0x1p128 || std::fabs(b[k].value) >= 0x1p128;
    }
    if (special) {
        bool up = first.infinite() && first.value > 0, down = first.infinite() && first.value < 0;
        nan = first.nan();
        for (unsigned k = 0; k < K; k++) {
            const bool infinite = a[k].infinite() || b[k].infinite();
            nan |= a[k].nan() || b[k].nan() || (infinite && terms[k] == 0);
            up |= infinite && terms[k] > 0;
            down |= infinite && terms[k] < 0;
        }
        nan |= up && down;
        if (!nan) return up ? INFINITY : -INFINITY;
    }
    const double magic = 1.5 * scale * 0x1p29; // adding it rounds to 2^-23 of the scale
    double sum = (first.value + magic) - magic;
    for (unsigned k = 0; k < K; k++) sum += (terms[k] + magic) - magic;
    return normed(sum, nan);
}

} // namespace host

template <class Tag, unsigned N, class = std::enable_if_t<host::is_accum_tag<Tag>::value>> accum<Tag, N> zeros() { return {}; }
template <class T, unsigned N, class = std::enable_if_t<!host::is_accum_tag<T>::value>, class = void> vector<T, N> zeros() {
    return {};
}

} // namespace aie
