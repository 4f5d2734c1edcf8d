#include "sched/trace.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* A worker takes a block in chunks; what follows within this time, in the same block, is one span. */
static const double JOIN_SECONDS = 100e-6;
static const double HOST_SECONDS_MIN = 1e-6;
enum { LANE_MAX = 2048, CLOCK_LOOKS = 5 };

typedef struct entry {
    double   begin, end; /* seconds since new */
    uint64_t size;       /* bytes, or elements of an update */
    fb_trace_label label;
    uint32_t track;      /* fb_stream, then the host, then workers */
} entry;

enum { TRACK_HOST = FB_STREAM_COUNT, TRACK_WORKERS };

/* Enqueued on a stream, between events[2 i] and events[2 i + 1]. */
typedef struct span {
    fb_trace_label label;
    uint64_t  size;
    fb_stream stream;
    double    begin, end;
} span;

/* What a worker or the host has done since the last step.  One thread adds, the engine's takes. */
typedef struct lane {
    pthread_mutex_t lock;
    entry   *entries;
    uint32_t n, capacity;
    uint64_t n_lost;
} lane;

struct fb_trace {
    fb_trace_options o;
    double     opened;      /* on the host's clock */
    double     offset;      /* of the device's clock: what it calls 0, in seconds since opened */
    fb_event  *look;        /* to compare the clocks by */
    fb_event **events;      /* [2 n_span] */
    span      *spans;       /* [n_span] of the step in hand, and, after its cut, of the next */
    uint32_t   n_span;
    uint32_t   n_cut;       /* of them, those before the cut */
    double     cut;         /* when it was made */
    uint32_t   open[FB_STREAM_COUNT]; /* the span not yet ended; UINT32_MAX: none */
    lane       host, *workers;
    entry     *kept;        /* ring */
    uint64_t   n_kept, capacity; /* ever, at most */
    uint64_t   n_lost;
    fb_trace_account account;
};

#define TEXT(name, text) text,
static const char *const cause_text[] = { FB_CAUSE_MAP(TEXT) };
#undef TEXT
#define ROW(name, text, means) { text, FB_CAUSE_##means },
static const struct {
    const char *text;
    fb_cause    means;
} kinds[] = { FB_TRACE_KIND_MAP(ROW) };
#undef ROW

const char *fb_cause_str(fb_cause c)
{
    assert(c < FB_CAUSE_COUNT);
    return cause_text[c];
}

/* ---- clocks ---- */

double fb_trace_now(const fb_trace *t)
{
    return t ? fb_clock() - t->opened : 0;
}

/* The host learns of an event a little late, never early: of all looks the smallest difference is nearest the truth. */
static fb_status compare_clocks(fb_trace *t, fb_error *err)
{
    fb_status st = FB_OK;
    fb_device *d = t->o.device;
    double seconds;
    FB_TRY(d->ops->record(d, FB_STREAM_COMPUTE, t->look, err));
    FB_TRY(d->ops->sync(d, FB_STREAM_COMPUTE, err));
    double now = fb_trace_now(t);
    FB_TRY(d->ops->event_time(d, t->look, &seconds, err));
    if (now - seconds < t->offset)
        t->offset = now - seconds;
done:
    return st;
}

/* ---- recording ---- */

fb_status fb_trace_begin(fb_trace *t, fb_stream s, fb_trace_label l, uint64_t size, fb_error *err)
{
    if (!t)
        return FB_OK;
    assert(t->open[s] == UINT32_MAX);
    if (t->n_span == t->o.n_span) {
        t->n_lost++;
        return FB_OK;
    }
    uint32_t i = t->open[s] = t->n_span++;
    t->spans[i] = (span){ .label = l, .size = size, .stream = s };
    return t->o.device->ops->record(t->o.device, s, t->events[2 * i], err);
}

fb_status fb_trace_end(fb_trace *t, fb_stream s, fb_error *err)
{
    if (!t || t->open[s] == UINT32_MAX)
        return FB_OK;
    uint32_t i = t->open[s];
    t->open[s] = UINT32_MAX;
    return t->o.device->ops->record(t->o.device, s, t->events[2 * i + 1], err);
}

