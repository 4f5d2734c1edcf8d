/* device.cu - the CUDA device: context, streams, events, arena, copies, calls to the host.
 *
 * Failures.  A kernel's fault shows at some later call and ruins the context for good; a refused launch shows at once.
 * Either way the first sentence is kept and every later sync reports it.  Host calls are promised to happen after a
 * failure too, so that nobody waits for ever: the driver is asked for them by cudaStreamAddCallback, which, unlike
 * cudaLaunchHostFunc, also calls back on a ruined stream; and whatever it still owes when a sync finds the context
 * ruined is called from there.
 * overlap: false needs nothing here: the engine then waits for all streams after each visit. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/cuda/cuda.h"

extern "C" {
#include "device/cuda/memory.h"
#include "device/cuda/planned.h"
#include "device/plugin.h"
}

enum { CALL_MAX = 1024, INDEX_MAX = 64, CC_MIN = 80, PCI_ID_SIZE = 32 };

/* What a context is taken to need where the driver's management library does not say: an estimate, on the safe side of the
 * 590 MiB that Hopper with CUDA 13 takes, libraries included. */
static const uint64_t CONTEXT_SIZE = 640u << 20;

/* The driver gives times between events as float milliseconds: exact to a microsecond up to here. */
static const float EPOCH_MS = 8000;

struct fb_event {
    cudaEvent_t event;
};

typedef struct block { /* an allocation, to know its size at free */
    void         *mem;
    uint64_t      size;
    struct block *next;
} block;

typedef enum { CALL_IDLE, CALL_PENDING, CALL_RUNNING } call_state;

typedef struct host_call {
    fb_cuda_host *host;
    void        (*fn)(void *arg, bool failed);
    void         *arg;
    call_state    state; /* under host->lock */
} host_call;

struct fb_cuda_host {
    block          *blocks;
    uint64_t        memory_max, used, peak;
    uint64_t        free_before;   /* driver's view, before this process took any */
    char            pci_bus_id[PCI_ID_SIZE];
    bool            managed;       /* the management library knows the GPU */
    fb_device_info  info;
    cudaEvent_t     epoch, next_epoch; /* event_time counts from the first */
    double          epoch_seconds;     /* since open */

    pthread_mutex_t lock;          /* guards the rest */
    pthread_cond_t  call_done;
    fb_error        fault;         /* the first failure; status FB_OK: none */
    bool            ruined;        /* the context: nothing more will run on it */
    uint64_t        n_call;        /* the ring's next is n_call % CALL_MAX; one thread enqueues */
    host_call       calls[CALL_MAX];
};

/* ---- failures ---- */

fb_status fb_cuda_fail_text(fb_cuda *c, const char *text, const char *what, fb_error *err)
{
    fb_error e = {};
    fb_fail(&e, FB_DEVICE, "cuda device %d: %s failed: %s", c->index, what, text);
    pthread_mutex_lock(&c->host->lock);
    if (c->host->fault.status == FB_OK)
        c->host->fault = e;
    pthread_mutex_unlock(&c->host->lock);
    if (err)
        *err = e;
    return e.status;
}

fb_status fb_cuda_fail(fb_cuda *c, cudaError_t e, const char *what, fb_error *err)
{
    cudaGetLastError(); /* an error that does not ruin the context must not be taken for the next launch's */
    return fb_cuda_fail_text(c, cudaGetErrorString(e), what, err);
}

/* The failure that came first, if there was any. */
static fb_status fault_of(fb_cuda *c, fb_error *err)
{
    pthread_mutex_lock(&c->host->lock);
    fb_error e = c->host->fault;
    pthread_mutex_unlock(&c->host->lock);
    if (e.status != FB_OK && err)
        *err = e;
    return e.status;
}

/* ---- calls to the host ---- */

