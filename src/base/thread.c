#include "base/thread.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEAM_SIZE_MAX = 4096,
    /* Rounds of looking before sleeping: a few microseconds.  Runs follow one another closely inside a step, and a
     * futex wake costs more than that; looking any longer would steal time from other teams. */
    SPIN_ROUNDS = 64,
    CGROUP_PATH_MAX = 512,
};

typedef struct team_worker {
    fb_team  *team;
    uint32_t  index;
    pthread_t thread;
} team_worker;

/* A run is open from its announcement until the caller has seen its last task handed out.  A thread works on a run
 * only if it joins while it is open, and the caller leaves only when all that joined have left: so a thread that
 * wakes late holds up nobody, and fn and ctx are never used after fb_team_run returned. */
struct fb_team {
    pthread_mutex_t  mutex; /* guards what follows, up to next */
    pthread_cond_t   start, done;
    bool             open, stop;
    fb_task          fn;
    void            *ctx;
    uint64_t         n_task;
    _Atomic uint64_t run;      /* counts runs; written under the mutex, watched without it */
    _Atomic uint32_t n_joined; /* likewise */
    _Alignas(64) _Atomic uint64_t next; /* the next task; a cache line of its own, every thread hammers it */
    _Alignas(64) uint32_t size;
    uint32_t         n_started, spin;
    team_worker      worker[]; /* 1..size-1; the caller is worker 0 and has no thread here */
};

static inline void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void team_work(fb_team *t, fb_task fn, void *ctx, uint64_t n_task, uint32_t worker)
{
    uint64_t task;
    while ((task = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed)) < n_task)
        fn(ctx, task, worker);
}

static void *team_main(void *arg)
{
    const team_worker *w = arg;
    fb_team *t = w->team;
    uint64_t seen = 0;

    for (;;) {
        for (uint32_t i = 0; i < t->spin && atomic_load_explicit(&t->run, memory_order_relaxed) == seen; i++)
            spin_pause();

        pthread_mutex_lock(&t->mutex);
        while (!t->stop && (!t->open || t->run == seen))
            pthread_cond_wait(&t->start, &t->mutex);
        if (t->stop) {
            pthread_mutex_unlock(&t->mutex);
            return NULL;
        }
        seen = t->run;
        t->n_joined++;
        fb_task fn = t->fn;
        void *ctx = t->ctx;
        uint64_t n_task = t->n_task;
        pthread_mutex_unlock(&t->mutex);

        team_work(t, fn, ctx, n_task, w->index);

        pthread_mutex_lock(&t->mutex);
        if (--t->n_joined == 0)
            pthread_cond_signal(&t->done);
        pthread_mutex_unlock(&t->mutex);
    }
}

static int team_start(fb_team *t, const char *name)
{
    /* Signals are the main thread's business: a handler must never run in the middle of an update. */
    sigset_t all, before;
    int rc = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (t->n_started + 1 < t->size) {
        team_worker *w = &t->worker[t->n_started];
        *w = (team_worker){ .team = t, .index = t->n_started + 1 };
        rc = pthread_create(&w->thread, NULL, team_main, w);
        if (rc)
            break;
        char label[16]; /* the kernel's limit */
        snprintf(label, sizeof label, "%.10s-%u", name, w->index);
        pthread_setname_np(w->thread, label);
        t->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

fb_status fb_team_new(fb_team **out, uint32_t size, const char *name, fb_error *err)
{
    if (size == 0 || size > TEAM_SIZE_MAX)
        return fb_fail(err, FB_CONFIG, "team '%s': %u threads asked for, expected 1 to %d", name, size, TEAM_SIZE_MAX);
    size_t bytes = sizeof(fb_team) + (size - 1) * sizeof(team_worker);
    bytes = (bytes + _Alignof(fb_team) - 1) / _Alignof(fb_team) * _Alignof(fb_team);
    fb_team *t = aligned_alloc(_Alignof(fb_team), bytes);
    if (!t)
        return fb_fail(err, FB_NOMEM, "team '%s': no memory for %u threads", name, size);
    memset(t, 0, bytes);
    t->size = size;
    t->spin = size <= fb_core_count() ? SPIN_ROUNDS : 0;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->start, NULL);
    pthread_cond_init(&t->done, NULL);

    int rc = team_start(t, name);
    if (rc) {
        fb_status st = fb_fail(err, FB_NOMEM, "team '%s': thread %u of %u cannot be started: %s; ask for fewer threads",
                               name, t->n_started + 1, size, strerror(rc));
        fb_team_free(t);
        return st;
    }
    *out = t;
    return FB_OK;
}

void fb_team_free(fb_team *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->mutex);
    t->stop = true;
    pthread_cond_broadcast(&t->start);
    pthread_mutex_unlock(&t->mutex);
    for (uint32_t i = 0; i < t->n_started; i++)
        pthread_join(t->worker[i].thread, NULL);
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->start);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}

uint32_t fb_team_size(const fb_team *t)
{
    return t->size;
}