fb_status fb_traced_upload(fb_device *d, fb_trace *t, fb_trace_label l, void *dst, const void *src, uint64_t size, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(fb_trace_begin(t, FB_STREAM_H2D, l, size, err));
    FB_TRY(d->ops->upload(d, FB_STREAM_H2D, dst, src, size, err));
    FB_TRY(fb_trace_end(t, FB_STREAM_H2D, err));
done:
    return st;
}

fb_status fb_traced_download(fb_device *d, fb_trace *t, fb_trace_label l, void *dst, const void *src, uint64_t size, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(fb_trace_begin(t, FB_STREAM_D2H, l, size, err));
    FB_TRY(d->ops->download(d, FB_STREAM_D2H, dst, src, size, err));
    FB_TRY(fb_trace_end(t, FB_STREAM_D2H, err));
done:
    return st;
}

fb_status fb_traced_wait(fb_device *d, fb_trace *t, fb_trace_label l, fb_event *e, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(fb_trace_begin(t, FB_STREAM_COMPUTE, l, 0, err));
    FB_TRY(d->ops->wait(d, FB_STREAM_COMPUTE, e, err));
    FB_TRY(fb_trace_end(t, FB_STREAM_COMPUTE, err));
done:
    return st;
}

static void add_to_lane(lane *l, const entry *e, double join_seconds)
{
    pthread_mutex_lock(&l->lock);
    entry *last = l->n ? &l->entries[l->n - 1] : NULL;
    if (last && last->label.kind == e->label.kind && last->label.block == e->label.block && e->begin - last->end < join_seconds) {
        last->end = e->end;
        last->size += e->size;
    } else if (l->n < l->capacity)
        l->entries[l->n++] = *e;
    else
        l->n_lost++;
    pthread_mutex_unlock(&l->lock);
}

void fb_trace_host(fb_trace *t, fb_trace_label l, double since)
{
    entry e = { .begin = since, .end = fb_trace_now(t), .label = l, .track = TRACK_HOST };
    if (t && e.end - e.begin >= HOST_SECONDS_MIN)
        add_to_lane(&t->host, &e, 0);
}

void fb_trace_update(fb_trace *t, uint32_t worker, uint32_t block, uint64_t n, double since)
{
    if (!t)
        return;
    assert(worker < t->o.n_worker);
    entry e = { .begin = since, .end = fb_trace_now(t), .size = n, .label = FB_LABEL(UPDATE, block, FB_NO_PART),
                .track = TRACK_WORKERS + worker };
    add_to_lane(&t->workers[worker], &e, JOIN_SECONDS);
}

/* ---- the account of a step ---- */

/* [from, to) of the compute stream passed with nothing enqueued: the host's waits, in order, say why.  *next is the first
 * of them that may still matter. */
static void blame_host(fb_trace *t, double from, double to, uint32_t *next)
{
    double left = to - from;
    if (left <= 0)
        return;
    for (uint32_t i = *next; i < t->host.n && t->host.entries[i].begin < to; i++) {
        const entry *e = &t->host.entries[i];
        if (e->end <= from) {
            *next = i + 1;
            continue;
        }
        double seconds = (e->end < to ? e->end : to) - (e->begin > from ? e->begin : from);
        t->account.idle[kinds[e->label.kind].means] += seconds;
        left -= seconds;
    }
    t->account.idle[FB_CAUSE_HOST] += left > 0 ? left : 0;
}

static void account_for_compute(fb_trace *t)
{
    fb_trace_account *a = &t->account;
    double at = a->begin;
    uint32_t next = 0;
    for (uint32_t i = 0; i < t->n_cut; i++) {
        const span *s = &t->spans[i];
        if (s->stream != FB_STREAM_COMPUTE)
            continue;
        blame_host(t, at, s->begin, &next);
        double from = s->begin > at ? s->begin : at, seconds = s->end > from ? s->end - from : 0;
        fb_cause means = kinds[s->label.kind].means;
        if (means == FB_CAUSE_WORK)
            a->work += seconds;
        else
            a->idle[means] += seconds;
        at = from + seconds;
    }
    blame_host(t, at, a->end, &next);
}

/* ---- the end of a step ---- */

static void keep(fb_trace *t, const entry *e)
{
    t->kept[t->n_kept++ % t->capacity] = *e;
}

