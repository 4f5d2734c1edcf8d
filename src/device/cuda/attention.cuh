/* attention.cuh - what the own attention kernels share: how the tokens are cut into tiles, and who sees whom.
 *
 * The spans lie in device memory, so the host knows neither the documents' lengths nor their number of tiles.  It
 * launches the most that there can be, and every block finds its own: document s, whose first query is q_start, has
 * the numbers from q_start / rows + s.  As the documents lie end to end, in order, those of one document end before those
 * of the next begin, for ceil(n / r) <= floor((a + n) / r) - floor(a / r) + 1; a number that is left over has no tile. */
#ifndef FB_DEVICE_CUDA_ATTENTION_CUH
#define FB_DEVICE_CUDA_ATTENTION_CUH

extern "C" {
#include "device/kernels.h"
}

typedef struct att_tile {
    fb_span  span;
    uint32_t first; /* row of the document */
    uint32_t n;     /* rows, 0: no tile has this number */
} att_tile;

/* The most tiles of `rows` tokens that n_span documents of t tokens together can have. */
inline uint64_t att_tile_count(uint32_t t, uint32_t n_span, uint32_t rows)
{
    return (uint64_t)t / rows + n_span;
}

/* All threads of the block call this. */
__device__ __forceinline__ att_tile att_find_tile(const fb_attention &a, uint32_t number, uint32_t rows)
{
    /* The first numbers ascend, so that the documents up to ours are those whose first number is not above it. */
    uint32_t n_before = 0;
    for (uint32_t base = 0; base < a.n_span; base += blockDim.x) {
        uint32_t s = base + threadIdx.x;
        uint32_t n = __syncthreads_count(s < a.n_span && a.span[s].q_start / rows + s <= number);
        n_before += n;
        if (n < blockDim.x)
            break;
    }
    att_tile tile = {};
    if (n_before == 0)
        return tile;
    uint32_t s = n_before - 1;
    tile.span = a.span[s];
    tile.first = (number - (tile.span.q_start / rows + s)) * rows;
    if (tile.first < tile.span.q_len)
        tile.n = min(rows, tile.span.q_len - tile.first);
    return tile;
}

/* The first key that the query at `position` sees. */
__device__ __forceinline__ uint32_t att_first_key(uint32_t window, uint32_t position)
{
    return window != 0 && position >= window ? position - window + 1 : 0;
}

/* One past the last query, of n, that sees the key at `position`. */
__device__ __forceinline__ uint32_t att_query_end(uint32_t window, uint32_t position, uint32_t n)
{
    return window != 0 && window < n - position ? position + window : n;
}

/* position: of the query.  Both count from the document's first key. */
__device__ __forceinline__ bool att_sees(uint32_t window, uint32_t position, uint32_t key)
{
    return key <= position && (window == 0 || position - key < window);
}

#endif