/* Whoever takes it from PENDING calls it. */
static void call_run(host_call *call, bool failed)
{
    fb_cuda_host *h = call->host;
    pthread_mutex_lock(&h->lock);
    bool mine = call->state == CALL_PENDING;
    if (mine)
        call->state = CALL_RUNNING;
    failed = failed || h->fault.status != FB_OK;
    pthread_mutex_unlock(&h->lock);
    if (!mine)
        return;
    call->fn(call->arg, failed);
    pthread_mutex_lock(&h->lock);
    call->state = CALL_IDLE;
    pthread_cond_broadcast(&h->call_done);
    pthread_mutex_unlock(&h->lock);
}

static void CUDART_CB call_back(cudaStream_t stream, cudaError_t e, void *call)
{
    (void)stream;
    call_run((host_call *)call, e != cudaSuccess);
}

static void call_wait(host_call *call)
{
    pthread_mutex_lock(&call->host->lock);
    while (call->state != CALL_IDLE)
        pthread_cond_wait(&call->host->call_done, &call->host->lock);
    pthread_mutex_unlock(&call->host->lock);
}

/* After the context is ruined: what the driver may owe for ever, in the order in which it was asked for. */
static void calls_settle(fb_cuda_host *h)
{
    pthread_mutex_lock(&h->lock);
    h->ruined = true;
    uint64_t next = h->n_call, first = next < CALL_MAX ? 0 : next - CALL_MAX;
    pthread_mutex_unlock(&h->lock);
    for (uint64_t i = first; i < next; i++) {
        call_run(&h->calls[i % CALL_MAX], true);
        call_wait(&h->calls[i % CALL_MAX]);
    }
}

static fb_status cuda_call(fb_device *d, fb_stream s, void (*fn)(void *arg, bool failed), void *arg, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    fb_cuda_host *h = c->host;
    if (h->ruined) { /* written by this thread alone */
        fn(arg, true);
        return fault_of(c, err);
    }
    host_call *call = &h->calls[h->n_call % CALL_MAX];
    call_wait(call);
    pthread_mutex_lock(&h->lock);
    call->fn = fn;
    call->arg = arg;
    call->state = CALL_PENDING;
    h->n_call++;
    pthread_mutex_unlock(&h->lock);
    cudaError_t e = cudaStreamAddCallback(c->stream[s], call_back, call, 0);
    if (e == cudaSuccess)
        return FB_OK;
    fb_status st = fb_cuda_fail(c, e, "a call to the host", err);
    calls_settle(h);
    return st;
}

/* ---- streams and events ---- */

static fb_status cuda_sync(fb_device *d, fb_stream s, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    cudaError_t e = cudaStreamSynchronize(c->stream[s]);
    if (e != cudaSuccess) {
        fb_cuda_fail(c, e, "work on a stream", NULL);
        if (!c->host->ruined)
            calls_settle(c->host);
    }
    return fault_of(c, err);
}

static fb_status cuda_event_new(fb_device *d, fb_event **out, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    fb_event *e = (fb_event *)calloc(1, sizeof *e);
    if (!e)
        return fb_fail(err, FB_NOMEM, "cuda device %d: no memory for an event", c->index);
    /* Waiting threads sleep: the cores have updates to do. */
    cudaError_t made = cudaEventCreateWithFlags(&e->event, cudaEventBlockingSync);
    if (made != cudaSuccess) {
        free(e);
        return fb_cuda_fail(c, made, "making an event", err);
    }
    *out = e;
    return FB_OK;
}

static void cuda_event_free(fb_device *d, fb_event *e)
{
    fb_cuda_enter(d);
    cudaEventDestroy(e->event);
    cudaGetLastError();
    free(e);
}

static fb_status cuda_record(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    FB_CUDA_TRY(c, cudaEventRecord(e->event, c->stream[s]), "recording an event", err);
    return FB_OK;
}

static fb_status cuda_wait(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    FB_CUDA_TRY(c, cudaStreamWaitEvent(c->stream[s], e->event, 0), "waiting for an event", err);
    return FB_OK;
}

static fb_status cuda_event_wait_host(fb_device *d, fb_event *e, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    FB_CUDA_TRY(c, cudaEventSynchronize(e->event), "work before an event", err);
    return fault_of(c, err);
}

