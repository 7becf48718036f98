// aie::vector, masks, loads and stores, and what only moves lanes. Included by aie_api/aie.hpp.
#pragma once

#include "types.hpp"

namespace aie {

inline constexpr unsigned vector_decl_align = 32;
inline constexpr unsigned vector_ldst_align = 32;

// A register of 128 to 1024 bits. Lanes are read by get(), written by set(); memory layout is lane 0 first.
template <class T, unsigned N> class vector {
    static constexpr unsigned width = N * host::lane<T>::bits;
    static_assert(width == 128 || width == 256 || width == 512 || width == 1024,
                  "aie::vector: XDNA1 has registers of 128, 256, 512 and 1024 bits: no such number of lanes");
    static constexpr bool nibbles = host::lane<T>::bits == 4;

public:
    using value_type = T;
    using scalar = typename host::lane<T>::scalar;
    std::conditional_t<nibbles, std::array<uint8, (N + 1) / 2>, std::array<scalar, N>> lanes{};

    static constexpr unsigned size() { return N; }
    static constexpr unsigned bits() { return width; }

    scalar get(unsigned i) const {
        if constexpr (nibbles) {
            const unsigned raw = (lanes[i / 2] >> (4 * (i % 2))) & 15;
            return static_cast<scalar>(std::is_same_v<T, int4> && raw > 7 ? static_cast<int>(raw) - 16 : static_cast<int>(raw));
        } else {
            return lanes[i];
        }
    }
    scalar operator[](unsigned i) const { return get(i); }
    void set(scalar value, unsigned i) {
        static_assert(!nibbles, "aie::vector: lanes of 4 bits cannot be set one by one");
        lanes[i] = value;
    }
    template <unsigned M> vector<T, M> extract(unsigned part) const {
        vector<T, M> out;
        std::memcpy(out.lanes.data(), bytes() + part * (M * host::lane<T>::bits / 8), M * host::lane<T>::bits / 8);
        return out;
    }
    template <unsigned M> vector &insert(unsigned part, const vector<T, M> &v) {
        std::memcpy(bytes() + part * (M * host::lane<T>::bits / 8), v.lanes.data(), M * host::lane<T>::bits / 8);
        return *this;
    }
    // The same bits as lanes of another type.
    template <class U> vector<U, width / host::lane<U>::bits> cast_to() const {
        vector<U, width / host::lane<U>::bits> out;
        std::memcpy(out.lanes.data(), lanes.data(), width / 8);
        return out;
    }

private:
    const uint8 *bytes() const { return reinterpret_cast<const uint8 *>(lanes.data()); }
    uint8 *bytes() { return reinterpret_cast<uint8 *>(lanes.data()); }
};

template <unsigned N> class mask {
    static_assert(N <= 64, "aie::mask: at most 64 lanes");
    std::uint64_t raw = 0;

public:
    static mask from_uint32(uint32 bits) {
        static_assert(N <= 32, "aie::mask: from_uint32 fills at most 32 lanes");
        mask m;
        m.raw = bits;
        return m;
    }
    bool test(unsigned i) const { return raw >> i & 1; }
};

namespace host {

// The load and store units want their own width: the core would read other bytes, so the host stops.
inline void aligned(const void *at, unsigned bits, const char *format) {
    const unsigned need = bits / 8 < vector_ldst_align ? bits / 8 : vector_ldst_align;
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    if (address % need) fail(format, address % need, need);
}

} // namespace host

template <unsigned N, class T> vector<std::remove_const_t<T>, N> load_v(T *from) {
    using V = vector<std::remove_const_t<T>, N>;
    host::aligned(from, V::bits(), "aie::load_v: address is %llu bytes beyond a multiple of %llu: vectors must be aligned");
    host::count(host::load, host::groups(V::bits(), 256));
    V v;
    std::memcpy(v.lanes.data(), from, V::bits() / 8);
    return v;
}

template <class T, unsigned N> void store_v(T *to, const vector<T, N> &v) {
    host::aligned(to, v.bits(), "aie::store_v: address is %llu bytes beyond a multiple of %llu: vectors must be aligned");
    host::count(host::store, host::groups(v.bits(), 256));
    std::memcpy(to, v.lanes.data(), v.bits() / 8);
}

template <class T, unsigned N> vector<T, N> broadcast(typename host::lane<T>::scalar value) {
    vector<T, N> v;
    for (unsigned i = 0; i < N; i++) v.set(value, i);
    return v;
}

template <class T, unsigned N, class... More> auto concat(const vector<T, N> &first, const More &...more) {
    vector<T, N * (1 + sizeof...(More))> out;
    unsigned part = 0;
    out.insert(part++, first);
    (out.insert(part++, more), ...);
    return out;
}

// v is `rows` x `columns`, row after row; the result is its transpose.
template <class T, unsigned N> vector<T, N> transpose(const vector<T, N> &v, unsigned rows, unsigned columns) {
    if (rows * columns != N) host::fail("aie::transpose: %llu x %llu is not the vector's size", rows, columns);
    static_assert(v.bits() <= 1024);
    host::count(host::shuffle, host::groups(v.bits(), 512));
    vector<T, N> out;
    for (unsigned r = 0; r < rows; r++)
        for (unsigned c = 0; c < columns; c++) out.set(v.get(r * columns + c), c * rows + r);
    return out;
}

// Chunks of `step` lanes, one of a and one of b in turn: the first N lanes, and the rest.
template <class T, unsigned N>
std::pair<vector<T, N>, vector<T, N>> interleave_zip(const vector<T, N> &a, const vector<T, N> &b, unsigned step) {
    host::count(host::shuffle, 2);
    std::pair<vector<T, N>, vector<T, N>> out;
    for (unsigned i = 0; i < 2 * N; i++) {
        const unsigned chunk = i / step, lane = chunk / 2 * step + i % step;
        (i < N ? out.first : out.second).set(chunk % 2 ? b.get(lane) : a.get(lane), i % N);
    }
    return out;
}

// Lane i of the result is lane i + n; lanes that leave at the bottom come back at the top.
template <class T, unsigned N> vector<T, N> shuffle_down_rotate(const vector<T, N> &v, unsigned n) {
    host::count(host::shuffle, host::groups(v.bits(), 512));
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.set(v.get((i + n) % N), i);
    return out;
}

// Every second chunk of `step` lanes, from the first on.
template <class T, unsigned N> vector<T, N / 2> filter_even(const vector<T, N> &v, unsigned step = 1) {
    host::count(host::shuffle, host::groups(v.bits(), 512));
    vector<T, N / 2> out;
    for (unsigned i = 0; i < N / 2; i++) out.set(v.get(i / step * 2 * step + i % step), i);
    return out;
}

// a where the mask is 0, b where it is 1.
template <class T, unsigned N> vector<T, N> select(const vector<T, N> &a, const vector<T, N> &b, const mask<N> &m) {
    host::count(host::alu, host::groups(a.bits(), 512));
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.set(m.test(i) ? b.get(i) : a.get(i), i);
    return out;
}

} // namespace aie
