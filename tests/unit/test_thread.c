/* The team: every task exactly once, by a worker index in range, whatever the sizes; the quota rules on files that
 * the test writes. */
#include "../../src/base/thread.c"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { N_TASK_MAX = 1000, N_WORKER_MAX = 8 };

typedef struct tally {
    uint32_t         plain[N_TASK_MAX];           /* not atomic on purpose: a data race shows under TSan */
    uint64_t         by_worker[N_WORKER_MAX][16]; /* likewise; one cache line or more each */
    _Atomic uint64_t out_of_range;
    uint64_t         n_task;
    uint32_t         size;
} tally;

static void count_task(void *ctx, uint64_t task, uint32_t worker)
{
    tally *c = ctx;
    if (task >= c->n_task || worker >= c->size) {
        c->out_of_range++;
        return;
    }
    c->plain[task]++;
    c->by_worker[worker][0]++;
}

static fb_team *team_of(uint32_t size)
{
    fb_team *t = NULL;
    fb_error err;
    assert_int_equal(fb_team_new(&t, size, "test", &err), FB_OK);
    assert_int_equal(fb_team_size(t), size);
    return t;
}

static void every_task_runs_exactly_once(void **state)
{
    (void)state;
    static const uint64_t n_tasks[] = { 0, 1, 2, 3, 7, 8, 9, 100, N_TASK_MAX };
    static tally c;
    for (uint32_t size = 1; size <= N_WORKER_MAX; size++) {
        fb_team *t = team_of(size);
        for (size_t k = 0; k < FB_COUNT(n_tasks); k++) {
            memset(&c, 0, sizeof c);
            c.n_task = n_tasks[k];
            c.size = size;
            fb_team_run(t, n_tasks[k], count_task, &c);
            uint64_t sum = 0;
            for (uint32_t w = 0; w < size; w++)
                sum += c.by_worker[w][0];
            assert_int_equal(c.out_of_range, 0);
            assert_int_equal(sum, n_tasks[k]);
            for (uint64_t i = 0; i < N_TASK_MAX; i++)
                assert_int_equal(c.plain[i], i < n_tasks[k]);
        }
        fb_team_free(t);
    }
}

/* What one run wrote is seen by the next, on any thread: prefix doubling needs each round complete. */
typedef struct doubling {
    const uint64_t *from;
    uint64_t       *to, stride;
} doubling;

static void double_task(void *ctx, uint64_t task, uint32_t worker)
{
    const doubling *d = ctx;
    (void)worker;
    d->to[task] = d->from[task] + (task >= d->stride ? d->from[task - d->stride] : 0);
}

static void runs_follow_one_another_in_order(void **state)
{
    (void)state;
    enum { N = 512 };
    static uint64_t buffer[2][N];
    fb_team *t = team_of(3);
    for (int repeat = 0; repeat < 100; repeat++) {
        uint64_t *from = buffer[0], *to = buffer[1];
        for (int i = 0; i < N; i++)
            from[i] = 1;
        for (uint64_t stride = 1; stride < N; stride *= 2) {
            doubling d = { from, to, stride };
            fb_team_run(t, N, double_task, &d);
            uint64_t *swap = from;
            from = to;
            to = swap;
        }
        for (uint64_t i = 0; i < N; i++)
            assert_int_equal(from[i], i + 1);
    }
    fb_team_free(t);
}

/* Many tiny runs with a context that dies at once: a thread that wakes late must not touch it. */
static void a_late_thread_never_sees_an_old_run(void **state)
{
    (void)state;
    fb_team *t = team_of(4);
    for (uint32_t i = 0; i < 3000; i++) {
        tally *c = calloc(1, sizeof *c);
        assert_non_null(c);
        c->n_task = 2 + i % 5;
        c->size = 4;
        fb_team_run(t, c->n_task, count_task, c);
        assert_int_equal(c->out_of_range, 0);
        for (uint64_t k = 0; k < c->n_task; k++)
            assert_int_equal(c->plain[k], 1);
        memset(c, 0xa5, sizeof *c);
        free(c);
    }
    fb_team_free(t);
}

/* The same on purpose: the team's thread starts only when the run is over, and finds the task counter at 0 again, as
 * the next run's announcement would leave it. */
