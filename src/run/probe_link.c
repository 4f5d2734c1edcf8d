/* probe_link.c - the copies between host and device: alone, both ways at once, and what they leave of the host's memory. */
#include <math.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "run/probe.h"

static const uint64_t small_size = 128 << 10, large_size = 32 << 20; /* to find the latency; for both ways at once */
static const double run_seconds = 0.02;

static fb_status copy(fb_prober *p, fb_stream s, void *device, uint64_t at, uint64_t size, fb_error *err)
{
    return s == FB_STREAM_H2D ? p->d->ops->upload(p->d, s, device, p->pinned + at, size, err)
                              : p->d->ops->download(p->d, s, p->pinned + at, device, size, err);
}

static fb_status elapsed(fb_prober *p, fb_event *since, fb_event *until, double *seconds, fb_error *err)
{
    fb_status st = FB_OK;
    double a, b;
    FB_TRY(p->d->ops->event_time(p->d, since, &a, err));
    FB_TRY(p->d->ops->event_time(p->d, until, &b, err));
    *seconds = fmax(b - a, 1e-9);
done:
    return st;
}

/* ---- one way ---- */

/* Seconds of one copy, of `times` in a row. */
static fb_status copy_once(fb_prober *p, fb_stream s, void *device, uint64_t size, uint32_t times, double *seconds, fb_error *err)
{
    fb_status st = FB_OK;
    const uint64_t places = p->pinned_size / size; /* another place each time: what a cache holds is faster */
    FB_TRY(p->d->ops->record(p->d, s, p->since, err));
    for (uint32_t i = 0; i < times; i++)
        FB_TRY(copy(p, s, device, i % places * size, size, err));
    FB_TRY(p->d->ops->record(p->d, s, p->until, err));
    FB_TRY(p->d->ops->sync(p->d, s, err));
    FB_TRY(elapsed(p, p->since, p->until, seconds, err));
    *seconds /= times;
done:
    return st;
}

static fb_status copy_seconds(fb_prober *p, fb_stream s, void *device, uint64_t size, double *seconds, fb_error *err)
{
    fb_status st = FB_OK;
    double samples[FB_PROBE_RUNS], once;
    FB_TRY(copy_once(p, s, device, size, 1, &once, err));
    uint32_t times = (uint32_t)fmin(64, ceil(run_seconds / once));
    for (int i = 0; i < FB_PROBE_RUNS; i++)
        FB_TRY(copy_once(p, s, device, size, times, &samples[i], err));
    *seconds = fb_prober_median(p, samples, FB_PROBE_RUNS);
done:
    return st;
}

static fb_status one_way(fb_prober *p, fb_stream s, void *device, fb_curve *curve, double *latency, fb_error *err)
{
    fb_status st = FB_OK;
    double seconds;
    *curve = (fb_curve){ 0 };
    for (uint64_t size = 1 << 20; size <= p->pinned_size; size *= 4) {
        FB_TRY(copy_seconds(p, s, device, size, &seconds, err));
        curve->x[curve->n] = (double)size;
        curve->y[curve->n++] = (double)size / seconds;
    }
    FB_TRY(copy_seconds(p, s, device, small_size, &seconds, err));
    *latency = seconds - (double)small_size / curve->y[curve->n - 1];
done:
    return st;
}

/* ---- both ways ---- */

enum { COPIES = 24 };

/* One direction's copies, with an event before the first and after each. */
typedef struct lane {
    fb_stream stream;
    void     *device;
    fb_event *events[COPIES + 1];
    double    at[COPIES + 1];
} lane;

static void lane_close(fb_prober *p, lane *l)
{
    for (int i = 0; i <= COPIES; i++)
        if (l->events[i])
            p->d->ops->event_free(p->d, l->events[i]);
}

static fb_status lane_open(fb_prober *p, lane *l, fb_stream stream, void *device, fb_error *err)
{
    fb_status st = FB_OK;
    *l = (lane){ .stream = stream, .device = device };
    for (int i = 0; i <= COPIES; i++)
        FB_TRY(p->d->ops->event_new(p->d, &l->events[i], err));
done:
    return st; /* lane_close either way */
}

/* Copies that were under way at time t, the one then running in part. */
static double copies_until(const lane *l, double t)
{
    for (int i = 1; i <= COPIES; i++)
        if (l->at[i] > t)
            return i - 1 + fmax(0, (t - l->at[i - 1]) / (l->at[i] - l->at[i - 1]));
    return COPIES;
}

/* Copies in one lane in the time during which both were at work, as bytes a second. */
static double rate_in(const lane *l, double since, double until)
{
    return (copies_until(l, until) - copies_until(l, since)) * (double)large_size / fmax(until - since, 1e-9);
}

