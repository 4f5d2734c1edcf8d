/* sgemm_avx512.c - C (+)= A B for processors with AVX-512.
 *
 * The scheme is Goto & van de Geijn 2008: a block of B, FB_SGEMM_DEPTH deep, is packed into panels of 32 columns, which
 * stay in the second-level cache; a strip of 14 rows of A stays in the first; their product, 14 x 32, is summed in 28
 * of the 32 registers.  A is read where it lies when its rows are contiguous over depth; stored transposed, every step
 * would touch another page, so it is packed into strips.
 * The sum over one block starts from zero and is then added to C: a sum of sums, which also errs less. */
#include "device/cpu/sgemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define AVX512_INLINE static inline __attribute__((always_inline, target("avx512f")))

enum {
    ROWS = FB_SGEMM_ROWS, COLS = FB_SGEMM_COLS,
    STRIP = 16,      /* floats a step of a packed strip takes: one vector */
    PACK_DEPTH = 32, /* steps packed at a time */
};

bool fb_sgemm_avx512_runs_here(void)
{
    return __builtin_cpu_supports("avx512f");
}

/* The first n of 16 lanes, n beyond 16 meaning all. */
static inline __mmask16 first_lanes(uint32_t n)
{
    return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1);
}

/* to[k * COLS + i] = from[i * ld + k] for i < 16, k < n_k <= 16; rows i >= n_row read as zeros. */
AVX512_INLINE void transpose_16(const float *from, uint64_t ld, uint32_t n_row, uint32_t n_k, float *to)
{
    __m512 a[16], b[16];
    __mmask16 mask = first_lanes(n_k);
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 16; i++)
        a[i] = i < n_row ? _mm512_maskz_loadu_ps(mask, from + i * ld) : _mm512_setzero_ps();
    /* Pairs of rows, then of pairs, then of quads, then of octets: 2x2, 4x4, 8x8, 16x16 blocks are transposed. */
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        __m512d b0 = _mm512_castps_pd(b[i]), b1 = _mm512_castps_pd(b[i + 1]);
        __m512d b2 = _mm512_castps_pd(b[i + 2]), b3 = _mm512_castps_pd(b[i + 3]);
        a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(b0, b2));
        a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(b0, b2));
        a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b1, b3));
        a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b1, b3));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
    }
#pragma GCC unroll 16
    for (uint32_t k = 0; k < 16; k++)
        if (k < n_k)
            _mm512_store_ps(to + k * COLS, a[k]);
}

/* Panels [depth, COLS] from B stored [cols, depth]; columns beyond cols are zero. */
AVX512 static void pack_b_transposed(const float *b, uint64_t ld, uint32_t depth, uint32_t cols, float *to)
{
    for (uint32_t c = 0; c < cols; c += COLS, to += (uint64_t)depth * COLS) {
        for (uint32_t half = 0; half < COLS; half += 16) {
            uint32_t n = cols - c > half ? cols - c - half : 0, k = 0;
            const float *from = b + (c + (uint64_t)half) * ld;
            if (n >= 16)
                for (; k + 16 <= depth; k += 16)
                    transpose_16(from + k, ld, 16, 16, to + k * COLS + half);
            for (; k < depth; k += 16)
                transpose_16(from + k, ld, n, depth - k < 16 ? depth - k : 16, to + k * COLS + half);
        }
    }
}

/* The same from B stored [depth, cols].  A few steps of depth at a time: all of them would touch a page each, one at a
 * time would write lines that lie a multiple of 4 KiB apart and so share a set of the first-level cache. */
AVX512 static void pack_b(const float *b, uint64_t ld, uint32_t depth, uint32_t cols, float *to)
{
    for (uint32_t first = 0; first < depth; first += PACK_DEPTH) {
        uint32_t end = depth - first < PACK_DEPTH ? depth : first + PACK_DEPTH;
        float *panel = to;
        for (uint32_t c = 0; c < cols; c += COLS, panel += (uint64_t)depth * COLS) {
            __mmask16 left = first_lanes(cols - c), right = first_lanes(cols - c > 16 ? cols - c - 16 : 0);
            for (uint32_t k = first; k < end; k++) {
                _mm512_store_ps(panel + k * COLS, _mm512_maskz_loadu_ps(left, b + k * ld + c));
                _mm512_store_ps(panel + k * COLS + 16, _mm512_maskz_loadu_ps(right, b + k * ld + c + 16));
            }
        }
    }
}

