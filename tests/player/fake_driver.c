/* A GPU's driver without a GPU: device memory is the host's, copies are done at once, and launches are
 * handed to whoever listens. Compiled twice, as libcuda.so.1 and, with FAKE_HIP, as libamdhip64.so. */
#define _POSIX_C_SOURCE 200809L
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef FAKE_HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#ifndef MOST
#define MOST (1u << 30) /* bytes of an allocation */
#endif

typedef void (*on_launch)(const void *image, const char *name, const unsigned *grid, unsigned threads, unsigned shared,
                          void *stream, void **parameters);
typedef void (*on_copy)(int kind, void *to, const void *from, size_t size, unsigned value);

typedef struct {
    const void *image;
    char name[128];
} function;

static on_launch listener;
static on_copy copies;
static int capability = 87, count = 1, fail_code;
static uint32_t machine = 0x4c; /* gfx942, in the flags of AMD's code */
static char failing[64];
static long fail_after, alive; /* alive: modules, functions, memory, streams, contexts */

/* What tests set and ask. */
void fake_listen(on_launch launch, on_copy copy)
{
    listener = launch;
    copies = copy;
}

void fake_device(int devices, int number, unsigned flags)
{
    count = devices;
    capability = number;
    machine = flags;
}

void fake_fail(const char *call, long after, int code)
{
    strncpy(failing, call, sizeof failing - 1);
    fail_after = after;
    fail_code = code;
}

long fake_alive(void) { return __atomic_load_n(&alive, __ATOMIC_SEQ_CST); }

static void lives(long by) { __atomic_add_fetch(&alive, by, __ATOMIC_SEQ_CST); }

/* What is launched while a graph is captured, by one thread at a time. */
#define MOST_BEFORE 256
typedef struct {
    int kind; /* 0: a launch, 1: a fill, 2: a copy */
    int before[MOST_BEFORE], n_before; /* what it waits for */
    function *f;
    unsigned grid[3], threads, shared, value;
    void **parameters;
    void *to;
    const void *from;
    size_t size;
} entry;

typedef struct {
    entry entries[4096];
    int count, made;
} graph;

static graph *capturing;
static void *latest[MOST_BEFORE]; /* entries that the next one waits for */
static int n_latest;

static entry *captured(int kind)
{
    entry *next = &capturing->entries[capturing->count++];
    next->kind = kind;
    for (; next->n_before < n_latest; next->n_before++)
        next->before[next->n_before] = (int)((entry *)latest[next->n_before] - capturing->entries);
    latest[0] = next;
    n_latest = 1;
    return next;
}

static int fails(const char *call) { return strcmp(call, failing) == 0 && fail_after-- <= 0 ? fail_code : 0; }

#define CALL(name)                                                                                                     \
    do {                                                                                                               \
        int code_ = fails(name);                                                                                       \
        if (code_)                                                                                                     \
            return code_;                                                                                              \
    } while (0)

int NAME(cuInit, hipInit)(unsigned flags)
{
    CALL("init");
    return flags ? 1 : 0;
}

int NAME(cuDeviceGetCount, hipGetDeviceCount)(int *result)
{
    CALL("count");
    *result = count;
    return 0;
}

#ifdef FAKE_HIP
int hipSetDevice(int device)
{
    CALL("enter");
    return device < 0 || device >= count ? 101 : 0;
}

const char *hipGetErrorString(int code) { return code == 2 ? "out of memory" : "pretended failure"; }
#else
int cuDeviceGet(int *device, int index)
{
    *device = index;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    CALL("retain");
    lives(1);
    *context = (char *)NULL + 4096 + device;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    lives(-1);
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    CALL("enter");
    return context == NULL;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = NULL;
    return 0;
}

int cuFuncSetAttribute(void *f, int attribute, int value)
{
    (void)value;
    return f == NULL || attribute != 8;
}

int cuGetErrorString(int code, const char **text)
{
    *text = code == 2 ? "out of memory" : "pretended failure";
    return 0;
}
#endif

