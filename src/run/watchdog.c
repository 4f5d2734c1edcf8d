#include "run/watchdog.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/memory.h"
#include "run/sink.h"

/* Between looks: no report is later than this against the second it is due. */
static const double LOOK_S = 0.25;

struct fb_watchdog {
    fb_job            *job;
    const fb_activity *activity;
    double             quiet_s;
    pthread_t          thread;
    pthread_mutex_t    lock; /* guards what follows */
    bool               stop;
    struct {
        fb_describe describe;
        const void *ctx;
    } describers[FB_WATCHDOG_DESCRIBERS];
};

/* What has been seen so far. */
typedef struct watch {
    uint64_t count, step;
    double   since;       /* when the count was last seen to change */
    double   step_since, longest_step;
    double   speak_after; /* of standing still */
} watch;

static void say_state(fb_watchdog *w, double still)
{
    char text[512];
    fb_memory_room room;
    fb_activity_say(w->activity, text, sizeof text);
    fb_say(&w->job->sink, FB_SAY_PROGRESS, "report: %s; last movement %.1f s ago", text, still);
    if (fb_memory_room_now(&room))
        fb_say(&w->job->sink, FB_SAY_PROGRESS, "report: host memory %.1f MiB held, %.1f MiB more can be had (%s)",
               (double)fb_memory_resident() / 0x1p20, (double)room.bytes / 0x1p20, room.limit);
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < FB_WATCHDOG_DESCRIBERS; i++)
        if (w->describers[i].describe) {
            w->describers[i].describe(w->describers[i].ctx, text, sizeof text);
            fb_say(&w->job->sink, FB_SAY_PROGRESS, "report: %s", text);
        }
    pthread_mutex_unlock(&w->lock);
}

static double patience(const fb_watchdog *w, const watch *s)
{
    return w->quiet_s > 2 * s->longest_step ? w->quiet_s : 2 * s->longest_step;
}

static void look(fb_watchdog *w, watch *s)
{
    double now = fb_clock();
    uint64_t count = fb_activity_count(w->activity), step = atomic_load_explicit(&w->activity->step, memory_order_relaxed);
    if (step != s->step) {
        if (s->step && now - s->step_since > s->longest_step)
            s->longest_step = now - s->step_since;
        s->step = step;
        s->step_since = now;
    }
    if (count != s->count) {
        s->count = count;
        s->since = now;
        s->speak_after = patience(w, s);
    }
    double still = now - s->since;
    if (w->quiet_s > 0 && still >= s->speak_after) {
        char text[256];
        fb_activity_say(w->activity, text, sizeof text);
        fb_say(&w->job->sink, FB_SAY_WARNING, "nothing has moved for %.0f s: %s", still, text);
        s->speak_after *= 2;
    }
    if (atomic_exchange(&w->job->report, 0))
        say_state(w, still);
}

static bool is_stopped(fb_watchdog *w)
{
    pthread_mutex_lock(&w->lock);
    bool stop = w->stop;
    pthread_mutex_unlock(&w->lock);
    return stop;
}

/* fb_job_report and fb_watchdog_stop wake it; else it wakes by itself. */
static void rest(fb_watchdog *w)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    long ns = until.tv_nsec + (long)(LOOK_S * 1e9);
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    while (sem_timedwait(&w->job->wake, &until) != 0 && errno == EINTR) {}
}

static void *watchdog_main(void *arg)
{
    fb_watchdog *w = arg;
    watch s = { .since = fb_clock(), .speak_after = w->quiet_s };
    while (!is_stopped(w)) {
        look(w, &s);
        rest(w);
    }
    return NULL;
}

fb_status fb_watchdog_start(fb_watchdog **out, fb_job *j, const fb_activity *activity, double quiet_s, fb_error *err)
{
    sigset_t all, before;
    fb_watchdog *w = calloc(1, sizeof *w);
    if (!w)
        return fb_fail(err, FB_NOMEM, "watchdog: no memory");
    *w = (fb_watchdog){ .job = j, .activity = activity, .quiet_s = quiet_s };
    pthread_mutex_init(&w->lock, NULL);
    sigfillset(&all); /* signals are the main thread's business */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&w->thread, NULL, watchdog_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        pthread_mutex_destroy(&w->lock);
        free(w);
        return fb_fail(err, FB_FAILED, "watchdog: the system refuses a thread");
    }
    pthread_setname_np(w->thread, "watchdog");
    *out = w;
    return FB_OK;
}

void fb_watchdog_stop(fb_watchdog *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_mutex_unlock(&w->lock);
    sem_post(&w->job->wake);
    pthread_join(w->thread, NULL);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static void set_describer(fb_watchdog *w, const void *find, fb_describe describe, const void *ctx)
{
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < FB_WATCHDOG_DESCRIBERS; i++)
        if (w->describers[i].ctx == find) {
            w->describers[i].describe = describe;
            w->describers[i].ctx = ctx;
            break;
        }
    pthread_mutex_unlock(&w->lock);
}

void fb_watchdog_add(fb_watchdog *w, fb_describe describe, const void *ctx)
{
    set_describer(w, NULL, describe, ctx);
}

void fb_watchdog_forget(fb_watchdog *w, const void *ctx)
{
    set_describer(w, ctx, NULL, NULL);
}
