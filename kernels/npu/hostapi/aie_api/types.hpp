// Scalar types, modes of a tile, counters and traps of the host's aie_api. Included by aie_api/aie.hpp.
//
// Facts are those of AMD's aie_api for AIE2 (XDNA1); where the hardware's bits are not documented, the comment says what
// was chosen. A trap is an exception that the wrapper of an entry point turns into an error text.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

using int8 = std::int8_t;
using uint8 = std::uint8_t;
using int16 = std::int16_t;
using uint16 = std::uint16_t;
using int32 = std::int32_t;
using uint32 = std::uint32_t;
using int64 = std::int64_t;

// Four-bit lanes exist inside vectors only: two to a byte, the lower lane in the lower half.
struct int4 {};
struct uint4 {};

struct acc32 {};
struct acc64 {};
struct accfloat {};
struct accauto {};

inline void event0() {}
inline void event1() {}

namespace aie {

// How bits that are shifted out, or do not fit into bfloat16, round. A tile starts in floor.
enum class rounding_mode {
    floor, ceil, symmetric_floor, symmetric_ceil,                           // always down, up, to zero, from zero
    negative_inf, positive_inf, symmetric_zero, symmetric_inf, conv_even, conv_odd // to nearest; a tie goes this way
};
enum class saturation_mode { none, saturate, symmetric };

namespace host {

struct trap {
    std::string text;
};

[[noreturn]] inline void fail(const char *format, unsigned long long a = 0, unsigned long long b = 0) {
    char text[256];
    std::snprintf(text, sizeof text, format, a, b);
    throw trap{text};
}

// What a tile keeps between calls of its kernels.
struct modes {
    rounding_mode rounding = rounding_mode::floor;
    saturation_mode saturation = saturation_mode::none;
};
inline modes tile_modes;

// Instructions issued, by the unit that they occupy; names as kernels/npu/compile.py gives them.
enum counter { mac_i8, mac_i8i4, mac_i16, mac_bf16, mac_vector, load, store, srs, shuffle, lookup, alu, counters };
inline std::array<std::uint64_t, counters> counts{};
inline void count(counter what, unsigned n = 1) { counts[what] += n; }

constexpr unsigned groups(unsigned n, unsigned of) { return (n + of - 1) / of; }

template <class...> inline constexpr bool never = false;

template <class T> struct lane { static constexpr unsigned bits = 8 * sizeof(T); using scalar = T; };
template <> struct lane<int4> { static constexpr unsigned bits = 4; using scalar = int8; };
template <> struct lane<uint4> { static constexpr unsigned bits = 4; using scalar = uint8; };

template <class To, class From> To bit_cast(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Does a magnitude with a rest go up by one? `rest` against `half` and the parity of what is kept decide.
inline bool away(rounding_mode mode, bool negative, bool odd, std::uint64_t rest, std::uint64_t half) {
    if (rest == 0) return false;
    switch (mode) {
    case rounding_mode::floor: return negative;
    case rounding_mode::ceil: return !negative;
    case rounding_mode::symmetric_floor: return false;
    case rounding_mode::symmetric_ceil: return true;
    default: break;
    }
    if (rest != half) return rest > half;
    switch (mode) {
    case rounding_mode::negative_inf: return negative;
    case rounding_mode::positive_inf: return !negative;
    case rounding_mode::symmetric_zero: return false;
    case rounding_mode::symmetric_inf: return true;
    case rounding_mode::conv_even: return odd;
    default: return !odd; // conv_odd
    }
}

// x / 2^shift in the tile's rounding mode (a negative shift multiplies).
inline std::int64_t shift_round(std::int64_t x, int shift) {
    if (shift <= 0) return static_cast<std::int64_t>(static_cast<std::uint64_t>(x) << -shift);
    if (shift > 62) fail("aie: a shift of %llu is beyond the accumulator", static_cast<unsigned long long>(shift));
    const bool negative = x < 0;
    const std::uint64_t size = negative ? 0 - static_cast<std::uint64_t>(x) : static_cast<std::uint64_t>(x);
    const std::uint64_t kept = size >> shift, rest = size & ((std::uint64_t{1} << shift) - 1);
    const std::uint64_t up = away(tile_modes.rounding, negative, kept & 1, rest, std::uint64_t{1} << (shift - 1));
    const auto rounded = static_cast<std::int64_t>(kept + up);
    return negative ? -rounded : rounded;
}

// Into T as the tile's saturation mode says: none keeps the low bits.
template <class T> T saturate(std::int64_t x) {
    using limits = std::numeric_limits<T>;
    const std::int64_t high = limits::max();
    std::int64_t low = limits::min();
    if (tile_modes.saturation == saturation_mode::none) return static_cast<T>(x);
    if (tile_modes.saturation == saturation_mode::symmetric && limits::is_signed) low = -high;
    return static_cast<T>(x < low ? low : x > high ? high : x);
}

inline std::uint16_t round_bf16(float value) {
    const auto bits = bit_cast<std::uint32_t>(value);
    const std::uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | (size < 0x7f810000u)); // cut, but a NaN yet
    if (size == 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16);
    const bool negative = bits >> 31;
    const std::uint32_t up = away(tile_modes.rounding, negative, (size >> 16) & 1, size & 0xffff, 0x8000);
    return static_cast<std::uint16_t>((bits >> 31 << 15) | ((size >> 16) + up));
}

} // namespace host

inline void set_rounding(rounding_mode mode) { host::tile_modes.rounding = mode; }
inline rounding_mode get_rounding() { return host::tile_modes.rounding; }
inline void set_saturation(saturation_mode mode) { host::tile_modes.saturation = mode; }
inline saturation_mode get_saturation() { return host::tile_modes.saturation; }

} // namespace aie

// Conversion from float rounds in the tile's mode, as the core's instruction does.
class bfloat16 {
    std::uint16_t raw = 0;

public:
    bfloat16() = default;
    bfloat16(float value) : raw(aie::host::round_bf16(value)) {}
    bfloat16(double value) : bfloat16(static_cast<float>(value)) {}
    bfloat16(int value) : bfloat16(static_cast<float>(value)) {}
    static constexpr bfloat16 from_bits(std::uint16_t bits) {
        bfloat16 value;
        value.raw = bits;
        return value;
    }
    constexpr std::uint16_t bits() const { return raw; }
    operator float() const { return aie::host::bit_cast<float>(static_cast<std::uint32_t>(raw) << 16); }
};
static_assert(sizeof(bfloat16) == 2);

template <> class std::numeric_limits<bfloat16> {
public:
    static constexpr bool is_specialized = true, is_signed = true, is_integer = false;
    static constexpr bfloat16 lowest() { return bfloat16::from_bits(0xff7f); }
    static constexpr bfloat16 max() { return bfloat16::from_bits(0x7f7f); }
};
