/* NCCL between processes of one machine: collectives that wait for one another, and move what is small.

   A communicator is a file that all of its ranks map, in the folder MOCK_GPU_RENDEZVOUS (/dev/shm by default). Each has
   a slot there. In collective n it writes what it sends into its slot, as soon as all have read the slots of n − 1; it
   receives as soon as all have written. So a rank that never comes holds the others, and nothing else does. */
#include "mock.h"

#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_RANKS 16
#define POLL_MICROSECONDS 200

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, FINALIZE };

static const char *const kind_names[] = {
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "finalize",
};

struct slot {
    atomic_ulong sent, received; /* numbers of collectives, from 1 */
    int kind, type, operation, root;
    size_t count;
    atomic_ulong splits;
    int color[2], key[2]; /* of even and of odd splits: others may still read those of the last one */
    char data[MAX_DATA];
};

/* From one rank to another. The receiver frees it for the next message. */
struct mailbox {
    atomic_ulong sent, received;
    size_t bytes;
    char data[MAX_DATA];
};

struct shared {
    atomic_int joined;
    struct slot slots[MAX_RANKS];
    struct mailbox mail[MAX_RANKS][MAX_RANKS]; /* from, to */
};

struct ncclComm {
    char name[200];
    int rank, size;
    struct shared *shared;
    unsigned long begun;                       /* collectives that have started here */
    unsigned long splits;
    unsigned long posted[MAX_RANKS], taken[MAX_RANKS]; /* messages to and from each rank */
    int enqueued;                              /* collectives that are not done */
    int captured;                              /* those of graphs that are alive */
    volatile bool aborted;
};

/* Several messages of a group are one op, as they are one kernel. */
struct message {
    struct ncclComm *comm;
    bool send, done;
    const void *from;
    void *to;
    size_t bytes;
    int peer;
    unsigned long number; /* 0: not begun */
    struct message *next;
};

struct collective {
    struct ncclComm *comm;
    enum kind kind;
    const void *from;
    void *to;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t operation;
    int root;
    unsigned long number; /* 0: not begun */
    bool lost, sent;
    double begin; /* not before this time */
    struct message *messages; /* instead of all of the above */
};

/* --- numbers ------------------------------------------------------------------------------------------------------ */

static size_t type_bytes(ncclDataType_t type)
{
    switch ((int)type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 1; /* 8-bit floating point */
    }
}

static double combined(double a, double b, ncclRedOp_t operation)
{
    switch ((int)operation) {
    case ncclProd: return a * b;
    case ncclMax: return a > b ? a : b;
    case ncclMin: return a < b ? a : b;
    default: return a + b;
    }
}

static float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
}

#define COMBINE(c_type)                                                              \
    for (size_t i = 0; i < count; i++)                                               \
        ((c_type *)sum)[i] = combined(((c_type *)sum)[i], ((const c_type *)with)[i], operation)

