/* Kernels: their names, and their launches, which do nothing. Only torch's fill writes its value. */
#include "mock.h"

/* --- names, which each library registers when it is loaded -------------------------------------------------------- */

#define TABLE (1 << 20) /* torch registers some 200,000 */

static struct { const void *function; const char *name; } *names;

static size_t slot_of(const void *function)
{
    size_t slot = ((uintptr_t)function >> 2) % TABLE;
    while (names[slot].function && names[slot].function != function)
        slot = (slot + 1) % TABLE;
    return slot;
}

static const char *kernel_name(const void *function)
{
    const char *name = names ? names[slot_of(function)].name : NULL;
    return name ? name : "unknown";
}

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}

void __cudaUnregisterFatBinary(void **handle) {}

void __cudaRegisterVar(
    void **handle, char *variable, char *address, const char *name, int external, size_t size, int constant, int global)
{
}

void __cudaRegisterFunction(
    void **handle, const char *function, char *device_function, const char *name, int threads, uint3 *thread_id,
    uint3 *block_id, dim3 *block, dim3 *grid, int *warp_size)
{
    if (!names)
        names = calloc(TABLE, sizeof *names);
    size_t slot = slot_of(function);
    names[slot].function = function;
    names[slot].name = name;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    ENTER();
    *address = calloc(1, 4096); /* nothing reads it, as kernels do nothing */
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(
    const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind)
{
    ENTER();
    return cudaSuccess;
}

/* --- launches ----------------------------------------------------------------------------------------------------- */

void mock_launch(const char *name, dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    pthread_mutex_lock(&mock_lock);
    mock_enqueue(stream, (struct op){0}, "kernel %s grid %u,%u,%u block %u,%u,%u shared %zu",
                 name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
    pthread_mutex_unlock(&mock_lock);
}

/* Bytes of an element that torch's fill kernel writes, from the mangled type that follows its name; 0 if unknown. */
static size_t element_bytes(const char *type)
{
    switch (*type) {
    case 'd': case 'l': return 8;
    case 'f': case 'i': return 4;
    case 's': return 2;
    case 'h': case 'a': case 'b': return 1;
    default: return !strncmp(type, "N3c108BFloat16E", 15) || !strncmp(type, "N3c104HalfE", 11) ? 2 : 0;
    }
}

/* torch's vectorized_elementwise_kernel<n, FillFunctor<T>, std::array<char*, 1>>(int count, FillFunctor<T> value,
   std::array<char*, 1> data). Returns whether it is that. */
static bool launch_fill(const char *name, void **arguments, cudaStream_t stream)
{
    static const char functor[] = "11FillFunctorI";
    const char *type = strstr(name, functor);
    if (!type || !strstr(name, "29vectorized_elementwise_kernel"))
        return false;
    size_t size = element_bytes(type + strlen(functor));
    if (!size)
        return false;
    uint64_t value = 0;
    memcpy(&value, arguments[1], size);
    pthread_mutex_lock(&mock_lock);
    struct op op = mock_fill(*(void **)arguments[2], value, size, *(int *)arguments[0]);
    mock_enqueue(stream, op, "kernel %s fills %d elements of %zu", name, *(int *)arguments[0], size);
    pthread_mutex_unlock(&mock_lock);
    return true;
}

static cudaError_t launch(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    const char *name = kernel_name(function);
    bool legal = grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.x < 1u << 31 && grid.y < 65536 &&
                 grid.z < 65536 && block.x * block.y * block.z <= 1024;
    if (!legal) {
        mock_report("ILLEGAL launch of %s grid %u,%u,%u block %u,%u,%u", name, grid.x, grid.y, grid.z, block.x, block.y,
                    block.z);
        return mock_failed(cudaErrorInvalidConfiguration);
    }
    if (!launch_fill(name, arguments, stream))
        mock_launch(name, grid, block, shared, stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    ENTER();
    return launch(function, grid, block, arguments, shared, stream);
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
    ENTER();
    return launch(
        function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

/* What the <<<…>>> of a launch leaves for the function that it calls. */
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configurations[8];
static __thread int configuration_count;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    int i = configuration_count++;
    configurations[i].grid = grid;
    configurations[i].block = block;
    configurations[i].shared = shared;
    configurations[i].stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    int i = --configuration_count;
    *grid = configurations[i].grid;
    *block = configurations[i].block;
    *shared = configurations[i].shared;
    *(cudaStream_t *)stream = configurations[i].stream;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    ENTER();
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = mock_compute_capability();
    attributes->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    ENTER();
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(
    cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device)
{
    ENTER();
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t shared, unsigned flags)
{
    ENTER();
    *blocks = block_size > 0 && block_size < 2048 ? 2048 / block_size : 1;
    return cudaSuccess;
}
