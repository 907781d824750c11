/* Devices: H100s with nothing in them. Errors, and what a test may order. */
#include "mock.h"

#include <time.h>
#include <unistd.h>

pthread_mutex_t mock_lock = PTHREAD_MUTEX_INITIALIZER;

static volatile pid_t touched_by; /* the process that has touched CUDA, or from which this one was forked after that */
static volatile int broken;       /* a sticky error, after which a real context is of no use */
static __thread int current_device;
static __thread cudaError_t last_error;

long mock_number(const char *variable, long otherwise)
{
    const char *text = getenv(variable);
    return text ? strtol(text, NULL, 10) : otherwise;
}

double mock_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int mock_compute_capability(void)
{
    return mock_number("MOCK_GPU_ARCH", 90);
}

int mock_device(void)
{
    return current_device;
}

bool mock_broken(void)
{
    return broken;
}

cudaError_t mock_failed(cudaError_t error)
{
    return last_error = error;
}

cudaError_t mock_enter(const char *function)
{
    if (!touched_by) {
        touched_by = getpid();
        mock_report("TOUCHED process %d by %s", (int)getpid(), function);
    }
    if (touched_by != getpid()) {
        mock_report("FORKED process %d after process %d had touched CUDA: %s", getpid(), touched_by, function);
        return mock_failed(cudaErrorInitializationError);
    }
    return broken ? mock_failed(broken) : cudaSuccess;
}

/* --- what a test may order ---------------------------------------------------------------------------------------- */

static long collectives_done;
static volatile long lost_from = -1; /* the number of the first collective that never starts */
static volatile double late_by;      /* seconds, of the next collective */

/* From now on every call fails with this error, as after an illegal access (700) or an ECC error (214). */
void mock_gpu_break(int error)
{
    broken = error;
}

/* No collective of this process starts from now on: the others wait for it. */
void mock_gpu_hang(void)
{
    lost_from = 0;
}

/* The next collective of this process starts later. */
void mock_gpu_late(double seconds)
{
    late_by = seconds;
}

/* Lock held. The environment orders the same: MOCK_GPU_HANG_AT and MOCK_GPU_LATE_AT, the numbers of collectives counted
   from 0; and MOCK_GPU_LATE_SECONDS. */
bool mock_lost_collective(double *late)
{
    long number = collectives_done++;
    *late = late_by;
    late_by = 0;
    if (number == mock_number("MOCK_GPU_LATE_AT", -1))
        *late = mock_number("MOCK_GPU_LATE_SECONDS", 1);
    long ordered = mock_number("MOCK_GPU_HANG_AT", -1);
    return (lost_from >= 0 && number >= lost_from) || (ordered >= 0 && number >= ordered);
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

/* MOCK_GPU_COUNT is what the machine has. CUDA_VISIBLE_DEVICES ends at the first entry that is none of them. */
static int visible_devices(void)
{
    int machine = mock_number("MOCK_GPU_COUNT", 1), count = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible)
        return machine;
    char list[1024], *rest;
    snprintf(list, sizeof list, "%s", visible);
    for (char *entry = strtok_r(list, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        char *end;
        long number = strtol(entry, &end, 10);
        bool by_number = end != entry && !*end && number >= 0 && number < machine;
        if (!by_number && strncmp(entry, "GPU-", 4) && strncmp(entry, "MIG-", 4))
            break;
        count++;
    }
    return count;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    ENTER();
    *count = visible_devices();
    return *count ? cudaSuccess : mock_failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    ENTER();
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    ENTER();
    if (device < 0 || device >= visible_devices())
        return mock_failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

size_t mock_device_bytes(void)
{
    return mock_number("MOCK_GPU_BYTES", 85520809984); /* 79.6 GiB, as an H100 of 80 GB has */
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    ENTER();
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = 52428800; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrComputeCapabilityMajor: *value = mock_compute_capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = mock_compute_capability() % 10; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrClusterLaunch: *value = mock_compute_capability() >= 90; break;
    default: *value = 0; /* no multicast, no memory pools, no IPC */
    }
    return cudaSuccess;
}

static int attribute_of(enum cudaDeviceAttr attribute)
{
    int value = 0;
    cudaDeviceGetAttribute(&value, attribute, 0);
    return value;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    ENTER();
    if (device < 0 || device >= visible_devices())
        return mock_failed(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA H100 80GB HBM3");
    memset(&properties->uuid, 7 + device, sizeof properties->uuid);
    properties->totalGlobalMem = mock_device_bytes();
    properties->major = attribute_of(cudaDevAttrComputeCapabilityMajor);
    properties->minor = attribute_of(cudaDevAttrComputeCapabilityMinor);
    properties->multiProcessorCount = attribute_of(cudaDevAttrMultiProcessorCount);
    properties->warpSize = attribute_of(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = attribute_of(cudaDevAttrMaxThreadsPerBlock);
    properties->maxThreadsPerMultiProcessor = attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->maxBlocksPerMultiProcessor = attribute_of(cudaDevAttrMaxBlocksPerMultiprocessor);
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = attribute_of(cudaDevAttrMaxGridDimX);
    properties->maxGridSize[1] = properties->maxGridSize[2] = attribute_of(cudaDevAttrMaxGridDimY);
    properties->sharedMemPerBlock = attribute_of(cudaDevAttrMaxSharedMemoryPerBlock);
    properties->sharedMemPerBlockOptin = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    properties->sharedMemPerMultiprocessor = attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    properties->regsPerBlock = attribute_of(cudaDevAttrMaxRegistersPerBlock);
    properties->regsPerMultiprocessor = attribute_of(cudaDevAttrMaxRegistersPerMultiprocessor);
    properties->l2CacheSize = attribute_of(cudaDevAttrL2CacheSize);
    properties->memoryBusWidth = attribute_of(cudaDevAttrGlobalMemoryBusWidth);
    properties->unifiedAddressing = 1;
    properties->textureAlignment = 512;
    properties->pciBusID = 1 + device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    ENTER();
    snprintf(text, length, "0000:%02x:00.0", 1 + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    ENTER();
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    ENTER();
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = broken; /* a sticky error stays */
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch ((int)error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "an error of the mock GPU";
    }
}

/* The phrases of these that programs look for; of others the name. */
const char *cudaGetErrorString(cudaError_t error)
{
    switch ((int)error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return cudaGetErrorName(error);
    }
}

cudaError_t cudaProfilerStart(void)
{
    return cudaSuccess;
}

cudaError_t cudaProfilerStop(void)
{
    return cudaSuccess;
}