/* Counts from a newer event from now on, so that the differences stay small. */
static fb_status advance_epoch(fb_cuda *c, fb_error *err)
{
    fb_cuda_host *h = c->host;
    float ms;
    FB_CUDA_TRY(c, cudaEventRecord(h->next_epoch, fb_cuda_compute(c)), "recording an event", err);
    FB_CUDA_TRY(c, cudaEventSynchronize(h->next_epoch), "work before an event", err);
    FB_CUDA_TRY(c, cudaEventElapsedTime(&ms, h->epoch, h->next_epoch), "reading an event's time", err);
    cudaEvent_t was = h->epoch;
    h->epoch = h->next_epoch;
    h->next_epoch = was;
    h->epoch_seconds += 1e-3 * (double)ms;
    return FB_OK;
}

static fb_status cuda_event_time(fb_device *d, fb_event *e, double *seconds, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    float ms;
    FB_CUDA_TRY(c, cudaEventElapsedTime(&ms, c->host->epoch, e->event), "reading an event's time", err);
    *seconds = c->host->epoch_seconds + 1e-3 * (double)ms;
    return ms < EPOCH_MS ? FB_OK : advance_epoch(c, err);
}

/* ---- copies ---- */

static fb_status cuda_upload(fb_device *d, fb_stream s, void *dst, const void *pinned, uint64_t size, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (size)
        FB_CUDA_TRY(c, cudaMemcpyAsync(dst, pinned, size, cudaMemcpyHostToDevice, c->stream[s]), "a copy to the device", err);
    return FB_OK;
}

static fb_status cuda_download(fb_device *d, fb_stream s, void *pinned, const void *src, uint64_t size, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (size)
        FB_CUDA_TRY(c, cudaMemcpyAsync(pinned, src, size, cudaMemcpyDeviceToHost, c->stream[s]), "a copy to the host", err);
    return FB_OK;
}

static fb_status cuda_fill_zero(fb_device *d, fb_stream s, void *dst, uint64_t size, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (size)
        FB_CUDA_TRY(c, cudaMemsetAsync(dst, 0, size, c->stream[s]), "clearing memory", err);
    return FB_OK;
}

/* ---- memory ---- */

static fb_status cuda_alloc(fb_device *d, uint64_t size, void **out, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    fb_cuda_host *h = c->host;
    if (h->memory_max && (size > h->memory_max || h->used > h->memory_max - size))
        return fb_fail(err, FB_NOFIT,
                       "cuda device %d: %.1f MiB asked of an arena of %.1f MiB with %.1f MiB in use; raise hbm_budget",
                       c->index, (double)size / 0x1p20, (double)h->memory_max / 0x1p20, (double)h->used / 0x1p20);
    block *b = (block *)malloc(sizeof *b);
    if (!b)
        return fb_fail(err, FB_NOMEM, "cuda device %d: no memory for an allocation's record", c->index);
    void *mem = NULL;
    cudaError_t e = cudaMalloc(&mem, size ? size : 1); /* aligned to 256 bytes: CUDA programming guide, "Device memory accesses" */
    if (e != cudaSuccess) {
        free(b);
        if (e != cudaErrorMemoryAllocation)
            return fb_cuda_fail(c, e, "taking memory", err);
        cudaGetLastError();
        size_t left = 0, total = 0;
        if (cudaMemGetInfo(&left, &total) != cudaSuccess)
            left = 0;
        return fb_fail(err, FB_NOFIT, "cuda device %d: the arena of %.1f MiB does not fit, %.1f MiB of %.1f are free; lower "
                       "hbm_budget, or end what else uses this GPU", c->index, (double)size / 0x1p20, (double)left / 0x1p20,
                       (double)total / 0x1p20);
    }
    b->mem = mem;
    b->size = size;
    b->next = h->blocks;
    h->blocks = b;
    h->used += size;
    if (h->used > h->peak)
        h->peak = h->used;
    *out = mem;
    return FB_OK;
}