int NAME(cuModuleLoadData, hipModuleLoadData)(void **module, const void *image)
{
    const void **result;
    CALL("load_module");
#ifdef FAKE_HIP
    uint32_t flags;
    memcpy(&flags, (const char *)image + 48, sizeof flags); /* e_flags of a 64-bit ELF */
    if ((flags & 0xff) != machine)
        return 209;
#endif
    result = malloc(sizeof *result);
    *result = image;
    *module = result;
    lives(1);
    return 0;
}

int NAME(cuModuleUnload, hipModuleUnload)(void *module)
{
    free(module);
    lives(-1);
    return 0;
}

/* Functions live as long as the process: who has unloaded their module must not launch them. */
int NAME(cuModuleGetFunction, hipModuleGetFunction)(void **result, void *module, const char *name)
{
    static function known[4096];
    static int used;
    int at = __atomic_fetch_add(&used, 1, __ATOMIC_SEQ_CST) % 4096;
    CALL("get_function");
    known[at].image = *(const void **)module;
    strncpy(known[at].name, name, sizeof known[at].name - 1);
    *result = &known[at];
    return 0;
}

int NAME(cuLaunchKernel, hipModuleLaunchKernel)(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                                 unsigned bz, unsigned shared, void *stream, void **parameters,
                                                 void **extra)
{
    unsigned grid[3];
    CALL("launch");
    if (f == NULL || by != 1 || bz != 1 || extra != NULL || parameters == NULL)
        return 1;
    grid[0] = gx;
    grid[1] = gy;
    grid[2] = gz;
    if (capturing != NULL) {
        entry *it = captured(0);
        it->f = f;
        memcpy(it->grid, grid, sizeof grid);
        it->threads = bx;
        it->shared = shared;
        it->parameters = parameters;
        return 0;
    }
    if (listener != NULL)
        listener(((function *)f)->image, ((function *)f)->name, grid, bx, shared, stream, parameters);
    return 0;
}

static int take(void **result, size_t size)
{
    if (size == 0 || size > MOST || posix_memalign(result, 256, size) != 0)
        return 2;
    memset(*result, 0xcd, size);
    lives(1);
    return 0;
}

static int give(void *memory)
{
    free(memory);
    lives(-1);
    return 0;
}

int NAME(cuMemAlloc_v2, hipMalloc)(void **result, size_t size)
{
    CALL("take");
    return take(result, size);
}

int NAME(cuMemFree_v2, hipFree)(void *memory) { return give(memory); }

int NAME(cuMemHostAlloc, hipHostMalloc)(void **result, size_t size, unsigned flags)
{
    CALL("take_host");
    return flags ? 1 : take(result, size);
}

int NAME(cuMemFreeHost, hipHostFree)(void *memory) { return give(memory); }

static int copy(int kind, void *to, const void *from, size_t size)
{
    CALL("copy");
    if (capturing != NULL) {
        entry *it = captured(2);
        it->to = to;
        it->from = from;
        it->size = size;
        it->value = (unsigned)kind;
        return kind == 0; /* what the host sends is of one run */
    }
    memmove(to, from, size);
    if (copies != NULL)
        copies(kind, to, from, size, 0);
    return 0;
}

int NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(void *to, const void *from, size_t size, void *stream)
{
    (void)stream;
    return copy(0, to, from, size);
}

int NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void *to, void *from, size_t size, void *stream)
{
    (void)stream;
    return copy(1, to, from, size);
}

int NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(void *to, void *from, size_t size, void *stream)
{
    (void)stream;
    return copy(2, to, from, size);
}

int NAME(cuMemsetD32Async, hipMemsetD32Async)(void *to, unsigned value, size_t number, void *stream)
{
    size_t i;
    (void)stream;
    CALL("fill");
    if (capturing != NULL) {
        entry *it = captured(1);
        it->to = to;
        it->value = value;
        it->size = number;
        return 0;
    }
    for (i = 0; i < number; i++)
        memcpy((char *)to + 4 * i, &value, 4);
    if (copies != NULL)
        copies(3, to, NULL, 4 * number, value);
    return 0;
}

int NAME(cuStreamCreate, hipStreamCreateWithFlags)(void **stream, unsigned flags)
{
    CALL("make_stream");
    lives(1);
    *stream = (char *)NULL + 8192;
    return flags != 1;
}

