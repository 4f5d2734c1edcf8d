#include "plan/machine.h"

#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/beside.h"
#include "io/file.h"
#include "io/json.h"

enum { PROFILE_SIZE_MAX = 1 << 20 };

double fb_curve_at(const fb_curve *c, double x)
{
    if (c->n == 0)
        return 0;
    if (x <= c->x[0])
        return c->y[0];
    for (uint32_t i = 1; i < c->n; i++)
        if (x < c->x[i])
            return c->y[i - 1] + (c->y[i] - c->y[i - 1]) * (log(x / c->x[i - 1]) / log(c->x[i] / c->x[i - 1]));
    return c->y[c->n - 1];
}

/* ---- the fields: reader and writer walk one table ---- */

typedef enum { TEXT, FLAG, REAL, COUNT, BYTES, CURVE } field_kind;

typedef struct field {
    const char *name;
    field_kind  kind;
    size_t      offset;
    double      min, max; /* of a number, or of a curve's y; min 0: 0 is "not known", and the field may be left out */
} field;

#define FIELD(kind, name, ...) { #name, kind, offsetof(fb_machine, name), __VA_ARGS__ }
#define RATE 1, 1e18
#define SHARE 1e-9, 1
#define SECONDS 1e-9, 1
#define SIZE 1, 0x1p60
#define OR_UNKNOWN(max) 0, max

static const field fields[] = {
    FIELD(TEXT, name, 0, 0),            FIELD(TEXT, device, 0, 0),
    FIELD(FLAG, measured, 0, 0),        FIELD(FLAG, unified, 0, 0),
    FIELD(REAL, matmul_peak, RATE),     FIELD(CURVE, matmul_rows, SHARE),
    FIELD(REAL, matmul_accumulate, SHARE),
    FIELD(CURVE, attention_fwd, RATE),  FIELD(CURVE, attention_bwd, RATE),
    FIELD(REAL, memory_rate, RATE),     FIELD(REAL, launch, SECONDS),
    FIELD(BYTES, memory, SIZE),         FIELD(BYTES, overhead, OR_UNKNOWN(0x1p60)),
    FIELD(REAL, peak_flops, OR_UNKNOWN(1e18)),
    FIELD(CURVE, h2d, RATE),            FIELD(CURVE, d2h, RATE),
    FIELD(REAL, h2d_both, RATE),        FIELD(REAL, d2h_both, RATE),
    FIELD(REAL, copy_latency, SECONDS),
    FIELD(REAL, dram, RATE),            FIELD(REAL, dram_dma, RATE),
    FIELD(CURVE, update, RATE),         FIELD(REAL, gather, RATE),
    FIELD(COUNT, cores, 1, 65536),      FIELD(BYTES, ram, SIZE),
    FIELD(BYTES, pinnable, OR_UNKNOWN(0x1p60)),
    FIELD(REAL, disk_write, OR_UNKNOWN(1e18)), FIELD(REAL, disk_read, OR_UNKNOWN(1e18)),
};

/* For people: kept in the file, not in the struct. */
static const char *const remarks[] = { "measurement", "sources", "notes" };

static void *at(const fb_machine *m, const field *f)
{
    return (char *)(uintptr_t)m + f->offset;
}

/* ---- read ---- */

static void read_text(fb_json_reader *r, const field *f, const json_t *value, char out[96])
{
    char shown[FB_JSON_SHOWN_SIZE];
    const char *text = json_string_value(value);
    size_t length = text ? strlen(text) : 0;
    bool plain = length > 0 && length < 96;
    for (size_t i = 0; plain && i < length; i++)
        plain = (unsigned char)text[i] >= 0x20 && text[i] != 0x7f; /* it will be printed */
    if (!plain)
        fb_json_refuse(r, "'%s' is %s; expected a string of 1 to 95 bytes without control characters", f->name,
                       fb_json_show(shown, value));
    else
        memcpy(out, text, length + 1);
}

/* Written so that NaN is out of every range. */
static bool in_range(const field *f, double x)
{
    return x >= f->min && x <= f->max;
}

static void read_number(fb_json_reader *r, const field *f, const json_t *value, void *out)
{
    char shown[FB_JSON_SHOWN_SIZE];
    bool whole = f->kind != REAL;
    if (!(whole ? json_is_integer(value) : json_is_number(value)) || !in_range(f, json_number_value(value)))
        fb_json_refuse(r, "'%s' is %s; expected %s from %g to %g", f->name, fb_json_show(shown, value),
                       whole ? "an integer" : "a number", f->min, f->max);
    else if (f->kind == REAL)
        *(double *)out = json_number_value(value);
    else if (f->kind == COUNT)
        *(uint32_t *)out = (uint32_t)json_integer_value(value);
    else
        *(uint64_t *)out = (uint64_t)json_integer_value(value);
}