static void cuda_free(fb_device *d, void *mem)
{
    fb_cuda_host *h = fb_cuda_enter(d)->host;
    for (block **at = &h->blocks; mem && *at; at = &(*at)->next) {
        block *b = *at;
        if (b->mem != mem)
            continue;
        *at = b->next;
        h->used -= b->size;
        cudaFree(b->mem);
        cudaGetLastError();
        free(b);
        return;
    }
    assert(!mem && "not an allocation of this device");
}

static fb_status cuda_pin(fb_device *d, void *host, uint64_t size, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    if (!size)
        return FB_OK;
    cudaError_t e = cudaHostRegister(host, size, cudaHostRegisterPortable);
    if (e == cudaSuccess)
        return FB_OK;
    cudaGetLastError();
    return fb_fail(err, FB_NOMEM, "cuda device %d: the system does not lock %.1f MiB of host memory for copies (%s); lower "
                   "ram_budget, or raise the limit on locked memory (ulimit -l, the container's memory)", c->index,
                   (double)size / 0x1p20, cudaGetErrorString(e));
}

static void cuda_unpin(fb_device *d, void *host)
{
    fb_cuda_enter(d);
    cudaHostUnregister(host); /* a range of no size was never registered: no harm */
    cudaGetLastError();
}

static void cuda_memory(fb_device *d, uint64_t *used, uint64_t *peak)
{
    fb_cuda_host *h = ((fb_cuda *)d)->host;
    *used = h->used;
    *peak = h->peak;
}

/* Free bytes of the whole GPU now, all processes counted; without a management library the context's own view. */
static uint64_t memory_free_now(fb_cuda *c)
{
    uint64_t total, left;
    size_t total_here = 0, left_here = 0;
    if (c->host->managed && fb_cuda_memory_seen(c->host->pci_bus_id, &total, &left))
        return left;
    if (cudaMemGetInfo(&left_here, &total_here) != cudaSuccess)
        cudaGetLastError();
    return left_here;
}

static void cuda_info(fb_device *d, fb_device_info *out)
{
    *out = ((fb_cuda *)d)->host->info;
    fb_cuda_attention_describe((fb_cuda *)d, out->attention, sizeof out->attention);
}

/* ---- open, close ---- */

/* Dense bf16 with fp32 accumulation, FLOP/s, from the vendor's data sheets; the longer of two names first. */
static double peak_flops(const char *name)
{
    static const struct {
        const char *part;
        double      tflops;
    } known[] = {
        { "H100 PCIe", 756 }, { "H100 NVL", 835 }, { "H200", 989.4 }, { "H100", 989.4 }, { "H800", 989.4 }, { "H20", 148 },
        { "GB200", 2500 }, { "B200", 2250 }, { "A100", 312 }, { "A800", 312 }, { "NVIDIA A10", 125 }, { "NVIDIA A40", 149.7 },
        { "NVIDIA L40S", 362 }, { "NVIDIA L40", 181 }, { "NVIDIA L4", 121 }, { "RTX 3090", 71 }, { "RTX 4090", 165.2 },
        { "RTX 5090", 209.5 },
    };
    for (size_t i = 0; i < FB_COUNT(known); i++)
        if (strstr(name, known[i].part))
            return known[i].tflops * 1e12;
    return 0;
}