int NAME(cuStreamDestroy_v2, hipStreamDestroy)(void *stream)
{
    lives(-1);
    return stream == NULL;
}

int NAME(cuStreamSynchronize, hipStreamSynchronize)(void *stream)
{
    CALL("wait");
    return stream == NULL;
}

int NAME(cuStreamBeginCapture_v2, hipStreamBeginCapture)(void *stream, int mode)
{
    CALL("begin_capture");
    if (capturing != NULL || mode != 1 || stream == NULL)
        return 1;
    capturing = calloc(1, sizeof *capturing);
    n_latest = 0;
    lives(1);
    return 0;
}

#ifndef OLD_DRIVER
int NAME(cuStreamGetCaptureInfo_v2, hipStreamGetCaptureInfo_v2)(void *stream, int *status, unsigned long long *id,
                                                                void **graph, void *const **nodes, size_t *number)
{
    CALL("get_captured");
    if (capturing == NULL || stream == NULL || graph != NULL)
        return 1;
    *status = 1;
    *id = 1;
    *nodes = latest;
    *number = (size_t)n_latest;
    return 0;
}

int NAME(cuStreamUpdateCaptureDependencies, hipStreamUpdateCaptureDependencies)(void *stream, void **nodes, size_t number,
                                                                                unsigned flags)
{
    size_t i, k;
    CALL("wait_for");
    if (capturing == NULL || stream == NULL || flags != 1 || number > MOST_BEFORE)
        return 1;
    for (i = 0; i < number; i++) {
        entry *it = nodes[i];
        if (it < capturing->entries || it >= capturing->entries + capturing->count)
            return 1;
        for (k = 0; k < i; k++)
            if (nodes[k] == it)
                return 1;
        latest[i] = it;
    }
    n_latest = (int)number;
    return 0;
}
#endif

int NAME(cuStreamEndCapture, hipStreamEndCapture)(void *stream, void **result)
{
    *result = capturing;
    capturing = NULL;
    CALL("end_capture");
    return stream == NULL || *result == NULL;
}

int NAME(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags)(void **result, void *captured, unsigned long long flags)
{
    CALL("make_graph");
    *result = malloc(sizeof(graph));
    memcpy(*result, captured, sizeof(graph));
    ((graph *)*result)->made = 1;
    lives(1);
    return flags != 0;
}

static int run_entry(const entry *e, void *stream)
{
    if (e->kind == 0)
        return NAME(cuLaunchKernel, hipModuleLaunchKernel)(e->f, e->grid[0], e->grid[1], e->grid[2], e->threads, 1, 1,
                                                           e->shared, stream, e->parameters, NULL);
    if (e->kind == 1)
        return NAME(cuMemsetD32Async, hipMemsetD32Async)(e->to, e->value, e->size, stream);
    return copy((int)e->value, e->to, e->from, e->size);
}

int NAME(cuGraphLaunch, hipGraphLaunch)(void *made, void *stream)
{
    graph *it = made;
    char *done;
    int i, k, left, code = 0;
    CALL("launch_graph");
    if (!it->made || capturing != NULL)
        return 1;
    /* Of what waits for nothing more, the last: whoever relies on another order computes something else. */
    done = calloc(1, (size_t)it->count + 1);
    for (left = it->count; left > 0 && !code; left--) {
        for (i = it->count - 1; i >= 0; i--) {
            for (k = 0; k < it->entries[i].n_before && done[it->entries[i].before[k]]; k++)
                ;
            if (!done[i] && k == it->entries[i].n_before)
                break;
        }
        code = i < 0 ? 1 : run_entry(&it->entries[i], stream);
        done[i < 0 ? 0 : i] = 1;
    }
    free(done);
    return code;
}

static int drop(void *it)
{
    free(it);
    lives(-1);
    return 0;
}

int NAME(cuGraphExecDestroy, hipGraphExecDestroy)(void *made) { return drop(made); }

int NAME(cuGraphDestroy, hipGraphDestroy)(void *graph) { return drop(graph); }
