// Lane by lane arithmetic, reductions and conversions. Included by aie_api/aie.hpp.
#pragma once

#include "accum.hpp"

namespace aie {

namespace host {

template <class T> inline constexpr bool is_real = std::is_same_v<T, bfloat16> || std::is_same_v<T, float>;

// Integers wrap; bfloat16 goes through a float32 accumulator and rounds in the tile's mode; float32 rounds to nearest.
template <class T, unsigned N, class F> vector<T, N> each(const vector<T, N> &a, const vector<T, N> &b, F f) {
    host::count(host::alu, host::groups(a.bits(), 512));
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.set(f(a.get(i), b.get(i)), i);
    return out;
}

template <class A, class B, class Tag> struct product {
    static constexpr bool real = is_real<A> && is_real<B>;
    static constexpr bool wide = sizeof(A) + sizeof(B) > 4;
    using type = std::conditional_t<std::is_same_v<Tag, accauto>,
                                    std::conditional_t<real, accfloat, std::conditional_t<wide, acc64, acc32>>, Tag>;
    static_assert(!std::is_same_v<A, float> && !std::is_same_v<B, float>,
                  "aie::mul: XDNA1 has no float32 vector multiply: split the factors into bfloat16 parts (hi = bf16(x), "
                  "lo = bf16(x - hi)) and accumulate their products");
    static_assert(real == (is_real<A> || is_real<B>), "aie::mul: integers and bfloat16 do not mix");
};

template <class A, class B, class Tag, unsigned N>
void multiply_add(accum<Tag, N> &acc, const vector<A, N> &a, const vector<B, N> &b, bool subtract) {
    host::count(host::mac_vector, host::groups(N, is_real<A> || sizeof(A) + sizeof(B) > 4 ? 16 : 32));
    for (unsigned i = 0; i < N; i++) {
        if constexpr (is_real<A>) {
            operand left(a.get(i));
            const operand right(b.get(i));
            if (subtract) left.value = -left.value;
            acc.lanes[i] = host::aligned_sum<1>(acc.lanes[i], &left, &right);
        } else {
            using C = typename accum<Tag, N>::cell;
            const int64 term = static_cast<int64>(a.get(i)) * b.get(i);
            acc.lanes[i] = host::wrap_add(acc.lanes[i], static_cast<C>(subtract ? -term : term));
        }
    }
}

} // namespace host

template <class T, unsigned N> vector<T, N> add(const vector<T, N> &a, const vector<T, N> &b) {
    if constexpr (host::is_real<T>)
        return host::each(a, b, [](T x, T y) { return T(static_cast<float>(x) + static_cast<float>(y)); });
    else
        return host::each(a, b, [](T x, T y) { return static_cast<T>(static_cast<int64>(x) + y); });
}
template <class T, unsigned N> vector<T, N> sub(const vector<T, N> &a, const vector<T, N> &b) {
    if constexpr (host::is_real<T>)
        return host::each(a, b, [](T x, T y) { return T(static_cast<float>(x) - static_cast<float>(y)); });
    else
        return host::each(a, b, [](T x, T y) { return static_cast<T>(static_cast<int64>(x) - y); });
}
template <class T, unsigned N> vector<T, N> neg(const vector<T, N> &a) { return sub(zeros<T, N>(), a); }

template <class Tag, unsigned N> accum<Tag, N> add(const accum<Tag, N> &a, const accum<Tag, N> &b) {
    host::count(host::alu, host::groups(N, 16));
    accum<Tag, N> out;
    for (unsigned i = 0; i < N; i++) out.lanes[i] = host::wrap_add(a.lanes[i], b.lanes[i]);
    return out;
}
template <class Tag, unsigned N> accum<Tag, N> sub(const accum<Tag, N> &a, const accum<Tag, N> &b) {
    host::count(host::alu, host::groups(N, 16));
    using C = typename accum<Tag, N>::cell;
    accum<Tag, N> out;
    for (unsigned i = 0; i < N; i++) {
        if constexpr (std::is_floating_point_v<C>)
            out.lanes[i] = a.lanes[i] - b.lanes[i];
        else
            out.lanes[i] = static_cast<C>(static_cast<std::uint64_t>(a.lanes[i]) - static_cast<std::uint64_t>(b.lanes[i]));
    }
    return out;
}
template <class Tag, class T, unsigned N> accum<Tag, N> add(const accum<Tag, N> &a, const vector<T, N> &b) {
    return add(a, accum<Tag, N>(b));
}
template <class Tag, class T, unsigned N> accum<Tag, N> sub(const accum<Tag, N> &a, const vector<T, N> &b) {
    return sub(a, accum<Tag, N>(b));
}

// The larger of each pair; where one is NaN, the first (the core compares a < b).
template <class T, unsigned N> vector<T, N> max(const vector<T, N> &a, const vector<T, N> &b) {
    static_assert(!std::is_same_v<T, float>, "aie::max: XDNA1 compares integers and bfloat16 lanes, not float32");
    return host::each(a, b, [](T x, T y) { return x < y ? y : x; });
}
template <class T, unsigned N> vector<T, N> min(const vector<T, N> &a, const vector<T, N> &b) {
    static_assert(!std::is_same_v<T, float>, "aie::min: XDNA1 compares integers and bfloat16 lanes, not float32");
    return host::each(a, b, [](T x, T y) { return y < x ? y : x; });
}

template <class Tag = accauto, class A, class B, unsigned N> auto mul(const vector<A, N> &a, const vector<B, N> &b) {
    accum<typename host::product<A, B, Tag>::type, N> out;
    host::multiply_add(out, a, b, false);
    return out;
}
template <class Tag = accauto, class A, unsigned N> auto mul(const vector<A, N> &a, A b) { return mul<Tag>(a, broadcast<A, N>(b)); }
template <class Tag, class A, class B, unsigned N>
accum<Tag, N> mac(const accum<Tag, N> &acc, const vector<A, N> &a, const vector<B, N> &b) {
    (void)sizeof(host::product<A, B, Tag>);
    accum<Tag, N> out = acc;
    host::multiply_add(out, a, b, false);
    return out;
}
template <class Tag, class A, unsigned N> accum<Tag, N> mac(const accum<Tag, N> &acc, const vector<A, N> &a, A b) {
    return mac(acc, a, broadcast<A, N>(b));
}
template <class Tag, class A, class B, unsigned N>
accum<Tag, N> msc(const accum<Tag, N> &acc, const vector<A, N> &a, const vector<B, N> &b) {
    (void)sizeof(host::product<A, B, Tag>);
    accum<Tag, N> out = acc;
    host::multiply_add(out, a, b, true);
    return out;
}
template <class A, unsigned N> auto mul_square(const vector<A, N> &a) { return mul(a, a); }

namespace host {

// Halves folded onto one another, as the core does.
template <class T, unsigned N, class F> T fold(const vector<T, N> &v, F f) {
    host::count(host::alu, N > 1 ? 5 : 0);
    std::array<T, N> lanes;
    for (unsigned i = 0; i < N; i++) lanes[i] = v.get(i);
    for (unsigned n = N / 2; n; n /= 2)
        for (unsigned i = 0; i < n; i++) lanes[i] = f(lanes[i], lanes[i + n]);
    return lanes[0];
}

} // namespace host

template <class T, unsigned N> T reduce_add(const vector<T, N> &v) {
    if constexpr (host::is_real<T>)
        return host::fold(v, [](T x, T y) { return T(static_cast<float>(x) + static_cast<float>(y)); });
    else
        return host::fold(v, [](T x, T y) { return static_cast<T>(static_cast<int64>(x) + y); });
}
template <class T, unsigned N> T reduce_max(const vector<T, N> &v) {
    static_assert(!std::is_same_v<T, float>, "aie::reduce_max: XDNA1 compares integers and bfloat16 lanes, not float32");
    return host::fold(v, [](T x, T y) { return x < y ? y : x; });
}
template <class T, unsigned N> T reduce_min(const vector<T, N> &v) {
    static_assert(!std::is_same_v<T, float>, "aie::reduce_min: XDNA1 compares integers and bfloat16 lanes, not float32");
    return host::fold(v, [](T x, T y) { return y < x ? y : x; });
}

// floor(x * 2^shift): the core's conversion always rounds down. A lane that does not fit traps (the core keeps its low bits);
// NaN becomes the lowest integer.
template <class To, unsigned N> vector<To, N> to_fixed(const vector<bfloat16, N> &v, int shift = 0) {
    static_assert(std::is_same_v<To, int16> || std::is_same_v<To, int32>, "aie::to_fixed: to int16 or int32");
    host::count(host::alu, host::groups(N, 16));
    vector<To, N> out;
    for (unsigned i = 0; i < N; i++) {
        const double x = std::floor(std::ldexp(static_cast<double>(static_cast<float>(v.get(i))), shift));
        using limits = std::numeric_limits<To>;
        if (x > limits::max() || x < limits::min()) host::fail("aie::to_fixed: lane %llu does not fit the integer", i);
        out.set(x != x ? limits::min() : static_cast<To>(x), i);
    }
    return out;
}

// x / 2^shift as float32, rounded to nearest.
template <class To = float, class T, unsigned N> vector<To, N> to_float(const vector<T, N> &v, int shift = 0) {
    static_assert(std::is_same_v<To, float> && std::is_integral_v<T>, "aie::to_float: from integers to float");
    host::count(host::alu, host::groups(N, 16) * (sizeof(T) > 2 ? 5 : 2));
    vector<To, N> out;
    for (unsigned i = 0; i < N; i++) out.set(static_cast<float>(std::ldexp(static_cast<double>(v.get(i)), -shift)), i);
    return out;
}

// Scalar reciprocal: a division, on the core in software.
inline float inv(float x) {
    host::count(host::alu, 8);
    return 1.0f / x;
}

} // namespace aie
