/* probe.c - `forebay probe`: measures this machine, shows it, writes its profile. */
#include "run/probe.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "config/options.h"
#include "io/file.h"
#include "run/sink.h"

/* ---- shared by the parts ---- */

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double fb_prober_median(fb_prober *p, double *samples, int n)
{
    qsort(samples, (size_t)n, sizeof *samples, compare_double);
    double median = (samples[(n - 1) / 2] + samples[n / 2]) / 2;
    p->spread = fmax(p->spread, (samples[n - 1] - samples[0]) / median);
    return median;
}

fb_status fb_prober_alloc(fb_prober *p, uint64_t size, void **out, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(p->d->ops->alloc(p->d, size, out, err));
    for (uint64_t at = 0; at < size; at += p->pinned_size) {
        uint64_t piece = size - at < p->pinned_size ? size - at : p->pinned_size;
        FB_TRY(p->d->ops->upload(p->d, FB_STREAM_COMPUTE, (char *)*out + at, p->pinned, piece, err));
    }
    FB_TRY(p->d->ops->sync(p->d, FB_STREAM_COMPUTE, err));
done:
    return st;
}

void fb_prober_settle(fb_prober *p)
{
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        p->d->ops->sync(p->d, (fb_stream)s, NULL); /* a failure has been told, or will be by whoever syncs to know */
}

/* ---- set-up ---- */

/* Uniform in [-1, 1), by all threads: numbers that depend on their place alone. */
static void fill_task(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_prober *p = ctx;
    const uint64_t piece = 1 << 20, size = fb_dtype_size(p->act), n = piece / size;
    uint64_t state = task;
    (void)worker;
    for (uint64_t i = task * n; i < (task + 1) * n; i++) {
        float x = (float)(2 * fb_random_uniform(&state) - 1);
        if (p->act == FB_F32)
            ((float *)(void *)p->pinned)[i] = x;
        else
            ((uint16_t *)(void *)p->pinned)[i] = fb_f32_bf16(x);
    }
}

static fb_status open_pinned(fb_prober *p, fb_error *err)
{
    p->pinned_size = (p->info.unified ? 64u : 256u) << 20;
    const uint64_t size = p->pinned_size + FB_PROBE_NOTES_SIZE;
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED)
        return fb_fail(err, FB_NOMEM, "probe: no memory for a buffer of %llu MiB to copy from", (unsigned long long)(size >> 20));
    madvise(mem, size, MADV_HUGEPAGE); /* advice only */
    p->pinned = mem;
    p->notes = p->pinned + p->pinned_size;
    fb_team_run(p->team, p->pinned_size >> 20, fill_task, p);
    fb_status st = p->d->ops->pin(p->d, p->pinned, size, err);
    if (st != FB_OK) {
        munmap(mem, size);
        p->pinned = NULL;
    }
    return st;
}

static void prober_close(fb_prober *p)
{
    if (p->d)
        fb_prober_settle(p);
    if (p->pinned) {
        p->d->ops->unpin(p->d, p->pinned);
        munmap(p->pinned, p->pinned_size + FB_PROBE_NOTES_SIZE);
    }
    fb_host_arrays_free(&p->arrays);
    fb_team_free(p->team);
    if (p->since)
        p->d->ops->event_free(p->d, p->since);
    if (p->until)
        p->d->ops->event_free(p->d, p->until);
    if (p->d)
        p->d->ops->close(p->d);
}

/* Streams through more than any cache holds, on a small machine through a sixteenth of its memory. */
static uint64_t array_elements(uint64_t ram)
{
    const uint64_t most = 128u << 20, some = ram / 16 / FB_HOST_BYTES;
    return some < most ? some : most;
}