/* Which GPU, and whether it and the driver will do.  Makes no context. */
static fb_status choose(fb_cuda *c, uint32_t index, cudaDeviceProp *prop, fb_error *err)
{
    int n = 0, driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaErrorInsufficientDriver)
        return fb_fail(err, FB_CONFIG, "backend 'cuda': the NVIDIA driver is too old: it serves CUDA %d.%d, this build needs "
                       "%d.%d; update the driver, or use backend: cpu", driver / 1000, driver % 1000 / 10, runtime / 1000,
                       runtime % 1000 / 10);
    if (e != cudaSuccess)
        return fb_fail(err, FB_CONFIG, "backend 'cuda': CUDA does not start (%s); see nvidia-smi, or use backend: cpu",
                       cudaGetErrorString(e));
    if (index >= (uint32_t)n || index >= INDEX_MAX)
        return fb_fail(err, FB_CONFIG, "device: %u is asked for, CUDA sees %d GPU%s, counted from 0; see CUDA_VISIBLE_DEVICES",
                       index, n, n == 1 ? "" : "s");
    e = cudaGetDeviceProperties(prop, (int)index);
    if (e != cudaSuccess)
        return fb_fail(err, FB_DEVICE, "cuda device %u does not say what it is: %s", index, cudaGetErrorString(e));
    c->cc = prop->major * 10 + prop->minor;
    if (c->cc < CC_MIN)
        return fb_fail(err, FB_CONFIG, "cuda device %u (%s) has compute capability %d.%d, 8.0 or later is needed; choose another "
                       "by device: N, or use backend: cpu", index, prop->name, prop->major, prop->minor);
    c->index = (int)index;
    c->n_sm = (uint32_t)prop->multiProcessorCount;
    c->shared_max = prop->sharedMemPerBlockOptin;
    return FB_OK;
}

/* Free memory before this process had a context: asked once in a process, as the context outlives the device. */
static uint64_t free_at_first(int index, uint64_t now)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t first[INDEX_MAX];
    pthread_mutex_lock(&lock);
    if (!first[index])
        first[index] = now;
    now = first[index];
    pthread_mutex_unlock(&lock);
    return now;
}

/* The context, and the memory before and after it. */
static fb_status start(fb_cuda *c, const cudaDeviceProp *prop, fb_error *err)
{
    fb_cuda_host *h = c->host;
    uint64_t total = 0, left = 0;
    FB_CUDA_TRY(c, cudaDeviceGetPCIBusId(h->pci_bus_id, PCI_ID_SIZE, c->index), "asking for the PCI address", err);
    /* A slice of a GPU has the whole one's address: then the whole one's figures are not ours. */
    h->managed = fb_cuda_memory_seen(h->pci_bus_id, &total, &left) && total - total / 16 <= prop->totalGlobalMem;
    if (h->managed)
        h->free_before = free_at_first(c->index, left);
    /* Waiting threads sleep.  A context that someone else made may keep its own way of waiting: no failure. */
    if (cudaInitDevice(c->index, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid) != cudaSuccess)
        cudaGetLastError();
    FB_CUDA_TRY(c, cudaSetDevice(c->index), "making a context", err);
    FB_CUDA_TRY(c, cudaFree(NULL), "making a context", err);
    if (!h->managed) {
        total = prop->totalGlobalMem;
        left = memory_free_now(c);
        h->free_before = free_at_first(c->index, left + CONTEXT_SIZE < total ? left + CONTEXT_SIZE : total);
    }
    fb_device_info *info = &h->info;
    snprintf(info->name, sizeof info->name, "%.60s, compute capability %d.%d", prop->name, prop->major, prop->minor);
    info->unified = prop->integrated;
    info->dtype = FB_BF16;
    info->logits_size = FB_CUDA_LOGITS_SIZE;
    info->memory_total = total;
    info->memory_free = h->free_before;
    info->peak_flops = peak_flops(prop->name);
    return FB_OK;
}

static void cuda_close(fb_device *d)
{
    if (!d)
        return;
    fb_cuda *c = fb_cuda_enter(d);
    fb_cuda_host *h = c->host;
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        if (c->stream[s] && cudaStreamSynchronize(c->stream[s]) != cudaSuccess && !h->ruined)
            calls_settle(h);
    fb_cuda_attention_deinit(c);
    fb_cuda_matmul_deinit(c);
    while (h->blocks)
        cuda_free(d, h->blocks->mem);
    if (c->workspace)
        cudaFree(c->workspace);
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        if (c->stream[s])
            cudaStreamDestroy(c->stream[s]);
    if (h->epoch)
        cudaEventDestroy(h->epoch);
    if (h->next_epoch)
        cudaEventDestroy(h->next_epoch);
    cudaGetLastError();
    free(c);
    if (h->ruined)
        return; /* the driver may still call back one day: its records stay */
    pthread_mutex_destroy(&h->lock);
    pthread_cond_destroy(&h->call_done);
    free(h);
}

