/* compare.h - runs one operation on the cpu and on the cuda device and compares what they leave.
 *
 * A case lays its operands out in one image: guards between them, everything not filled poisoned with 0xff, which is a NaN
 * in every float type.  The image goes to the same offsets of an arena on each device, the operation runs, the images
 * come back.  On cuda the operation runs twice from the same image and must leave the same bits (where it promises to).
 * Outside its outputs nothing may have changed.
 *
 * Tolerances.  Both sides compute in float32 (u = 2^-24) and sum in different orders.  A sum of n terms of mixed sign
 * has an error of about u sqrt(n) of the terms' root sum of squares; an output is accepted when the relative
 * Frobenius error of all its elements is within  u (16 + 4 sqrt(n)),  n the longest sum behind one.  A bfloat16 output is
 * rounded at the same points, so that it differs only where the float32 value before it lies within its error of a
 * tie: rarely.  Then it is off by 2^-8 of itself; accepted are one such element, or as many as give 2^-11 of Frobenius
 * error (1 in 64); a rounding point left out (some 2^-10 in every element) is not. */
#ifndef FB_TESTS_GPU_COMPARE_H
#define FB_TESTS_GPU_COMPARE_H

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/kernels.h"

typedef enum { T_F32 = FB_F32, T_BF16 = FB_BF16, T_F64 = 100, T_U32 } element;

enum { GUARD = 256, REGION_MAX = 32, POISON = 0xff, ARENA_SIZE = 1 << 30 };

typedef struct region {
    const char *name;
    element     type;
    uint64_t    offset, n;
    bool        output;
    double      tolerance; /* relative Frobenius error; INFINITY: scratch, anything goes */
    double      floor;     /* root mean square that the error is held against when the values' own is less */
} region;

static struct {
    fb_device     *device[2];      /* cpu, cuda */
    unsigned char *arena[2];
    unsigned char *image, *got[3]; /* cpu, cuda, cuda again */
    region         regions[REGION_MAX];
    int            n_region;
    uint64_t       used, random;
    unsigned char *at;             /* the arena of the device that is about to run */
    bool           repeats;        /* cuda promises the same bits twice */
    int            n_pass, n_fail;
    const char    *only;           /* NULL: all cases */
    fb_error       err;
} t;

static void must(fb_status st)
{
    if (st == FB_OK)
        return;
    fprintf(stderr, "gave up: %s\n", t.err.msg);
    exit(1);
}

static void verdict(const char *name, bool pass, const char *why)
{
    *(pass ? &t.n_pass : &t.n_fail) += 1;
    printf("%s %s%s%s\n", pass ? "ok  " : "FAIL", name, *why ? ": " : "", why);
    fflush(stdout);
}

static double uniform(void) /* in (-1, 1); splitmix64: Steele, Lea, Flood 2014 */
{
    uint64_t z = t.random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(int64_t)z * 0x1p-63;
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)((uniform() + 1) / 2 * n) % n;
}

static uint64_t element_size(element type)
{
    return type == T_F64 ? 8 : type == T_BF16 ? 2 : 4;
}

static double tolerance(fb_dtype type, double n)
{
    return type == FB_BF16 ? 0x1p-11 : 0x1p-24 * (16 + 4 * sqrt(n));
}

/* ---- laying out a case ---- */

static void begin(void)
{
    t.n_region = 0;
    t.used = GUARD;
}

static int carve(const char *name, element type, uint64_t n)
{
    assert(t.n_region < REGION_MAX);
    uint64_t size = n * element_size(type);
    region *r = &t.regions[t.n_region];
    *r = (region){ .name = name, .type = type, .offset = t.used, .n = n };
    t.used += (size + 255) / 256 * 256 + GUARD;
    assert(t.used <= ARENA_SIZE);
    memset(t.image + r->offset - GUARD, POISON, t.used - r->offset + GUARD);
    return t.n_region++;
}

static void set(int id, uint64_t i, double value)
{
    region *r = &t.regions[id];
    void *base = t.image + r->offset;
    assert(i < r->n);
    switch (r->type) {
    case T_F32:  ((float *)base)[i] = (float)value; break;
    case T_BF16: ((uint16_t *)base)[i] = fb_f32_bf16((float)value); break;
    case T_F64:  ((double *)base)[i] = value; break;
    default:     ((uint32_t *)base)[i] = (uint32_t)value;
    }
}

static double get(const unsigned char *image, int id, uint64_t i)
{
    const region *r = &t.regions[id];
    const void *base = image + r->offset;
    switch (r->type) {
    case T_F32:  return ((const float *)base)[i];
    case T_BF16: return fb_bf16_f32(((const uint16_t *)base)[i]);
    case T_F64:  return ((const double *)base)[i];
    default:     return ((const uint32_t *)base)[i];
    }
}