static fb_status prober_open(fb_prober *p, const fb_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    fb_machine *m = &p->m;
    m->measured = true;
    m->cores = fb_core_count();
    m->ram = fb_memory_available(); /* before anything of it is taken */
    if (!m->ram)
        FB_TRY(fb_fail(err, FB_FAILED, "probe: the system does not say how much memory there is (/proc/meminfo)"));
    FB_TRY(fb_device_open(&p->d, &(fb_device_options){ .backend = o->backend, .index = o->device, .n_thread = o->compute_threads,
        .deterministic = o->full_determinism }, err));
    p->d->ops->info(p->d, &p->info);
    p->act = o->compute_dtype == FB_DTYPE_AUTO ? p->info.dtype : (fb_dtype)o->compute_dtype;
    /* "NVIDIA H200, compute capability 9.0": what comes first names the product. */
    snprintf(m->device, sizeof m->device, "%.*s", (int)strcspn(p->info.name, ","), p->info.name);
    const char *product = strncmp(m->device, "NVIDIA ", 7) ? m->device : m->device + 7;
    snprintf(m->name, sizeof m->name, "%.56s, %u cores, %.0f GiB", product, m->cores, (double)m->ram / 0x1p30);
    m->unified = p->info.unified;
    m->memory = p->info.memory_total ? p->info.memory_total : m->ram;
    m->overhead = p->info.memory_overhead;
    m->peak_flops = p->info.peak_flops;
    FB_TRY(p->d->ops->event_new(p->d, &p->since, err));
    FB_TRY(p->d->ops->event_new(p->d, &p->until, err));
    FB_TRY(fb_team_new(&p->team, m->cores, "probe", err));
    FB_TRY(fb_host_arrays_new(&p->arrays, array_elements(m->ram), p->team, err));
    FB_TRY(open_pinned(p, err));
done:
    return st; /* prober_close either way */
}

/* ---- what is said ---- */

/* Four digits: more would be noise, and hard to read. */
static double shorten(double x)
{
    double exponent = x > 0 ? floor(log10(x)) - 3 : 0;
    double unit = pow(10, fabs(exponent)); /* a whole number either way, so that nothing is added by the rounding */
    return exponent >= 0 ? round(x / unit) * unit : round(x * unit) / unit;
}

static void shorten_curve(fb_curve *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        c->y[i] = shorten(c->y[i]);
}

static void shorten_all(fb_machine *m)
{
    double *const numbers[] = { &m->matmul_peak, &m->matmul_accumulate, &m->memory_rate, &m->launch, &m->h2d_both, &m->d2h_both,
                                &m->copy_latency, &m->dram, &m->dram_dma, &m->gather, &m->disk_write, &m->disk_read };
    fb_curve *const curves[] = { &m->matmul_rows, &m->attention_fwd, &m->attention_bwd, &m->h2d, &m->d2h, &m->update };
    for (size_t i = 0; i < FB_COUNT(numbers); i++)
        *numbers[i] = shorten(*numbers[i]);
    for (size_t i = 0; i < FB_COUNT(curves); i++)
        shorten_curve(curves[i]);
}

/* "128 0.412  256 0.7": x in units of x_unit, y of y_unit. */
static void say_curve(const fb_sink *sink, const char *what, const char *unit, const fb_curve *c, double x_unit, double y_unit)
{
    char text[512] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < c->n && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%g: %.4g", i ? "   " : "", c->x[i] / x_unit, c->y[i] / y_unit);
    fb_say(sink, FB_SAY_RESULT, "  %-34s %s   %s", what, text, unit);
}

static void say_one(const fb_sink *sink, const char *what, const char *unit, double x)
{
    fb_say(sink, FB_SAY_RESULT, "  %-34s %.4g %s", what, x, unit);
}

static void report(const fb_prober *p, bool disk)
{
    const fb_machine *m = &p->m;
    const fb_sink *s = p->sink;
    const double G = 1e9, T = 1e12, GIB = 0x1p30, MIB = 0x1p20;
    fb_say(s, FB_SAY_RESULT, "%s (%s), %s", m->name, p->info.name, fb_dtype_hf_str(p->act));
    fb_say(s, FB_SAY_RESULT, "device");
    say_one(s, "memory", "GiB", (double)m->memory / GIB);
    say_one(s, "of it context and libraries", "GiB", (double)m->overhead / GIB);
    say_one(s, "products, warm", "TFLOP/s", m->matmul_peak / T);
    if (m->peak_flops > 0)
        say_one(s, "of the data sheet's peak", "", m->matmul_peak / m->peak_flops);
    say_curve(s, "of that, by the smallest dimension", "", &m->matmul_rows, 1, 1);
    say_one(s, "of that, accumulating in float32", "", m->matmul_accumulate);
    say_curve(s, "attention forward, by length", "TFLOP/s", &m->attention_fwd, 1, T);
    say_curve(s, "attention backward, by length", "TFLOP/s", &m->attention_bwd, 1, T);
    say_one(s, "row kernels", "GB/s", m->memory_rate / G);
    say_one(s, "a small kernel", "us", m->launch * 1e6);
    fb_say(s, FB_SAY_RESULT, "link");
    say_curve(s, "host to device, by MiB", "GB/s", &m->h2d, MIB, G);
    say_curve(s, "device to host, by MiB", "GB/s", &m->d2h, MIB, G);
    fb_say(s, FB_SAY_RESULT, "  %-34s %.4g and %.4g GB/s", "both at once", m->h2d_both / G, m->d2h_both / G);
    say_one(s, "a copy, beside its bytes", "us", m->copy_latency * 1e6);
    fb_say(s, FB_SAY_RESULT, "host");
    say_one(s, "cores", "", m->cores);
    say_one(s, "memory to use", "GiB", (double)m->ram / GIB);
    say_one(s, "memory's rate, triad", "GB/s", m->dram / G);
    say_one(s, "while copies run both ways", "GB/s", m->dram_dma / G);
    say_curve(s, "AdamW, by threads", "Gparam/s", &m->update, 1, G);
    say_one(s, "embedding rows gathered", "GB/s", m->gather / G);
    if (disk)
        fb_say(s, FB_SAY_RESULT, "  %-34s %.4g and %.4g GB/s", "disk, written and read", m->disk_write / G, m->disk_read / G);
}

