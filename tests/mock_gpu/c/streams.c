/* Streams, events, copies and fills, and their capture into graphs.

   What is enqueued on a stream is done in order. Most of it is done at once, by the thread that enqueues it, as kernels
   take no time here. A collective waits for other processes, and what is behind it on its stream, or waits for an
   event there, stays enqueued: then a thread of ours advances all streams until they are empty. */
#include "mock.h"

#include <stdarg.h>
#include <unistd.h>

#define POLL_MICROSECONDS 100

/* --- captures and graphs ------------------------------------------------------------------------------------------ */

/* What was captured. It lives as long as the graph, or an executable made of it. */
struct graph {
    int references;
    size_t count, room; /* of ops: what a replay does beside launches */
    struct op *ops;
    size_t nodes; /* all that was captured, launches too */
};

/* Streams join a capture by waiting for an event of it, and have to be joined to its first stream before it ends. Each
   stream counts what was captured from it, and knows up to where it comes after each other one (vector clocks). */
#define MAX_STREAMS 64 /* of one capture; slot 0 is that on which it began */

typedef uint32_t clocks[MAX_STREAMS];

struct capture {
    unsigned long long id;
    int slots;
    enum cudaStreamCaptureMode mode;
    pthread_t owner;
    bool invalidated;
    struct graph *graph;
    struct capture *next;
};

static struct capture *captures; /* those in progress */
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static struct capture *capture_of(unsigned long long id)
{
    struct capture *each = captures;
    while (each && each->id != id)
        each = each->next;
    return each;
}

static void release_graph(struct graph *graph)
{
    if (--graph->references)
        return;
    for (size_t i = 0; i < graph->count; i++)
        if (graph->ops[i].advance == mock_advance_collective)
            mock_release_collective(graph->ops[i].collective);
    free(graph->ops);
    free(graph);
}

static cudaError_t invalidate(struct capture *capture, const char *function)
{
    mock_report("ILLEGAL in a capture: %s", function);
    capture->invalidated = true;
    return mock_failed(cudaErrorStreamCaptureUnsupported);
}

/* The rule is that of cudaThreadExchangeStreamCaptureMode's documentation. */
cudaError_t mock_prohibited(const char *function)
{
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    for (struct capture *each = captures; each; each = each->next) {
        bool own = pthread_equal(each->owner, pthread_self()) && each->mode != cudaStreamCaptureModeRelaxed;
        bool others = thread_mode == cudaStreamCaptureModeGlobal && each->mode == cudaStreamCaptureModeGlobal;
        if (own || others)
            return invalidate(each, function);
    }
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

struct stream {
    int number, priority, device;
    unsigned long long capture; /* 0: none */
    int slot;                   /* in the capture */
    clocks clock;
    struct op *first, *last;
    struct stream *next;
};

static struct stream default_stream = {.number = 0};
static struct stream *streams = &default_stream;
static int stream_count = 1;
static bool advancing; /* whether our thread runs */

struct stream *mock_stream(cudaStream_t stream)
{
    bool is_default = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? &default_stream : (struct stream *)stream;
}

int mock_stream_number(cudaStream_t stream)
{
    return mock_stream(stream)->number;
}

bool mock_capturing(cudaStream_t stream)
{
    return mock_stream(stream)->capture != 0;
}

/* Lock held. Returns whether anything is left. */
static bool advance_all(void)
{
    bool left, progress;
    do {
        left = progress = false;
        for (struct stream *each = streams; each; each = each->next) {
            while (each->first && each->first->advance(each->first)) {
                struct op *done = each->first;
                each->first = done->next;
                free(done);
                progress = true;
            }
            left |= each->first != NULL;
        }
    } while (progress && left);
    return left;
}

static void *advance_until_empty(void *unused)
{
    pthread_mutex_lock(&mock_lock);
    while (advance_all()) {
        pthread_mutex_unlock(&mock_lock);
        usleep(POLL_MICROSECONDS);
        pthread_mutex_lock(&mock_lock);
    }
    advancing = false;
    pthread_mutex_unlock(&mock_lock);
    return NULL;
}

static void push(struct stream *stream, struct op op)
{
    if (!stream->first && op.advance(&op))
        return;
    struct op *copy = malloc(sizeof *copy);
    *copy = op;
    copy->next = NULL;
    *(stream->first ? &stream->last->next : &stream->first) = copy;
    stream->last = copy;
    if (!advancing) {
        pthread_t thread;
        advancing = true;
        if (pthread_create(&thread, NULL, advance_until_empty, NULL) || pthread_detach(thread))
            abort();
    }
}

void mock_enqueue(cudaStream_t handle, struct op op, const char *format, ...)
{
    struct stream *stream = mock_stream(handle);
    char what[3500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    mock_log("%s stream %d%s", what, stream->number, stream->capture ? " captured" : "");
    if (!stream->capture) {
        if (op.advance)
            push(stream, op);
        return;
    }
    stream->clock[stream->slot]++;
    struct graph *graph = capture_of(stream->capture)->graph;
    graph->nodes++;
    if (!op.advance) /* a launch: a replay has nothing to do for it */
        return;
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 64;
        graph->ops = realloc(graph->ops, graph->room * sizeof op);
    }
    graph->ops[graph->count++] = op;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority)
{
    ENTER();
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&mock_lock);
    stream->number = stream_count++;
    stream->priority = priority;
    stream->device = mock_device();
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&mock_lock);
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags)
{
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle)
{
    return cudaStreamCreateWithPriority(handle, 0, 0);
}