static void read_curve(fb_json_reader *r, const field *f, const json_t *value, fb_curve *out)
{
    char shown[FB_JSON_SHOWN_SIZE];
    size_t n = json_array_size(value);
    if (!json_is_array(value))
        fb_json_refuse(r, "'%s' is %s; expected an array of points [x, y]", f->name, fb_json_show(shown, value));
    else if (n < 1 || n > FB_CURVE_MAX)
        fb_json_refuse(r, "'%s' has %zu points; expected 1 to %d", f->name, n, FB_CURVE_MAX);
    for (size_t i = 0; i < n && r->st == FB_OK; i++) {
        const json_t *point = json_array_get(value, i), *x = json_array_get(point, 0), *y = json_array_get(point, 1);
        if (json_array_size(point) != 2 || !json_is_number(x) || !json_is_number(y)) {
            fb_json_refuse(r, "'%s' has %s as point %zu; expected two numbers, [x, y]", f->name, fb_json_show(shown, point), i + 1);
            return;
        }
        out->x[i] = json_number_value(x);
        out->y[i] = json_number_value(y);
        if (!(out->x[i] > 0 && out->x[i] <= 1e18))
            fb_json_refuse(r, "'%s' has %s as point %zu; expected an x above 0, at most 1e18", f->name, fb_json_show(shown, point),
                           i + 1);
        else if (i > 0 && !(out->x[i] > out->x[i - 1]))
            fb_json_refuse(r, "'%s' has %s as point %zu, behind x = %g; expected rising x", f->name, fb_json_show(shown, point),
                           i + 1, out->x[i - 1]);
        else if (!in_range(f, out->y[i]))
            fb_json_refuse(r, "'%s' has %s as point %zu; expected a y from %g to %g", f->name, fb_json_show(shown, point), i + 1,
                           f->min, f->max);
    }
    out->n = (uint32_t)n;
}

static void read_field(fb_json_reader *r, const field *f, const json_t *root, fb_machine *m)
{
    char shown[FB_JSON_SHOWN_SIZE];
    const json_t *value = json_object_get(root, f->name);
    bool optional = f->min == 0 && (f->kind == REAL || f->kind == BYTES);
    if (!value && optional)
        return;
    if (!value)
        fb_json_refuse(r, "has no '%s', which is needed; docs/FORMATS.md has all fields of a machine profile", f->name);
    else if (f->kind == TEXT)
        read_text(r, f, value, at(m, f));
    else if (f->kind == CURVE)
        read_curve(r, f, value, at(m, f));
    else if (f->kind != FLAG)
        read_number(r, f, value, at(m, f));
    else if (!json_is_boolean(value))
        fb_json_refuse(r, "'%s' is %s; expected true or false", f->name, fb_json_show(shown, value));
    else
        *(bool *)at(m, f) = json_is_true(value);
}

static bool is_known(const char *key)
{
    for (size_t i = 0; i < FB_COUNT(fields); i++)
        if (strcmp(fields[i].name, key) == 0)
            return true;
    for (size_t i = 0; i < FB_COUNT(remarks); i++)
        if (strcmp(remarks[i], key) == 0)
            return true;
    return false;
}

fb_status fb_machine_parse(fb_machine *out, const char *text, size_t size, const char *where, fb_error *err)
{
    fb_json_reader r = { .where = where, .err = err };
    fb_machine m = { 0 };
    json_error_t e;
    const char *key;
    json_t *value, *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &e);
    if (!root)
        return fb_fail_file(err, FB_INPUT, where, "is not JSON: %s (line %d, column %d)", e.text, e.line, e.column);
    if (!json_is_object(root))
        fb_json_refuse(&r, "is not a JSON object; expected a machine profile, as forebay probe --out writes one");
    for (size_t i = 0; i < FB_COUNT(fields); i++)
        read_field(&r, &fields[i], root, &m);
    json_object_foreach(root, key, value)
        if (!is_known(key))
            fb_json_refuse(&r, "has '%.64s', which is no field of a machine profile; remarks go into 'notes'", key);
    if (m.overhead >= m.memory)
        fb_json_refuse(&r, "'overhead' is %llu, 'memory' only %llu; expected less", (unsigned long long)m.overhead,
               (unsigned long long)m.memory);
    if (r.st == FB_OK)
        *out = m;
    json_decref(root);
    return r.st;
}

