#include "device/fault/fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/random.h"
#include "device/kernels.h"

#define OP_MAP(X) X(alloc) X(pin) X(event_new) X(upload) X(download) X(fill_zero) X(record) X(wait) X(call) X(sync) \
    X(event_wait_host) FB_KERNEL_MAP(X)

#define OP_ENUM(name) OP_##name,
enum { OP_MAP(OP_ENUM) OP_COUNT };
#define OP_NAME(name) #name,
static const char *const op_names[] = { OP_MAP(OP_NAME) };

enum { WORD_SIZE = 512, SLOW_US = 300000, PIECE = 1 << 16 };

typedef struct fault {
    fb_device  device; /* first */
    fb_device *inner;
    uint64_t   random;
    uint32_t   delay_us;
    uint64_t   fail_at[OP_COUNT], slow_at[OP_COUNT]; /* 0: never */
    uint64_t   fail_any_at, count_any;
    uint64_t   count[OP_COUNT];
    int        poison; /* -1: none */
    char       count_path[WORD_SIZE];
} fault;

static fault *fault_of(fb_device *d)
{
    return (fault *)d;
}

static void sleep_us(void *arg, bool failed)
{
    uint64_t us = (uint64_t)(uintptr_t)arg;
    struct timespec t = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };
    if (!failed)
        nanosleep(&t, NULL);
}

static fb_status strike(fault *f, int op, fb_error *err)
{
    uint64_t n = ++f->count[op];
    if (++f->count_any == f->fail_any_at || n == f->fail_at[op])
        return fb_fail(err, FB_DEVICE, "fault device: injected failure of %s, call %llu", op_names[op], (unsigned long long)n);
    return FB_OK;
}

/* On the host, or, in the call of a stream, there, before what is called. */
static fb_status linger(fault *f, int op, int stream, fb_error *err)
{
    if (f->count[op] != f->slow_at[op])
        return FB_OK;
    void *us = (void *)(uintptr_t)SLOW_US;
    if (stream >= 0)
        return f->inner->ops->call(f->inner, (fb_stream)stream, sleep_us, us, err);
    sleep_us(us, false);
    return FB_OK;
}

static fb_status dawdle(fault *f, fb_stream s, fb_error *err)
{
    uint64_t r = fb_random_next(&f->random);
    if (!f->delay_us || r % 4)
        return FB_OK;
    return f->inner->ops->call(f->inner, s, sleep_us, (void *)(uintptr_t)(r / 4 % (f->delay_us + 1)), err);
}

