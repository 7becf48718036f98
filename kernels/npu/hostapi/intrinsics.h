// Types of the NPU core's registers and keywords of its compilers, so that g++ can read aie_api (headers.py). Nothing here has
// a body: an intrinsic takes and returns anything, and only the calls of aie_api's own templates are checked.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#define chess_storage(...)
#define chess_copy(x) (x)
#define chess_unroll_loop(...)
#define chess_loop_range(...)
#define chess_loop_count(...)
#define chess_manifest(...) false
#define chess_const(...) false
#define chess_flatten_loop
#define chess_prepare_for_pipelining
#define chess_no_hw_loop
#define chess_dont_chain
#define chess_protect_access
#define property(...)
#define restrict __restrict
#define __aie_register_keep(...)
#define __aie_dm_resource_a
#define __aie_dm_resource_b
#define __aie_dm_resource_c
#define __aie_dm_resource_d
#define __aie_dm_resource_ab
#define __aie_dm_resource_ac
#define __aie_dm_resource_ad
#define __aie_dm_resource_bc
#define __aie_dm_resource_bd
#define __aie_dm_resource_cd
#define __aie_dm_resource_stack

enum class aie_dm_resource { none, a, b, c, d, ab, ac, ad, bc, bd, cd, stack };
template <class T> inline constexpr aie_dm_resource aie_dm_resource_get_v = aie_dm_resource::none;
template <class T, aie_dm_resource R> using aie_dm_resource_set_t = T;
template <class T> using aie_dm_resource_remove_t = std::remove_cv_t<T>;

struct any_value {
    template <class T> operator T() const;
    template <class T> any_value &operator=(T &&);
};
any_value operator|(any_value, unsigned long);
any_value operator&(any_value, unsigned long);
template <class T> any_value operator-(any_value, T &&);

template <class T> struct complex_of {
    T real, imag;
    complex_of() = default;
    constexpr complex_of(T r, T i = T()) : real(r), imag(i) {}
};
struct int4_t {
    signed char v;
    int4_t() = default;
    constexpr int4_t(int x) : v(static_cast<signed char>(x)) {}
    constexpr operator int() const { return v; }
};
struct uint4_t {
    unsigned char v;
    uint4_t() = default;
    constexpr uint4_t(int x) : v(static_cast<unsigned char>(x)) {}
    constexpr operator int() const { return v; }
};
struct bfloat16 {
    std::uint16_t v;
    bfloat16() = default;
    constexpr bfloat16(float) : v(0) {}
    constexpr bfloat16(any_value) : v(0) {}
    constexpr operator float() const { return 0; }
};
using cint16 = complex_of<std::int16_t>;
using cint32 = complex_of<std::int32_t>;
using cfloat = complex_of<float>;
using cbfloat16 = complex_of<bfloat16>;
using addr_t = unsigned;
void event0();
void event1();

// A register of N elements; the tag makes types of the same width differ.
template <class Tag, unsigned N, unsigned Bytes> struct reg {
    alignas(32) unsigned char raw[Bytes < 32 ? 32 : Bytes];
    reg() = default;
    reg(any_value) {}
    template <class T> explicit reg(T &&...);
    any_value operator[](unsigned) const;
};
#define REGISTER(type, n, bits) using v##n##type = reg<struct tag_##type, n, n * bits / 8>;
#define REGISTERS(type, bits)                                                                                                     \
    REGISTER(type, 2, bits)                                                                                                       \
    REGISTER(type, 4, bits)                                                                                                       \
    REGISTER(type, 8, bits)                                                                                                       \
    REGISTER(type, 16, bits)                                                                                                      \
    REGISTER(type, 32, bits)                                                                                                      \
    REGISTER(type, 64, bits)                                                                                                      \
    REGISTER(type, 128, bits)                                                                                                     \
    REGISTER(type, 256, bits)
REGISTERS(int4, 4)
REGISTERS(uint4, 4)
REGISTERS(int8, 8)
REGISTERS(uint8, 8)
REGISTERS(int16, 16)
REGISTERS(uint16, 16)
REGISTERS(int32, 32)
REGISTERS(uint32, 32)
REGISTERS(int64, 64)
REGISTERS(uint64, 64)
REGISTERS(float, 32)
REGISTERS(bfloat16, 16)
REGISTERS(cint16, 32)
REGISTERS(cint32, 64)
REGISTERS(cfloat, 64)
REGISTERS(cbfloat16, 32)
REGISTERS(acc32, 32)
REGISTERS(acc64, 64)
REGISTERS(accfloat, 32)
REGISTERS(cacc64, 128)
REGISTERS(caccfloat, 64)
// Sparse weights, which no kernel here has.
REGISTERS(int4_sparse, 4)
REGISTERS(int4_sparse_compress, 4)
REGISTERS(uint4_sparse, 4)
REGISTERS(uint4_sparse_compress, 4)
REGISTERS(int8_sparse, 8)
REGISTERS(int8_sparse_compress, 8)
REGISTERS(uint8_sparse, 8)
REGISTERS(uint8_sparse_compress, 8)
REGISTERS(int16_sparse, 16)
REGISTERS(int16_sparse_compress, 16)
REGISTERS(uint16_sparse, 16)
REGISTERS(uint16_sparse_compress, 16)
REGISTERS(bfloat16_sparse, 16)
REGISTERS(bfloat16_sparse_compress, 16)
// Accumulators by tag.
struct acc16 {};
struct acc24 {};
struct acc32 {};
struct acc40 {};
struct acc48 {};
struct acc56 {};
struct acc64 {};
struct accfloat {};
struct cacc16 {};
struct cacc24 {};
struct cacc32 {};
struct cacc40 {};
struct cacc48 {};
struct cacc56 {};
struct cacc64 {};
struct caccfloat {};