/* Streams stay in the list, as what is enqueued on them is still done. */
cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    ENTER();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER();
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority)
{
    ENTER();
    *priority = mock_stream(handle)->priority;
    return cudaSuccess;
}

/* Wait until a condition holds, as the host waits for a device. */
#define WAIT_UNTIL(condition)                                                       \
    do {                                                                            \
        while (!(condition) && !mock_broken()) {                                    \
            pthread_mutex_unlock(&mock_lock);                                       \
            usleep(POLL_MICROSECONDS);                                              \
            pthread_mutex_lock(&mock_lock);                                         \
        }                                                                           \
        if (!error && mock_broken())                                                \
            error = mock_enter(__func__);                                           \
    } while (0)

static bool all_empty(void)
{
    for (struct stream *each = streams; each; each = each->next)
        if (each->first)
            return false;
    return true;
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    ENTER();
    struct stream *stream = mock_stream(handle);
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = stream->capture ? invalidate(capture_of(stream->capture), "cudaStreamQuery") : cudaSuccess;
    if (!error && stream->first)
        error = cudaErrorNotReady;
    pthread_mutex_unlock(&mock_lock);
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    ENTER();
    struct stream *stream = mock_stream(handle);
    mock_log("synchronize stream %d", stream->number);
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = cudaSuccess;
    if (stream->capture)
        error = invalidate(capture_of(stream->capture), "cudaStreamSynchronize");
    else
        error = mock_prohibited("cudaStreamSynchronize");
    if (!error)
        WAIT_UNTIL(!stream->first);
    pthread_mutex_unlock(&mock_lock);
    return error;
}

cudaError_t cudaDeviceSynchronize(void)
{
    ENTER();
    mock_log("synchronize device");
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = captures ? invalidate(captures, "cudaDeviceSynchronize") : cudaSuccess;
    if (!error)
        WAIT_UNTIL(all_empty());
    pthread_mutex_unlock(&mock_lock);
    return error;
}

static bool advance_call(struct op *op)
{
    op->call.function(op->call.argument);
    return true;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument)
{
    ENTER();
    pthread_mutex_lock(&mock_lock);
    mock_enqueue(handle, (struct op){.advance = advance_call, .call = {function, argument}}, "hostfunc");
    pthread_mutex_unlock(&mock_lock);
    return cudaSuccess;
}

/* --- copies and fills --------------------------------------------------------------------------------------------- */

static bool advance_copy(struct op *op)
{
    if (op->copy.bytes <= MAX_DATA)
        memmove(op->copy.to, op->copy.from, op->copy.bytes);
    return true;
}

static const char *place_name(enum place place)
{
    return place == ON_DEVICE ? "device" : place == PINNED ? "pinned" : "pageable";
}

static cudaError_t enqueue_copy(void *to, const void *from, size_t bytes, cudaStream_t handle, bool wait)
{
    struct stream *stream = mock_stream(handle);
    pthread_mutex_lock(&mock_lock);
    enum place source = mock_place(from, NULL), target = mock_place(to, NULL);
    bool pageable = source == PAGEABLE || target == PAGEABLE;
    cudaError_t error = cudaSuccess;
    if (stream->capture && (pageable || wait))
        error = invalidate(capture_of(stream->capture), "a copy from or to pageable memory");
    else if (wait)
        error = mock_prohibited("cudaMemcpy");
    if (!error) {
        struct op op = {.advance = advance_copy, .copy = {to, from, bytes}};
        mock_enqueue(handle, op, "copy %zu %s to %s", bytes, place_name(source), place_name(target));
        if (wait || (pageable && !stream->capture)) /* the driver stages pageable memory before it returns */
            WAIT_UNTIL(!stream->first);
    }
    pthread_mutex_unlock(&mock_lock);
    return error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    ENTER();
    return enqueue_copy(to, from, bytes, stream, false);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    ENTER();
    return enqueue_copy(to, from, bytes, NULL, true);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, cudaStream_t stream)
{
    ENTER();
    return enqueue_copy(to, from, bytes, stream, false);
}