static const fb_device_ops cuda_ops = {
    .name = "cuda", .info = cuda_info,
    .alloc = cuda_alloc, .free = cuda_free, .pin = cuda_pin, .unpin = cuda_unpin,
    .event_new = cuda_event_new, .event_free = cuda_event_free,
    .upload = cuda_upload, .download = cuda_download, .fill_zero = cuda_fill_zero,
    .record = cuda_record, .wait = cuda_wait, .call = cuda_call, .sync = cuda_sync,
    .event_wait_host = cuda_event_wait_host, .event_time = cuda_event_time, .memory = cuda_memory, .close = cuda_close,
};

static void ignore_call(void *arg, bool failed)
{
    (void)arg, (void)failed;
}

/* Everything that takes memory later if it is not done now. */
static fb_status warm(fb_cuda *c, fb_error *err)
{
    FB_CUDA_OK(fb_cuda_kernels_init(c, err));
    FB_CUDA_OK(fb_cuda_matmul_init(c, err));
    FB_CUDA_OK(fb_cuda_attention_init(c, err));
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        FB_CUDA_OK(cuda_call(&c->device, (fb_stream)s, ignore_call, NULL, err));
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        FB_CUDA_OK(cuda_sync(&c->device, (fb_stream)s, err));
    uint64_t left = memory_free_now(c), before = c->host->free_before;
    c->host->info.memory_overhead = before > left ? before - left : 0;
    return FB_OK;
}

static fb_status prepare(fb_cuda *c, const fb_device_options *o, fb_error *err)
{
    fb_cuda_host *h = c->host;
    cudaDeviceProp prop;
    FB_CUDA_OK(choose(c, o->index, &prop, err));
    FB_CUDA_OK(start(c, &prop, err));
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        FB_CUDA_TRY(c, cudaStreamCreateWithFlags(&c->stream[s], cudaStreamNonBlocking), "making a stream", err);
    FB_CUDA_TRY(c, cudaEventCreateWithFlags(&h->epoch, cudaEventBlockingSync), "making an event", err);
    FB_CUDA_TRY(c, cudaEventCreateWithFlags(&h->next_epoch, cudaEventBlockingSync), "making an event", err);
    FB_CUDA_TRY(c, cudaEventRecord(h->epoch, fb_cuda_compute(c)), "recording an event", err);
    FB_CUDA_TRY(c, cudaMalloc(&c->workspace, FB_CUDA_WORKSPACE_SIZE), "taking the workspace", err);
    return warm(c, err);
}

static fb_status cuda_open(fb_device **out, const fb_device_options *o, fb_error *err)
{
    fb_cuda *c = (fb_cuda *)calloc(1, sizeof *c);
    fb_cuda_host *h = (fb_cuda_host *)calloc(1, sizeof *h);
    if (!c || !h) {
        free(c);
        free(h);
        return fb_fail(err, FB_NOMEM, "cuda device: no memory for its streams");
    }
    c->device.ops = &cuda_ops;
    c->device.kernels = &fb_cuda_kernels;
    c->host = h;
    c->index = -1; /* not chosen yet: closing must not make a context */
    for (int i = 0; i < CALL_MAX; i++)
        h->calls[i].host = h;
    h->memory_max = o->memory_max;
    c->deterministic = o->deterministic;
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->call_done, NULL);
    fb_status st = prepare(c, o, err);
    if (st == FB_OK)
        *out = &c->device;
    else
        cuda_close(&c->device);
    return st;
}

extern "C" {
extern __attribute__((visibility("default"))) const fb_plugin fb_plugin_cuda;
const fb_plugin fb_plugin_cuda = { FB_VERSION, cuda_open };
}
