/* cuBLAS: products are logged with their shapes, and computed by nobody. cuDNN is refused. */
#include "mock.h"

#include <cublasLt.h>
#include <cublas_v2.h>

struct handle {
    cudaStream_t stream;
};

static cublasStatus_t product(cudaStream_t stream, const char *what)
{
    if (mock_enter("a product of cuBLAS"))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    pthread_mutex_lock(&mock_lock);
    mock_enqueue(stream, (struct op){0}, "%s", what);
    pthread_mutex_unlock(&mock_lock);
    return CUBLAS_STATUS_SUCCESS;
}

/* By how many bytes an address is beyond one that a multiple of 16 divides: what vector loads want is 0. */
static unsigned misaligned(const void *address)
{
    return (uintptr_t)address % 16;
}

static char letter(cublasOperation_t operation)
{
    return operation == CUBLAS_OP_N ? 'N' : 'T';
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle)
{
    if (mock_enter(__func__))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof(struct handle));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    ((struct handle *)handle)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode)
{
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode)
{
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int count)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType a_type, int lda, const void *b, cudaDataType b_type, int ldb, const void *beta, void *c,
    cudaDataType c_type, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm)
{
    char what[256];
    snprintf(what, sizeof what, "gemm %c%c m %d n %d k %d ld %d %d %d types %d %d %d misaligned %u %u %u", letter(ta),
             letter(tb), m, n, k, lda, ldb, ldc, a_type, b_type, c_type, misaligned(a), misaligned(b), misaligned(c));
    return product(((struct handle *)handle)->stream, what);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType a_type, int lda, long long a_stride, const void *b, cudaDataType b_type, int ldb,
    long long b_stride, const void *beta, void *c, cudaDataType c_type, int ldc, long long c_stride, int count,
    cublasComputeType_t compute, cublasGemmAlgo_t algorithm)
{
    char what[256];
    snprintf(what, sizeof what, "gemm %c%c m %d n %d k %d ld %d %d %d types %d %d %d misaligned %u %u %u count %d",
             letter(ta), letter(tb), m, n, k, lda, ldb, ldc, a_type, b_type, c_type, misaligned(a), misaligned(b),
             misaligned(c), count);
    return product(((struct handle *)handle)->stream, what);
}

cublasStatus_t cublasSgemm_v2(
    cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha,
    const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc)
{
    return cublasGemmEx(handle, ta, tb, m, n, k, alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb, beta, c, CUDA_R_32F,
                        ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasSgemmStridedBatched(
    cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha,
    const float *a, int lda, long long a_stride, const float *b, int ldb, long long b_stride, const float *beta,
    float *c, int ldc, long long c_stride, int count)
{
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, CUDA_R_32F, lda, a_stride, b, CUDA_R_32F, ldb,
                                      b_stride, beta, c, CUDA_R_32F, ldc, c_stride, count, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasDgemm_v2(
    cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double *alpha,
    const double *a, int lda, const double *b, int ldb, const double *beta, double *c, int ldc)
{
    return cublasGemmEx(handle, ta, tb, m, n, k, alpha, a, CUDA_R_64F, lda, b, CUDA_R_64F, ldb, beta, c, CUDA_R_64F,
                        ldc, CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasDgemmStridedBatched(
    cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double *alpha,
    const double *a, int lda, long long a_stride, const double *b, int ldb, long long b_stride, const double *beta,
    double *c, int ldc, long long c_stride, int count)
{
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, CUDA_R_64F, lda, a_stride, b, CUDA_R_64F, ldb,
                                      b_stride, beta, c, CUDA_R_64F, ldc, c_stride, count, CUBLAS_COMPUTE_64F,
                                      CUBLAS_GEMM_DEFAULT);
}

/* --- cuBLASLt ----------------------------------------------------------------------------------------------------- */

struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
    int32_t batch;
};

/* torch keeps these structures in its own memory, in the words of the public types. */
_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "a layout has to fit into cuBLASLt's");

cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld)
{
    struct layout *created = malloc(sizeof *created);
    *created = (struct layout){type, rows, columns, ld, 1};
    *layout = (cublasLtMatrixLayout_t)created;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes)
{
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        memcpy(&((struct layout *)layout)->batch, value, sizeof(int32_t));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t *description, cublasComputeType_t compute, cudaDataType scale)
{
    *description = calloc(1, sizeof(cublasLtMatmulDescOpaque_t));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description)
{
    free(description);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = calloc(1, sizeof(cublasLtMatmulPreferenceOpaque_t));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
    size_t bytes)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int requested,
    cublasLtMatmulHeuristicResult_t results[], int *count)
{
    memset(results, 0, sizeof *results);
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha, const void *a,
    cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
    cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm,
    void *workspace, size_t bytes, cudaStream_t stream)
{
    const struct layout *la = (void *)a_layout, *lb = (void *)b_layout, *ld = (void *)d_layout;
    char what[256];
    snprintf(what, sizeof what,
             "gemm lt a %lux%lu b %lux%lu d %lux%lu ld %ld %ld %ld types %d %d %d misaligned %u %u %u count %d",
             la->rows, la->columns, lb->rows, lb->columns, ld->rows, ld->columns, la->ld, lb->ld, ld->ld, la->type,
             lb->type, ld->type, misaligned(a), misaligned(b), misaligned(d), ld->batch);
    return product(stream, what);
}

size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

/* --- cuDNN -------------------------------------------------------------------------------------------------------- */

/* Of torch's attention backends cuDNN's is not modelled. Whoever lets torch choose it sees that it is refused. */
int cudnnCreate(void **handle)
{
    *handle = NULL;
    mock_report("REFUSED cudnnCreate");
    return 1001; /* CUDNN_STATUS_NOT_INITIALIZED */
}
