/* generate.c - `forebay generate`: continue a prompt through the same streamed blocks, with a key-value cache. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/python.h"
#include "run/sampler.h"
#include "run/session.h"
#include "run/sink.h"

enum { PREFILL_MAX = 256, OVERRIDES_MAX = 64, END_MAX = 32 };

typedef struct request {
    uint64_t   max_new_tokens, seed, top_k;
    double     temperature, top_p;
    bool       raw;
    const char *system;
    const char *rest[OVERRIDES_MAX]; /* for the config's table */
    int        n_rest;
} request;

typedef struct generator {
    request      r;
    const fb_sink *sink;
    fb_options   options;
    fb_python   *text;
    fb_session   session;
    fb_sampler   sampler;
    float       *logits;       /* [V] */
    uint32_t    *ids;          /* prompt, then what is generated */
    uint32_t     n_prompt, n, n_max;
    uint32_t     end[END_MAX], n_end;
    char        *shown;        /* text already said */
} generator;

/* ---- arguments ---- */

static fb_status bad_value(fb_error *err, const char *key, const char *expected, const char *value)
{
    return fb_fail(err, FB_CONFIG, "command line: %s must be %s, not '%s'", key, expected, value);
}

static bool whole(const char *text, uint64_t max, uint64_t *out)
{
    char *end;
    unsigned long long v = strtoull(text, &end, 10);
    *out = v;
    return *text >= '0' && *text <= '9' && !*end && v <= max;
}

static bool real(const char *text, double low, double high, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && !*end && *out >= low && *out <= high;
}

static fb_status read_override(request *r, const char *arg, fb_error *err)
{
    const char *value = strchr(arg, '=');
    size_t n = value ? (size_t)(value++ - arg) : 0;
#define IS(key) (n == strlen(key) && !strncmp(arg, key, n))
    if (IS("max_new_tokens"))
        return whole(value, 1u << 24, &r->max_new_tokens) && r->max_new_tokens ? FB_OK
            : bad_value(err, "max_new_tokens", "a number from 1", value);
    if (IS("top_k"))
        return whole(value, UINT32_MAX, &r->top_k) ? FB_OK : bad_value(err, "top_k", "a whole number (0: all)", value);
    if (IS("seed"))
        return whole(value, UINT64_MAX, &r->seed) ? FB_OK : bad_value(err, "seed", "a whole number", value);
    if (IS("temperature"))
        return real(value, 0, 1e6, &r->temperature) ? FB_OK : bad_value(err, "temperature", "a number from 0 (greedy)", value);
    if (IS("top_p"))
        return real(value, 1e-9, 1, &r->top_p) ? FB_OK : bad_value(err, "top_p", "a number above 0 and up to 1", value);
    if (IS("raw")) {
        r->raw = !strcmp(value, "true");
        return r->raw || !strcmp(value, "false") ? FB_OK : bad_value(err, "raw", "true or false", value);
    }
    if (IS("system")) {
        r->system = value;
        return FB_OK;
    }
#undef IS
    if (r->n_rest == OVERRIDES_MAX)
        return fb_fail(err, FB_CONFIG, "command line: more than %d settings", OVERRIDES_MAX);
    r->rest[r->n_rest++] = arg;
    return FB_OK;
}

/* ---- text ---- */

static fb_status ask_text(generator *g, json_t *question, json_t **answer, fb_error *err)
{
    fb_status st = FB_OK;
    const char *line;
    char *text = question ? json_dumps(question, JSON_COMPACT) : NULL;
    json_decref(question);
    if (!text)
        return fb_fail(err, FB_NOMEM, "generate: no memory, or the prompt is not UTF-8");
    st = fb_python_ask(g->text, text, &line, err);
    free(text);
    if (st != FB_OK) { /* how the child ended says more */
        fb_error why;
        fb_status ended = fb_python_finish(g->text, &why);
        g->text = NULL;
        return ended != FB_OK ? fb_fail(err, ended, "%s", why.msg) : st;
    }
    *answer = json_loads(line, 0, NULL);
    const char *wrong = json_string_value(json_object_get(*answer, "error"));
    if (*answer && !wrong)
        return FB_OK;
    st = wrong ? fb_fail(err, FB_INPUT, "%s", wrong)
        : fb_fail(err, FB_FAILED, "generate: forebay.text answered with something that is not JSON");
    json_decref(*answer);
    *answer = NULL;
    return st;
}

