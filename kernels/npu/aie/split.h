// Products of float32 vectors on a core that multiplies bfloat16 only: a float32 is the sum of three bfloat16 parts.
#pragma once

#include <aie_api/aie.hpp>

template <unsigned N> struct parts {
    aie::vector<bfloat16, N> hi, mid, lo;
};

// The parts add up to x exactly (8 bits of it each), given rounding to nearest.
template <unsigned N> inline parts<N> split(const aie::vector<float, N> &x) {
    parts<N> p;
    aie::accum<accfloat, N> rest(x);
    p.hi = rest.template to_vector<bfloat16>();
    rest = aie::sub(rest, p.hi);
    p.mid = rest.template to_vector<bfloat16>();
    rest = aie::sub(rest, p.mid);
    p.lo = rest.template to_vector<bfloat16>();
    return p;
}

// a * b, relative error below 2^-21: of the nine products the three smallest are left out, the others are added smallest first.
template <unsigned N> inline aie::accum<accfloat, N> product(const parts<N> &a, const parts<N> &b) {
    aie::accum<accfloat, N> acc = aie::mul(a.lo, b.hi);
    acc = aie::mac(acc, a.hi, b.lo);
    acc = aie::mac(acc, a.mid, b.mid);
    acc = aie::mac(acc, a.mid, b.hi);
    acc = aie::mac(acc, a.hi, b.mid);
    return aie::mac(acc, a.hi, b.hi);
}
