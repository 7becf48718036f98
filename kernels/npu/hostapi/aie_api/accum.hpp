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

// bf16 products into a float32 accumulator: all terms are aligned to the largest exponent among them, each is rounded to 24
// bits there, and their sum is exact. Ties of that rounding go to even here: the hardware's choice is not published.
// Terms that are not finite make the plain float32 sum.
template <unsigned K> float aligned_sum(float start, const double *terms) {
    double largest = std::fabs(static_cast<double>(start));
    for (unsigned k = 0; k < K; k++) largest = largest < std::fabs(terms[k]) ? std::fabs(terms[k]) : largest;
    if (!(largest < 0x1p128) || largest != largest) {
        float sum = start;
        for (unsigned k = 0; k < K; k++) sum += static_cast<float>(terms[k]);
        return sum;
    }
    if (largest == 0) return start;
    const auto exponent = bit_cast<std::uint64_t>(largest) >> 52 << 52; // 2^e of the largest term
    const double magic = 1.5 * bit_cast<double>(exponent) * 0x1p29;     // adding it rounds to 2^(e-23)
    double sum = (static_cast<double>(start) + magic) - magic;
    for (unsigned k = 0; k < K; k++) sum += (terms[k] + magic) - magic;
    return static_cast<float>(sum);
}

} // namespace host

template <class Tag, unsigned N, class = std::enable_if_t<host::is_accum_tag<Tag>::value>> accum<Tag, N> zeros() { return {}; }
template <class T, unsigned N, class = std::enable_if_t<!host::is_accum_tag<T>::value>, class = void> vector<T, N> zeros() {
    return {};
}

} // namespace aie