static fb_status both_once(fb_prober *p, lane lanes[2], double rates[2], fb_error *err)
{
    fb_status st = FB_OK;
    const fb_device_ops *ops = p->d->ops;
    for (int i = 0; i <= COPIES; i++)
        for (int k = 0; k < 2; k++) {
            const uint64_t places = p->pinned_size / 2 / large_size; /* each direction has a half of the host's buffer */
            if (i > 0)
                FB_TRY(copy(p, lanes[k].stream, lanes[k].device, ((uint64_t)i % places + (uint64_t)k * places) * large_size,
                            large_size, err));
            FB_TRY(ops->record(p->d, lanes[k].stream, lanes[k].events[i], err));
        }
    for (int k = 0; k < 2; k++)
        FB_TRY(ops->sync(p->d, lanes[k].stream, err));
    for (int k = 0; k < 2; k++)
        for (int i = 0; i <= COPIES; i++)
            FB_TRY(ops->event_time(p->d, lanes[k].events[i], &lanes[k].at[i], err));
    double since = fmax(lanes[0].at[0], lanes[1].at[0]), until = fmin(lanes[0].at[COPIES], lanes[1].at[COPIES]);
    for (int k = 0; k < 2; k++)
        rates[k] = rate_in(&lanes[k], since, until);
done:
    return st;
}

static fb_status both_ways(fb_prober *p, void *up, void *down, fb_error *err)
{
    fb_status st = FB_OK;
    lane lanes[2] = { 0 };
    double samples[2][FB_PROBE_RUNS], rates[2];
    FB_TRY(lane_open(p, &lanes[0], FB_STREAM_H2D, up, err));
    FB_TRY(lane_open(p, &lanes[1], FB_STREAM_D2H, down, err));
    for (int i = 0; i < FB_PROBE_RUNS; i++) {
        FB_TRY(both_once(p, lanes, rates, err));
        samples[0][i] = rates[0];
        samples[1][i] = rates[1];
    }
    p->m.h2d_both = fb_prober_median(p, samples[0], FB_PROBE_RUNS);
    p->m.d2h_both = fb_prober_median(p, samples[1], FB_PROBE_RUNS);
done:
    fb_prober_settle(p);
    lane_close(p, &lanes[0]);
    lane_close(p, &lanes[1]);
    return st;
}

/* ---- what is left of the host's memory meanwhile ---- */

static void note_end(void *arg, bool failed)
{
    (void)failed; /* the sync says so */
    atomic_store((atomic_bool *)arg, true);
}

/* Triads on all cores for as long as copies run both ways; bytes a second of those that ended before the first of the
 * two directions did. */
static fb_status triads_during_copies(fb_prober *p, void *up, void *down, double *rate, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_device_ops *ops = p->d->ops;
    const double wanted = 0.25;
    atomic_bool ended = false;
    const uint64_t places = p->pinned_size / 2 / large_size;
    const double slower = fmin(p->m.h2d_both, p->m.d2h_both);
    const uint32_t copies = (uint32_t)fmin(400, ceil(wanted * slower / (double)large_size));
    double passes = 0, seconds = 0;
    for (uint32_t i = 0; st == FB_OK && i < copies; i++) {
        st = copy(p, FB_STREAM_H2D, up, i % places * large_size, large_size, err);
        if (st == FB_OK)
            st = copy(p, FB_STREAM_D2H, down, (i % places + places) * large_size, large_size, err);
    }
    if (st == FB_OK)
        st = ops->call(p->d, FB_STREAM_H2D, note_end, &ended, err);
    if (st == FB_OK)
        st = ops->call(p->d, FB_STREAM_D2H, note_end, &ended, err);
    while (st == FB_OK) {
        double pass = fb_host_pass(p->team, &p->arrays, p->triad);
        bool whole = !atomic_load(&ended);
        if (whole || passes == 0) { /* a host so slow that no pass ends in time: what it did mostly meanwhile */
            passes++;
            seconds += pass;
        }
        if (!whole)
            break;
    }
    *rate = passes * FB_TRIAD_BYTES * (double)p->arrays.n / seconds;
    for (int k = 0; st == FB_OK && k < 2; k++)
        st = ops->sync(p->d, k ? FB_STREAM_D2H : FB_STREAM_H2D, err);
    fb_prober_settle(p); /* whatever happened: the calls refer to this function's flag */
    return st;
}

static fb_status memory_beside_copies(fb_prober *p, void *up, void *down, fb_error *err)
{
    fb_status st = FB_OK;
    double samples[FB_PROBE_RUNS];
    for (int i = 0; i < FB_PROBE_RUNS; i++)
        FB_TRY(triads_during_copies(p, up, down, &samples[i], err));
    p->m.dram_dma = fb_prober_median(p, samples, FB_PROBE_RUNS);
done:
    return st;
}

fb_status fb_probe_link(fb_prober *p, fb_error *err)
{
    fb_status st = FB_OK;
    void *up = NULL, *down = NULL;
    double up_latency, down_latency;
    FB_TRY(fb_prober_alloc(p, p->pinned_size, &up, err));
    FB_TRY(fb_prober_alloc(p, p->pinned_size, &down, err));
    FB_TRY(one_way(p, FB_STREAM_H2D, up, &p->m.h2d, &up_latency, err));
    FB_TRY(one_way(p, FB_STREAM_D2H, down, &p->m.d2h, &down_latency, err));
    p->m.copy_latency = fmax(1e-7, (up_latency + down_latency) / 2); /* below what a clock would show, never 0 */
    FB_TRY(both_ways(p, up, down, err));
    FB_TRY(memory_beside_copies(p, up, down, err));
done:
    fb_prober_settle(p);
    p->d->ops->free(p->d, up);
    p->d->ops->free(p->d, down);
    return st;
}
