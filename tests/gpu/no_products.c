/* no_products.c - stands in for cuBLASLt, and computes nothing (tests/gpu/sanitize.sh preloads it).
 *
 * It leaves a run with our kernels alone.  racecheck takes six minutes to instrument cuBLASLt's, and then reports hazards in
 * them (nvjet_sm90_*), since it does not follow the barriers of bulk copies.  What such a run computes is worthless; where its
 * threads read and write follows from shapes, and is what it always is. */
#include <cublasLt.h>
#include <string.h>

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    static char nobody;
    *handle = (cublasLtHandle_t)(void *)&nobody;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    (void)handle;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    (void)status;
    return "no products";
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_size, cudaStream_t stream)
{
    (void)handle, (void)product, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout, (void)beta, (void)c, (void)c_layout;
    (void)d, (void)d_layout, (void)algo, (void)workspace, (void)workspace_size, (void)stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result)
{
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d;
    *result = (cublasLtMatmulHeuristicResult_t){ .algo = *algo };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_max,
                                              cublasLtMatmulHeuristicResult_t results[], int *n)
{
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)n_max;
    results[0] = (cublasLtMatmulHeuristicResult_t){ 0 };
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t product, size_t size, cublasComputeType_t compute,
                                               cudaDataType_t scale)
{
    (void)compute, (void)scale;
    memset((void *)product, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size)
{
    (void)product, (void)attribute, (void)value, (void)size;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size)
{
    memset((void *)preference, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size)
{
    (void)preference, (void)attribute, (void)value, (void)size;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size, cudaDataType_t type, uint64_t rows,
                                                 uint64_t cols, int64_t ld)
{
    (void)type, (void)rows, (void)cols, (void)ld;
    memset((void *)layout, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}