fb_status fb_machine_read(fb_machine *out, const char *path, fb_error *err)
{
    char *text;
    uint64_t size;
    fb_status st = fb_file_read(&text, &size, path, PROFILE_SIZE_MAX, err);
    if (st != FB_OK)
        return st;
    st = fb_machine_parse(out, text, size, path, err);
    free(text);
    return st;
}

/* ---- write ---- */

/* The shortest text that reads back as the same number; NaN and infinity become null, which no reader takes. */
static void put_real(FILE *to, double x)
{
    static const size_t digits[] = { 6, 9, 12, 15, 16, 17 };
    if (x == floor(x) && fabs(x) < 1e9) {
        fprintf(to, "%.0f", x);
        return;
    }
    json_t *value = json_real(x);
    char *text = NULL;
    for (size_t i = 0; value && i < FB_COUNT(digits); i++) {
        free(text);
        text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits[i]));
        json_t *back = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
        bool same = json_number_value(back) == x;
        json_decref(back);
        if (same)
            break;
    }
    fputs(text ? text : "null", to);
    free(text);
    json_decref(value);
}

static void put_text(FILE *to, const char *s)
{
    json_t *value = json_string(s); /* NULL when it is not UTF-8 */
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    fputs(text ? text : "null", to);
    free(text);
    json_decref(value);
}

static void put_field(FILE *to, const field *f, const fb_machine *m)
{
    const void *value = at(m, f);
    const fb_curve *c = value;
    switch (f->kind) {
    case TEXT:  put_text(to, value); break;
    case FLAG:  fputs(*(const bool *)value ? "true" : "false", to); break;
    case REAL:  put_real(to, *(const double *)value); break;
    case COUNT: fprintf(to, "%u", *(const uint32_t *)value); break;
    case BYTES: fprintf(to, "%llu", (unsigned long long)*(const uint64_t *)value); break;
    case CURVE:
        for (uint32_t i = 0; i < c->n && i < FB_CURVE_MAX; i++) {
            fputs(i ? ", [" : "[[", to);
            put_real(to, c->x[i]);
            fputs(", ", to);
            put_real(to, c->y[i]);
            fputs("]", to);
        }
        fputs(c->n ? "]" : "[]", to);
    }
}

static void put_origin(FILE *to, const fb_machine_origin *o)
{
    const struct { const char *name, *text; } words[] = {
        { "date", o->date }, { "forebay", o->forebay }, { "backend", o->backend }, { "device", o->device },
    };
    fputs(",\n  \"measurement\": { ", to);
    for (size_t i = 0; i < FB_COUNT(words); i++)
        if (words[i].text) {
            fprintf(to, "\"%s\": ", words[i].name);
            put_text(to, words[i].text);
            fputs(", ", to);
        }
    fputs("\"spread\": ", to);
    put_real(to, o->spread);
    fputs(" }", to);
}

fb_status fb_machine_text(char **out, const fb_machine *m, const fb_machine_origin *origin, fb_error *err)
{
    char *text = NULL;
    size_t size;
    fb_machine back;
    FILE *to = open_memstream(&text, &size);
    if (!to)
        return fb_fail(err, FB_NOMEM, "machine profile: no memory for its text");
    for (size_t i = 0; i < FB_COUNT(fields); i++) {
        fprintf(to, "%s  \"%s\": ", i ? ",\n" : "{\n", fields[i].name);
        put_field(to, &fields[i], m);
    }
    if (origin)
        put_origin(to, origin);
    fputs("\n}\n", to);
    if (fclose(to) != 0) {
        free(text);
        return fb_fail(err, FB_NOMEM, "machine profile: no memory for its text");
    }
    fb_status st = fb_machine_parse(&back, text, size, "the profile to be written", err);
    if (st == FB_OK)
        *out = text;
    else
        free(text);
    return st;
}

fb_status fb_machine_write(const fb_machine *m, const fb_machine_origin *origin, const char *path, fb_error *err)
{
    char *text;
    fb_status st = fb_machine_text(&text, m, origin, err);
    if (st != FB_OK)
        return st;
    st = fb_file_write_atomic(path, text, strlen(text), err);
    free(text);
    return st;
}

/* ---- find ---- */

