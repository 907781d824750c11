/* Memory. Device memory is reserved and never touched but by small copies and fills, so that a rank of a 7B model takes
   a few hundred MB of the host's. */
#include "mock.h"

#include <sys/mman.h>

struct allocation {
    char *start;
    size_t bytes;
    enum place place;
    int device;
    bool registered; /* the program's own memory, pinned afterwards */
};

#define MAX_ALLOCATIONS 65536
#define DRIVERS_OWN 600000000 /* bytes of each device that no program gets */

static struct allocation allocations[MAX_ALLOCATIONS];
static int count;
static size_t used[MAX_DEVICES], peak[MAX_DEVICES];

size_t mock_device_bytes(void);

static struct allocation *find(const void *address)
{
    for (int i = 0; i < count; i++) {
        struct allocation *each = &allocations[i];
        if ((const char *)address >= each->start && (const char *)address < each->start + each->bytes)
            return each;
    }
    return NULL;
}

static void add(struct allocation added)
{
    int i = 0;
    while (i < count && allocations[i].start)
        i++;
    if (i == MAX_ALLOCATIONS)
        abort();
    allocations[i] = added;
    count += i == count;
}

enum place mock_place(const void *address, int *device)
{
    struct allocation *found = find(address);
    if (found && device)
        *device = found->device;
    return found ? found->place : PAGEABLE;
}

cudaError_t mock_allocate(void **address, size_t bytes, enum place place)
{
    int device = mock_device();
    *address = NULL;
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = mock_prohibited(place == PINNED ? "cudaHostAlloc" : "cudaMalloc");
    if (!error && place == ON_DEVICE && used[device] + bytes > mock_device_bytes() - DRIVERS_OWN)
        error = cudaErrorMemoryAllocation;
    if (!error) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (start == MAP_FAILED) {
            error = cudaErrorMemoryAllocation;
        } else {
            add((struct allocation){start, bytes, place, device, false});
            used[device] += place == ON_DEVICE ? bytes : 0;
            peak[device] = used[device] > peak[device] ? used[device] : peak[device];
            *address = start;
        }
    }
    pthread_mutex_unlock(&mock_lock);
    const char *name = place == ON_DEVICE ? "malloc" : "hostalloc";
    mock_log("%s %zu%s used %zu", name, bytes, error ? " refused" : "", used[device]);
    return error ? mock_failed(error) : cudaSuccess;
}

cudaError_t mock_release(void *address)
{
    if (!address)
        return cudaSuccess;
    pthread_mutex_lock(&mock_lock);
    struct allocation *found = find(address);
    cudaError_t error = found ? mock_prohibited("cudaFree") : cudaErrorInvalidValue;
    if (!error) {
        mock_log("free %zu", found->bytes);
        if (found->place == ON_DEVICE)
            used[found->device] -= found->bytes;
        munmap(found->start, found->bytes);
        memset(found, 0, sizeof *found);
    }
    pthread_mutex_unlock(&mock_lock);
    return error ? mock_failed(error) : cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t bytes)
{
    ENTER();
    return mock_allocate(address, bytes, ON_DEVICE);
}

cudaError_t cudaFree(void *address)
{
    ENTER();
    return mock_release(address);
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags)
{
    ENTER();
    return mock_allocate(address, bytes, PINNED);
}

cudaError_t cudaFreeHost(void *address)
{
    ENTER();
    return mock_release(address);
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    ENTER();
    pthread_mutex_lock(&mock_lock);
    add((struct allocation){address, bytes, PINNED, mock_device(), true});
    pthread_mutex_unlock(&mock_lock);
    mock_log("hostregister %zu", bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address)
{
    ENTER();
    pthread_mutex_lock(&mock_lock);
    struct allocation *found = find(address);
    bool registered = found && found->registered;
    if (registered)
        memset(found, 0, sizeof *found);
    pthread_mutex_unlock(&mock_lock);
    return registered ? cudaSuccess : mock_failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags)
{
    ENTER();
    *device_address = address;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    ENTER();
    *total = mock_device_bytes();
    *available = *total - DRIVERS_OWN - used[mock_device()];
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address)
{
    ENTER();
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&mock_lock);
    enum place place = mock_place(address, &attributes->device);
    pthread_mutex_unlock(&mock_lock);
    attributes->type = place == ON_DEVICE ? cudaMemoryTypeDevice
                     : place == PINNED    ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
    if (place != PAGEABLE)
        attributes->devicePointer = attributes->hostPointer = (void *)address;
    return cudaSuccess;
}

/* For tests: bytes of the current device that are reserved, and the most since the last reset. */

size_t mock_gpu_used(void)
{
    return used[mock_device()];
}

size_t mock_gpu_peak(void)
{
    return peak[mock_device()];
}

void mock_gpu_reset_peak(void)
{
    peak[mock_device()] = used[mock_device()];
}
