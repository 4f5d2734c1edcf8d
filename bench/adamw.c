/* bench/adamw - how near the update comes to this machine's memory bandwidth.
 *
 *     bench/adamw [--threads N] [--size MiB] [--rounds N]
 *
 * The mark is STREAM's triad, a[i] = b[i] + s * c[i] (McCalpin 1995), counted as STREAM counts it: two arrays read and
 * one written, 12 bytes an element.  A plain store also reads the line that it overwrites, which STREAM does not count,
 * so the triad is timed with plain and with non-temporal stores and the better one is the mark.  The update reads what
 * it writes, so that what is counted is what moves: 28 bytes a parameter for fp32 masters (p, m, v read and written,
 * g read), 26 for split ones (hi, lo, m, v read and written, a bf16 g read).  Bandwidth drifts on a busy machine:
 * each round times everything once, and each line is its best round. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/dtype.h"
#include "base/thread.h"
#include "optim/adamw_impl.h"

/* Elements a task takes: small enough that threads end together, large enough that a task costs nothing. */
enum { SPAN = 1 << 16 };

typedef struct arrays {
    uint64_t  n; /* a multiple of SPAN */
    float    *p, *g, *m, *v;
    uint16_t *hi, *g16;
    int16_t  *lo;
    fb_adamw  hyper;
} arrays;

/* First touch, by the threads that will use the pages.  The values stay ordinary over any number of updates and
 * triads: weights near 1, gradients of alternating sign. */
static void fill(void *ctx, uint64_t task, uint32_t worker)
{
    const arrays *x = ctx;
    (void)worker;
    for (uint64_t i = task * SPAN; i < (task + 1) * SPAN; i++) {
        x->p[i] = 1.0f + 0x1p-10f * (float)(i % 64);
        x->g[i] = (i & 1 ? -1e-3f : 1e-3f) * (float)(1 + i % 7);
        x->m[i] = 0.0f;
        x->v[i] = 1e-6f;
        x->g16[i] = fb_f32_bf16(x->g[i]);
        fb_split_f32(&x->hi[i], &x->lo[i], &x->p[i], 1);
    }
}

static void triad_plain(void *ctx, uint64_t task, uint32_t worker)
{
    const arrays *x = ctx;
    (void)worker;
    float *restrict a = x->g + task * SPAN;
    const float *restrict b = x->m + task * SPAN, *restrict c = x->v + task * SPAN;
    for (uint64_t i = 0; i < SPAN; i++)
        a[i] = b[i] + 0.5f * c[i];
}

#if defined(__x86_64__)
/* Fetches ahead as the update does: the mark gets every help that the measured code gets. */
__attribute__((target("avx"))) static void triad_streaming(void *ctx, uint64_t task, uint32_t worker)
{
    const arrays *x = ctx;
    (void)worker;
    float *a = x->g + task * SPAN;
    const float *b = x->m + task * SPAN, *c = x->v + task * SPAN;
    const __m256 s = _mm256_set1_ps(0.5f);
    for (uint64_t i = 0; i < SPAN; i += 16) { /* a cache line of each; arrays begin on a page */
        _mm_prefetch((const char *)(b + i) + FB_ADAMW_AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)(c + i) + FB_ADAMW_AHEAD, _MM_HINT_T0);
        for (uint64_t k = i; k < i + 16; k += 8)
            _mm256_stream_ps(a + k, _mm256_add_ps(_mm256_load_ps(b + k), _mm256_mul_ps(s, _mm256_load_ps(c + k))));
    }
    _mm_sfence();
}
#endif

static void update_f32(void *ctx, uint64_t task, uint32_t worker)
{
    const arrays *x = ctx;
    (void)worker;
    uint64_t i = task * SPAN;
    fb_adamw_f32(x->p + i, x->g + i, x->m + i, x->v + i, SPAN, &x->hyper, true);
}

static void update_split(void *ctx, uint64_t task, uint32_t worker)
{
    const arrays *x = ctx;
    (void)worker;
    uint64_t i = task * SPAN;
    fb_adamw_split(x->hi + i, x->lo + i, x->g16 + i, x->m + i, x->v + i, SPAN, &x->hyper, true);
}

typedef struct subject {
    const char *name, *kernel; /* kernel NULL: a triad */
    fb_task     task;
    int         size; /* bytes an element */
} subject;