/* ---- the command ---- */

static fb_status read_options(fb_options *o, const fb_probe_request *r, fb_error *err)
{
    static const char *const keys[] = { "backend=", "device=", "compute_dtype=", "compute_threads=", "full_determinism=" };
    for (int i = 0; i < r->n_override; i++) {
        bool taken = false;
        for (size_t k = 0; k < FB_COUNT(keys); k++)
            taken |= strncmp(r->overrides[i], keys[k], strlen(keys[k])) == 0;
        if (!taken)
            return fb_fail(err, FB_CONFIG, "probe: '%.64s' says nothing about a machine; it takes backend, device, compute_dtype, "
                           "compute_threads, full_determinism", r->overrides[i]);
    }
    return fb_options_read(o, NULL, r->overrides, r->n_override, fb_say_warning, (void *)(uintptr_t)r->sink, err);
}

static fb_status measure(fb_prober *p, const char *disk_dir, fb_error *err)
{
    static const struct {
        const char *what;
        fb_status (*run)(fb_prober *p, fb_error *err);
    } parts[] = {
        { "matrix products", fb_probe_products }, { "attention", fb_probe_attention }, { "row kernels", fb_probe_rows },
        { "host memory and update", fb_probe_host }, { "link", fb_probe_link },
    };
    fb_status st = FB_OK;
    if (disk_dir) /* first, since it may fail for the name's sake */
        FB_TRY(fb_probe_disk(p, disk_dir, err));
    for (size_t i = 0; i < FB_COUNT(parts); i++) {
        double since = fb_clock();
        FB_TRY(parts[i].run(p, err));
        fb_say(p->sink, FB_SAY_PROGRESS, "%s: %.1f s", parts[i].what, fb_clock() - since);
    }
done:
    return st;
}

/* Before minutes are spent on what could then not be kept. */
static fb_status check_out(const char *path, fb_error *err)
{
    char folder[FB_PATH_SIZE];
    const char *slash = strrchr(path, '/');
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    if (access(folder, W_OK | X_OK) == 0)
        return FB_OK;
    return fb_fail_file(err, FB_IO, path, "cannot be written there: %s; name another file after --out", strerror(errno));
}

fb_status fb_probe(const fb_probe_request *r, fb_error *err)
{
    fb_status st = FB_OK;
    fb_options o = { 0 };
    fb_prober p = { .sink = r->sink };
    char date[16];
    const time_t now = time(NULL);
    struct tm day;
    FB_TRY(read_options(&o, r, err));
    if (r->out)
        FB_TRY(check_out(r->out, err));
    FB_TRY(prober_open(&p, &o, err));
    FB_TRY(measure(&p, r->disk_dir, err));
    shorten_all(&p.m);
    report(&p, r->disk_dir != NULL);
    fb_say(p.sink, FB_SAY_RESULT, "figures are medians; repetitions lay up to %.0f %% apart", 100 * p.spread);
    if (r->out) {
        gmtime_r(&now, &day);
        strftime(date, sizeof date, "%Y-%m-%d", &day);
        FB_TRY(fb_machine_write(&p.m, &(fb_machine_origin){ .date = date, .forebay = fb_version(), .backend = p.d->ops->name,
            .device = p.info.name, .spread = shorten(p.spread) }, r->out, err));
        fb_say(p.sink, FB_SAY_RESULT, "profile: %s", r->out);
    }
done:
    prober_close(&p);
    fb_options_free(&o);
    return st;
}
