#include "config/options.h"

#include "config/compat.h"
#include "config/key.h"
#include "config/parse.h"
#include "config/yaml.h"
#include "io/file.h"

#include <assert.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KWARGS "lr_scheduler_kwargs"
enum { COMPAT_COUNT_MAX = 128 };

/* ---- reading ---- */

typedef struct reader {
    fb_options *o;
    const char *path;             /* of the file; NULL while the command line is read */
    uint32_t    line;             /* of the entry being read */
    uint32_t    file_line[FB_KEY_COUNT + COMPAT_COUNT_MAX]; /* where the file says it, 0: it does not */
    struct {
        bool     given;           /* last said with a value, so the default does not hold */
        bool     in_file;
        uint32_t line;
    } said[FB_KEY_COUNT];
    void (*warn)(void *ctx, const char *sentence);
    void     *ctx;
    fb_error *err;
} reader;

static fb_status fail_memory(fb_error *err)
{
    return fb_fail(err, FB_NOMEM, "no memory for the options");
}

/* In the file a key stands once; on the command line the last one wins, as scripts that add to a list of arguments expect. */
static fb_status once(reader *r, size_t index, const char *name)
{
    char place[FB_PLACE_SIZE];
    if (!r->path)
        return FB_OK;
    if (r->file_line[index])
        return fb_fail(r->err, FB_CONFIG, "%s: %s is given twice, first in line %u; keep one",
                       fb_place_str(place, r->path, r->line), name, r->file_line[index]);
    r->file_line[index] = r->line;
    return FB_OK;
}

static fb_status apply_key(reader *r, const fb_key *k, const char *value, bool list)
{
    size_t i = (size_t)(k - fb_key_table);
    char   place[FB_PLACE_SIZE], shown[FB_SHOWN_SIZE], expected[FB_EXPECTATION_SIZE];
    fb_place_str(place, r->path, r->line);
    fb_status st = once(r, i, k->name);
    if (st != FB_OK)
        return st;
    if (list && !(k->flags & FB_KEY_LIST))
        return fb_fail(r->err, FB_CONFIG, "%s: %s takes one value, not a list", place, k->name);
    if (value && !*value && k->kind == FB_KIND_TEXT && !(k->flags & FB_KEY_MAY_EMPTY))
        value = NULL; /* no path and no name is empty */
    r->said[i].given = value != NULL;
    r->said[i].in_file = r->path != NULL;
    r->said[i].line = r->line;
    st = value ? fb_key_set(r->o, k, value) : fb_key_set_default(r->o, k);
    if (st == FB_OK)
        return FB_OK;
    if (st == FB_NOMEM)
        return fail_memory(r->err);
    return fb_fail(r->err, FB_CONFIG, "%s: %s must be %s, not '%s' (%s)", place, k->name,
                   fb_key_expectation(expected, k), fb_shown_str(shown, value), k->help);
}

static bool compat_takes(const char *only, const char *value)
{
    bool   on;
    size_t n;
    if (fb_parse_bool(value, &on))
        value = on ? "true" : "false";
    for (const char *s = only; *s; s += n + (s[n] == '|')) {
        n = strcspn(s, "|");
        if (strlen(value) == n && !memcmp(s, value, n))
            return true;
    }
    return false;
}

static fb_status apply_compat(reader *r, const fb_compat *c, const char *value)
{
    char place[FB_PLACE_SIZE], shown[FB_SHOWN_SIZE], sentence[512];
    fb_place_str(place, r->path, r->line);
    fb_status st = once(r, FB_KEY_COUNT + (size_t)(c - fb_compat_key), c->name);
    if (st != FB_OK || !value)
        return st;
    if (c->only && !compat_takes(c->only, value)) {
        const char *bar = strchr(c->only, '|');
        return fb_fail(r->err, FB_CONFIG, "%s: %s may only be %.*s%s%s, not '%s': %s", place, c->name,
                       bar ? (int)(bar - c->only) : (int)strlen(c->only), c->only, bar ? " or " : "", bar ? bar + 1 : "",
                       fb_shown_str(shown, value), c->reason);
    }
    snprintf(sentence, sizeof sentence, "%s: %s is accepted but changes nothing here: %s", place, c->name, c->reason);
    if (r->warn)
        r->warn(r->ctx, sentence);
    return FB_OK;
}

