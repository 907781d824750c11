/* NVML, a library by itself, so that a program finds it or does not.

   MOCK_GPU_COUNT GPUs; MOCK_GPU_MIG=1 parts each into two instances, which have no utilization of their own. It does
   not touch CUDA. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

#define INSTANCES 2 /* of a GPU, with MIG */

/* A handle is 1 + a GPU's index; with 1 + an instance's in the bits above the first eight. */
typedef size_t handle;

struct rates {
    unsigned gpu, memory; /* percent */
};

struct memory {
    unsigned long long total, free, used; /* bytes */
};

static int gpus(void)
{
    const char *count = getenv("MOCK_GPU_COUNT");
    return count ? atoi(count) : 1;
}

static int has_mig(void)
{
    const char *mig = getenv("MOCK_GPU_MIG");
    return mig && atoi(mig);
}

static int index_of(handle device)
{
    return (int)(device & 0xff) - 1;
}

static int instance_of(handle device) /* -1: the whole GPU */
{
    return (int)(device >> 8) - 1;
}

int nvmlInit(void) /* torch calls this one */
{
    return SUCCESS;
}

int nvmlInit_v2(void)
{
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
    return SUCCESS;
}

int nvmlShutdown(void)
{
    return SUCCESS;
}

const char *nvmlErrorString(int error)
{
    return error == SUCCESS ? "Success" : error == NOT_SUPPORTED ? "Not Supported" : "Not Found";
}

int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    snprintf(text, length, "580.00");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = gpus();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *device)
{
    if ((int)index >= gpus())
        return INVALID_ARGUMENT;
    *device = index + 1;
    return SUCCESS;
}

int nvmlDeviceGetUUID(handle device, char *text, unsigned length)
{
    int instance = instance_of(device);
    if (instance < 0)
        snprintf(text, length, "GPU-00000000-0000-0000-0000-%012d", index_of(device));
    else
        snprintf(text, length, "MIG-00000000-0000-0000-%04d-%012d", instance, index_of(device));
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, handle *device)
{
    for (int index = 0; index < gpus(); index++)
        for (int instance = -1; instance < (has_mig() ? INSTANCES : 0); instance++) {
            handle candidate = index + 1 + ((size_t)(instance + 1) << 8);
            char text[96];
            nvmlDeviceGetUUID(candidate, text, sizeof text);
            if (!strcmp(text, uuid)) {
                *device = candidate;
                return SUCCESS;
            }
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, handle *device)
{
    unsigned domain, bus;
    if (sscanf(address, "%x:%x:", &domain, &bus) != 2 || bus < 1 || (int)bus > gpus())
        return NOT_FOUND;
    *device = bus;
    return SUCCESS;
}

int nvmlDeviceGetIndex(handle device, unsigned *index)
{
    *index = index_of(device);
    return SUCCESS;
}

int nvmlDeviceGetName(handle device, char *text, unsigned length)
{
    snprintf(text, length, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}

int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending)
{
    *current = *pending = has_mig();
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(handle device, unsigned *count)
{
    *count = has_mig() ? INSTANCES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(handle device, unsigned instance, handle *part)
{
    if (!has_mig() || instance >= INSTANCES)
        return NOT_FOUND;
    *part = device + ((size_t)(instance + 1) << 8);
    return SUCCESS;
}

/* Utilization is not reported of instances, nor of a GPU that is parted into them. */
int nvmlDeviceGetUtilizationRates(handle device, struct rates *rates)
{
    if (has_mig())
        return NOT_SUPPORTED;
    rates->gpu = 50;
    rates->memory = 25;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(handle device, struct memory *memory)
{
    memory->total = 85520809984ull / (instance_of(device) < 0 ? 1 : INSTANCES);
    memory->used = 1ull << 30;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(handle device, unsigned *milliwatts)
{
    *milliwatts = 350000;
    return instance_of(device) < 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(handle device, int sensor, unsigned *degrees)
{
    *degrees = 60;
    return instance_of(device) < 0 ? SUCCESS : NOT_SUPPORTED;
}
