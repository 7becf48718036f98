// Table look-up through four copies of a table. Included by aie_api/aie.hpp.
//
// A table of n values is stored twice (ab, cd: two memory banks), each with every 16-byte line twice in a row, so that four
// lanes read at once: lane i reads copy i % 4. A copy that differs from its siblings therefore shows in every fourth lane.
#pragma once

#include "arith.hpp"

namespace aie {

enum class lut_oor_policy { saturate, truncate };

template <unsigned Parallel, class Offset, class Slope = Offset> struct lut {
    static_assert(Parallel == 4 && std::is_same_v<Offset, bfloat16> && std::is_same_v<Slope, bfloat16>,
                  "aie::lut: the host has look-ups of bfloat16 values from four copies, as the NPU's exp uses");
    const bfloat16 *ab, *cd;
    unsigned elements;
    lut(unsigned elements_, const void *ab_, const void *cd_)
        : ab(static_cast<const bfloat16 *>(ab_)), cd(static_cast<const bfloat16 *>(cd_)), elements(elements_) {
        host::aligned(ab, 256, "aie::lut: table ab is %llu bytes beyond a multiple of %llu");
        host::aligned(cd, 256, "aie::lut: table cd is %llu bytes beyond a multiple of %llu");
        if (elements % 8 || (elements & (elements - 1))) host::fail("aie::lut: %llu values: not a power of two of at least 8", elements);
    }
};

// fetch(keys): values at index key / 2^step_bits; indices beyond the table wrap. The division is a shift-round of the
// accumulator, so it obeys the tile's rounding mode, as on the core: set floor before fetch.
template <class Key, class Lut, lut_oor_policy policy> class parallel_lookup;
template <class Key, class Lut> class parallel_lookup<Key, Lut, lut_oor_policy::truncate> {
    static_assert(std::is_same_v<Key, uint16>, "aie::parallel_lookup: the host has keys of uint16");
    Lut table;
    int step;

public:
    explicit parallel_lookup(const Lut &table_, unsigned step_bits = 0) : table(table_), step(static_cast<int>(step_bits)) {}

    template <unsigned N> vector<bfloat16, N> fetch(const vector<uint16, N> &keys) const {
        static_assert(N == 16 || N == 32, "aie::parallel_lookup: 16 or 32 lanes at a time");
        host::count(host::lookup, N / 16);
        constexpr int offset = 2; // the address counts quarters of a value
        vector<bfloat16, N> out;
        for (unsigned i = 0; i < N; i++) {
            const int64 address = host::shift_round(keys.get(i), step - offset) & ((int64{table.elements} << offset) - 1);
            const auto element = static_cast<unsigned>(address >> offset);
            const unsigned line = element / 8 * 16 + i % 2 * 8 + element % 8;
            out.set((i % 4 < 2 ? table.ab : table.cd)[line], i);
        }
        return out;
    }
};

} // namespace aie