static fb_status apply_unknown(reader *r, const char *name)
{
    char        place[FB_PLACE_SIZE], shown[FB_SHOWN_SIZE];
    bool        kwargs = !strncmp(name, KWARGS ".", strlen(KWARGS "."));
    const char *inner = kwargs ? name + strlen(KWARGS ".") : name, *near = fb_key_nearest(inner, kwargs);
    fb_place_str(place, r->path, r->line);
    fb_shown_str(shown, inner);
    const char *in = kwargs ? " in " KWARGS : "";
    if (near)
        return fb_fail(r->err, FB_CONFIG, "%s: unknown key '%s'%s; did you mean '%s'?", place, shown, in, near);
    return fb_fail(r->err, FB_CONFIG, "%s: unknown key '%s'%s; `forebay help config` lists all keys", place, shown, in);
}

static fb_status apply(reader *r, const fb_yaml_entry *e)
{
    char place[FB_PLACE_SIZE];
    r->line = e->line;
    if (!strcmp(e->key, KWARGS))
        return e->value ? fb_fail(r->err, FB_CONFIG, "%s: " KWARGS " must be a mapping such as {min_lr: 1e-6}",
                                  fb_place_str(place, r->path, r->line))
                        : FB_OK;
    if (!strncmp(e->key, KWARGS ".", strlen(KWARGS "."))) {
        const fb_key *k = fb_key_find(e->key + strlen(KWARGS "."));
        return k && k->schedules ? apply_key(r, k, e->value, e->list) : apply_unknown(r, e->key);
    }
    const fb_key *k = fb_key_find(e->key);
    if (k)
        return apply_key(r, k, e->value, e->list);
    for (size_t i = 0; i < fb_compat_count; i++)
        if (!strcmp(e->key, fb_compat_key[i].name))
            return apply_compat(r, &fb_compat_key[i], e->value);
    return apply_unknown(r, e->key);
}

static fb_status apply_all(reader *r, const fb_yaml *y)
{
    fb_status st = FB_OK;
    for (uint32_t i = 0; i < y->n && st == FB_OK; i++)
        st = apply(r, &y->entry[i]);
    return st;
}

static fb_status read_file(reader *r, const char *path)
{
    fb_status st = FB_OK;
    char     *text = NULL;
    uint64_t  size;
    fb_yaml   y = { 0 };
    r->path = path;
    FB_TRY(fb_file_read(&text, &size, path, FB_YAML_SIZE_MAX, r->err));
    FB_TRY(fb_yaml_parse(&y, path, text, size, KWARGS, r->err));
    FB_TRY(apply_all(r, &y));
done:
    if (st == FB_INPUT) { /* a configuration that cannot be read is the command line's fault, not a data file's */
        st = FB_CONFIG;
        if (r->err)
            r->err->status = st;
    }
    fb_yaml_free(&y);
    free(text);
    return st;
}

/* The shell has done the quoting, so a value is taken as it stands; only [a, b] and {a: b} are read as YAML. */
static fb_status read_override(reader *r, const char *argument)
{
    fb_status   st = FB_OK;
    char        shown[FB_SHOWN_SIZE], *text = NULL;
    fb_yaml     y = { 0 };
    const char *equals = strchr(argument, '=');
    r->path = NULL;
    if (!equals || equals == argument)
        return fb_fail(r->err, FB_CONFIG, "command line: expected key=value, found '%s'", fb_shown_str(shown, argument));
    json_t *probe = json_string(argument); /* refuses what is not UTF-8, which no log or checkpoint could repeat */
    if (!probe)
        return fb_fail(r->err, FB_CONFIG, "command line: the value of '%.*s' is not UTF-8 text",
                       (int)(equals - argument < 60 ? equals - argument : 60), argument);
    json_decref(probe);
    const char *value = equals + 1;
    if (asprintf(&text, "%.*s: %s", (int)(equals - argument), argument, value) < 0)
        return fail_memory(r->err);
    text[equals - argument] = 0;
    const fb_key *k = fb_key_find(text);
    bool          mapping = *value == '{' && !strcmp(text, KWARGS);
    bool          list = *value == '[' && (k ? (k->flags & FB_KEY_LIST) != 0 : !strcmp(text, "report_to"));
    if (mapping || list) {
        text[equals - argument] = ':';
        FB_TRY(fb_yaml_parse(&y, NULL, text, strlen(text), KWARGS, r->err));
        FB_TRY(apply_all(r, &y));
    } else {
        bool null = !strcmp(value, "null") || !strcmp(value, "~");
        FB_TRY(apply(r, &(fb_yaml_entry){ .key = text, .value = null ? NULL : text + (equals - argument) + 2 }));
    }
done:
    fb_yaml_free(&y);
    free(text);
    return st;
}