/* An operand with values in mean +- scale. */
static int input(const char *name, element type, uint64_t n, double mean, double scale)
{
    int id = carve(name, type, n);
    for (uint64_t i = 0; i < n; i++)
        set(id, i, mean + scale * uniform());
    return id;
}

static int output(const char *name, element type, uint64_t n, double tol)
{
    int id = carve(name, type, n);
    t.regions[id].output = true;
    t.regions[id].tolerance = tol;
    return id;
}

/* Also read: filled. */
static int in_out(const char *name, element type, uint64_t n, double scale, double tol)
{
    int id = input(name, type, n, 0, scale);
    t.regions[id].output = true;
    t.regions[id].tolerance = tol;
    return id;
}

static void *at(int id)
{
    return id < 0 ? NULL : t.at + t.regions[id].offset;
}

/* ---- running and comparing ---- */

static void run_on(int device, unsigned char *out, fb_status (*launch)(fb_device *d, const void *args), const void *args)
{
    fb_device *d = t.device[device];
    const fb_device_ops *o = d->ops;
    t.at = t.arena[device];
    must(o->upload(d, FB_STREAM_COMPUTE, t.at, t.image, t.used, &t.err));
    must(launch(d, args));
    must(o->download(d, FB_STREAM_COMPUTE, out, t.at, t.used, &t.err));
    must(o->sync(d, FB_STREAM_COMPUTE, &t.err));
}

static bool is_poison(const unsigned char *p, uint64_t size)
{
    for (uint64_t i = 0; i < size; i++)
        if (p[i] != POISON)
            return false;
    return true;
}

/* Elements that neither side has written do not count. */
static bool output_agrees(int id, char *why, size_t why_size)
{
    const region *r = &t.regions[id];
    uint64_t size = element_size(r->type), worst = 0, n_written = 0;
    double error = 0, norm = 0, largest = 0, worst_error = 0;
    if (r->tolerance == INFINITY)
        return true;
    for (uint64_t i = 0; i < r->n; i++) {
        uint64_t byte = r->offset + i * size;
        double want = get(t.got[0], id, i), got = get(t.got[1], id, i), off = fabs(got - want);
        if (is_poison(t.got[0] + byte, size) && is_poison(t.got[1] + byte, size))
            continue;
        n_written++;
        if (!isfinite(want) || !isfinite(got)) {
            snprintf(why, why_size, "%s[%llu] is %g, not %g", r->name, (unsigned long long)i, got, want);
            return false;
        }
        error += off * off;
        norm += want * want;
        largest = fmax(largest, fabs(want));
        if (off > worst_error)
            worst_error = off, worst = i;
    }
    norm = fmax(norm, r->floor * r->floor * (double)n_written);
    bool one_tie = r->type == T_BF16 && r->tolerance > 0 && sqrt(error) <= 0x1p-7 * largest && error == worst_error * worst_error;
    if (r->n && !n_written)
        snprintf(why, why_size, "%s was not written", r->name);
    else if (sqrt(error) > r->tolerance * sqrt(norm) && !one_tie)
        snprintf(why, why_size, "%s is off by %.3g, %.3g is accepted; worst [%llu]: %.9g, not %.9g", r->name,
                 norm > 0 ? sqrt(error / norm) : sqrt(error), r->tolerance, (unsigned long long)worst, get(t.got[1], id, worst),
                 get(t.got[0], id, worst));
    else
        return true;
    return false;
}

/* Guards and inputs, on cuda. */
static bool rest_untouched(char *why, size_t why_size)
{
    uint64_t from = 0;
    for (int id = 0; id <= t.n_region; id++) {
        const region *r = &t.regions[id];
        bool last = id == t.n_region;
        uint64_t until = last ? t.used : r->output ? r->offset : r->offset + r->n * element_size(r->type);
        for (uint64_t i = from; i < until; i++)
            if (t.got[1][i] != t.image[i]) {
                snprintf(why, why_size, "byte %llu, %s %s, was overwritten", (unsigned long long)i,
                         last ? "after" : "before the end of or in", t.regions[last ? id - 1 : id].name);
                return false;
            }
        if (!last)
            from = r->offset + r->n * element_size(r->type);
    }
    return true;
}

static void compare(const char *name, fb_status (*launch)(fb_device *d, const void *args), const void *args)
{
    char why[256] = "";
    if (t.only && !strstr(name, t.only))
        return;
    run_on(0, t.got[0], launch, args);
    run_on(1, t.got[1], launch, args);
    run_on(1, t.got[2], launch, args);
    bool pass = rest_untouched(why, sizeof why);
    for (int id = 0; pass && id < t.n_region; id++)
        if (t.regions[id].output)
            pass = output_agrees(id, why, sizeof why);
    if (pass && t.repeats && memcmp(t.got[1], t.got[2], t.used) != 0) {
        pass = false;
        snprintf(why, sizeof why, "a second run left other bits");
    }
    verdict(name, pass, why);
}

#endif
