// What aie_api has and XDNA1 lacks: naming it is a compile error that says what to do. Included by aie_api/aie.hpp.
#pragma once

#include "types.hpp"

namespace aie {

template <class... Args> void exp2(const Args &...) {
    static_assert(host::never<Args...>, "aie::exp2: no such instruction on XDNA1 (XDNA2 has it): use the tables of exp2_table.h");
}
template <class... Args> void tanh(const Args &...) {
    static_assert(host::never<Args...>, "aie::tanh: no such instruction on XDNA1 (XDNA2 has it): use tables");
}
template <class... Args> float invsqrt(const Args &...) {
    static_assert(host::never<Args...>, "aie::invsqrt: it calls sqrtf, which XDNA1's C library lacks: no core links; iterate");
    return 0;
}
template <class... Args> void load_unaligned_v(const Args &...) {
    static_assert(host::never<Args...>, "aie::load_unaligned_v: not in the subset: lay the data out in aligned vectors");
}

} // namespace aie