static bool advance_fill(struct op *op)
{
    if (op->fill.size * op->fill.count <= MAX_DATA)
        for (size_t i = 0; i < op->fill.count; i++)
            memcpy((char *)op->fill.to + i * op->fill.size, &op->fill.value, op->fill.size);
    return true;
}

/* Also what torch's own fill kernel does; see launches.c. Lock held. */
struct op mock_fill(void *to, uint64_t value, size_t size, size_t count)
{
    return (struct op){.advance = advance_fill, .fill = {to, value, size, count}};
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    ENTER();
    pthread_mutex_lock(&mock_lock);
    mock_enqueue(stream, mock_fill(to, (unsigned char)value, 1, bytes), "fill %zu with %d", bytes, value);
    pthread_mutex_unlock(&mock_lock);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    return cudaMemsetAsync(to, value, bytes, NULL);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

struct event {
    uint64_t recorded, reached;  /* the number of the last record that was enqueued, and of the last one done */
    unsigned long long captured; /* by which capture it was last recorded, if by one */
    clocks clock;                /* of the stream, then */
    bool timed;
    double time; /* seconds */
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags)
{
    ENTER();
    struct event *event = calloc(1, sizeof *event);
    event->timed = !(flags & cudaEventDisableTiming);
    *handle = (cudaEvent_t)event;
    mock_log("event create%s", event->timed ? " timed" : "");
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle)
{
    return cudaEventCreateWithFlags(handle, 0);
}

/* Enqueued work may still refer to it, so it is not freed: 300 bytes each. */
cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    ENTER();
    return cudaSuccess;
}

static bool advance_record(struct op *op)
{
    struct event *event = op->event.event;
    event->reached = op->event.version ? op->event.version : ++event->recorded; /* 0: in a replay */
    event->time = mock_now();
    return true;
}

static bool advance_wait(struct op *op)
{
    return op->event.event->reached >= op->event.version;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags)
{
    ENTER();
    struct event *event = (struct event *)handle;
    const char *timed = event->timed ? " timed" : "";
    pthread_mutex_lock(&mock_lock);
    bool captured = mock_capturing(stream);
    if (captured && !(flags & cudaEventRecordExternal)) { /* no node of the graph: it orders what is captured */
        struct stream *source = mock_stream(stream);
        event->captured = source->capture;
        memcpy(event->clock, source->clock, sizeof event->clock);
        mock_log("record%s stream %d captured", timed, source->number);
    } else {
        struct op op = {.advance = advance_record, .event = {event, captured ? 0 : ++event->recorded}};
        event->captured = captured ? event->captured : 0;
        mock_enqueue(stream, op, "record%s%s", timed, captured ? " external" : "");
    }
    pthread_mutex_unlock(&mock_lock);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(handle, stream, 0);
}

static void join(struct stream *stream, struct capture *capture)
{
    if (capture->slots == MAX_STREAMS)
        abort();
    stream->capture = capture->id;
    stream->slot = capture->slots++;
    memset(stream->clock, 0, sizeof stream->clock);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned flags)
{
    ENTER();
    struct event *event = (struct event *)waited;
    struct stream *stream = mock_stream(handle);
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&mock_lock);
    if (event->captured) { /* the stream joins the capture, if it is not in it */
        struct capture *capture = capture_of(event->captured);
        if (!capture || (stream->capture && stream->capture != event->captured)) {
            error = cudaErrorStreamCaptureIsolation;
        } else {
            if (!stream->capture)
                join(stream, capture);
            for (int i = 0; i < MAX_STREAMS; i++)
                stream->clock[i] = event->clock[i] > stream->clock[i] ? event->clock[i] : stream->clock[i];
        }
    } else if (stream->capture && event->reached < event->recorded) {
        error = cudaErrorStreamCaptureIsolation;
    } else if (!stream->capture) {
        struct op op = {.advance = advance_wait, .event = {event, event->recorded}};
        mock_enqueue(handle, op, "wait");
    }
    if (error)
        mock_report("ILLEGAL wait of stream %d for an event outside of its capture", stream->number);
    pthread_mutex_unlock(&mock_lock);
    return error ? mock_failed(error) : cudaSuccess;
}

