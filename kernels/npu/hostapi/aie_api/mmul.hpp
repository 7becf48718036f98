// aie::mmul in the shapes that XDNA1's core multiplies natively, and no other. Included by aie_api/aie.hpp.
//
// A is M x K, B is K x N, C is M x N, each row after row in its vector. A default object is zero: the first mac() then costs
// nothing extra.
#pragma once

#include "accum.hpp"

namespace aie {

namespace host {

template <class A, class B> inline constexpr unsigned kind_of =
    lane<A>::bits == 8 && lane<B>::bits == 8   ? 88
    : lane<A>::bits == 8 && lane<B>::bits == 4 ? 84
    : std::is_same_v<A, bfloat16> && std::is_same_v<B, bfloat16> ? 99
    : std::is_integral_v<A> && lane<A>::bits == 16 && lane<B>::bits == 8 ? 168
    : std::is_integral_v<A> && std::is_integral_v<B> && lane<A>::bits == 16 && lane<B>::bits == 16 ? 1616
                                                                                                  : 0;

constexpr bool native(unsigned kind, unsigned m, unsigned k, unsigned n) {
    const unsigned shape = m * 10000 + k * 100 + n;
    switch (kind) {
    case 88: return shape == 40808 || shape == 20808;
    case 84: return shape == 41608;
    case 168: return shape == 40804 || shape == 40408 || shape == 20808;
    case 1616: return shape == 40404 || shape == 20408 || shape == 40208;
    case 99: return shape == 40804;
    default: return false;
    }
}

template <class A, class B, class Tag> struct accumulator { using type = Tag; };
template <class A, class B> struct accumulator<A, B, accauto> {
    using type = std::conditional_t<kind_of<A, B> == 99, accfloat, std::conditional_t<kind_of<A, B> == 1616, acc64, acc32>>;
};

// A type that holds every product of an A and a B.
template <class A, class B> inline constexpr unsigned mac_bits =
    lane<A>::bits + lane<B>::bits +
    (std::is_unsigned_v<typename lane<A>::scalar> && std::is_unsigned_v<typename lane<B>::scalar> ? 1 : 0);
template <class A, class B> using mac_product =
    std::conditional_t<mac_bits<A, B> <= 16, int16, std::conditional_t<mac_bits<A, B> <= 32, int32, int64>>;

template <class T, unsigned N> struct mac_row { using type __attribute__((vector_size(N * sizeof(T)))) = T; };

template <class A, class B> constexpr counter mac_counter() {
    return kind_of<A, B> == 88 ? mac_i8 : kind_of<A, B> == 84 ? mac_i8i4 : kind_of<A, B> == 99 ? mac_bf16 : mac_i16;
}

} // namespace host

template <unsigned M, unsigned K, unsigned N, class A, class B = A, class Tag = accauto> class mmul {
    static_assert(host::kind_of<A, B> != 0, "aie::mmul: XDNA1 multiplies int8 x int8, int8 x int4, int16 x int8, int16 x int16 "
                                            "and bfloat16 x bfloat16 matrices only");
    static_assert(host::kind_of<A, B> == 0 || host::native(host::kind_of<A, B>, M, K, N),
                  "aie::mmul: no such shape on XDNA1. Native M x K x N: 8b x 8b 4x8x8, 2x8x8; 8b x 4b 4x16x8; 16b x 8b 4x8x4, "
                  "4x4x8, 2x8x8; 16b x 16b 4x4x4, 2x4x8, 4x2x8; bfloat16 4x8x4");

public:
    using tag = typename host::accumulator<A, B, Tag>::type;
    static constexpr unsigned size_A = M * K, size_B = K * N, size_C = M * N;
    using accum_type = accum<tag, size_C>;

    mmul() = default;
    explicit mmul(const accum_type &c) : data(c) {}
    template <class T> explicit mmul(const vector<T, size_C> &c, int shift = 0) { data.from_vector(c, shift); }

    void mac(const vector<A, size_A> &a, const vector<B, size_B> &b) {
        host::count(host::mac_counter<A, B>());
        if constexpr (std::is_same_v<tag, accfloat>)
            mac_real(a, b);
        else
            mac_integer(a, b);
    }
    void mul(const vector<A, size_A> &a, const vector<B, size_B> &b) {
        data = accum_type{};
        mac(a, b);
    }
    template <class T> vector<T, size_C> to_vector(int shift = 0) const { return data.template to_vector<T>(shift); }
    const accum_type &to_accum() const { return data; }

private:
    accum_type data;

    // Rows of B as the compiler's vectors: lane by lane this is most of what the simulator does.
    void mac_integer(const vector<A, size_A> &a, const vector<B, size_B> &b) {
        using cell = typename accum_type::cell;
        using product = host::mac_product<A, B>;
        using products = typename host::mac_row<product, N>::type;
        using sums = typename host::mac_row<std::make_unsigned_t<cell>, N>::type; // wraps, as the core's accumulators do
        std::array<products, K> right;
        for (unsigned k = 0; k < K; k++)
            if constexpr (host::lane<B>::bits == 4) {
                for (unsigned n = 0; n < N; n++) right[k][n] = static_cast<product>(b.get(k * N + n));
            } else {
                typename host::mac_row<typename host::lane<B>::scalar, N>::type lanes;
                std::memcpy(&lanes, &b.lanes[k * N], sizeof lanes);
                right[k] = __builtin_convertvector(lanes, products);
            }
        for (unsigned m = 0; m < M; m++) {
            sums sum;
            std::memcpy(&sum, &data.lanes[m * N], sizeof sum);
            for (unsigned k = 0; k < K; k++)
                sum += __builtin_convertvector(right[k] * static_cast<product>(a.get(m * K + k)), sums);
            std::memcpy(&data.lanes[m * N], &sum, sizeof sum);
        }
    }
    void mac_real(const vector<A, size_A> &a, const vector<B, size_B> &b) {
        std::array<host::operand, size_A> left;
        std::array<host::operand, size_B> right; // columns one after another
        for (unsigned i = 0; i < size_A; i++) left[i] = host::operand(a.get(i));
        for (unsigned i = 0; i < size_B; i++) right[i % N * K + i / N] = host::operand(b.get(i));
        for (unsigned m = 0; m < M; m++)
            for (unsigned n = 0; n < N; n++)
                data.lanes[m * N + n] = host::aligned_sum<K>(data.lanes[m * N + n], &left[m * K], &right[n * K]);
    }
};

} // namespace aie