/* Strike or linger, then forward.  stream: -1 for a call of the host. */
#define FORWARD(op, stream)                         \
    fault *f = fault_of(d);                         \
    fb_status st = strike(f, OP_##op, err);         \
    if (st == FB_OK)                                \
        st = linger(f, OP_##op, stream, err);       \
    return st != FB_OK ? st : f->inner->ops->op

static fb_status fill(fault *f, unsigned char *mem, uint64_t size, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_device_ops *ops = f->inner->ops;
    unsigned char *pattern = malloc(PIECE);
    if (!pattern)
        return fb_fail(err, FB_NOMEM, "fault device: no memory for a pattern");
    memset(pattern, f->poison, PIECE);
    for (uint64_t at = 0; at < size && st == FB_OK; at += PIECE)
        st = ops->upload(f->inner, FB_STREAM_H2D, mem + at, pattern, size - at < PIECE ? size - at : PIECE, err);
    fb_status done = ops->sync(f->inner, FB_STREAM_H2D, st == FB_OK ? err : NULL);
    free(pattern);
    return st != FB_OK ? st : done;
}

static fb_status fault_alloc(fb_device *d, uint64_t size, void **out, fb_error *err)
{
    fb_status st = FB_OK;
    fault *f = fault_of(d);
    FB_TRY(strike(f, OP_alloc, err));
    FB_TRY(linger(f, OP_alloc, -1, err));
    FB_TRY(f->inner->ops->alloc(f->inner, size, out, err));
    if (f->poison >= 0 && (st = fill(f, *out, size, err)) != FB_OK)
        f->inner->ops->free(f->inner, *out);
done:
    return st;
}

static void fault_free(fb_device *d, void *mem)
{
    fault_of(d)->inner->ops->free(fault_of(d)->inner, mem);
}

static fb_status fault_pin(fb_device *d, void *host, uint64_t size, fb_error *err)
{
    FORWARD(pin, -1)(f->inner, host, size, err);
}

static void fault_unpin(fb_device *d, void *host)
{
    fault_of(d)->inner->ops->unpin(fault_of(d)->inner, host);
}

static fb_status fault_event_new(fb_device *d, fb_event **out, fb_error *err)
{
    FORWARD(event_new, -1)(f->inner, out, err);
}

static void fault_event_free(fb_device *d, fb_event *e)
{
    fault_of(d)->inner->ops->event_free(fault_of(d)->inner, e);
}

static fb_status fault_upload(fb_device *d, fb_stream s, void *dst, const void *pinned, uint64_t size, fb_error *err)
{
    fb_status late = dawdle(fault_of(d), s, err);
    if (late != FB_OK)
        return late;
    FORWARD(upload, (int)s)(f->inner, s, dst, pinned, size, err);
}

static fb_status fault_download(fb_device *d, fb_stream s, void *pinned, const void *src, uint64_t size, fb_error *err)
{
    fb_status late = dawdle(fault_of(d), s, err);
    if (late != FB_OK)
        return late;
    FORWARD(download, (int)s)(f->inner, s, pinned, src, size, err);
}

static fb_status fault_fill_zero(fb_device *d, fb_stream s, void *dst, uint64_t size, fb_error *err)
{
    FORWARD(fill_zero, (int)s)(f->inner, s, dst, size, err);
}

static fb_status fault_record(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    FORWARD(record, (int)s)(f->inner, s, e, err);
}

static fb_status fault_wait(fb_device *d, fb_stream s, fb_event *e, fb_error *err)
{
    FORWARD(wait, (int)s)(f->inner, s, e, err);
}

static fb_status fault_call(fb_device *d, fb_stream s, void (*fn)(void *arg, bool failed), void *arg, fb_error *err)
{
    FORWARD(call, (int)s)(f->inner, s, fn, arg, err);
}

static fb_status fault_sync(fb_device *d, fb_stream s, fb_error *err)
{
    fault *f = fault_of(d);
    fb_status done = f->inner->ops->sync(f->inner, s, err); /* even of a sync that fails: what failed does not run on */
    fb_status st = strike(f, OP_sync, done == FB_OK ? err : NULL);
    if (st == FB_OK)
        st = linger(f, OP_sync, -1, err);
    return done != FB_OK ? done : st;
}

static fb_status fault_event_wait_host(fb_device *d, fb_event *e, fb_error *err)
{
    FORWARD(event_wait_host, -1)(f->inner, e, err);
}

static fb_status fault_event_time(fb_device *d, fb_event *e, double *seconds, fb_error *err)
{
    return fault_of(d)->inner->ops->event_time(fault_of(d)->inner, e, seconds, err);
}

static void fault_memory(fb_device *d, uint64_t *used, uint64_t *peak)
{
    fault_of(d)->inner->ops->memory(fault_of(d)->inner, used, peak);
}

static void fault_info(fb_device *d, fb_device_info *out)
{
    fault_of(d)->inner->ops->info(fault_of(d)->inner, out);
}

static void write_counts(const fault *f)
{
    FILE *to = fopen(f->count_path, "ae");
    for (int op = 0; to && op < OP_COUNT; op++)
        fprintf(to, "device %s %llu\n", op_names[op], (unsigned long long)f->count[op]);
    if (to)
        fclose(to);
}

static void fault_close(fb_device *d)
{
    if (*fault_of(d)->count_path)
        write_counts(fault_of(d));
    fault_of(d)->inner->ops->close(fault_of(d)->inner);
    free(d);
}

#define DEFINE_KERNEL(name)                                                              \
    static fb_status fault_##name(fb_device *d, const fb_##name *a, fb_error *err)       \
    {                                                                                    \
        fault *f = fault_of(d);                                                          \
        fb_status st = strike(f, OP_##name, err);                                        \
        if (st == FB_OK)                                                                 \
            st = linger(f, OP_##name, FB_STREAM_COMPUTE, err);                           \
        if (st == FB_OK)                                                                 \
            st = dawdle(f, FB_STREAM_COMPUTE, err);                                      \
        return st != FB_OK ? st : f->inner->kernels->name(f->inner, a, err);             \
    }
FB_KERNEL_MAP(DEFINE_KERNEL)

static uint64_t fault_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim);

#define TABLE_ENTRY(name) .name = fault_##name,
static fb_kernels fault_kernels = { FB_KERNEL_MAP(TABLE_ENTRY) .attention_scratch = fault_attention_scratch };

static const fb_kernels *wrapped_kernels; /* the default back end's; the same for every fault device */

static uint64_t fault_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    return wrapped_kernels->attention_scratch(t_max, n_head, head_dim);
}

static const fb_device_ops fault_ops = {
    .name = "fault", .info = fault_info,
    .alloc = fault_alloc, .free = fault_free, .pin = fault_pin, .unpin = fault_unpin,
    .event_new = fault_event_new, .event_free = fault_event_free,
    .upload = fault_upload, .download = fault_download, .fill_zero = fault_fill_zero,
    .record = fault_record, .wait = fault_wait, .call = fault_call, .sync = fault_sync,
    .event_wait_host = fault_event_wait_host, .event_time = fault_event_time, .memory = fault_memory, .close = fault_close,
};

/* Digits and nothing else. */
static bool read_number(const char *text, uint64_t max, uint64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && !*end && !errno && *out <= max;
}

/* "OP:N" behind the equals sign; the colon is overwritten. */
static fb_status parse_point(fault *f, const char *op, char *colon, uint64_t n, bool fails, fb_error *err)
{
    int i = 0;
    *colon = 0;
    while (i < OP_COUNT && strcmp(op, op_names[i]))
        i++;
    if (fails && !strcmp(op, "any"))
        f->fail_any_at = n;
    else if (i == OP_COUNT)
        return fb_fail(err, FB_CONFIG, "backend fault: '%.64s' is no operation of a device", op);
    else
        (fails ? f->fail_at : f->slow_at)[i] = n;
    return FB_OK;
}

static fb_status parse_spec(fault *f, const char *spec, fb_error *err)
{
    char word[WORD_SIZE];
    while (*spec) {
        size_t n = strcspn(spec, ",");
        if (n >= sizeof word)
            return fb_fail(err, FB_CONFIG, "backend fault: a word of the spec is longer than %zu characters", sizeof word - 1);
        memcpy(word, spec, n);
        word[n] = 0;
        spec += n + (spec[n] == ',');
        char *colon = strchr(word, ':');
        uint64_t value;
        if (!strncmp(word, "seed=", 5) && read_number(word + 5, UINT64_MAX, &value))
            f->random = value;
        else if (!strncmp(word, "delay=", 6) && read_number(word + 6, 1000000, &value))
            f->delay_us = (uint32_t)value;
        else if (!strncmp(word, "poison=", 7) && read_number(word + 7, UINT8_MAX, &value))
            f->poison = (int)value;
        else if (!strncmp(word, "count=", 6) && word[6])
            strcpy(f->count_path, word + 6);
        else if ((!strncmp(word, "fail=", 5) || !strncmp(word, "slow=", 5)) && colon
                 && read_number(colon + 1, UINT64_MAX, &value) && value) {
            fb_status st = parse_point(f, word + 5, colon, value, word[0] == 'f', err);
            if (st != FB_OK)
                return st;
        } else
            return fb_fail(err, FB_CONFIG, "backend fault: '%.64s' is not seed=N, delay=MICROS (up to 1000000), fail=OP:N, "
                           "slow=OP:N, poison=BYTE or count=PATH", word);
    }
    return FB_OK;
}

fb_status fb_fault_open(fb_device **out, const fb_device_options *o, const char *spec, fb_error *err)
{
    fb_status st = FB_OK;
    fault *f = calloc(1, sizeof *f);
    if (!f)
        return fb_fail(err, FB_NOMEM, "fault device: no memory");
    f->random = 1;
    f->poison = -1;
    f->device.ops = &fault_ops;
    f->device.kernels = &fault_kernels;
    FB_TRY(parse_spec(f, spec, err));
    fb_device_options inner = *o;
    inner.backend = "auto";
    FB_TRY(fb_device_open(&f->inner, &inner, err));
    wrapped_kernels = f->inner->kernels;
    *out = &f->device;
    f = NULL;
done:
    free(f);
    return st;
}
