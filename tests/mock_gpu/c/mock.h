/* A CUDA device that computes nothing: what the files of this folder share. See docs/mock-gpu.md. */
#ifndef MOCK_GPU_H
#define MOCK_GPU_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 8
#define MAX_DATA (1 << 20) /* bytes; larger copies, fills and collectives move nothing */

/* Guards everything below but the log. Never held while anything waits. */
extern pthread_mutex_t mock_lock;

/* --- device.c: devices, errors, what a test may order ------------------------------------------------------------- */

/* Called first by whatever needs the driver. Tells of the process's first such call, and returns an error if the device
   is broken or the process was forked from one that had touched CUDA. */
cudaError_t mock_enter(const char *function);
cudaError_t mock_failed(cudaError_t error); /* keeps it for cudaGetLastError */
int mock_device(void);                      /* the calling thread's */
int mock_compute_capability(void);          /* 90 for 9.0 */
long mock_number(const char *variable, long otherwise); /* of the environment */
double mock_now(void);                      /* seconds */
bool mock_broken(void);                     /* all calls fail from now on, and nothing that is enqueued begins */
bool mock_lost_collective(double *late);    /* whether the next collective never starts; else by how much it is late */

#define ENTER()                                   \
    do {                                          \
        cudaError_t entered = mock_enter(__func__); \
        if (entered) return entered;              \
    } while (0)

/* --- log.c -------------------------------------------------------------------------------------------------------- */

void mock_log(const char *format, ...) __attribute__((format(printf, 1, 2)));    /* if logging is on */
void mock_report(const char *format, ...) __attribute__((format(printf, 1, 2))); /* always: what is wrong */
int mock_unmodelled(const char *function, int error);                            /* reports it; returns the error */

/* --- memory.c ----------------------------------------------------------------------------------------------------- */

enum place { ON_DEVICE, PINNED, PAGEABLE };

enum place mock_place(const void *address, int *device); /* lock held; the device may be NULL */
cudaError_t mock_allocate(void **address, size_t bytes, enum place place);
cudaError_t mock_release(void *address);

/* --- streams.c ---------------------------------------------------------------------------------------------------- */

/* Work that is enqueued on a stream, or captured into a graph. */
struct op {
    bool (*advance)(struct op *); /* lock held: does what can be done now; returns whether all is done */
    struct op *next;
    union {
        struct { void *to; const void *from; size_t bytes; } copy;
        struct { void *to; uint64_t value; size_t size, count; } fill; /* size bytes of value, count times */
        struct { struct event *event; uint64_t version; } event;
        struct { cudaHostFn_t function; void *argument; } call;
        struct collective *collective;
    };
};

struct stream;

struct stream *mock_stream(cudaStream_t stream);
int mock_stream_number(cudaStream_t stream); /* for the log */
bool mock_capturing(cudaStream_t stream);    /* lock held */
/* Lock held. An op without a function is a launch, of which nothing is done. What follows is for the log. */
void mock_enqueue(cudaStream_t stream, struct op op, const char *format, ...) __attribute__((format(printf, 3, 4)));
struct op mock_fill(void *to, uint64_t value, size_t size, size_t count);
cudaError_t mock_prohibited(const char *function); /* lock held: an error if a capture forbids what is unsafe then */

/* --- nccl.c ------------------------------------------------------------------------------------------------------- */

/* All with the lock held. A captured collective is a pattern, of which each replay enqueues a copy. */
bool mock_advance_collective(struct op *op);
struct collective *mock_copy_collective(const struct collective *collective);
void mock_release_collective(struct collective *captured); /* when the graph is gone */

/* --- launches.c --------------------------------------------------------------------------------------------------- */

void mock_launch(const char *name, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);

#endif
