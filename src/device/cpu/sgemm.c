#include "device/cpu/sgemm.h"

#include <assert.h>
#include <cblas.h>

#include "device/cpu/cpu.h"

void fb_cpu_blas_init(void)
{
    scipy_openblas_set_num_threads(1);
}

void fb_sgemm_openblas(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add,
                       float *c, uint64_t c_ld)
{
    assert(rows <= INT32_MAX && cols <= INT32_MAX && depth <= INT32_MAX); /* OpenBLAS counts in int */
    assert(a.ld <= INT32_MAX && b.ld <= INT32_MAX && c_ld <= INT32_MAX);
    scipy_cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans,
                      (blasint)rows, (blasint)cols, (blasint)depth, 1.0f, a.base, (blasint)a.ld, b.base, (blasint)b.ld,
                      add ? 1.0f : 0.0f, c, (blasint)c_ld);
}

void fb_sgemm(uint32_t rows, uint32_t cols, uint32_t depth, fb_sgemm_operand a, fb_sgemm_operand b, bool add, float *c,
              uint64_t c_ld, float *room)
{
    if (fb_sgemm_avx512_runs_here())
        fb_sgemm_avx512(rows, cols, depth, a, b, add, c, c_ld, room);
    else
        fb_sgemm_openblas(rows, cols, depth, a, b, add, c, c_ld);
}
