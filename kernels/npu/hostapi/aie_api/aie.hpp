// A subset of AMD's aie_api in portable C++17, so that the kernels of ../aie run on any computer. Written from the interface's
// documentation; nothing of AMD's sources is in it.
//
// The same kernel source is compiled by the NPU's compiler against the real header: the include path decides, no #ifdef.
//   has      vector, mask, load_v, store_v, broadcast, zeros, concat, transpose, interleave_zip, shuffle_down_rotate, select;
//            accum (acc32, acc64, accfloat) with shift-round-saturate; add, sub, neg, max, min, mul, mac, msc, mul_square;
//            reduce_add, reduce_max, reduce_min; to_fixed, to_float, inv; mmul in native shapes; lut, parallel_lookup;
//            set_rounding, set_saturation (a tile starts in floor and without saturation)
//   refuses  what XDNA1 lacks, at compile time (other mmul shapes, exp2, tanh, invsqrt, float32 vector multiply and compare, other
//            register widths), and misaligned vectors at run time
//   counts   instructions by unit (types.hpp, counter), for the cycle model
// Not modelled: time, register pressure, the program memory's size.
#pragma once

#include "types.hpp"
#include "vector.hpp"
#include "accum.hpp"
#include "arith.hpp"
#include "mmul.hpp"
#include "lut.hpp"
#include "refused.hpp"