void fb_team_run(fb_team *t, uint64_t n_task, fb_task fn, void *ctx)
{
    assert(n_task <= UINT64_MAX - TEAM_SIZE_MAX); /* next runs past n_task by one a thread */
    if (t->size == 1 || n_task <= 1) {
        for (uint64_t task = 0; task < n_task; task++)
            fn(ctx, task, 0);
        return;
    }

    pthread_mutex_lock(&t->mutex);
    assert(!t->open); /* two callers at a time, or a task that runs its own team */
    t->fn = fn;
    t->ctx = ctx;
    t->n_task = n_task;
    atomic_store_explicit(&t->next, 0, memory_order_relaxed);
    t->open = true;
    t->run++;
    pthread_cond_broadcast(&t->start);
    pthread_mutex_unlock(&t->mutex);

    team_work(t, fn, ctx, n_task, 0);

    pthread_mutex_lock(&t->mutex);
    t->open = false;
    pthread_mutex_unlock(&t->mutex);
    for (uint32_t i = 0; i < t->spin && atomic_load_explicit(&t->n_joined, memory_order_relaxed) != 0; i++)
        spin_pause();
    pthread_mutex_lock(&t->mutex);
    while (t->n_joined != 0)
        pthread_cond_wait(&t->done, &t->mutex);
    pthread_mutex_unlock(&t->mutex);
}

/* CPUs in the affinity mask.  The mask is as long as the kernel was built for, so the buffer grows until it fits. */
static uint32_t affinity_cores(void)
{
    for (int n_cpu = 1024; n_cpu <= 1 << 20; n_cpu *= 2) {
        cpu_set_t *set = CPU_ALLOC(n_cpu);
        if (!set)
            return 1;
        size_t size = CPU_ALLOC_SIZE(n_cpu);
        bool read = sched_getaffinity(0, size, set) == 0;
        bool too_small = !read && errno == EINVAL;
        int count = read ? CPU_COUNT_S(size, set) : 1;
        CPU_FREE(set);
        if (!too_small)
            return count > 1 ? (uint32_t)count : 1;
    }
    return 1;
}

/* The leading numbers of a small text file ("max" reads as -1); how many were read. */
static int read_numbers(const char *dir, const char *name, long long number[2])
{
    char path[2 * CGROUP_PATH_MAX], text[64];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", dir, name) >= sizeof path)
        return 0;
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    const char *line = fgets(text, sizeof text, f);
    fclose(f);
    if (!line)
        return 0;
    if (strncmp(text, "max", 3) == 0) {
        number[0] = -1;
        return 1;
    }
    return sscanf(text, "%lld %lld", &number[0], &number[1]);
}

static uint32_t min_cores(uint32_t cores, long long quota, long long period)
{
    if (quota <= 0 || period <= 0)
        return cores;
    long long allowed = quota / period + (quota % period != 0);
    return allowed < cores ? (uint32_t)allowed : cores;
}

/* The quota of one cgroup: cpu.max "quota period" (v2), or cpu.cfs_quota_us and cpu.cfs_period_us (v1). */
static uint32_t cgroup_dir_cores(const char *dir, uint32_t cores)
{
    long long quota[2], period[2];
    if (read_numbers(dir, "cpu.max", quota) == 2)
        return min_cores(cores, quota[0], quota[1]);
    if (read_numbers(dir, "cpu.cfs_quota_us", quota) >= 1 && read_numbers(dir, "cpu.cfs_period_us", period) >= 1)
        return min_cores(cores, quota[0], period[0]);
    return cores;
}

/* A cgroup is bound by its ancestors' quotas too.  In a container the path may be the host's, unknown under this
 * mount: its missing folders are then passed over, and the mount's root, which is the container's cgroup, counts. */
static uint32_t cgroup_path_cores(const char *mount, const char *path, uint32_t cores)
{
    char dir[CGROUP_PATH_MAX];
    if ((size_t)snprintf(dir, sizeof dir, "%s%s", mount, path) >= sizeof dir)
        return cgroup_dir_cores(mount, cores);
    for (;;) {
        cores = cgroup_dir_cores(dir, cores);
        char *slash = strrchr(dir + strlen(mount), '/');
        if (!slash)
            return cores;
        *slash = '\0';
    }
}

/* membership: the lines "id:controllers:path" of /proc/self/cgroup; no controllers means v2. */
static uint32_t cgroup_cores(const char *membership, const char *root, uint32_t cores)
{
    FILE *f = fopen(membership, "re");
    if (!f)
        return cores;
    char line[CGROUP_PATH_MAX], list[CGROUP_PATH_MAX + 2], mount[CGROUP_PATH_MAX];
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        controllers++;
        *path++ = '\0';
        if (*controllers == '\0') {
            cores = cgroup_path_cores(root, path, cores);
            continue;
        }
        snprintf(list, sizeof list, ",%s,", controllers);
        /* v1's cpu controller is mounted, or linked to, at this name by systemd and by container runtimes. */
        if (strstr(list, ",cpu,") && (size_t)snprintf(mount, sizeof mount, "%s/cpu", root) < sizeof mount)
            cores = cgroup_path_cores(mount, path, cores);
    }
    fclose(f);
    return cores;
}

uint32_t fb_core_count(void)
{
    uint32_t cores = cgroup_cores("/proc/self/cgroup", "/sys/fs/cgroup", affinity_cores());
    return cores > 1 ? cores : 1;
}