static fb_status read_spans(fb_trace *t, fb_error *err)
{
    fb_status st = FB_OK;
    fb_device *d = t->o.device;
    for (uint32_t i = 0; i < t->n_cut; i++) {
        span *s = &t->spans[i];
        FB_TRY(d->ops->event_time(d, t->events[2 * i], &s->begin, err));
        FB_TRY(d->ops->event_time(d, t->events[2 * i + 1], &s->end, err));
        s->begin += t->offset;
        s->end += t->offset;
        if (s->end < s->begin) /* within the clock's grain */
            s->end = s->begin;
    }
done:
    return st;
}

static void take_spans(fb_trace *t)
{
    fb_trace_account *a = &t->account;
    for (uint32_t i = 0; i < t->n_cut; i++) {
        const span *s = &t->spans[i];
        keep(t, &(entry){ s->begin, s->end, s->size, s->label, (uint32_t)s->stream });
        if (s->stream == FB_STREAM_H2D) {
            a->h2d += s->end - s->begin;
            a->h2d_size += s->size;
        } else if (s->stream == FB_STREAM_D2H) {
            a->d2h += s->end - s->begin;
            a->d2h_size += s->size;
        }
    }
    t->n_span -= t->n_cut;
    for (uint32_t i = 0; i < t->n_span; i++) { /* the next step's: with their events, which are in use */
        t->spans[i] = t->spans[t->n_cut + i];
        for (uint32_t k = 0; k < 2; k++) {
            fb_event **here = &t->events[2 * i + k], **there = &t->events[2 * (t->n_cut + i) + k], *free_again = *here;
            *here = *there;
            *there = free_again;
        }
    }
    t->n_cut = 0;
}

/* What began before `until`: the rest is the next step's. */
static void take_lane(fb_trace *t, lane *l, double until)
{
    uint32_t i = 0;
    pthread_mutex_lock(&l->lock);
    for (; i < l->n && l->entries[i].begin < until; i++) {
        const entry *e = &l->entries[i];
        keep(t, e);
        if (kinds[e->label.kind].means == FB_CAUSE_UPDATING) {
            t->account.update += e->end - e->begin;
            t->account.n_updated += e->size;
        }
    }
    l->n -= i;
    memmove(l->entries, l->entries + i, l->n * sizeof *l->entries);
    t->n_lost += l->n_lost;
    l->n_lost = 0;
    pthread_mutex_unlock(&l->lock);
}

void fb_trace_start(fb_trace *t)
{
    t->account.end = fb_trace_now(t);
}

fb_status fb_trace_cut(fb_trace *t, fb_error *err)
{
    fb_status st = FB_OK;
    if (!t)
        return FB_OK;
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        assert(t->open[s] == UINT32_MAX);
    FB_TRY(compare_clocks(t, err));
    t->n_cut = t->n_span;
    t->cut = fb_trace_now(t);
done:
    return st;
}

fb_status fb_trace_step(fb_trace *t, fb_error *err)
{
    fb_status st = FB_OK;
    if (!t)
        return FB_OK;
    FB_TRY(read_spans(t, err));
    t->account = (fb_trace_account){ .begin = t->account.end, .end = t->cut };
    account_for_compute(t);
    take_spans(t);
    take_lane(t, &t->host, t->cut);
    for (uint32_t w = 0; w < t->o.n_worker; w++)
        take_lane(t, &t->workers[w], INFINITY);
    t->account.n_lost = t->n_lost;
done:
    return st;
}

const fb_trace_account *fb_trace_account_of(const fb_trace *t)
{
    return &t->account;
}

/* ---- the file ---- */

enum { PID_DEVICE = 1, PID_HOST, PID_SLOTS };

static void name_track(FILE *f, int pid, uint32_t tid, const char *name, uint32_t number)
{
    char text[64];
    snprintf(text, sizeof text, number == FB_NO_PART ? "%s" : "%s %u", name, number);
    fprintf(f, "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%u,\"args\":{\"name\":\"%s\"}},\n", pid, tid, text);
    fprintf(f, "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%u,\"args\":{\"sort_index\":%u}},\n", pid, tid,
            tid);
}

static void name_process(FILE *f, int pid, const char *name)
{
    fprintf(f, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"%s\"}},\n", pid, name);
}