static fb_status take_ids(const json_t *array, uint32_t *out, size_t max, uint32_t vocab, uint32_t *n, fb_error *err)
{
    *n = 0;
    if (json_array_size(array) > max)
        return fb_fail(err, FB_CONFIG, "generate: the prompt has %zu tokens, at most %zu are possible", json_array_size(array),
                       max);
    for (size_t i = 0; i < json_array_size(array); i++) {
        json_int_t id = json_integer_value(json_array_get(array, i));
        if (id < 0 || id >= vocab)
            return fb_fail(err, FB_INPUT, "generate: the tokenizer gives id %lld, the model's vocabulary has %u", (long long)id,
                           vocab);
        out[(*n)++] = (uint32_t)id;
    }
    return FB_OK;
}

static fb_status encode_prompt(generator *g, const char *model_dir, const char *prompt, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_model_config *c = &g->session.manifest.cfg;
    json_t *info = NULL, *encoded = NULL;
    FB_TRY(fb_python_start(&g->text, "forebay.text", (const char *const[]){ model_dir, NULL }, err));
    FB_TRY(ask_text(g, json_pack("{s:s}", "op", "info"), &info, err));
    bool chat = !g->r.raw && json_is_true(json_object_get(info, "has_template"));
    FB_TRY(ask_text(g, json_pack("{s:s, s:s, s:b, s:s?}", "op", "encode", "text", prompt, "chat", chat, "system", g->r.system),
                    &encoded, err));
    const json_t *ids = json_object_get(encoded, "ids");
    g->n_max = (uint32_t)(json_array_size(ids) + g->r.max_new_tokens);
    g->ids = calloc(g->n_max, sizeof *g->ids);
    if (!g->ids)
        FB_TRY(fb_fail(err, FB_NOMEM, "generate: no memory for %u tokens", g->n_max));
    FB_TRY(take_ids(ids, g->ids, g->n_max, c->vocab, &g->n_prompt, err));
    if (!g->n_prompt)
        FB_TRY(fb_fail(err, FB_CONFIG, "generate: the prompt is empty"));
    g->n = g->n_prompt;
    FB_TRY(take_ids(json_object_get(info, "eos"), g->end, END_MAX - c->n_eos, UINT32_MAX, &g->n_end, err));
    for (uint32_t i = 0; i < c->n_eos; i++)
        g->end[g->n_end++] = c->eos[i];
done:
    json_decref(info);
    json_decref(encoded);
    return st;
}

static bool ends(const generator *g, uint32_t id)
{
    for (uint32_t i = 0; i < g->n_end; i++)
        if (g->end[i] == id)
            return true;
    return false;
}

/* Says what the new tokens add.  A character whose bytes are spread over tokens decodes to U+FFFD until the last one
 * is there: such an end waits. */
static fb_status show(generator *g, bool last, fb_error *err)
{
    fb_status st = FB_OK;
    json_t *ids = json_array(), *answer = NULL;
    for (uint32_t i = g->n_prompt; i < g->n; i++)
        json_array_append_new(ids, json_integer(g->ids[i]));
    FB_TRY(ask_text(g, json_pack("{s:s, s:o, s:b}", "op", "decode", "ids", ids, "skip_special", 1), &answer, err));
    const char *text = json_string_value(json_object_get(answer, "text"));
    if (!text)
        FB_TRY(fb_fail(err, FB_FAILED, "generate: forebay.text gave no text"));
    size_t n = strlen(text), n_shown = g->shown ? strlen(g->shown) : 0;
    bool broken = n >= 3 && !memcmp(text + n - 3, "\xef\xbf\xbd", 3);
    if ((broken && !last) || n < n_shown || (n_shown && memcmp(text, g->shown, n_shown)))
        goto done;
    if (g->sink && g->sink->say && n > n_shown)
        g->sink->say(g->sink->ctx, FB_SAY_TEXT, text + n_shown);
    free(g->shown);
    g->shown = strdup(text);
done:
    json_decref(answer);
    return st;
}