static void combine(void *sum, const void *with, size_t count, ncclDataType_t type, ncclRedOp_t operation)
{
    switch ((int)type) {
    case ncclInt8: COMBINE(int8_t); break;
    case ncclUint8: COMBINE(uint8_t); break;
    case ncclInt32: COMBINE(int32_t); break;
    case ncclInt64: COMBINE(int64_t); break;
    case ncclFloat32: COMBINE(float); break;
    case ncclFloat64: COMBINE(double); break;
    case ncclBfloat16:
        for (size_t i = 0; i < count; i++) {
            float a = from_bf16(((uint16_t *)sum)[i]), b = from_bf16(((const uint16_t *)with)[i]);
            ((uint16_t *)sum)[i] = to_bf16(combined(a, b, operation));
        }
        break;
    default: mock_unmodelled("sums of this type by NCCL", 0);
    }
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

/* Bytes that a rank sends. */
static size_t sent_bytes(const struct collective *c)
{
    bool to_each = c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL;
    return c->count * type_bytes(c->type) * (to_each ? c->comm->size : 1);
}

/* All have sent: receive. With c->count elements a rank, as NCCL counts them. */
static void receive(const struct collective *c)
{
    int size = c->comm->size, rank = c->comm->rank;
    size_t bytes = c->count * type_bytes(c->type);
    struct slot *slots = c->comm->shared->slots;
    if (sent_bytes(c) > MAX_DATA || !c->count)
        return;
    switch (c->kind) {
    case BROADCAST:
        memcpy(c->to, slots[c->root].data, bytes);
        break;
    case ALL_GATHER:
        for (int i = 0; i < size; i++)
            memcpy((char *)c->to + i * bytes, slots[i].data, bytes);
        break;
    case ALL_TO_ALL:
        for (int i = 0; i < size; i++)
            memcpy((char *)c->to + i * bytes, slots[i].data + rank * bytes, bytes);
        break;
    case REDUCE:
        if (rank != c->root)
            break; /* fall through */
    case ALL_REDUCE:
    case REDUCE_SCATTER: {
        size_t offset = c->kind == REDUCE_SCATTER ? rank * bytes : 0;
        char *sum = malloc(bytes);
        memcpy(sum, slots[0].data + offset, bytes);
        for (int i = 1; i < size; i++)
            combine(sum, slots[i].data + offset, c->count, c->type, c->operation);
        if (c->operation == ncclAvg && c->type == ncclFloat32)
            for (size_t i = 0; i < c->count; i++)
                ((float *)sum)[i] /= size;
        else if (c->operation == ncclAvg)
            mock_unmodelled("NCCL's mean of a type other than fp32", 0);
        memcpy(c->to, sum, bytes);
        free(sum);
        break;
    }
    case FINALIZE:
        break;
    }
}

static bool fits(const struct collective *c, const struct slot *other)
{
    return other->kind == (int)c->kind && other->count == c->count && other->type == (int)c->type &&
           other->operation == (int)c->operation && other->root == c->root;
}

static bool advance_messages(struct message *first);

static bool advance(struct collective *c)
{
    struct ncclComm *comm = c->comm;
    struct slot *slots = comm->shared->slots, *own = &slots[comm->rank];
    if (comm->aborted)
        return true;
    if (!c->number) {
        double late;
        c->number = ++comm->begun;
        c->lost = mock_lost_collective(&late);
        c->begin = mock_now() + late;
    }
    if (c->lost || mock_now() < c->begin || mock_broken())
        return false;
    if (!c->sent) {
        for (int i = 0; i < comm->size; i++)
            if (slots[i].received < c->number - 1)
                return false;
        own->kind = c->kind;
        own->count = c->count;
        own->type = c->type;
        own->operation = c->operation;
        own->root = c->root;
        if (sent_bytes(c) <= MAX_DATA && c->from)
            memcpy(own->data, c->from, sent_bytes(c));
        own->sent = c->number;
        c->sent = true;
    }
    for (int i = 0; i < comm->size; i++)
        if (slots[i].sent < c->number)
            return false;
    for (int i = 0; i < comm->size; i++) {
        if (fits(c, &slots[i]))
            continue;
        mock_report("MISMATCH in %s: rank %d does %s of %zu, rank %d %s of %zu", comm->name, comm->rank,
                    kind_names[c->kind], c->count, i, kind_names[slots[i].kind], slots[i].count);
        c->lost = true; /* as NCCL would hang */
        return false;
    }
    receive(c);
    own->received = c->number;
    return true;
}

bool mock_advance_collective(struct op *op)
{
    struct collective *c = op->collective;
    if (c->messages ? !advance_messages(c->messages) : !advance(c))
        return false;
    while (c->messages) {
        struct message *done = c->messages;
        c->messages = done->next;
        free(done);
    }
    c->comm->enqueued--;
    free(c);
    return true;
}

struct collective *mock_copy_collective(const struct collective *collective)
{
    struct collective *copy = malloc(sizeof *copy);
    *copy = *collective;
    copy->comm->enqueued++;
    struct message **last = &copy->messages;
    for (const struct message *each = collective->messages; each; each = each->next) {
        *last = malloc(sizeof **last);
        **last = *each;
        last = &(*last)->next;
    }
    return copy;
}

void mock_release_collective(struct collective *captured)
{
    captured->comm->captured--;
}

static ncclResult_t enqueue(struct collective described, cudaStream_t stream)
{
    if (mock_enter("a collective of NCCL"))
        return ncclUnhandledCudaError;
    struct collective *c = malloc(sizeof *c);
    *c = described;
    pthread_mutex_lock(&mock_lock);
    *(mock_capturing(stream) ? &c->comm->captured : &c->comm->enqueued) += 1;
    struct op op = {.advance = mock_advance_collective, .collective = c};
    if (c->messages)
        mock_enqueue(stream, op, "nccl messages %s", c->comm->name);
    else
        mock_enqueue(stream, op, "nccl %s %zu type %d op %d ranks %d in %s", kind_names[c->kind], c->count, c->type,
                     c->operation, c->comm->size, c->comm->name);
    pthread_mutex_unlock(&mock_lock);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
    cudaStream_t stream)
{
    return enqueue((struct collective){comm, ALL_REDUCE, from, to, count, type, operation}, stream);
}

ncclResult_t ncclReduce(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root, ncclComm_t comm,
    cudaStream_t stream)
{
    return enqueue((struct collective){comm, REDUCE, from, to, count, type, operation, root}, stream);
}

ncclResult_t ncclBroadcast(
    const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream)
{
    return enqueue((struct collective){comm, BROADCAST, from, to, count, type, 0, root}, stream);
}

ncclResult_t ncclBcast(
    void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream)
{
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    return enqueue((struct collective){comm, ALL_GATHER, from, to, count, type}, stream);
}

ncclResult_t ncclReduceScatter(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
    cudaStream_t stream)
{
    return enqueue((struct collective){comm, REDUCE_SCATTER, from, to, count, type, operation}, stream);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclAlltoAll(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    return enqueue((struct collective){comm, ALL_TO_ALL, from, to, count, type}, stream);
}
#endif

/* --- messages, and groups of calls -------------------------------------------------------------------------------- */

static __thread int group_depth;
static __thread struct message *group_messages;
static __thread cudaStream_t group_stream;
static __thread struct ncclComm *group_aborts[64];
static __thread int group_abort_count;

static bool advance_message(struct message *m)
{
    struct ncclComm *comm = m->comm;
    if (m->done || comm->aborted)
        return true;
    if (!m->number)
        m->number = m->send ? ++comm->posted[m->peer] : ++comm->taken[m->peer];
    struct mailbox *box = m->send ? &comm->shared->mail[comm->rank][m->peer] : &comm->shared->mail[m->peer][comm->rank];
    if (m->send && box->sent < m->number) {
        if (box->received < m->number - 1)
            return false;
        box->bytes = m->bytes;
        if (m->bytes <= MAX_DATA)
            memcpy(box->data, m->from, m->bytes);
        box->sent = m->number;
    }
    if (m->send)
        return m->done = box->received >= m->number;
    if (box->sent < m->number)
        return false;
    if (box->bytes != m->bytes)
        mock_report("MISMATCH in %s: %zu bytes received where %zu were sent", comm->name, m->bytes, box->bytes);
    else if (m->bytes <= MAX_DATA)
        memcpy(m->to, box->data, m->bytes);
    box->received = m->number;
    return m->done = true;
}

static bool advance_messages(struct message *first)
{
    bool all = true;
    for (struct message *each = first; each; each = each->next)
        all &= advance_message(each);
    return all;
}

static ncclResult_t flush_messages(void)
{
    struct message *messages = group_messages;
    group_messages = NULL;
    if (!messages)
        return ncclSuccess;
    return enqueue((struct collective){.comm = messages->comm, .messages = messages}, group_stream);
}

static ncclResult_t post(struct message message, cudaStream_t stream)
{
    struct message *copy = malloc(sizeof *copy);
    *copy = message;
    copy->next = NULL;
    struct message **last = &group_messages;
    while (*last)
        last = &(*last)->next;
    *last = copy;
    group_stream = stream;
    return group_depth ? ncclSuccess : flush_messages();
}

ncclResult_t ncclSend(
    const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    struct message message = {comm, .send = true, .from = from, .bytes = count * type_bytes(type), .peer = peer};
    return post(message, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return post((struct message){comm, .to = to, .bytes = count * type_bytes(type), .peer = peer}, stream);
}

/* The communicator's memory is reclaimed when no graph refers to it any more: NCCL 2.26 and newer wait for that. */
static void reclaim(struct ncclComm *comm)
{
    pthread_mutex_lock(&mock_lock);
    if (comm->captured)
        mock_log("nccl abort of %s waits for %d captured collectives", comm->name, comm->captured);
    while (comm->captured) {
        pthread_mutex_unlock(&mock_lock);
        usleep(POLL_MICROSECONDS);
        pthread_mutex_lock(&mock_lock);
    }
    pthread_mutex_unlock(&mock_lock);
    mock_log("nccl reclaims %s", comm->name);
}

ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (--group_depth)
        return ncclSuccess;
    for (int i = 0; i < group_abort_count; i++)
        reclaim(group_aborts[i]);
    group_abort_count = 0;
    return flush_messages();
}

/* --- communicators ------------------------------------------------------------------------------------------------ */

static ncclComm_t join(const char *name, int rank, int size)
{
    const char *folder = getenv("MOCK_GPU_RENDEZVOUS");
    struct ncclComm *comm = calloc(1, sizeof *comm);
    snprintf(comm->name, sizeof comm->name, "%s", name);
    comm->rank = rank;
    comm->size = size;
    char path[512];
    snprintf(path, sizeof path, "%s/mock-nccl-%s", folder ? folder : "/dev/shm", name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (size > MAX_RANKS || file < 0 || ftruncate(file, sizeof(struct shared)))
        abort();
    comm->shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (comm->shared == MAP_FAILED)
        abort();
    close(file);
    if (atomic_fetch_add(&comm->shared->joined, 1) + 1 == size)
        unlink(path); /* all have mapped it */
    mock_log("nccl rank %d of %d waits for %s", rank, size, name);
    while (comm->shared->joined < size)
        usleep(POLL_MICROSECONDS);
    mock_log("nccl rank %d of %d is in %s", rank, size, name);
    return comm;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    return getentropy(id, 16) ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    if (mock_enter(__func__))
        return ncclUnhandledCudaError;
    char name[33];
    for (int i = 0; i < 16; i++)
        snprintf(name + 2 * i, 3, "%02x", (unsigned char)id.internal[i]);
    *comm = join(name, rank, size);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

ncclResult_t ncclCommInitRankScalable(
    ncclComm_t *comm, int size, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config)
{
    return ncclCommInitRankConfig(comm, size, *id, rank, config);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm, ncclConfig_t *config)
{
    struct slot *slots = parent->shared->slots, *own = &slots[parent->rank];
    int turn = (parent->splits + 1) % 2, rank = 0, size = 0;
    own->color[turn] = color;
    own->key[turn] = key;
    own->splits = ++parent->splits;
    for (int i = 0; i < parent->size; i++) {
        while (slots[i].splits < parent->splits && !parent->aborted)
            usleep(POLL_MICROSECONDS);
        bool before = slots[i].key[turn] < key || (slots[i].key[turn] == key && i < parent->rank);
        size += slots[i].color[turn] == color;
        rank += slots[i].color[turn] == color && before;
    }
    if (parent->aborted)
        return ncclInternalError;
    char name[200];
    snprintf(name, sizeof name, "%.150s-%lu-%d", parent->name, parent->splits, color);
    *comm = color == NCCL_SPLIT_NOCOLOR ? NULL : join(name, rank, size);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *size)
{
    *size = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = ncclSuccess;
    return ncclSuccess;
}

/* Frees what waits on this rank, and on no other. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    mock_log("nccl abort of %s", comm->name);
    comm->aborted = true;
    if (!group_depth)
        reclaim(comm);
    else if (group_abort_count < 64)
        group_aborts[group_abort_count++] = comm;
    return ncclSuccess;
}

/* Collective: returns when what was enqueued is done and all ranks are here. */
ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    mock_log("nccl finalize of %s", comm->name);
    struct collective finalize = {comm, FINALIZE};
    pthread_mutex_lock(&mock_lock);
    while (!comm->aborted && (comm->enqueued || !advance(&finalize))) {
        pthread_mutex_unlock(&mock_lock);
        usleep(POLL_MICROSECONDS);
        pthread_mutex_lock(&mock_lock);
    }
    pthread_mutex_unlock(&mock_lock);
    return ncclSuccess;
}

/* The memory stays: what was enqueued may still refer to it. */
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    mock_log("nccl destroy of %s", comm->name);
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **address, size_t bytes)
{
    return mock_allocate(address, bytes, ON_DEVICE) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclMemFree(void *address)
{
    return mock_release(address) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    if (result == ncclUnhandledCudaError)
        return "unhandled cuda error";
    return result == ncclSuccess ? "no error" : "an error of the mock GPU";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return "";
}
