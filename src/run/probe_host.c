/* probe_host.c - what the host does by itself: memory, update, gathered rows, disk. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "io/file.h"
#include "run/probe.h"

static const double patience = 1.0; /* seconds for a figure, after the third repetition */

/* The median of the seconds of a pass; the first one does not count. */
static double pass_seconds(fb_prober *p, fb_team *team, fb_task task)
{
    double samples[FB_PROBE_RUNS], start = fb_clock();
    int got = 0;
    fb_host_pass(team, &p->arrays, task);
    while (got < FB_PROBE_RUNS && (got < 3 || fb_clock() - start < patience))
        samples[got++] = fb_host_pass(team, &p->arrays, task);
    return fb_prober_median(p, samples, got);
}

static void probe_dram(fb_prober *p)
{
    const fb_task triads[] = { fb_host_triad_plain(), fb_host_triad_streaming() };
    p->m.dram = 0;
    for (size_t i = 0; i < FB_COUNT(triads); i++) {
        double rate = triads[i] ? FB_TRIAD_BYTES * (double)p->arrays.n / pass_seconds(p, p->team, triads[i]) : 0;
        if (rate > p->m.dram) {
            p->m.dram = rate;
            p->triad = triads[i];
        }
    }
}

/* 1, 2, 4 ... threads, and all. */
static fb_status probe_update(fb_prober *p, fb_error *err)
{
    fb_status st = FB_OK;
    fb_team *team = NULL;
    fb_curve *c = &p->m.update;
    *c = (fb_curve){ 0 };
    for (uint32_t threads = 1;; threads = 2 * threads < p->m.cores ? 2 * threads : p->m.cores) {
        FB_TRY(fb_team_new(&team, threads, "probe", err));
        c->x[c->n] = threads;
        c->y[c->n++] = (double)p->arrays.n / pass_seconds(p, team, fb_host_update_split());
        fb_team_free(team);
        team = NULL;
        if (threads >= p->m.cores || c->n == FB_CURVE_MAX)
            break;
    }
done:
    fb_team_free(team);
    return st;
}

/* ---- gathered rows, as the engine gathers the embedding's ---- */

enum { GATHER_ROWS = 256, ROW_SIZE = 8192 };

static void gather_task(void *ctx, uint64_t task, uint32_t worker)
{
    const fb_host_arrays *x = ctx;
    (void)worker;
    const uint64_t rows = x->n * sizeof *x->m / ROW_SIZE;
    for (uint64_t i = task * GATHER_ROWS; i < (task + 1) * GATHER_ROWS; i++) {
        uint64_t row = fb_random_mix(i ^ x->hyper.step << 32) % rows;
        memcpy((char *)x->g + i * ROW_SIZE, (const char *)x->m + row * ROW_SIZE, ROW_SIZE);
    }
}

static void probe_gather(fb_prober *p)
{
    const uint64_t tasks = p->arrays.n * sizeof *p->arrays.g / ROW_SIZE / GATHER_ROWS;
    double samples[FB_PROBE_RUNS];
    for (int i = 0; i < FB_PROBE_RUNS; i++) {
        p->arrays.hyper.step++; /* other rows each time */
        double since = fb_clock();
        fb_team_run(p->team, tasks, gather_task, &p->arrays);
        samples[i] = fb_clock() - since;
    }
    p->m.gather = (double)(tasks * GATHER_ROWS * ROW_SIZE) / fb_prober_median(p, samples, FB_PROBE_RUNS);
}

fb_status fb_probe_host(fb_prober *p, fb_error *err)
{
    probe_dram(p);
    probe_gather(p);
    return probe_update(p, err);
}

/* ---- disk ---- */

static const uint64_t disk_size = 512 << 20;
static const double disk_seconds = 10; /* of writing; a slow disk is judged by less */

static fb_status write_file(int fd, const char *path, const fb_prober *p, uint64_t *size, double *rate, fb_error *err)
{
    double since = fb_clock();
    *size = 0;
    while (*size < disk_size && (*size == 0 || fb_clock() - since < disk_seconds)) {
        ssize_t n = write(fd, p->pinned, p->pinned_size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fb_fail_file(err, FB_IO, path, "cannot be written: %s", strerror(errno));
        if (fdatasync(fd) != 0) /* piece by piece, so that the clock sees the disk and not the cache */
            return fb_fail_file(err, FB_IO, path, "cannot be made durable: %s", strerror(errno));
        *size += (uint64_t)n;
    }
    *rate = (double)*size / (fb_clock() - since);
    return FB_OK;
}

static fb_status read_file(int fd, const char *path, fb_prober *p, uint64_t size, double *rate, fb_error *err)
{
    uint64_t got = 0;
    /* Advice, but followed for clean pages; what a file system keeps anyway, training would find there too. */
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    double since = fb_clock();
    while (got < size) {
        ssize_t n = pread(fd, p->pinned, p->pinned_size, (off_t)got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fb_fail_file(err, FB_IO, path, "cannot be read back: %s",
                                n < 0 ? strerror(errno) : "it is shorter than what was written");
        got += (uint64_t)n;
    }
    *rate = (double)got / (fb_clock() - since);
    return FB_OK;
}

fb_status fb_probe_disk(fb_prober *p, const char *dir, fb_error *err)
{
    char path[FB_PATH_SIZE];
    uint64_t size;
    fb_status st = fb_path_join(path, sizeof path, dir, "forebay-probe-XXXXXX", err);
    if (st != FB_OK)
        return st;
    int fd = mkstemp(path);
    if (fd < 0)
        return fb_fail_file(err, FB_IO, dir, "no file can be made there: %s; name a folder after --disk", strerror(errno));
    unlink(path); /* gone however this ends */
    st = write_file(fd, path, p, &size, &p->m.disk_write, err);
    if (st == FB_OK)
        st = read_file(fd, path, p, size, &p->m.disk_read, err);
    close(fd);
    return st;
}