static void a_closed_run_cannot_be_joined(void **state)
{
    (void)state;
    static tally c;
    memset(&c, 0, sizeof c);
    c.n_task = 3;
    c.size = 2;
    fb_team *t = team_of(2);
    pthread_mutex_lock(&t->mutex);
    t->stop = true;
    pthread_cond_broadcast(&t->start);
    pthread_mutex_unlock(&t->mutex);
    pthread_join(t->worker[0].thread, NULL);
    t->stop = false;
    t->n_started = 0;

    fb_team_run(t, c.n_task, count_task, &c);
    t->next = 0;
    assert_int_equal(team_start(t, "late"), 0);
    usleep(5000);
    fb_team_free(t);
    for (uint64_t i = 0; i < c.n_task; i++)
        assert_int_equal(c.plain[i], 1);
}

static void meet_task(void *ctx, uint64_t task, uint32_t worker)
{
    (void)task, (void)worker;
    pthread_barrier_wait(ctx);
}

static void all_threads_work_at_once(void **state)
{
    (void)state;
    fb_team *t = team_of(4);
    pthread_barrier_t barrier; /* opens only when four tasks are under way together: a serial team would hang */
    pthread_barrier_init(&barrier, NULL, 4);
    fb_team_run(t, 4, meet_task, &barrier);
    pthread_barrier_destroy(&barrier);
    fb_team_free(t);
}

static void impossible_sizes_are_refused(void **state)
{
    (void)state;
    fb_team *t = NULL;
    fb_error err;
    assert_int_equal(fb_team_new(&t, 0, "none", &err), FB_CONFIG);
    assert_string_equal(err.msg, "team 'none': 0 threads asked for, expected 1 to 4096");
    assert_int_equal(fb_team_new(&t, UINT32_MAX, "all", NULL), FB_CONFIG);
    assert_null(t);
    fb_team_free(NULL);
}

static char dir[] = "test_thread_XXXXXX"; /* rewritten by mkdtemp */

static void put(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    for (char *p = path + sizeof dir; *p; p++)
        if (*p == '/') {
            *p = '\0';
            mkdir(path, 0700);
            *p = '/';
        }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static uint32_t cores_with(const char *membership)
{
    char path[256];
    put("self", membership);
    snprintf(path, sizeof path, "%s/self", dir);
    return cgroup_cores(path, dir, 64);
}

static void quotas_bind_at_every_level_and_round_up(void **state)
{
    (void)state;
    char where[128];
    const char *tmp = getenv("TMPDIR");
    snprintf(where, sizeof where, "%s", tmp ? tmp : P_tmpdir);
    assert_int_equal(chdir(where), 0);
    assert_non_null(mkdtemp(dir));

    assert_int_equal(cores_with(""), 64);
    assert_int_equal(cores_with("not a cgroup line\n0:\n"), 64);
    assert_int_equal(cores_with("0::/\n"), 64); /* no such file */

    put("cpu.max", "max 100000\n");
    put("a/cpu.max", "1250000 100000\n");
    put("a/b/cpu.max", "max 100000\n");
    put("c/cpu.max", "1000 100000\n");
    put("d/cpu.max", "garbage\n");
    assert_int_equal(cores_with("0::/\n"), 64);
    assert_int_equal(cores_with("0::/a\n"), 13); /* 12.5 */
    assert_int_equal(cores_with("0::/a/b\n"), 13);
    assert_int_equal(cores_with("0::/c\n"), 1);
    assert_int_equal(cores_with("0::/d\n"), 64);
    put("cpu.max", "300000 100000\n");
    assert_int_equal(cores_with("0::/of/the/host\n"), 3); /* unknown path: the mount's root counts */

    put("cpu/cpu.cfs_quota_us", "-1\n");
    put("cpu/cpu.cfs_period_us", "100000\n");
    put("cpu/job/cpu.cfs_quota_us", "200001\n");
    put("cpu/job/cpu.cfs_period_us", "50000\n");
    assert_int_equal(cores_with("5:cpuset:/job\n4:cpu,cpuacct:/job\n"), 5);
    assert_int_equal(cores_with("4:cpuacct,cpu:/\n"), 64);
    assert_int_equal(cores_with("4:cpuacct:/job\n"), 64);

    char command[64];
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

static void this_machine_has_between_one_core_and_its_cpus(void **state)
{
    (void)state;
    assert_in_range(fb_core_count(), 1, (uint32_t)sysconf(_SC_NPROCESSORS_ONLN));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_exactly_once),
        cmocka_unit_test(runs_follow_one_another_in_order),
        cmocka_unit_test(a_late_thread_never_sees_an_old_run),
        cmocka_unit_test(a_closed_run_cannot_be_joined),
        cmocka_unit_test(all_threads_work_at_once),
        cmocka_unit_test(impossible_sizes_are_refused),
        cmocka_unit_test(quotas_bind_at_every_level_and_round_up),
        cmocka_unit_test(this_machine_has_between_one_core_and_its_cpus),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
