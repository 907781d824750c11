/* The driver's own entry points: for Triton's launcher, and the few that torch asks the runtime for. */
#include "mock.h"

#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#define ENTER_DRIVER()                                        \
    do {                                                      \
        CUresult entered = (CUresult)mock_enter(__func__);    \
        if (entered) return entered;                          \
    } while (0)

static int context; /* there is one, and nothing in it */

CUresult cuInit(unsigned flags)
{
    ENTER_DRIVER();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER_DRIVER();
    return (CUresult)cudaGetDeviceCount(count);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER_DRIVER();
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    ENTER_DRIVER();
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device); /* the same numbers */
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER_DRIVER();
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device)
{
    ENTER_DRIVER();
    *retained = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *current)
{
    ENTER_DRIVER();
    *current = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext current)
{
    ENTER_DRIVER();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER_DRIVER();
    *device = mock_device();
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* Only what a kernel may read has an address there: Triton's launcher refuses what this refuses. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
    ENTER_DRIVER();
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        return mock_unmodelled("cuPointerGetAttribute of another attribute", CUDA_ERROR_NOT_SUPPORTED);
    pthread_mutex_lock(&mock_lock);
    enum place place = mock_place((void *)address, NULL);
    pthread_mutex_unlock(&mock_lock);
    *(CUdeviceptr *)data = address;
    return place == PAGEABLE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* --- Triton's kernels --------------------------------------------------------------------------------------------- */

/* A module is its binary, a function its name. */
CUresult cuModuleLoadData(CUmodule *module, const void *binary)
{
    ENTER_DRIVER();
    *module = (CUmodule)&context;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    ENTER_DRIVER();
    if (access(path, R_OK)) return CUDA_ERROR_FILE_NOT_FOUND;
    *module = (CUmodule)&context;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module)
{
    ENTER_DRIVER();
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    ENTER_DRIVER();
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    ENTER_DRIVER();
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    ENTER_DRIVER();
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    ENTER_DRIVER();
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, dim3 grid, dim3 block, unsigned shared, CUstream stream)
{
    char name[512];
    snprintf(name, sizeof name, "triton:%s", (const char *)function);
    if (grid.y > 65535 || grid.z > 65535) {
        mock_report("ILLEGAL launch of %s grid %u,%u,%u", name, grid.x, grid.y, grid.z);
        return CUDA_ERROR_INVALID_VALUE;
    }
    mock_launch(name, grid, block, shared, (cudaStream_t)stream);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra)
{
    ENTER_DRIVER();
    dim3 grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    dim3 block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    return launch(function, grid, block, config->sharedMemBytes, config->hStream);
}

/* As torch.compile launches its own. */
CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **extra)
{
    ENTER_DRIVER();
    return launch(function, (dim3){grid_x, grid_y, grid_z}, (dim3){block_x, block_y, block_z}, shared, stream);
}

/* --- what is asked for by name ------------------------------------------------------------------------------------ */

static int unmodelled_entry(void)
{
    return mock_unmodelled("a function of the driver that is logged as MISSING", CUDA_ERROR_NOT_SUPPORTED);
}

/* torch asks for all that it may need at once, so what is not modelled is told of when it is called. */
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result)
{
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) {
        mock_log("MISSING %s", name);
        *function = (void *)unmodelled_entry;
    }
    if (result)
        *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