/* $FOREBAY_PROFILES if it is set, else where they are installed, else the source tree's. */
static void find_folder(char out[FB_PATH_SIZE])
{
    static const char *const places[] = { "/../share/forebay" };
    const char *chosen = getenv("FOREBAY_PROFILES");
    if (chosen && *chosen)
        snprintf(out, FB_PATH_SIZE, "%s", chosen);
    else if (!fb_find_beside(out, FB_PATH_SIZE, places, FB_COUNT(places), "profiles"))
        snprintf(out, FB_PATH_SIZE, "%s", FB_SOURCE_DIR "/profiles");
}

/* Names of the shipped profiles, sorted, without ".json". */
typedef struct listing {
    char folder[FB_PATH_SIZE];
    struct dirent **entries;
    int n;
} listing;

static int is_profile(const struct dirent *e)
{
    size_t length = strlen(e->d_name);
    return e->d_name[0] != '.' && length > 5 && strcmp(e->d_name + length - 5, ".json") == 0;
}

static fb_status listing_read(listing *l, fb_error *err)
{
    find_folder(l->folder);
    l->n = scandir(l->folder, &l->entries, is_profile, alphasort);
    if (l->n < 0)
        return fb_fail_file(err, FB_INPUT, l->folder, "the folder of machine profiles cannot be read; run `make install` again, "
                            "or set FOREBAY_PROFILES");
    return FB_OK;
}

static void listing_free(listing *l)
{
    for (int i = 0; i < l->n; i++)
        free(l->entries[i]);
    free(l->entries);
}

static void listing_names(const listing *l, char *out, size_t size)
{
    size_t used = 0;
    snprintf(out, size, "none");
    for (int i = 0; i < l->n && used < size; i++) {
        const char *name = l->entries[i]->d_name;
        used += (size_t)snprintf(out + used, size - used, "%s%.*s", i ? ", " : "", (int)strlen(name) - 5, name);
    }
}

static bool is_path(const char *name)
{
    size_t length = strlen(name);
    return strchr(name, '/') || (length > 5 && strcmp(name + length - 5, ".json") == 0);
}

fb_status fb_machine_find(fb_machine *out, const char *name, fb_error *err)
{
    char path[FB_PATH_SIZE], file[FB_PATH_SIZE], known[256];
    listing l = { 0 };
    if (is_path(name))
        return fb_machine_read(out, name, err);
    fb_status st = FB_OK;
    FB_TRY(listing_read(&l, err));
    snprintf(file, sizeof file, "%s.json", name);
    for (int i = 0; i < l.n; i++)
        if (strcmp(l.entries[i]->d_name, file) == 0) {
            FB_TRY(fb_path_join(path, sizeof path, l.folder, file, err));
            FB_TRY(fb_machine_read(out, path, err));
            goto done;
        }
    listing_names(&l, known, sizeof known);
    st = fb_fail(err, FB_INPUT, "there is no machine profile '%.64s'; known are: %s; or give the path of one that forebay probe "
                 "--out wrote", name, known);
done:
    listing_free(&l);
    return st;
}

/* "NVIDIA H200, compute capability 9.0": the product's name is what comes first.  The whole of it counts: an "RTX 4090 Laptop
 * GPU" is no "RTX 4090". */
static bool is_product(const char *device, const char *product)
{
    size_t length = strcspn(device, ",");
    return strlen(product) == length && strncmp(device, product, length) == 0;
}

static double distance(const fb_machine *m, uint64_t ram)
{
    return ram ? fabs(log((double)m->ram / (double)ram)) : 0;
}

fb_status fb_machine_for_device(fb_machine *out, const char *device, uint64_t ram, fb_error *err)
{
    char path[FB_PATH_SIZE];
    listing l = { 0 };
    fb_machine m, best = { 0 };
    fb_status st = FB_OK;
    FB_TRY(listing_read(&l, err));
    for (int i = 0; i < l.n; i++) {
        FB_TRY(fb_path_join(path, sizeof path, l.folder, l.entries[i]->d_name, err));
        FB_TRY(fb_machine_read(&m, path, err));
        if (is_product(device, m.device) && (!best.device[0] || distance(&m, ram) < distance(&best, ram)))
            best = m;
    }
    if (best.device[0])
        *out = best;
    else
        st = fb_fail(err, FB_INPUT, "no shipped machine profile is of '%.64s'; measure one with forebay probe --out FILE", device);
done:
    listing_free(&l);
    return st;
}
