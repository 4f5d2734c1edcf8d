/* bench/adamw - how near the update comes to this machine's memory bandwidth.
 *
 *     bench/adamw [--threads N] [--size MiB] [--rounds N]
 *
 * The mark is STREAM's triad (run/host_rate.h), with plain and with non-temporal stores: the better one counts.  What is counted
 * of the update is what moves: 28 bytes a parameter for fp32 masters (p, m, v read and written, g read), 26 for split ones (hi,
 * lo, m, v read and written, a bf16 g read).  Bandwidth drifts on a busy machine: each round times everything once, and each
 * line is its best round. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/host_rate.h"

typedef struct subject {
    const char *name, *kernel; /* kernel NULL: a triad */
    fb_task   (*task)(void);
    int         size; /* bytes an element */
} subject;

static const subject subjects[] = {
    { "triad, plain stores", NULL, fb_host_triad_plain, FB_TRIAD_BYTES },
    { "triad, non-temporal stores", NULL, fb_host_triad_streaming, FB_TRIAD_BYTES },
    { "AdamW fp32, scalar", "scalar", fb_host_update_f32, FB_UPDATE_F32_BYTES },
    { "AdamW fp32, avx2", "avx2", fb_host_update_f32, FB_UPDATE_F32_BYTES },
    { "AdamW fp32, avx512", "avx512", fb_host_update_f32, FB_UPDATE_F32_BYTES },
    { "AdamW split, scalar", "scalar", fb_host_update_split, FB_UPDATE_SPLIT_BYTES },
    { "AdamW split, avx2", "avx2", fb_host_update_split, FB_UPDATE_SPLIT_BYTES },
    { "AdamW split, avx512", "avx512", fb_host_update_split, FB_UPDATE_SPLIT_BYTES },
};

/* best: elements a second of each subject, 0 where this processor cannot run it. */
static void measure(fb_team *team, fb_host_arrays *x, unsigned long n_round, double *best)
{
    for (unsigned long round = 0; round < n_round; round++)
        for (size_t i = 0; i < FB_COUNT(subjects); i++) {
            fb_task task = subjects[i].task();
            if (!task || (subjects[i].kernel && !fb_adamw_select(subjects[i].kernel)))
                continue;
            double rate = (double)x->n / fb_host_pass(team, x, task);
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
    fb_host_arrays x;
    if (fb_host_arrays_new(&x, (uint64_t)size_mib << 18, team, &err) != FB_OK) {
        fprintf(stderr, "%s: %s; give a smaller --size\n", argv[0], err.msg);
        return fb_status_exit_code(FB_NOMEM);
    }

    double best[FB_COUNT(subjects)] = { 0 };
    printf("%lu threads; arrays of %lu MiB (last-level cache %ld MiB); best of %lu rounds\n", n_thread, size_mib,
           sysconf(_SC_LEVEL3_CACHE_SIZE) >> 20, n_round);
    measure(team, &x, n_round, best);
    print_results(best);
    fb_host_arrays_free(&x);
    fb_team_free(team);
    return 0;
}