/* ---- what only all keys together tell ---- */

#define GIVEN(r, name) ((r)->said[fb_key_find(#name) - fb_key_table].given)
#define REFUSE(r, name, ...) refuse(r, fb_key_find(#name), __VA_ARGS__)

/* A sentence that begins with where the key was last said. */
static fb_status refuse(const reader *r, const fb_key *k, const char *fmt, ...) FB_PRINTF(3, 4);
static fb_status refuse(const reader *r, const fb_key *k, const char *fmt, ...)
{
    size_t  i = (size_t)(k - fb_key_table);
    char    place[FB_PLACE_SIZE], sentence[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(sentence, sizeof sentence, fmt, ap);
    va_end(ap);
    fb_place_str(place, r->said[i].in_file ? r->path : NULL, r->said[i].line);
    return fb_fail(r->err, FB_CONFIG, "%s: %s", place, sentence);
}

static void derive(reader *r)
{
    fb_options *o = r->o;
    o->packing_given = GIVEN(r, packing);
    if (!o->packing_given)
        o->packing = o->stage == FB_STAGE_PT;
    if (!o->per_device_eval_batch_size)
        o->per_device_eval_batch_size = o->per_device_train_batch_size;
    if (GIVEN(r, eval_steps) && !GIVEN(r, eval_strategy))
        o->eval_strategy = FB_SAVE_STEPS;
    if (o->eval_strategy == FB_SAVE_STEPS && !o->eval_steps)
        o->eval_steps = o->logging_steps;
}

static fb_status check_length_and_data(const reader *r)
{
    const fb_options *o = r->o;
    uint64_t          n_row = (uint64_t)o->per_device_train_batch_size * o->gradient_accumulation_steps;
    bool              evaluates = o->eval_strategy != FB_SAVE_NO, has_rows = o->val_size > 0 || o->eval_dataset;
    if (o->max_steps == 0)
        return REFUSE(r, max_steps, "max_steps must be -1 (by epochs) or above 0, not 0");
    if (o->max_steps < 0 && o->num_train_epochs == 0)
        return REFUSE(r, num_train_epochs, "num_train_epochs must be above 0 where max_steps does not say how long to train");
    if (n_row > UINT32_MAX) {
        bool accumulates = GIVEN(r, gradient_accumulation_steps);
        return refuse(r, fb_key_find(accumulates ? "gradient_accumulation_steps" : "per_device_train_batch_size"),
                      "per_device_train_batch_size x gradient_accumulation_steps is %llu rows in an update; at most %u can be",
                      (unsigned long long)n_row, UINT32_MAX);
    }
    if (o->val_size >= 1 && o->val_size != trunc(o->val_size))
        return REFUSE(r, val_size, "val_size must be a fraction below 1 or a whole number of rows, not %.12g", o->val_size);
    if (o->val_size > 0 && o->eval_dataset)
        return REFUSE(r, val_size, "val_size holds rows of dataset out, but eval_dataset is given too; keep one of them");
    if (evaluates && !has_rows && GIVEN(r, eval_strategy))
        return REFUSE(r, eval_strategy, "eval_strategy asks for evaluation of nothing; give eval_dataset or val_size");
    if (evaluates && !has_rows)
        return REFUSE(r, eval_steps, "eval_steps asks for evaluation of nothing; give eval_dataset or val_size");
    if (o->mask_history && o->train_on_prompt)
        return REFUSE(r, mask_history, "mask_history and train_on_prompt contradict each other; keep one of them");
    return FB_OK;
}

/* As transformers refuses them: get_cosine_with_min_lr_schedule_with_warmup, and unexpected keyword arguments. */
static fb_status check_schedule(const reader *r)
{
    const fb_options *o = r->o;
    for (size_t i = 0; i < FB_KEY_COUNT; i++) {
        const fb_key *k = &fb_key_table[i];
        if (!k->schedules || !r->said[i].given || k->schedules >> o->lr_scheduler_type & 1)
            continue;
        int first = 0;
        while (!(k->schedules >> first & 1))
            first++;
        return refuse(r, k, "lr_scheduler_type %s takes no %s; drop it, or use %s", fb_lr_type_str(o->lr_scheduler_type), k->name,
                      fb_lr_type_str(first));
    }
    if (GIVEN(r, min_lr) && GIVEN(r, min_lr_rate))
        return REFUSE(r, min_lr_rate, "min_lr_rate and min_lr say the same twice; keep one of them");
    if (o->lr_scheduler_type == FB_LR_COSINE_WITH_MIN_LR && !GIVEN(r, min_lr) && !GIVEN(r, min_lr_rate))
        return REFUSE(r, lr_scheduler_type, "lr_scheduler_type cosine_with_min_lr needs min_lr or min_lr_rate");
    return FB_OK;
}

fb_status fb_options_read(fb_options *out, const char *path, const char *const *overrides, int n,
                          void (*warn)(void *ctx, const char *sentence), void *ctx, fb_error *err)
{
    fb_status  st = FB_OK;
    fb_options o = { 0 };
    reader     r = { .o = &o, .warn = warn, .ctx = ctx, .err = err };
    assert(fb_compat_count <= COMPAT_COUNT_MAX);
    for (size_t i = 0; i < FB_KEY_COUNT; i++)
        if (fb_key_set_default(&o, &fb_key_table[i]) != FB_OK) {
            st = fail_memory(err);
            goto done;
        }
    if (path)
        FB_TRY(read_file(&r, path));
    for (int i = 0; i < n; i++)
        FB_TRY(read_override(&r, overrides[i]));
    r.path = path;
    derive(&r);
    FB_TRY(check_length_and_data(&r));
    FB_TRY(check_schedule(&r));
    *out = o;
    o = (fb_options){ 0 };
done:
    fb_options_free(&o);
    return st;
}

fb_status fb_options_require(const fb_options *o, const char *const *keys, int n, fb_error *err)
{
    for (int i = 0; i < n; i++) {
        const fb_key *k = fb_key_find(keys[i]);
        assert(k && k->kind == FB_KIND_TEXT);
        if (!*(char **)fb_key_field(o, k))
            return fb_fail(err, FB_CONFIG, "%s is missing: the %s; give it in the configuration file or as %s=VALUE", k->name,
                           k->help, k->name);
    }
    return FB_OK;
}

void fb_options_free(fb_options *o)
{
    for (size_t i = 0; i < FB_KEY_COUNT; i++)
        if (fb_key_table[i].kind == FB_KIND_TEXT)
            free(*(char **)fb_key_field(o, &fb_key_table[i]));
    *o = (fb_options){ 0 };
}

/* ---- writing ---- */

char *fb_options_json(const fb_options *o)
{
    json_t *all = json_object();
    char   *text = NULL;
    for (size_t i = 0; i < FB_KEY_COUNT; i++)
        if (json_object_set_new(all, fb_key_table[i].name, fb_key_json(o, &fb_key_table[i])) != 0)
            goto done; /* out of memory, the only reason: all text was checked to be UTF-8 when it was read */
    text = json_dumps(all, JSON_INDENT(2));
done:
    json_decref(all);
    return text;
}

void fb_options_help(void (*line)(void *ctx, const char *text), void *ctx)
{
    char text[512];
    snprintf(text, sizeof text, "%-28s %-8s %-10s %s", "key", "type", "default", "");
    line(ctx, text);
    for (size_t i = 0; i < FB_KEY_COUNT; i++) {
        const fb_key *k = &fb_key_table[i];
        int        n = snprintf(text, sizeof text, "%-28s %-8s %-10s %s", k->name, fb_key_kind_str(k),
                                k->fallback ? k->fallback : "-", k->help);
        for (const fb_choice *c = k->choice; c && c->name; c++)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%s%s", c == k->choice ? " (" : ", ", c->name,
                          c[1].name ? "" : ")");
        assert((size_t)n < sizeof text);
        line(ctx, text);
    }
    line(ctx, "");
    line(ctx, "Accepted from other trainers' files, without effect (in brackets: only with this value):");
    for (size_t i = 0; i < fb_compat_count; i++) {
        const fb_compat *c = &fb_compat_key[i];
        char             name[80];
        snprintf(name, sizeof name, "%s%s%s%s", c->name, c->only ? " [" : "", c->only ? c->only : "", c->only ? "]" : "");
        snprintf(text, sizeof text, "%-48s %s", name, c->reason);
        line(ctx, text);
    }
}