static cudaError_t look_at(struct event *event, const char *function)
{
    if (event->captured) {
        mock_report("ILLEGAL %s of a captured event", function);
        return mock_failed(cudaErrorCapturedEvent);
    }
    return mock_prohibited(function);
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    ENTER();
    struct event *event = (struct event *)handle;
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = look_at(event, "cudaEventQuery");
    if (!error && event->reached < event->recorded)
        error = cudaErrorNotReady;
    pthread_mutex_unlock(&mock_lock);
    return error;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    ENTER();
    struct event *event = (struct event *)handle;
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = look_at(event, "cudaEventSynchronize");
    if (!error)
        WAIT_UNTIL(event->reached >= event->recorded);
    pthread_mutex_unlock(&mock_lock);
    return error;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    ENTER();
    struct event *first = (struct event *)begin, *last = (struct event *)end;
    pthread_mutex_lock(&mock_lock);
    cudaError_t error = cudaSuccess;
    if (!first->timed || !last->timed || !first->recorded || !last->recorded)
        error = mock_failed(cudaErrorInvalidResourceHandle);
    else if (first->reached < first->recorded || last->reached < last->recorded)
        error = cudaErrorNotReady;
    else
        *milliseconds = (last->time - first->time) * 1e3;
    pthread_mutex_unlock(&mock_lock);
    return error;
}

/* --- capture ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    static unsigned long long ids;
    ENTER();
    struct stream *stream = mock_stream(handle);
    if (stream == &default_stream || stream->capture) {
        mock_report("ILLEGAL begin of a capture on stream %d", stream->number);
        return mock_failed(stream->capture ? cudaErrorIllegalState : cudaErrorStreamCaptureUnsupported);
    }
    struct capture *capture = calloc(1, sizeof *capture);
    capture->graph = calloc(1, sizeof *capture->graph);
    capture->graph->references = 1;
    capture->mode = mode;
    capture->owner = pthread_self();
    pthread_mutex_lock(&mock_lock);
    capture->id = ++ids;
    join(stream, capture);
    capture->next = captures;
    captures = capture;
    pthread_mutex_unlock(&mock_lock);
    mock_log("capture begins mode %d stream %d", (int)mode, stream->number);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    ENTER();
    *graph = NULL;
    struct stream *stream = mock_stream(handle);
    pthread_mutex_lock(&mock_lock);
    struct capture *capture = capture_of(stream->capture);
    if (!capture) {
        pthread_mutex_unlock(&mock_lock);
        mock_report("ILLEGAL end of a capture that has not begun");
        return mock_failed(cudaErrorIllegalState);
    }
    cudaError_t error = capture->invalidated ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (struct stream *each = streams; each; each = each->next) {
        if (each->capture != capture->id)
            continue;
        each->capture = 0;
        if (stream->clock[each->slot] < each->clock[each->slot] && !error) {
            mock_report("ILLEGAL end of a capture with stream %d not joined", each->number);
            error = cudaErrorStreamCaptureUnjoined;
        }
    }
    struct capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    mock_log("capture ends nodes %zu%s", capture->graph->nodes, error ? " in vain" : "");
    if (error)
        release_graph(capture->graph);
    else
        *graph = (cudaGraph_t)capture->graph;
    free(capture);
    pthread_mutex_unlock(&mock_lock);
    return error ? mock_failed(error) : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    ENTER();
    pthread_mutex_lock(&mock_lock);
    struct capture *capture = capture_of(mock_stream(handle)->capture);
    *status = !capture              ? cudaStreamCaptureStatusNone
            : capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&mock_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count)
{
    cudaError_t error = cudaStreamIsCapturing(handle, status);
    pthread_mutex_lock(&mock_lock);
    struct capture *capture = capture_of(mock_stream(handle)->capture);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    pthread_mutex_unlock(&mock_lock);
    return error;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    *count = ((struct graph *)graph)->nodes;
    return nodes ? mock_unmodelled("cudaGraphGetNodes with nodes", cudaErrorNotSupported) : cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    ENTER();
    pthread_mutex_lock(&mock_lock);
    ((struct graph *)graph)->references++;
    pthread_mutex_unlock(&mock_lock);
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    pthread_mutex_lock(&mock_lock);
    release_graph((struct graph *)graph);
    pthread_mutex_unlock(&mock_lock);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    return cudaGraphDestroy((cudaGraph_t)executable);
}

/* Branches are done one after the other, in the order in which they were captured. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle)
{
    ENTER();
    struct graph *graph = (struct graph *)executable;
    pthread_mutex_lock(&mock_lock);
    mock_log("replay nodes %zu stream %d", graph->nodes, mock_stream_number(handle));
    for (size_t i = 0; i < graph->count; i++) {
        struct op op = graph->ops[i];
        if (op.advance == mock_advance_collective)
            op.collective = mock_copy_collective(op.collective);
        push(mock_stream(handle), op);
    }
    pthread_mutex_unlock(&mock_lock);
    return cudaSuccess;
}