/* ---- the model ---- */

/* All layers resident when they fit, two slots else. */
static fb_status start_model(generator *g, fb_error *err)
{
    fb_session_request r = { .options = &g->options, .micro_rows = 1, .n_micro = 1,
                             .row_len = g->n_prompt < PREFILL_MAX ? g->n_prompt : PREFILL_MAX, .cache_len = g->n_max };
    bool slots_given = false;
    for (int i = 0; i < g->r.n_rest; i++)
        slots_given |= !strncmp(g->r.rest[i], "slots=", 6);
    if (!slots_given)
        g->options.slots = FB_SLOTS_ALL;
    fb_status st = fb_session_plan(&g->session, &r, err);
    if (st == FB_NOFIT && !slots_given) {
        g->options.slots = 2;
        st = fb_session_plan(&g->session, &r, err);
    }
    return st == FB_OK ? fb_session_start(&g->session, &r, err) : st;
}

/* Runs tokens [first, first + n); the last one's logits are left in g->logits if wanted. */
static fb_status advance(generator *g, uint32_t first, uint32_t n, bool wanted, fb_error *err)
{
    fb_micro *m = fb_engine_micro(g->session.engine, 0);
    fb_micro_begin(m);
    fb_micro_add_document(m, g->ids + first, NULL, n);
    for (uint32_t i = 0; i < n; i++)
        m->host.position[i] += first;
    m->host.span[0] = (fb_span){ .q_start = 0, .q_len = n, .k_start = 0, .k_len = first + n };
    if (wanted) {
        m->host.learn_index[0] = n - 1;
        m->host.target[0] = 0;
        m->n_learned = 1;
    }
    fb_micro_finish(m);
    return fb_engine_logits(g->session.engine, first, g->logits, err);
}

static fb_status generate(generator *g, fb_error *err)
{
    fb_status st = FB_OK;
    for (uint32_t at = 0, n; at < g->n_prompt; at += n) {
        n = g->n_prompt - at < PREFILL_MAX ? g->n_prompt - at : PREFILL_MAX;
        FB_TRY(advance(g, at, n, at + n == g->n_prompt, err));
    }
    while (g->n < g->n_max) {
        uint32_t id = fb_sampler_next(&g->sampler, g->logits);
        if (ends(g, id))
            break;
        g->ids[g->n++] = id;
        FB_TRY(show(g, false, err));
        if (g->n < g->n_max)
            FB_TRY(advance(g, g->n - 1, 1, true, err));
    }
    FB_TRY(show(g, true, err));
    fb_say(g->sink, FB_SAY_RESULT, "%s", "");
done:
    return st;
}

fb_status fb_generate(const char *model_dir, const char *prompt, const char *const *overrides, int n_override,
                      const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    generator g = { .sink = sink, .r = { .max_new_tokens = 256, .top_p = 1 } };
    for (int i = 0; i < n_override; i++)
        FB_TRY(read_override(&g.r, overrides[i], err));
    FB_TRY(fb_options_read(&g.options, NULL, g.r.rest, g.r.n_rest, fb_say_warning, (void *)sink, err));
    FB_TRY(fb_session_open(&g.session, model_dir, err));
    FB_TRY(encode_prompt(&g, model_dir, prompt, err));
    FB_TRY(start_model(&g, err));
    g.sampler = (fb_sampler){ .temperature = g.r.temperature, .top_p = g.r.top_p, .top_k = (uint32_t)g.r.top_k,
                              .random = g.r.seed };
    FB_TRY(fb_sampler_init(&g.sampler, g.session.manifest.cfg.vocab, err));
    g.logits = calloc(g.session.manifest.cfg.vocab, sizeof *g.logits);
    if (!g.logits)
        FB_TRY(fb_fail(err, FB_NOMEM, "generate: no memory for the logits of %u tokens", g.session.manifest.cfg.vocab));
    FB_TRY(generate(&g, err));
done:
    fb_session_close(&g.session);
    if (g.text)
        fb_python_finish(g.text, NULL);
    fb_sampler_deinit(&g.sampler);
    fb_options_free(&g.options);
    free(g.logits);
    free(g.ids);
    free(g.shown);
    return st;
}
