/* sgemm.h - the product of two float32 matrices on the calling thread: what one tile of a matmul kernel is.
 *
 * OpenBLAS does it on any processor; where there is AVX-512, our own kernel does.  OpenBLAS packs both operands at every
 * call, which tiles smaller than whole matrices do not repay; ours reads the rows of A in place.  At 518 x 288 tiles and
 * SmolLM2's shapes one Sapphire Rapids core of a busy machine made 111-140 GFLOP/s with OpenBLAS, 142-167 with ours
 * (interleaved, best of 10).
 * Which of the two runs depends on the processor alone. */
#ifndef FB_DEVICE_CPU_SGEMM_H
#define FB_DEVICE_CPU_SGEMM_H

#include <stdbool.h>
#include <stdint.h>

/* Of A [rows, depth] or B [depth, cols]; transposed: stored as [depth, rows] or [cols, depth]. */
typedef struct fb_sgemm_operand {
    const float *base;
    uint64_t     ld;
    bool         transposed;
} fb_sgemm_operand;

enum {
    FB_SGEMM_ROWS = 14, FB_SGEMM_COLS = 32, /* the block that stays in registers: sizes of tiles are best multiples */
    FB_SGEMM_DEPTH = 384,                   /* summed in registers at a time */
};

/* Floats of room that a product needs, 64-byte aligned. */
static inline uint64_t fb_sgemm_room(uint32_t rows, uint32_t cols)
{
    uint64_t strips = ((uint64_t)rows + FB_SGEMM_ROWS - 1) / FB_SGEMM_ROWS;
    uint64_t panels = ((uint64_t)cols + FB_SGEMM_COLS - 1) / FB_SGEMM_COLS;
    return FB_SGEMM_DEPTH * (strips * 16 + panels * FB_SGEMM_COLS);
}

/* C = A B, or C += A B when add.  c [rows, cols] is not read unless add.  The order in which an element is summed depends
 * on the three sizes alone, so its bits depend on its row of A and its column of B only. */
void fb_sgemm(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add, float *c,
              uint64_t c_ld, float *room);

/* The two behind it. */
void fb_sgemm_openblas(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add,
                       float *c, uint64_t c_ld);
bool fb_sgemm_avx512_runs_here(void);
void fb_sgemm_avx512(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add,
                     float *c, uint64_t c_ld, float *room);

#endif