/* Strips [depth, STRIP] of ROWS rows each from A stored [depth, rows], likewise. */
AVX512 static void pack_a_transposed(const float *a, uint64_t ld, uint32_t depth, uint32_t rows, float *to)
{
    for (uint32_t first = 0; first < depth; first += PACK_DEPTH) {
        uint32_t end = depth - first < PACK_DEPTH ? depth : first + PACK_DEPTH;
        float *strip = to;
        for (uint32_t r = 0; r < rows; r += ROWS, strip += (uint64_t)depth * STRIP) {
            __mmask16 lanes = first_lanes(rows - r < ROWS ? rows - r : ROWS);
            for (uint32_t k = first; k < end; k++)
                _mm512_store_ps(strip + k * STRIP, _mm512_maskz_loadu_ps(lanes, a + k * ld + r));
        }
    }
}

/* C[rows, COLS] (+)= A B for rows <= ROWS, a constant wherever this is inlined.  Row r, step k of A is at
 * a[r * row + k * step].  Five pointers and small multiples of row reach 14 rows with x86's addressing. */
AVX512_INLINE void block(uint32_t rows, uint32_t depth, const float *a, uint64_t row, uint64_t step, const float *panel,
                         bool add, float *c, uint64_t c_ld, __mmask16 left, __mmask16 right)
{
    const float *a0 = a, *a3 = a + 3 * row, *a6 = a + 6 * row, *a9 = a + 9 * row, *a12 = a + 12 * row;
    __m512 sum[ROWS][2];
#pragma GCC unroll 14
    for (uint32_t r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (uint32_t k = 0; k < depth; k++) {
        __m512 b0 = _mm512_load_ps(panel), b1 = _mm512_load_ps(panel + 16);
#pragma GCC unroll 14
        for (uint32_t r = 0; r < rows; r++) {
            const float *from = r < 3 ? a0 : r < 6 ? a3 : r < 9 ? a6 : r < 12 ? a9 : a12;
            __m512 v = _mm512_set1_ps(from[r % 3 * row]);
            sum[r][0] = _mm512_fmadd_ps(v, b0, sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(v, b1, sum[r][1]);
        }
        panel += COLS;
        a0 += step, a3 += step, a6 += step, a9 += step, a12 += step;
    }
#pragma GCC unroll 14
    for (uint32_t r = 0; r < rows; r++) {
        float *to = c + r * c_ld;
        if (add) {
            sum[r][0] = _mm512_add_ps(_mm512_maskz_loadu_ps(left, to), sum[r][0]);
            sum[r][1] = _mm512_add_ps(_mm512_maskz_loadu_ps(right, to + 16), sum[r][1]);
        }
        _mm512_mask_storeu_ps(to, left, sum[r][0]);
        _mm512_mask_storeu_ps(to + 16, right, sum[r][1]);
    }
}

AVX512 void fb_sgemm_avx512(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add,
                            float *c, uint64_t c_ld, float *room)
{
    uint64_t n_panel = ((uint64_t)cols + COLS - 1) / COLS;
    for (uint32_t d = 0; d < depth; d += FB_SGEMM_DEPTH) {
        uint32_t n = depth - d < FB_SGEMM_DEPTH ? depth - d : FB_SGEMM_DEPTH;
        float *panels = room, *strips = room + n_panel * n * COLS;
        if (b.transposed)
            pack_b_transposed(b.base + d, b.ld, n, cols, panels);
        else
            pack_b(b.base + d * b.ld, b.ld, n, cols, panels);
        if (a.transposed)
            pack_a_transposed(a.base + d * a.ld, a.ld, n, rows, strips);

        bool plus = add || d > 0;
        for (uint32_t r = 0; r < rows; r += ROWS) {
            const float *strip = a.transposed ? strips + (uint64_t)(r / ROWS) * n * STRIP : a.base + r * a.ld + d;
            uint64_t row = a.transposed ? 1 : a.ld, step = a.transposed ? STRIP : 1;
            uint32_t n_row = rows - r < ROWS ? rows - r : ROWS;
            for (uint32_t j = 0; j < cols; j += COLS) {
                const float *panel = panels + (uint64_t)j * n;
                float *to = c + r * c_ld + j;
                __mmask16 left = first_lanes(cols - j), right = first_lanes(cols - j > 16 ? cols - j - 16 : 0);
                switch (n_row) {
#define BLOCK(count) case count: block(count, n, strip, row, step, panel, plus, to, c_ld, left, right); break;
                BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6) BLOCK(7)
                BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12) BLOCK(13) BLOCK(14)
                }
            }
        }
    }
}

#else

bool fb_sgemm_avx512_runs_here(void)
{
    return false;
}

void fb_sgemm_avx512(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add,
                     float *c, uint64_t c_ld, float *room)
{
    (void)room;
    fb_sgemm_openblas(rows, cols, depth, a, b, add, c, c_ld);
}
#endif