static const subject subjects[] = {
    { "triad, plain stores", NULL, triad_plain, 12 },
#if defined(__x86_64__)
    { "triad, non-temporal stores", NULL, triad_streaming, 12 },
#endif
    { "AdamW fp32, scalar", "scalar", update_f32, 28 },
    { "AdamW fp32, avx2", "avx2", update_f32, 28 },
    { "AdamW fp32, avx512", "avx512", update_f32, 28 },
    { "AdamW split, scalar", "scalar", update_split, 26 },
    { "AdamW split, avx2", "avx2", update_split, 26 },
    { "AdamW split, avx512", "avx512", update_split, 26 },
};

static bool runs_here(const subject *s)
{
    if (s->kernel)
        return fb_adamw_select(s->kernel);
#if defined(__x86_64__)
    if (s->task == triad_streaming)
        return __builtin_cpu_supports("avx");
#endif
    return true;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* best: elements a second of each subject, 0 where this processor cannot run it. */
static void measure(fb_team *team, arrays *x, unsigned long n_round, double *best)
{
    fb_team_run(team, x->n / SPAN, fill, x);
    for (unsigned long round = 0; round < n_round; round++)
        for (size_t i = 0; i < FB_COUNT(subjects); i++) {
            if (!runs_here(&subjects[i]))
                continue;
            x->hyper.step++;
            double start = now();
            fb_team_run(team, x->n / SPAN, subjects[i].task, x);
            double rate = (double)x->n / (now() - start);
            best[i] = rate > best[i] ? rate : best[i];
        }
}

static void print_results(const double *best)
{
    double mark = 0;
    for (size_t i = 0; i < FB_COUNT(subjects); i++)
        if (!subjects[i].kernel && best[i] * subjects[i].size > mark)
            mark = best[i] * subjects[i].size;
    for (size_t i = 0; i < FB_COUNT(subjects); i++) {
        const subject *s = &subjects[i];
        double moved = best[i] * s->size; /* bytes a second */
        if (best[i] == 0)
            printf("%-28s not supported by this processor\n", s->name);
        else if (!s->kernel)
            printf("%-28s %8.2f GB/s\n", s->name, moved / 1e9);
        else
            printf("%-28s %8.2f GB/s  %5.1f%% of triad  %6.3f Gparam/s, %d bytes each\n", s->name, moved / 1e9,
                   100 * moved / mark, best[i] / 1e9, s->size);
    }
}

/* Huge pages where the system allows; without them only the speed differs. */
static void *map_array(uint64_t size)
{
    void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED)
        return NULL;
    madvise(mem, size, MADV_HUGEPAGE);
    return mem;
}

static int usage(const char *program)
{
    fprintf(stderr, "usage: %s [--threads 1..4096] [--size MiB an fp32 array, 64..1048576] [--rounds 1..1000]\n", program);
    return 2;
}

int main(int argc, char **argv)
{
    unsigned long n_thread = fb_core_count(), size_mib = 768, n_round = 5;
    for (int i = 1; i < argc; i += 2) {
        char *end = NULL;
        unsigned long value = i + 1 < argc ? strtoul(argv[i + 1], &end, 10) : 0;
        bool number = end && end != argv[i + 1] && *end == '\0';
        if (number && strcmp(argv[i], "--threads") == 0 && value >= 1 && value <= 4096)
            n_thread = value;
        else if (number && strcmp(argv[i], "--size") == 0 && value >= 64 && value <= 1048576)
            size_mib = value;
        else if (number && strcmp(argv[i], "--rounds") == 0 && value >= 1 && value <= 1000)
            n_round = value;
        else
            return usage(argv[0]);
    }

    fb_error err;
    fb_team *team = NULL;
    if (fb_team_new(&team, (uint32_t)n_thread, "bench", &err) != FB_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return fb_status_exit_code(err.status);
    }
    uint64_t n = (uint64_t)size_mib << 18;
    arrays x = { .n = n, .p = map_array(4 * n), .g = map_array(4 * n), .m = map_array(4 * n), .v = map_array(4 * n),
                 .hi = map_array(2 * n), .lo = map_array(2 * n), .g16 = map_array(2 * n),
                 .hyper = { .lr = 1e-5, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip = 0.5 } };
    if (!x.p || !x.g || !x.m || !x.v || !x.hi || !x.lo || !x.g16) {
        fprintf(stderr, "%s: no memory for %lu MiB of arrays; give a smaller --size\n", argv[0], size_mib * 22 / 4);
        return fb_status_exit_code(FB_NOMEM);
    }

    double best[FB_COUNT(subjects)] = { 0 };
    printf("%lu threads; arrays of %lu MiB (last-level cache %ld MiB); best of %lu rounds\n", n_thread, size_mib,
           sysconf(_SC_LEVEL3_CACHE_SIZE) >> 20, n_round);
    measure(team, &x, n_round, best);
    print_results(best);
    fb_team_free(team);
    return 0;
}