static void block_text(const fb_trace *t, uint32_t block, char out[24])
{
    if (block == 0)
        strcpy(out, "embedding");
    else if (block + 1 == t->o.n_block)
        strcpy(out, "head");
    else
        snprintf(out, 24, "layer %u", block - 1);
}

/* One complete event; times in microseconds. */
static void write_event(const fb_trace *t, FILE *f, int pid, uint32_t tid, const char *what, const char *category, const entry *e)
{
    char block[24];
    block_text(t, e->label.block, block);
    fprintf(f, "{\"ph\":\"X\",\"pid\":%d,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"%s\",\"name\":\"%s%s%s\",\"args\":{", pid,
            tid, 1e6 * e->begin, 1e6 * (e->end - e->begin), category, what, *what ? ", " : "", block);
    if (e->label.kind != FB_TRACE_SEND_WEIGHTS && e->label.part != FB_NO_PART)
        fprintf(f, "\"micro_batch\":%u%s", e->label.part, e->size ? "," : "");
    if (e->size)
        fprintf(f, "\"%s\":%llu", e->label.kind == FB_TRACE_UPDATE ? "elements" : "bytes", (unsigned long long)e->size);
    fprintf(f, "}},\n");
}

static const entry *kept_at(const fb_trace *t, uint64_t i)
{
    return &t->kept[i % t->capacity];
}

static void write_track(const fb_trace *t, FILE *f, uint32_t track)
{
    uint64_t first = t->n_kept > t->capacity ? t->n_kept - t->capacity : 0;
    for (uint64_t i = first; i < t->n_kept; i++) {
        const entry *e = kept_at(t, i);
        fb_cause means = kinds[e->label.kind].means;
        if (e->track != track)
            continue;
        const char *category = means == FB_CAUSE_WORK ? "compute" : means == FB_CAUSE_COPY ? "copy"
                             : means == FB_CAUSE_UPDATING ? "update" : "wait";
        write_event(t, f, track < FB_STREAM_COUNT ? PID_DEVICE : PID_HOST, track, kinds[e->label.kind].text, category, e);
    }
}

/* A slot is taken from the upload into it until the last kernel that reads it, before the next upload into it.  Entries
 * of a step lie in the order in which they were enqueued, which is the order in which slots change hands. */
static void write_slot(const fb_trace *t, FILE *f, uint32_t slot)
{
    uint64_t first = t->n_kept > t->capacity ? t->n_kept - t->capacity : 0;
    entry held = { .begin = -1 };
    for (uint64_t i = first; i < t->n_kept; i++) {
        const entry *e = kept_at(t, i);
        bool sent = e->label.kind == FB_TRACE_SEND_WEIGHTS && e->label.part == slot && e->track == FB_STREAM_H2D;
        bool used = e->track == FB_STREAM_COMPUTE && kinds[e->label.kind].means == FB_CAUSE_WORK
            && e->label.kind != FB_TRACE_GRAD_OUT;
        if (used && held.begin >= 0 && e->label.block == held.label.block && e->end > held.end)
            held.end = e->end;
        if (!sent)
            continue;
        if (held.begin >= 0)
            write_event(t, f, PID_SLOTS, slot, "", "slot", &held);
        held = *e;
    }
    if (held.begin >= 0)
        write_event(t, f, PID_SLOTS, slot, "", "slot", &held);
}

