// attention.cc as a design feeds it: positions ride behind the query tile, since a core has no other way in left.
// A core's two incoming channels bring query tiles and, in turn, tiles of keys and values. Behind the LQ x D queries lie 16
// int32: position of the tile's first row, positions in the cache, window. The key tile's position is counted here.
#include "attention.cc"

extern "C" {

void attention_stream_start(float *o, bfloat16 *m, float *l, int32 *count) {
    start(o, m, l);
    count[0] = 0;
}

void attention_stream_tile(const bfloat16 *q, const bfloat16 *k, const bfloat16 *v, float *o, bfloat16 *m, float *l, float *s,
                           bfloat16 *p, int32 *count) {
    const int32 *head = reinterpret_cast<const int32 *>(q + LQ * DIM_D);
    attention_tile(q, k, v, o, m, l, s, p, head[0], count[0], head[1], head[2]);
    count[0] += LK;
}

void attention_stream_finish(const float *o, const float *l, bfloat16 *out) { finish(o, l, out); }

} // extern "C"