fb_status fb_trace_write(const fb_trace *t, const char *path, fb_error *err)
{
    static const char *const stream_name[] = { "compute", "h2d", "d2h" };
    FILE *f = fopen(path, "we");
    if (!f)
        return fb_fail(err, FB_IO, "%s: the trace cannot be written: %s; name another file", path, strerror(errno));
    fprintf(f, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"spans\":%llu,\"spans_not_kept\":%llu,"
            "\"spans_lost\":%llu},\"traceEvents\":[\n",
            (unsigned long long)(t->n_kept < t->capacity ? t->n_kept : t->capacity),
            (unsigned long long)(t->n_kept < t->capacity ? 0 : t->n_kept - t->capacity), (unsigned long long)t->n_lost);
    name_process(f, PID_DEVICE, "device");
    name_process(f, PID_HOST, "host");
    for (uint32_t s = 0; s < FB_STREAM_COUNT; s++)
        name_track(f, PID_DEVICE, s, stream_name[s], FB_NO_PART);
    name_track(f, PID_HOST, TRACK_HOST, "waits", FB_NO_PART);
    for (uint32_t w = 0; w < t->o.n_worker; w++)
        name_track(f, PID_HOST, TRACK_WORKERS + w, "update worker", w);
    for (uint32_t s = 0; s < t->o.n_slot; s++)
        name_track(f, PID_SLOTS, s, "slot", s);
    name_track(f, PID_SLOTS, t->o.n_slot, "head slot", FB_NO_PART);
    for (uint32_t track = 0; track < TRACK_WORKERS + t->o.n_worker; track++)
        write_track(t, f, track);
    for (uint32_t s = 0; s <= t->o.n_slot; s++)
        write_slot(t, f, s);
    /* Last, because nothing may follow a JSON list's last comma. */
    fprintf(f, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"slots\"}}\n]}\n", PID_SLOTS);
    bool bad = ferror(f);
    if (fclose(f) || bad)
        return fb_fail(err, FB_IO, "%s: the trace could not be written whole: %s; is the disk full?", path, strerror(errno));
    return FB_OK;
}

/* ---- new, free ---- */

static fb_status new_lane(lane *l, uint32_t capacity, fb_error *err)
{
    l->entries = calloc(capacity, sizeof *l->entries);
    l->capacity = capacity;
    return l->entries ? FB_OK : fb_fail(err, FB_NOMEM, "trace: no memory for %u spans", capacity);
}

fb_status fb_trace_new(fb_trace **out, const fb_trace_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    fb_trace *t = calloc(1, sizeof *t);
    if (!t)
        return fb_fail(err, FB_NOMEM, "trace: no memory");
    t->o = *o;
    pthread_mutex_init(&t->host.lock, NULL);
    for (int s = 0; s < FB_STREAM_COUNT; s++)
        t->open[s] = UINT32_MAX;
    /* A worker's spans are about one a block; the host's fewer than the streams'. */
    t->capacity = (uint64_t)o->n_step * (2 * (uint64_t)o->n_span + 2 * (uint64_t)o->n_worker * o->n_block) + 1;
    t->kept = calloc(t->capacity, sizeof *t->kept);
    t->spans = calloc(o->n_span, sizeof *t->spans);
    t->events = calloc(2 * (size_t)o->n_span, sizeof(fb_event *));
    t->workers = calloc(o->n_worker, sizeof *t->workers);
    if (!t->kept || !t->spans || !t->events || !t->workers)
        FB_TRY(fb_fail(err, FB_NOMEM, "trace: no memory for %u steps of %u spans", o->n_step, o->n_span));
    for (uint32_t w = 0; w < o->n_worker; w++)
        pthread_mutex_init(&t->workers[w].lock, NULL);
    FB_TRY(new_lane(&t->host, o->n_span, err));
    for (uint32_t w = 0; w < o->n_worker; w++)
        FB_TRY(new_lane(&t->workers[w], LANE_MAX, err));
    for (uint32_t i = 0; i < 2 * o->n_span; i++)
        FB_TRY(o->device->ops->event_new(o->device, &t->events[i], err));
    FB_TRY(o->device->ops->event_new(o->device, &t->look, err));
    t->opened = fb_clock();
    t->offset = 1e300;
    for (int i = 0; i < CLOCK_LOOKS; i++)
        FB_TRY(compare_clocks(t, err));
    fb_trace_start(t);
    *out = t;
    t = NULL;
done:
    fb_trace_free(t);
    return st;
}

void fb_trace_free(fb_trace *t)
{
    if (!t)
        return;
    fb_device *d = t->o.device;
    for (uint32_t i = 0; t->events && i < 2 * t->o.n_span; i++)
        if (t->events[i])
            d->ops->event_free(d, t->events[i]);
    if (t->look)
        d->ops->event_free(d, t->look);
    for (uint32_t w = 0; t->workers && w < t->o.n_worker; w++) {
        pthread_mutex_destroy(&t->workers[w].lock);
        free(t->workers[w].entries);
    }
    pthread_mutex_destroy(&t->host.lock);
    free(t->host.entries);
    free(t->workers);
    free(t->events);
    free(t->spans);
    free(t->kept);
    free(t);
}
